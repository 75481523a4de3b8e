"""Counters of a run on the device, and the verdicts of `check` on the host."""

import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from following import Following
from tables import cases, unchanged

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_three_bad_steps_are_counted_and_are_an_error_if_two_are_accepted():
    tx = jaxscale.loss_scaled(optax.adam(0.1))
    state = tx.init(jnp.zeros(3))
    for _ in range(3):
        _, state = tx.update(jnp.full(3, jnp.inf), state)
    numbers = jaxscale.metrics(state)
    assert (numbers["loss_scale"], numbers["total_notfinite"]) == (4096, 3)
    jaxscale.check(state, max_consecutive=3)
    with pytest.raises(jaxscale.LossScaleStuckError, match=r"^3 steps .* is 4096\.0\."):
        jaxscale.check(state, max_consecutive=2)


W = jnp.full(3, 0.5)
BAD = jnp.full(3, jnp.nan)
SGD = optax.sgd(0.1)
TX = jaxscale.loss_scaled(optax.adam(0.1))
FOLLOWING = jaxscale.loss_scaled(SGD, Following())
FIXED = jaxscale.loss_scaled(SGD, 2.0**12)
FLOORED = jaxscale.loss_scaled(
    SGD, jaxscale.DynamicLossScale(init_scale=2**12, min_scale=2**10)
)
SLOW = jaxscale.loss_scaled(SGD, jaxscale.DynamicLossScale(backoff_factor=0.99))
TOP = jaxscale.loss_scaled(SGD, jaxscale.DynamicLossScale(init_scale=2.0**24))


@functools.partial(jax.jit, static_argnums=0)
def one_step(tx, grads, state):
    _, state = tx.update(grads, state, grads)
    return state


def after(steps, grads=BAD, tx=TX, params=W):
    state = tx.init(params)
    for _ in range(steps):
        state = one_step(tx, grads, state)
    return state


def stuck(tree, match=None, **options):
    """Returns the words of `check` on a run that is stuck."""
    with pytest.raises(jaxscale.LossScaleStuckError, match=match) as error:
        jaxscale.check(tree, **options)
    return str(error.value)


@cases("policy", [jaxscale.DynamicLossScale, Following])
def test_metrics_hold_the_state_of_the_loss_scale(policy):
    scaling = policy().init()
    assert jaxscale.metrics({"policy": scaling}) == scaling._asdict()
    state = jaxscale.loss_scaled(SGD, policy()).init(W)
    assert jaxscale.metrics(state).items() >= state.scaling._asdict().items()


def test_metrics_are_the_same_scalars_inside_jit_and_outside():
    state = after(2)
    outside = jaxscale.metrics(state)
    inside = jax.jit(jaxscale.metrics)({"opt": (state,), "params": W})
    assert inside == outside
    assert {value.shape for value in inside.values()} == {()}
    prefixed = jaxscale.metrics(state, prefix="train/")
    assert prefixed == {f"train/{name}": value for name, value in outside.items()}
    assert (outside["notfinite_count"], outside["step_applied"]) == (2, False)


NORMED = {"max_norm": 1.0, "spikes": jaxscale.SpikeRule(window=4), "track_leaves": True}
LOGGED = {
    "dynamic": TX,
    "following": FOLLOWING,
    "fixed": FIXED,
    "everything": jaxscale.loss_scaled(SGD, **NORMED),
    "no scale": jaxscale.skip_nonfinite(SGD, **NORMED),
    "window": jaxscale.multi_steps(TX, 2),
}


@pytest.mark.worlds
@cases("name", LOGGED, fast=["everything", "window"])
def test_metrics_are_json_at_all_times_and_have_the_same_names(name):
    tx = LOGGED[name]
    names = jaxscale.metrics(tx.init(jnp.zeros(3))).keys()
    for steps, grads in ((0, BAD), (1, BAD), (1, jnp.full(3, 1e30)), (9, jnp.ones(3))):
        numbers = jaxscale.metrics(after(steps, grads, tx))
        assert numbers.keys() == names
        text = json.dumps(jax.tree.map(float, numbers), allow_nan=False)
        for number in json.loads(text).values():
            assert abs(number) <= np.finfo(np.float32).max


def test_metrics_without_a_loss_scale_leave_out_what_it_would_count():
    scaled = jaxscale.metrics(jaxscale.loss_scaled(SGD).init(W))
    unscaled = jaxscale.metrics(jaxscale.skip_nonfinite(SGD).init(W))
    trackers = {"growth_tracker", "hysteresis_tracker", "backoff_count"}
    assert scaled.keys() - unscaled.keys() == trackers | {
        "total_retries",
        "total_exhausted",
    }
    assert unscaled.keys() <= scaled.keys()
    assert unscaled["loss_scale"] == 1


# The optimizer, its gradients, in how many steps, how many skips are accepted, and what is said.
VERDICTS = {
    "progress": (TX, 1.0, 5, 0, None),
    "few skips": (TX, np.nan, 3, 3, None),
    "all the way down": (TOP, np.nan, 24, 50, None),
    "further than that": (TOP, np.nan, 51, 50, "51 steps"),
    "zeros, dynamic": (TX, 0.0, 6, 5, None),
}


@pytest.mark.worlds
@cases("name", VERDICTS, fast=["few skips", "further than that"])
def test_a_run_is_stuck_after_more_bad_steps_than_are_accepted(name):
    tx, size, steps, accepted, text = VERDICTS[name]
    state = after(steps, jnp.full(3, size), tx)
    for tree in ({"opt": state}, jax.tree.map(np.asarray, state)):
        if text is None:
            jaxscale.check(tree, max_consecutive=accepted)
        else:
            stuck(tree, text, max_consecutive=accepted)
    recovered = one_step(tx, jnp.ones(3), state)
    jaxscale.check(recovered, max_consecutive=0)


def half_loss(w, x):
    """Finite; the gradients overflow float16 at a scale of more than about 100."""
    products = (w * x).astype(jnp.float16).astype(jnp.float32)
    return jnp.sum(products * 500)


def large_half_loss(w, x):
    """Finite; the gradients overflow float16 at a scale of more than about an eighth."""
    return 1000 * half_loss(w, x)


def root_loss(w, x):
    """Finite; the gradients are inf at any scale where x is 0."""
    return jnp.sum(jnp.sqrt(jnp.abs(w * x)))


def negative_root_loss(w, x):
    """NaN where x is negative."""
    return -jnp.sum(jnp.sqrt(w * x))


def square_loss(w, x):
    """Finite; without a gradient where x is 0."""
    return jnp.sum((w * x) ** 2)


def trained(tx, loss_fn, batches, pass_value=True, clean=unchanged):
    """The state after some batches, whose gradients something may change first."""

    @jax.jit
    def step(w, state, x):
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(w, x)
        value = loss if pass_value else None
        return jaxscale.apply_gradients(tx, clean(grads), state, w, value=value)

    w = W
    state = tx.init(W)
    for x in batches:
        w, state = step(w, state, jnp.full(3, x))
    return state


class Hopeless(NamedTuple):
    """A run that no longer makes steps, and which of `CAUSES` are told."""

    causes: str
    tx: optax.GradientTransformation
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array]
    batches: list[float]
    pass_value: bool = True  # to `apply_gradients`


CAUSES = {
    "loss": "no loss scale can help",
    "never": "51 of them with a non-finite loss); the loss scale is 32768.0",
    "shard": "20 steps were fine: look for a stretch of bad data",
    "backward": "if not, pass it",
    "one": "A scale of 1 scales nothing",
    "large": "mean instead of a sum",
    "floor": "at its floor, and too high",
    "fixed": "fixed, and too high",
    "falling": "still on its way down, to 1: start lower",
    "unscaled": "Check the batch for NaN",
    "optimizer": "The optimizer itself made a NaN",
}
FALLS = [400.0] * 60
BAD_BATCHES = [-1.0] * 60
HOPELESS = {
    "the forward pass never worked": Hopeless(
        "loss never", TX, negative_root_loss, BAD_BATCHES[:51]
    ),
    "a shard of bad data": Hopeless(
        "loss shard", TX, negative_root_loss, [1.0] * 20 + BAD_BATCHES
    ),
    "no scale is low enough": Hopeless(
        "backward one large", TX, root_loss, [1.0] * 5 + [0.0] * 60
    ),
    "the loss is too large": Hopeless(
        "backward one large", TX, large_half_loss, [1.0] * 70
    ),
    "the loss is not passed": Hopeless(
        "backward one large", TX, negative_root_loss, BAD_BATCHES, pass_value=False
    ),
    "a floor that is too high": Hopeless(
        "backward large floor", FLOORED, half_loss, FALLS
    ),
    "a fixed scale that is too high": Hopeless(
        "backward fixed", FIXED, half_loss, FALLS
    ),
    "a scale that comes down slowly": Hopeless(
        "backward falling", SLOW, half_loss, FALLS
    ),
    "no scaling at all": Hopeless(
        "backward unscaled", jaxscale.skip_nonfinite(SGD), root_loss, [0.0] * 60
    ),
    "the optimizer makes a NaN of zeros": Hopeless(
        "optimizer",
        jaxscale.loss_scaled(optax.contrib.prodigy()),
        square_loss,
        [0.0] + [1.0] * 60,
    ),
}


@pytest.mark.worlds
@cases("case", HOPELESS, fast=["a shard of bad data", "a floor that is too high"])
def test_the_right_cause_is_named_and_no_other(case):
    causes, tx, *others = HOPELESS[case]
    message = stuck(trained(tx, *others), tx=tx)
    told = [cause for cause, words in CAUSES.items() if words in message]
    assert told == causes.split()


@pytest.mark.worlds
def test_the_line_that_is_named_helps():
    tx = jaxscale.loss_scaled(optax.sgd(0.0))
    batches = [1.0] * 70
    message = stuck(trained(tx, large_half_loss, batches), tx=tx)
    line = re.search(r"`(jaxscale\.loss_scaled\(tx, .*?\)\))`", message).group(1)
    tx = eval(line, {"jaxscale": jaxscale, "tx": optax.sgd(0.0)})
    state = trained(tx, large_half_loss, batches)
    jaxscale.check(state, tx=tx, max_consecutive=0)
    assert 2.0**-6 <= state.scaling.loss_scale <= 2.0**-3


# Warnings. A state, or a tree with one, what is said of it, if anything, and the optimizer.


class Told(NamedTuple):
    make: Callable[[], object]
    says: str = ""
    tx: optax.GradientTransformation | None = None


PAIR = {"a": W, "b": W}
LABELS = {"a": "scaled", "b": "bare"}
CHAINED = optax.chain(optax.clip(1.0), TX)
NAMED = optax.named_chain(("clip", optax.clip(1.0)), ("scaled", TX))
PARTED = optax.partition({"scaled": TX, "bare": SGD}, LABELS)
FLAT = optax.flatten(TX)
AROUND = jaxscale.loss_scaled(optax.chain(optax.clip(1.0), SGD))
INSIDE = r"inside of another one.*Make it the outermost"


def flax_state():
    return jaxscale.flax.TrainState.create(apply_fn=None, params=PAIR, tx=NAMED)


WRAPPED = {
    "chain": Told(lambda: CHAINED.init(PAIR), INSIDE),
    "named chain": Told(lambda: NAMED.init(PAIR), INSIDE, NAMED),
    "partition": Told(lambda: {"params": W, "state": PARTED.init(PAIR)}, INSIDE),
    "flat": Told(lambda: FLAT.init(PAIR), INSIDE, FLAT),
    "train state": Told(flax_state, INSIDE),
    "alone": Told(lambda: TX.init(PAIR)),
    "with parameters": Told(lambda: (PAIR, TX.init(PAIR)), tx=TX),
    "beside a bare one": Told(lambda: (TX.init(W), SGD.init(W))),
    "around a chain": Told(lambda: AROUND.init(W), tx=AROUND),
}


def cleaned(grads):
    return jnp.nan_to_num(grads, nan=0.0, posinf=0.0, neginf=0.0)


MOMENTUM = optax.sgd(0.1, momentum=0.9)
NORMS = jaxscale.loss_scaled(SGD, spikes=jaxscale.SpikeRule())
# The optimizer, the loss, its batch, and what is done to gradients before the optimizer gets them.
ZEROS = {
    "dynamic": (TX, square_loss, 0.0),
    "fixed": (jaxscale.loss_scaled(MOMENTUM, 8), square_loss, -0.0),
    "unscaled": (jaxscale.skip_nonfinite(MOMENTUM), square_loss, 0.0),
    "window": (jaxscale.multi_steps(TX, 1), square_loss, 0.0),
    "hidden": (TX, large_half_loss, 1.0, cleaned),
    "no moments, but norms": (NORMS, square_loss, 0.0),
}


def with_zeros(name, steps, then_one_more=False):
    """A run whose gradients are all 0, and maybe a last step whose are not."""
    tx, loss_fn, x, *clean = ZEROS[name]

    def make():
        state = trained(tx, loss_fn, [x] * steps, True, *clean)
        if then_one_more:
            _, state = jax.jit(tx.update)(W, state, W)
        return state

    return Told(make, "" if then_one_more or steps < 50 else ALL_ZERO, tx)


ALL_ZERO = r" 0 \w+ 50 steps.*`on_grads="
ALL_ZEROS = {f"50 zeros, {name}": with_zeros(name, 50) for name in ZEROS}
NOT_ALL_ZEROS = {f"49 zeros, {name}": with_zeros(name, 49) for name in ZEROS}
NOT_ALL_ZEROS |= {f"a last one, {name}": with_zeros(name, 50, True) for name in ZEROS}
HALF_ZERO = {"a": W, "b": 0 * W}
SPIKES = jaxscale.SpikeRule()


def with_large_square(**options):
    """Adam after a finite gradient whose square is inf."""
    tx = jaxscale.skip_nonfinite(optax.adam(0.1), **options)
    return after(1, W.at[1].set(1e30), tx)


def idle(tx, scale=2.0**24, **counters):
    """A state after many finite steps, with a scale that has only ever grown."""
    state = jax.device_get(after(1, jnp.ones(3), tx))
    scaling = state.scaling._replace(loss_scale=np.float32(scale))
    state = state._replace(scaling=scaling, total_steps=np.int32(10_000))
    return state._replace(**{name: np.int32(n) for name, n in counters.items()})


def stacked(*states):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


UNUSED = r"`jax.value_and_grad`.*train_step\(loss_fn, tx\).*skip_nonfinite\(tx\)"
BAD_MOMENT = "moment.*is inf or NaN.*check_updates"
OTHERS = {
    "one gradient of 0": Told(lambda: after(50, HALF_ZERO, params=PAIR)),
    "a square": Told(with_large_square, BAD_MOMENT),
    "updates": Told(lambda: with_large_square(check_updates=True)),
    "spikes": Told(lambda: with_large_square(spikes=SPIKES)),
    "an overflow": Told(lambda: idle(TX, total_notfinite=1)),
    "a retry": Told(lambda: idle(TX, total_retries=1)),
    "following": Told(lambda: idle(FOLLOWING)),
    "grown": Told(lambda: idle(TX), UNUSED),
    "a bad loss": Told(
        lambda: idle(TX, total_notfinite=1, total_notfinite_loss=1), UNUSED
    ),
    "a population": Told(lambda: stacked(idle(TX, 2.0**23), idle(TX)), UNUSED),
    "a tree": Told(lambda: {"opt": idle(TX)}, UNUSED),
}
WARNINGS = WRAPPED | ALL_ZEROS | NOT_ALL_ZEROS | OTHERS
FAST_WARNINGS = [*WRAPPED, "50 zeros, dynamic", "50 zeros, hidden", *OTHERS]


@cases("name", WARNINGS, fast=FAST_WARNINGS)
def test_check_warns_of_what_is_wrong_and_of_nothing_else(name):
    told = WARNINGS[name]
    tree = told.make()
    trees = [tree]
    if isinstance(tree, jaxscale.LossScaledState) and not tree.total_steps.shape:
        trees.append(stacked(tree, tree))
    for tree in trees:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jaxscale.check(tree, tx=told.tx)
        assert len(caught) == bool(told.says)
        for warning in caught:
            assert warning.filename == __file__
            assert re.search(told.says, str(warning.message))


class Tracked(NamedTuple):
    is_loss_scale_state = True

    loss_scale: jax.Array
    last: jax.Array  # f32[3]


class Tracking(jaxscale.LossScale):
    """A policy of one's own, whose state holds more than scalars."""

    def init(self):
        return Tracked(jnp.array(2.0**20), jnp.zeros(3))

    def adjust(self, state, grads_finite):
        return Tracked(jnp.maximum(state.loss_scale / 2, 4.0), jnp.roll(state.last, 1))


def test_check_reads_a_state_that_holds_more_than_scalars():
    tx = jaxscale.loss_scaled(SGD, Tracking())
    alone = after(7, tx=tx)
    for state in (alone, stacked(after(1, tx=tx), alone)):
        stuck(state, r"7 steps.*on its way down, to 4:", tx=tx, max_consecutive=5)

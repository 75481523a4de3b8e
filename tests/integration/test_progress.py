"""What the counters say, on the device and on the host."""

import contextlib
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
ADAPTIVE = jaxscale.loss_scaled(SGD, "adaptive")
FIXED = jaxscale.loss_scaled(SGD, 2.0**12)
FLOORED = jaxscale.loss_scaled(
    SGD, jaxscale.DynamicLossScale(init_scale=2**12, min_scale=2**10)
)
SLOW = jaxscale.loss_scaled(SGD, jaxscale.DynamicLossScale(backoff_factor=0.99))
TOP = jaxscale.loss_scaled(SGD, jaxscale.DynamicLossScale(init_scale=2.0**24))


@functools.partial(jax.jit, static_argnums=0)
def one_step(tx, grads, state):
    _, state = tx.update(grads, state)
    return state


def after(steps, grads=BAD, tx=TX):
    state = tx.init(jnp.zeros(3))
    for _ in range(steps):
        state = one_step(tx, grads, state)
    return state


def stuck(tree, match=None, **options):
    """What `check` says of a run that is stuck."""
    with pytest.raises(jaxscale.LossScaleStuckError, match=match) as error:
        jaxscale.check(tree, **options)
    return str(error.value)


@cases("policy", [jaxscale.DynamicLossScale, jaxscale.AdaptiveLossScale])
def test_metrics_hold_the_state_of_the_loss_scale(policy):
    scaling = policy().init()
    assert jaxscale.metrics({"policy": scaling}) == scaling._asdict()
    state = after(1, jnp.ones(3), jaxscale.loss_scaled(SGD, policy()))
    assert jaxscale.metrics(state).items() >= state.scaling._asdict().items()


def test_metrics_are_the_same_scalars_inside_jit_and_outside():
    state = after(2)
    outside = jaxscale.metrics(state)
    inside = jax.jit(jaxscale.metrics)({"opt": (state,), "params": jnp.zeros(3)})
    assert inside == outside
    prefixed = jaxscale.metrics(state, prefix="train/")
    assert prefixed == {f"train/{name}": value for name, value in outside.items()}
    assert {value.shape for value in [*inside.values(), *outside.values()]} == {()}
    assert (outside["notfinite_count"], outside["step_applied"]) == (2, False)


NORMED = {"max_norm": 1.0, "spikes": jaxscale.SpikeRule(window=4), "track_leaves": True}
LOGGED = {
    "dynamic": TX,
    "adaptive": ADAPTIVE,
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
    assert scaled.keys() - unscaled.keys() == {
        "growth_tracker",
        "hysteresis_tracker",
        "backoff_count",
        "total_retries",
        "total_exhausted",
    }
    assert unscaled.keys() <= scaled.keys()
    assert unscaled["loss_scale"] == 1


def chained(tx):
    return optax.chain(optax.clip(1.0), tx)


def named(tx):
    return optax.named_chain(("clip", optax.clip(1.0)), ("scaled", tx))


def parted(tx):
    labels = {"a": "scaled", "b": "bare"}
    return optax.partition({"scaled": tx, "bare": SGD}, labels)


PAIR = {"a": W, "b": W}
# The optimizer, a state of it as a loop carries it, and whether `check` gets the optimizer.
INSIDE = {
    "chain": (chained(TX), lambda tx: tx.init(PAIR), False),
    "named chain": (named(TX), lambda tx: tx.init(PAIR), True),
    "partition": (parted(TX), lambda tx: {"params": W, "state": tx.init(PAIR)}, False),
    "flat": (optax.flatten(TX), lambda tx: tx.init(PAIR), True),
    "train state": (
        named(TX),
        lambda tx: jaxscale.flax.TrainState.create(apply_fn=None, params=PAIR, tx=tx),
        False,
    ),
}
OUTERMOST = {
    "alone": (TX, lambda tx: tx.init(PAIR), False),
    "with parameters": (TX, lambda tx: (PAIR, tx.init(PAIR)), True),
    "beside a bare one": (TX, lambda tx: (tx.init(W), SGD.init(W)), False),
    "around a chain": (jaxscale.loss_scaled(chained(SGD)), lambda tx: tx.init(W), True),
}


@cases("name", INSIDE | OUTERMOST, fast=["partition", "flat", "train state", "alone"])
def test_check_tells_of_an_optimizer_that_is_wrapped_inside_of_another(name):
    tx, make_tree, passes_tx = (INSIDE | OUTERMOST)[name]
    tree = make_tree(tx)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxscale.check(tree, tx=tx if passes_tx else None)
    assert len(caught) == (name in INSIDE)
    for warning in caught:
        assert warning.filename == __file__
        assert re.match(
            r"`check`.*inside of another one.*Make it the outermost",
            str(warning.message),
        )


# The optimizer, its gradients, in how many steps, how many skips are accepted, and what is said.
VERDICTS = {
    "progress": (TX, 1.0, 5, 0, None),
    "few skips": (TX, np.nan, 3, 3, None),
    "all the way down": (TOP, np.nan, 24, 50, None),
    "further than that": (TOP, np.nan, 51, 50, "51 steps"),
    "zeros, adaptive": (ADAPTIVE, 0.0, 5, 5, None),
    "more zeros, adaptive": (
        ADAPTIVE,
        0.0,
        6,
        5,
        r"0 in 6 steps at loss scale 256.*init",
    ),
    "no zeros, adaptive": (ADAPTIVE, 1.0, 6, 5, None),
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


def trained(tx, loss_fn, batches, pass_value=True):
    @jax.jit
    def step(w, state, x):
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(w, x)
        value = loss if pass_value else None
        return jaxscale.apply_gradients(tx, grads, state, w, value=value)

    w = W
    state = tx.init(W)
    for x in batches:
        w, state = step(w, state, jnp.full(3, x))
    return state


def cleaned(grads):
    return jnp.nan_to_num(grads, nan=0.0, posinf=0.0, neginf=0.0)


MOMENTUM = optax.sgd(0.1, momentum=0.9)
# The optimizer, what is done to gradients before it gets them, and the loss and batch of a step.
ALL_ZERO = {
    "dynamic": (TX, unchanged, square_loss, 0.0),
    "fixed": (jaxscale.loss_scaled(MOMENTUM, 8), unchanged, square_loss, -0.0),
    "unscaled": (jaxscale.skip_nonfinite(MOMENTUM), unchanged, square_loss, 0.0),
    "window": (jaxscale.multi_steps(TX, 1), unchanged, square_loss, 0.0),
    "hidden": (TX, cleaned, large_half_loss, 1.0),
    "no moments, but norms": (
        jaxscale.loss_scaled(SGD, spikes=jaxscale.SpikeRule()),
        unchanged,
        square_loss,
        0.0,
    ),
}


@cases("name", ALL_ZERO)
def test_steps_whose_gradients_are_all_0_are_told_of(name):
    tx, clean, loss_fn, x = ALL_ZERO[name]

    @jax.jit
    def step(w, state, x):
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(w, jnp.full(3, x))
        return jaxscale.apply_gradients(tx, clean(grads), state, w, value=loss)

    w = W
    state = tx.init(w)
    for steps in (49, 1):
        jaxscale.check(state, tx=tx)
        for _ in range(steps):
            w, state = step(w, state, x)
    for tree in (state, stacked(state, state)):
        with pytest.warns(UserWarning, match=r" 0 \w+ 50 steps.*`on_grads="):
            jaxscale.check(tree, tx=tx)
    _, state = jax.jit(tx.update)(W, state, w)
    jaxscale.check(state, tx=tx)


def test_one_gradient_that_is_0_is_no_symptom():
    state = TX.init(PAIR)
    for _ in range(50):
        state = one_step(TX, {"a": W, "b": 0 * W}, state)
    jaxscale.check(state)  # a warning is an error here


# A finite gradient whose square is inf, and what skips that step.
TOO_LARGE = 1e30
SQUARES = {
    "by default": ({}, True),
    "check_updates": ({"check_updates": True}, False),
    "spikes": ({"spikes": jaxscale.SpikeRule()}, False),
}


@cases("name", SQUARES)
def test_a_moment_that_is_inf_is_told_of(name):
    options, is_told = SQUARES[name]
    tx = jaxscale.skip_nonfinite(optax.adam(0.1), **options)
    state = one_step(tx, W, tx.init(W))
    jaxscale.check(state, tx=tx)
    grads = W.at[1].set(TOO_LARGE)
    _, state = jax.jit(tx.update)(grads, state, W)
    warns = contextlib.nullcontext()
    if is_told:
        warns = pytest.warns(UserWarning, match="moment.*is inf or NaN.*check_updates")
    for tree in (state, stacked(state, state)):
        with warns:
            jaxscale.check(tree, tx=tx)


class Hopeless(NamedTuple):
    """A run that no longer makes steps, and what `check` says of it."""

    tx: optax.GradientTransformation
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array]
    batches: list[float]
    says: list[str]
    says_not: list[str]
    pass_value: bool = True  # to `apply_gradients`
    pass_tx: bool = True  # to `check`


HOPELESS = {
    "the forward pass never worked": Hopeless(
        TX,
        negative_root_loss,
        [-1.0] * 51,
        says=[
            "51 of them with a non-finite loss",
            "is 32768.0",
            "no loss scale can help",
            "never was",
        ],
        says_not=["backward", "were fine"],
    ),
    "a shard of bad data": Hopeless(
        TX,
        negative_root_loss,
        [1.0] * 20 + [-1.0] * 60,
        says=[
            "60 steps in a row",
            "60 of 80 in all",
            "20 steps were fine",
            "stretch of bad data",
        ],
        says_not=["backward", "range of its dtype"],
    ),
    "no scale is low enough": Hopeless(
        TX,
        root_loss,
        [1.0] * 5 + [0.0] * 60,
        says=[
            "0 of them with a non-finite loss",
            "scale is 1.0",
            "square root of 0",
            "debug_infs",
        ],
        says_not=["no loss scale can help", "fixed", "floor"],
    ),
    "the loss is too large": Hopeless(
        TX,
        large_half_loss,
        [1.0] * 70,
        says=[
            "scale is 1.0",
            "loss is too large for float16",
            "mean instead of a sum",
            "min_scale",
        ],
        says_not=["no loss scale can help", "fixed", "at its floor"],
    ),
    "the loss is not passed": Hopeless(
        TX,
        negative_root_loss,
        [-1.0] * 60,
        says=["scale is 1.0", "if not, pass it"],
        says_not=["no loss scale can help"],
        pass_value=False,
    ),
    "a floor that is too high": Hopeless(
        FLOORED,
        half_loss,
        [400.0] * 60,
        says=["scale is 1024.0", "at its floor", "(min_scale=2.0**-4)", "at any scale"],
        says_not=["is fixed", "on its way down"],
    ),
    "a fixed scale that is too high": Hopeless(
        FIXED,
        half_loss,
        [400.0] * 60,
        says=["scale is 4096.0", "The scale is fixed, and too high"],
        says_not=["floor", "on its way down"],
    ),
    "a scale that comes down slowly": Hopeless(
        SLOW,
        half_loss,
        [400.0] * 60,
        says=["still on its way down, to 1:", "start lower"],
        says_not=["floor", "is fixed", "square root"],
    ),
    "no scaling at all": Hopeless(
        jaxscale.skip_nonfinite(SGD),
        root_loss,
        [0.0] * 60,
        says=[
            "with a non-finite loss). If",
            "Check the batch for NaN",
            "square root of 0",
        ],
        says_not=["no loss scale can help", "floor", "scale is", "float16"],
    ),
    "the optimizer makes a NaN of zeros": Hopeless(
        jaxscale.loss_scaled(optax.contrib.prodigy()),
        square_loss,
        [0.0] + [1.0] * 60,
        says=["The optimizer itself made a NaN", "estim_lr", "check_updates=True"],
        says_not=["bad data", "no loss scale can help", "range of its dtype", "doctor"],
    ),
}


@pytest.mark.worlds
@cases("case", HOPELESS, fast=["a shard of bad data", "a floor that is too high"])
def test_the_right_cause_is_named(case):
    run = HOPELESS[case]
    state = trained(run.tx, run.loss_fn, run.batches, run.pass_value)
    message = stuck(state, tx=run.tx if run.pass_tx else None)
    for words in run.says:
        assert words in message
    for words in run.says_not:
        assert words not in message


@pytest.mark.worlds
@cases("policy", ["dynamic", "adaptive"], fast=["dynamic"])
def test_the_line_that_is_named_helps(policy):
    tx = jaxscale.loss_scaled(optax.sgd(0.0), policy)
    batches = [1.0] * 70
    state = trained(tx, large_half_loss, batches)
    message = stuck(state, tx=tx)
    named = re.search(r"`(jaxscale\.loss_scaled\(tx, .*?\)\))`", message)
    line = named.group(1)
    assert ("Adaptive" in line) == (policy == "adaptive")
    names = {"jaxscale": jaxscale, "tx": optax.sgd(0.0)}
    tx = eval(line, names)
    state = trained(tx, large_half_loss, batches)
    jaxscale.check(state, tx=tx, max_consecutive=0)
    assert 2.0**-6 <= state.scaling.loss_scale <= 2.0**-3


def idle(tx, scale=2.0**24, **counters):
    """A state after many finite steps, with a scale that has only ever grown."""
    state = jax.device_get(after(1, jnp.ones(3), tx))
    scaling = state.scaling._replace(loss_scale=np.float32(scale))
    state = state._replace(scaling=scaling, total_steps=np.int32(10_000))
    return state._replace(**{name: np.int32(n) for name, n in counters.items()})


# Each makes a state when a test asks for it, and is told of or not.
IDLE = {
    "an overflow": (lambda: idle(TX, total_notfinite=1), False),
    "a retry": (lambda: idle(TX, total_retries=1), False),
    "adaptive": (lambda: idle(ADAPTIVE), False),
    "grown": (lambda: idle(TX), True),
    "a bad loss": (lambda: idle(TX, total_notfinite=1, total_notfinite_loss=1), True),
    "a population": (lambda: stacked(idle(TX, 2.0**23), idle(TX)), True),
    "a tree": (lambda: {"opt": idle(TX)}, True),
}


def stacked(*states):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


@cases("name", IDLE)
def test_a_scale_that_only_ever_grew_is_warned_of(name):
    make_state, is_warned_of = IDLE[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxscale.check(make_state())
    assert len(caught) == is_warned_of
    for warning in caught:
        assert warning.filename == __file__
        for words in (
            "`jax.value_and_grad`",
            "train_step(loss_fn, tx)",
            "skip_nonfinite(tx)",
        ):
            assert words in str(warning.message)


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

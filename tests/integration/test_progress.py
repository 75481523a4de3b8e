"""What the counters say, on the device and on the host."""

import functools
import re
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

W, BAD = jnp.full(3, 0.5), jnp.full(3, jnp.nan)
SGD = optax.sgd(0.1)
TX = jaxscale.loss_scaled(optax.adam(0.1))
ADAPTIVE = jaxscale.loss_scaled(SGD, "adaptive")
FIXED = jaxscale.loss_scaled(SGD, 2.0**12)
FLOORED = jaxscale.loss_scaled(SGD, jaxscale.DynamicLossScale(init_scale=2**12, min_scale=2**10))
SLOW = jaxscale.loss_scaled(SGD, jaxscale.DynamicLossScale(backoff_factor=0.99))
TOP = jaxscale.loss_scaled(SGD, jaxscale.DynamicLossScale(init_scale=2.0**24))


@functools.partial(jax.jit, static_argnums=0)
def one_step(tx, grads, state):
    return tx.update(grads, state)[1]


def after(steps, grads=BAD, tx=TX):
    """The state of an optimizer after so many steps with the same gradients."""
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
def test_metrics_of_a_loss_scale_alone_are_its_state(policy):
    state = policy().init()
    assert jaxscale.metrics({"policy": state}) == state._asdict()


def test_metrics_of_an_optimizer_hold_those_of_its_loss_scale():
    state = after(1, jnp.ones(3), ADAPTIVE)
    assert jaxscale.metrics(state).items() >= state.scaling._asdict().items()


def test_metrics_are_scalars_inside_jit_and_outside():
    state = after(2)
    inside = jax.jit(jaxscale.metrics)({"opt": (state,), "params": jnp.zeros(3)})
    outside = jaxscale.metrics(state)
    assert inside == outside
    for value in (*inside.values(), *outside.values()):
        assert value.shape == ()
    assert outside["notfinite_count"] == 2
    assert not outside["step_applied"]


def test_check_is_silent_while_training_makes_progress():
    jaxscale.check(after(5, jnp.ones(3)), max_consecutive=0)
    jaxscale.check({"opt": after(3)}, max_consecutive=3)
    _, recovered = TX.update(jnp.ones(3), after(9))
    jaxscale.check(recovered, max_consecutive=0)


def test_a_scale_may_come_down_all_the_way_by_default():
    jaxscale.check(after(24, tx=TOP))
    stuck(jax.tree.map(np.asarray, after(51, tx=TOP)), "51 steps")


# The number of steps, the size of the gradients, and the optimizer.
WITH_SOME_GRADIENTS = {
    "few zeros": (5, 0.0, ADAPTIVE),
    "ones": (6, 1.0, ADAPTIVE),
    "a policy that does not look": (6, 0.0, TX),
}


@cases("name", WITH_SOME_GRADIENTS)
def test_gradients_that_are_not_0_suffice(name):
    steps, size, tx = WITH_SOME_GRADIENTS[name]
    jaxscale.check(after(steps, jnp.full(3, size), tx), max_consecutive=5)


def test_a_policy_that_follows_gradients_needs_some_that_are_not_0():
    blind = after(6, jnp.zeros(3), ADAPTIVE)
    stuck(blind, r"0 in 6 steps at loss scale 256.*init", max_consecutive=5)


def half_loss(w, x):
    """Finite, with gradients that overflow float16 at a scale of more than about 100."""
    return jnp.sum((w * x).astype(jnp.float16).astype(jnp.float32) * 500)


LOSSES = {
    "half": half_loss,
    "large": lambda w, x: 1000 * half_loss(w, x),  # at a scale of more than about an eighth
    # Finite, with gradients of inf at any scale where x is 0.
    "root": lambda w, x: jnp.sum(jnp.sqrt(jnp.abs(w * x))),
    # NaN where x is negative.
    "domain": lambda w, x: -jnp.sum(jnp.sqrt(w * x)),
}


def trained(tx, name, batches, pass_loss=True):
    @jax.jit
    def step(w, state, x):
        loss, grads = jaxscale.value_and_grad(LOSSES[name], state)(w, x)
        value = loss if pass_loss else None
        return jaxscale.apply_gradients(tx, grads, state, w, value=value)

    w, state = W, tx.init(W)
    for x in batches:
        w, state = step(w, state, jnp.full(3, x))
    return state


class Hopeless(NamedTuple):
    """A run without a good step at its end, and what is said of it."""

    tx: optax.GradientTransformation
    loss: str
    batches: list[float]
    says: list[str]
    says_not: list[str]
    pass_loss: bool = True
    pass_tx: bool = True


HOPELESS = {
    "the forward pass never worked": Hopeless(
        tx=TX,
        loss="domain",
        batches=[-1.0] * 51,
        says=[
            "51 of them with a non-finite loss",
            "is 32768.0",
            "no loss scale can help",
            "never was",
        ],
        says_not=["backward", "were fine"],
    ),
    "a shard of bad data": Hopeless(
        tx=TX,
        loss="domain",
        batches=[1.0] * 20 + [-1.0] * 60,
        says=[
            "60 steps in a row",
            "60 of 80 in all",
            "20 steps were fine",
            "stretch of bad data",
        ],
        says_not=["backward", "range of its dtype"],
    ),
    "no scale is low enough": Hopeless(
        tx=TX,
        loss="root",
        batches=[1.0] * 5 + [0.0] * 60,
        says=[
            "0 of them with a non-finite loss",
            "scale is 1.0",
            "square root of 0",
            "debug_infs",
        ],
        says_not=["no loss scale can help", "fixed", "floor"],
    ),
    "the loss is too large": Hopeless(
        tx=TX,
        loss="large",
        batches=[1.0] * 70,
        says=[
            "scale is 1.0",
            "loss is too large for float16",
            "mean instead of a sum",
            "min_scale",
        ],
        says_not=["no loss scale can help", "fixed", "at its floor"],
    ),
    "the loss is not passed": Hopeless(
        tx=TX,
        loss="domain",
        batches=[-1.0] * 60,
        says=["scale is 1.0", "if not, pass it"],
        says_not=["no loss scale can help"],
        pass_loss=False,
    ),
    "a floor that is too high": Hopeless(
        tx=FLOORED,
        loss="half",
        batches=[400.0] * 60,
        says=["scale is 1024.0", "at its floor", "(min_scale=2.0**-4)", "at any scale"],
        says_not=["is fixed", "on its way down"],
    ),
    "a fixed scale that is too high": Hopeless(
        tx=FIXED,
        loss="half",
        batches=[400.0] * 60,
        says=["scale is 4096.0", "The scale is fixed, and too high"],
        says_not=["floor", "on its way down"],
    ),
    "a scale that comes down slowly": Hopeless(
        tx=SLOW,
        loss="half",
        batches=[400.0] * 60,
        says=["still on its way down, to 1:", "start lower"],
        says_not=["floor", "is fixed", "square root"],
    ),
    "an optimizer that is not known": Hopeless(
        tx=FLOORED,
        loss="half",
        batches=[400.0] * 60,
        says=["fixed and too high, or still on its way down", "Pass `tx`"],
        says_not=["floor"],
        pass_tx=False,
    ),
    "no scaling at all": Hopeless(
        tx=jaxscale.skip_nonfinite(SGD),
        loss="root",
        batches=[0.0] * 60,
        says=["scale is 1.0", "A scale of 1 scales nothing", "square root of 0"],
        says_not=["no loss scale can help", "floor"],
    ),
}


@cases("case", HOPELESS, fast=["a shard of bad data", "a floor that is too high"])
def test_the_right_cause_is_named(case):
    run = HOPELESS[case]
    state = trained(run.tx, run.loss, run.batches, run.pass_loss)
    message = stuck(state, tx=run.tx if run.pass_tx else None)
    assert not [words for words in run.says if words not in message]
    assert not [words for words in run.says_not if words in message]


@cases("policy", ["dynamic", "adaptive"], fast=["dynamic"])
def test_the_line_that_is_named_helps(policy):
    standing = optax.sgd(0.0)
    batches = [1.0] * 70
    tx = jaxscale.loss_scaled(standing, policy)
    message = stuck(trained(tx, "large", batches), tx=tx)
    (line,) = re.findall(r"`(jaxscale\.loss_scaled\(tx, .*?\)\))`", message)
    assert ("Adaptive" in line) == (policy == "adaptive")
    advised = eval(line, {"jaxscale": jaxscale, "tx": standing})
    state = trained(advised, "large", batches)
    jaxscale.check(state, tx=advised, max_consecutive=0)
    assert 2.0**-6 <= state.scaling.loss_scale <= 2.0**-3


def idle(tx, scale=2.0**24, **counters):
    """A state after many finite steps, with a scale that has only ever grown."""
    state = jax.device_get(after(1, jnp.ones(3), tx))
    scaling = state.scaling._replace(loss_scale=np.float32(scale))
    counters = {"total_steps": 10_000} | counters
    return state._replace(scaling=scaling, **{k: np.int32(v) for k, v in counters.items()})


# A scale that is lower or has moved down, a run that is short, and policies that do not grow.
SILENT = {
    "a lower scale": (TX, {"scale": 2.0**23}),
    "an overflow": (TX, {"total_notfinite": 1}),
    "a retry": (TX, {"total_retries": 1}),
    "too few steps": (TX, {"total_steps": 9999}),
    "a fixed scale": (FIXED, {}),
    "an adaptive one": (ADAPTIVE, {}),
}


@cases("name", SILENT)
def test_a_scale_that_may_have_come_down_is_not_warned_of(name):
    tx, changes = SILENT[name]
    jaxscale.check(idle(tx, **changes))  # a warning is an error here


def test_a_scale_that_only_ever_grew_is_warned_of_once():
    grown, lower = idle(TX), idle(TX, 2.0**23)
    bad_loss = idle(TX, total_notfinite=1, total_notfinite_loss=1)
    several = jax.tree.map(lambda *leaves: np.stack(leaves), lower, grown)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for state in (grown, bad_loss, several, {"opt": grown}):
            jaxscale.check(state)
    assert len(caught) == 4
    # By default Python shows one text of one line of a program once.
    shown = {(str(warning.message), warning.filename, warning.lineno) for warning in caught}
    ((text, file, _),) = shown
    assert file == __file__
    for words in ("`jax.value_and_grad`", "train_step(loss_fn, tx)", "skip_nonfinite(tx)"):
        assert words in text


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


def test_check_reads_a_train_state_and_states_that_hold_more_than_scalars():
    state = jaxscale.flax.TrainState.create(apply_fn=None, params=W, tx=FIXED)
    for _ in range(4):
        state = state.apply_gradients(grads=BAD)
    stuck(state, "The scale is fixed", max_consecutive=3)  # it brings its optimizer
    tx = jaxscale.loss_scaled(SGD, Tracking())
    alone = after(7, tx=tx)
    states = jax.tree.map(lambda *xs: jnp.stack(xs), after(1, tx=tx), alone)
    for state in (alone, states):
        stuck(state, r"7 steps.*on its way down, to 4:", tx=tx, max_consecutive=5)


def test_the_advice_finds_where_an_overflow_is_born():
    def step(w):
        state = TX.init(w)
        return TX.update(jaxscale.grad(lambda w: jnp.sum(jnp.sqrt(w)), state)(w), state, w)

    with jax.debug_infs(True):  # inside `jit` the skip hides it
        jax.jit(step)(jnp.zeros(3))
    with jax.disable_jit(), jax.debug_infs(True):
        step(jnp.ones(3))
        with pytest.raises(FloatingPointError):
            step(jnp.zeros(3))

"""Several micro-batches a step: what a bad one costs, in every nesting."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
import tables
from tables import (
    INNERS,
    PARAMS,
    assert_same_bits,
    avals,
    cases,
    counters,
    fused_step,
    spread,
)
from training import x64

import jaxscale
import jaxscale.flax

pytestmark = pytest.mark.standard_promotion


def test_the_step_of_two_micro_batches_is_that_of_their_mean():
    tx = jaxscale.multi_steps(jaxscale.loss_scaled(optax.sgd(1.0)), 2)
    params = jnp.zeros(())
    state = tx.init(params)
    for grad in (1.0, 3.0):
        params, state = jaxscale.apply_gradients(tx, jnp.array(grad), state, params)
    assert params == -2


GOOD = tables.gradients(2, 8)
POLICY = jaxscale.DynamicLossScale(
    growth_interval=2, init_scale=2.0**10, max_scale=2.0**13
)


def windowed(inner, length, policy=POLICY):
    return jaxscale.multi_steps(jaxscale.loss_scaled(inner, policy), length)


VALUES = [jnp.nan, jnp.inf, -jnp.inf, jnp.nan]
LOST = list(map(tables.spoiled, GOOD[4:], VALUES))
# Two of four micro-batches are bad: then the mean is exactly that of a window of the other two.
MIXED = [LOST[0], *GOOD[:2], *LOST[1:3], *GOOD[2:4], LOST[3]]


SAFE = jaxscale.skip_nonfinite
SCALED = functools.partial(jaxscale.loss_scaled, loss_scale=POLICY)
WINDOW = jaxscale.multi_steps
NESTINGS = {
    "outside": (SCALED, WINDOW),
    "inside": (WINDOW, SCALED),
    "alone": (WINDOW,),
    "without a scale": (SAFE, WINDOW),
}


def nest(inner, wraps, length):
    """An optimizer in some wrappers, the innermost first."""
    tx = inner
    for wrap in wraps:
        tx = wrap(tx, length) if wrap is WINDOW else wrap(tx)
    return tx


def train_and_check(tx, sequence, length):
    """The parameters and the state after some micro-batches; checks what holds after each."""
    params = PARAMS
    state = tx.init(PARAMS)
    types = avals(state)
    for i, grads in enumerate(sequence, 1):
        before = params
        params, state = fused_step(tx, params, state, grads)
        assert avals(state) == types
        if i % length:  # the window is not full
            assert_same_bits(params, before)
    return params, state


@pytest.mark.worlds
@cases(
    "inner, nesting",
    spread(INNERS, NESTINGS),
    fast=[("adamw_clipped", nesting) for nesting in ("outside", "inside", "alone")],
)
def test_bad_micro_batches_leave_no_trace_in_any_nesting(inner, nesting):
    ends = []
    for length, sequence, num_bad in ((4, MIXED, 4), (2, GOOD[:4], 0)):
        tx = nest(INNERS[inner], NESTINGS[nesting], length)
        # Windows of two and of four are two programs, which may differ.
        params, state = train_and_check(tx, sequence, length)
        assert state.total_notfinite == num_bad
        assert state.total_steps == len(sequence)
        ends.append((params, state.inner_state))
    assert_same_bits(*ends)


# The dtype of a parameter, and that of its sums.
SUMS = {
    "float16": "float32",
    "bfloat16": "float32",
    "float64": "float64",
    "complex64": "complex64",
    "int32": None,
}
OWG = "_overwrite_with_gradient"
IDENTITY = windowed(optax.identity(), 2)


@pytest.mark.worlds
def test_a_window_of_each_type_is_summed_in_float32_or_wider():
    """It holds only gradients and overwrites."""
    with x64():
        params = {dtype: jnp.ones(2, dtype) for dtype in SUMS}
        params |= {
            OWG: jnp.ones(2, jnp.float32),
            "key": jax.random.key(0),
            "none": None,
        }
        state = IDENTITY.init(params)
        sums = jax.tree.map(lambda leaf: leaf.dtype.name, state.inner_state.acc_grads)
        assert sums == SUMS | {OWG: "float32", "key": None, "none": None}
        types = avals(state)
        grads = params | {"complex64": jnp.array([1 + 2j, 3 - 4j], jnp.complex64)}
        for size in (0.0, 1.0):
            grads[OWG] = jnp.full(2, size, jnp.float32)
            updates, state = jax.jit(IDENTITY.update)(grads, state, params)
            assert avals(state) == types
    assert updates["complex64"].tolist() == grads["complex64"].tolist()
    assert updates[OWG].tolist() == [0, 0]  # 1, the largest, as it was


class Run(NamedTuple):
    """An optimizer and its gradients, and what they come to."""

    tx: Any
    grads: list[Any]
    expected: list[float]  # the parameter after each
    bad: list[int]  # which of them are skipped
    num_steps: int  # how many steps the optimizer makes


ONE_BAD = [1.0, jnp.inf, *[1.0] * 8]
BY_TWO = [0, 0, -1, -1, -2, -2, -3, -3, -4, -4]  # the nine good ones make four windows


def divide_by_distance_from_one(updates, params):
    return jax.tree.map(lambda update: 1 / (update - 1), updates)


INF_AT_ONE = optax.stateless(divide_by_distance_from_one)
OF_OPTAX = optax.MultiSteps(optax.sgd(1.0), 2)
SKIPS_TOO = optax.MultiSteps(
    optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_not_finite
)
SCHEDULED = windowed(optax.sgd(1.0), lambda step: jnp.where(step < 2, 1, 3))
CHECKED = jaxscale.multi_steps(
    jaxscale.loss_scaled(INF_AT_ONE, 8, check_updates=True), 2
)
ROUNDED_DOWN = jnp.array([2.9, 0.0, 3.0])
RUNS = {
    **{
        f"a schedule of {length} acts as one of 1": Run(
            tx=windowed(optax.sgd(1.0), lambda step, length=length: length),
            grads=[1.0] * 3,
            expected=[-1, -2, -3],
            bad=[],
            num_steps=3,
        )
        for length in (0, -1, 0.5, 1.9, -(2**31), 1)
    },
    "a schedule is rounded down and may go through 0": Run(
        tx=windowed(optax.sgd(1.0), lambda step: ROUNDED_DOWN[jnp.minimum(step, 2)]),
        grads=[1.0, 3.0, 5.0, 1.0, 2.0, 6.0],
        expected=[0, -2, -7, -7, -7, -10],
        bad=[],
        num_steps=3,
    ),
    "no share underflows": Run(
        tx=windowed(optax.sgd(1.0), 4),
        grads=[jnp.float16(2.0**-24)] * 4,
        expected=[0, 0, 0, -(2.0**-24)],
        bad=[],
        num_steps=1,
    ),
    "the length may follow a schedule": Run(
        tx=SCHEDULED,
        grads=[1.0] * 8,
        expected=[-1, -2, -2, -2, -3, -3, -3, -4],
        bad=[],
        num_steps=4,
    ),
    "checked updates cost a window its step and no more": Run(
        tx=CHECKED,
        grads=[1.0, 1.0, 3.0, 3.0],
        expected=[0, 0, 0, 0.5],
        bad=[1],
        num_steps=1,
    ),
    # A bad one in a window of ours, and in the nestings that Optax' own accumulator allows.
    "around": Run(
        tx=windowed(optax.sgd(1.0), 2),
        grads=[1.0, jnp.inf, 1.0, 1.0],
        expected=[0, -1, -1, -2],
        bad=[1],
        num_steps=2,
    ),
    "inside": Run(
        jaxscale.loss_scaled(OF_OPTAX), ONE_BAD, BY_TWO, bad=[1], num_steps=4
    ),
    "skips": Run(
        jaxscale.loss_scaled(SKIPS_TOO), ONE_BAD, BY_TWO, bad=[1], num_steps=4
    ),
}


@pytest.mark.worlds
@pytest.mark.device
@cases("name", RUNS, fast=[name for name in RUNS if "of" not in name])
def test_a_step_is_made_when_the_window_is_full(name):
    run = RUNS[name]
    start = {"w": jnp.zeros_like(run.grads[0])}
    state = jaxscale.flax.TrainState.create(apply_fn=None, params=start, tx=run.tx)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    history = []
    for i, grad in enumerate(run.grads):
        state = step(state, {"w": jnp.asarray(grad)})
        history.append(float(state.params["w"]))
        assert state.opt_state.step_applied == (i not in run.bad)
        assert state.step == counters(state)["gradient_step"]
    assert history == run.expected
    assert state.step == run.num_steps


def test_inner_is_given_the_mean_loss_of_what_counted():
    calls = []

    def update(updates, state, params=None, *, value, other):
        calls.append((float(value), other))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    tx = windowed(inner, 4)
    grad = jnp.ones(())
    state = tx.init(grad)
    for value in [1.0, jnp.nan, 5.0, jnp.inf]:
        _, state = tx.update(grad, state, value=jnp.float16(value), other="text")
    assert calls[-1] == (3.0, "text")
    assert state.total_notfinite_loss == 2
    assert state.inner_state.acc_value == 0


@cases(
    "first, then, num_before",
    [(4, 2, 1), (2, 4, 1), (4, 2, 3), (8, 3, 4), (2, 8, 1), (1, 4, 0)],
)
def test_a_window_that_changes_its_length_steps_by_the_mean_of_what_was_added(
    first, then, num_before
):
    """As when a run is resumed with another length. What comes after is a window of its own."""
    params = jnp.zeros(2)
    length = first
    state = windowed(optax.sgd(1.0), first).init(params)
    for i in range(num_before + then):
        if i == num_before:
            length = then
        tx = windowed(optax.sgd(1.0), length)
        params, state = fused_step(tx, params, state, jnp.ones(2))
        if state.inner_state.gradient_step == 1:
            break
    assert params.tolist() == [-1, -1]
    assert (state.inner_state.mini_step, state.inner_state.divisor) == (0, 0)

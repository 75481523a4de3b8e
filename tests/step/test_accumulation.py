"""Several micro-batches a step: what a bad one costs, in every nesting."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import (
    INNERS,
    PARAMS,
    assert_same_bits,
    avals,
    cases,
    counters,
    gradients,
    run,
    spoiled,
)
from training import x64

import jaxscale
import jaxscale.flax

pytestmark = pytest.mark.standard_promotion

GOOD = gradients(2, 8)
DROPS = ["micro_batch", "window"]
UNITS = ["optimizer_step", "micro_batch"]
POLICY = jaxscale.DynamicLossScale(growth_interval=2, init_scale=2.0**10, max_scale=2.0**13)


def windowed(inner, length, policy=POLICY, **options):
    return jaxscale.multi_steps(jaxscale.loss_scaled(inner, policy), length, **options)


def reference(kinds, length, drop, unit):
    """Plain Python: the parameter, the loss scale and the counters after some micro-batches.

    A kind is "good", "grads" (an overflow on the way back) or "loss" (a bad forward pass);
    the i-th gradient is i + 1, the optimizer is SGD with a learning rate of 1.
    """
    param, scale, streak, steps, window = 0.0, POLICY.init_scale, 0, 0, []
    for i, kind in enumerate(kinds):
        window.append(i + 1.0 if kind == "good" else None)
        counted = [grad for grad in window if grad is not None]
        stepped = False
        if len(window) == length:
            stepped = bool(counted) and (drop == "micro_batch" or len(counted) == length)
            if stepped:
                param -= math.fsum(counted) / len(counted)
                steps += 1
            window = []
        if kind == "grads":
            scale, streak = max(scale / 2, POLICY.min_scale), 0
        elif kind == "good" and (stepped or unit == "micro_batch"):
            streak += 1
            if streak == POLICY.growth_interval:
                scale, streak = min(scale * 2, POLICY.max_scale), 0
    return param, scale, streak, steps, len(window), sum(kind != "good" for kind in kinds)


@functools.cache
def scanned(length, drop, unit):
    tx = windowed(optax.sgd(1.0), length, drop=drop, growth_unit=unit)

    def body(carry, kind_and_grad):
        kind, grad = kind_and_grad
        grad = jnp.where(kind == 0, grad, jnp.inf)
        value = jnp.where(kind == 2, jnp.nan, 1.0)
        updates, state = tx.update(grad, carry[1], carry[0], value=value)
        return (carry[0] + updates, state), None

    def train(kinds, grads):
        param = jnp.zeros(())
        return jax.lax.scan(body, (param, tx.init(param)), (kinds, grads))[0]

    return jax.jit(train)


@cases(
    "length, drop, unit",
    itertools.product([1, 2, 3, 4], DROPS, UNITS),
    fast=[(3, "micro_batch", "optimizer_step"), (2, "window", "micro_batch")],
)
@given(kinds=st.lists(st.sampled_from(["good", "good", "grads", "loss"]), min_size=24, max_size=24))
def test_it_does_what_the_rule_says(length, drop, unit, kinds):
    numbers = jnp.array([["good", "grads", "loss"].index(kind) for kind in kinds])
    param, state = scanned(length, drop, unit)(numbers, jnp.arange(1.0, 25.0))
    got = jaxscale.metrics(state)
    expected = reference(kinds, length, drop, unit)
    np.testing.assert_allclose(param, expected[0], rtol=1e-5)  # means of 3 are rounded
    names = ("loss_scale", "growth_tracker", "gradient_step", "mini_step", "total_notfinite")
    assert tuple(got[name] for name in names) == expected[1:]
    assert (got["total_steps"], got["total_notfinite_loss"]) == (24, kinds.count("loss"))


@cases(
    "inner, drop",
    itertools.product(["adamw_clipped", "noisy"], DROPS),
    fast=[("adamw_clipped", "window")],
)
def test_every_nesting_is_the_same(inner, drop):
    inner = INNERS[inner]
    sequence = [GOOD[0], spoiled(GOOD[1], jnp.nan), *GOOD[2:5], spoiled(GOOD[5], jnp.inf)]

    def window(inner):
        return jaxscale.multi_steps(inner, 2, drop=drop)

    safe, scaled = jaxscale.skip_nonfinite, functools.partial(jaxscale.loss_scaled, loss_scale=8)
    for nestings in (
        [window(scaled(inner)), scaled(window(inner))],
        [window(inner), window(safe(inner)), safe(window(inner))],
    ):
        first, *others = (run(tx, sequence) for tx in nestings)
        for other in others:
            assert_same_bits(other, first)
        assert counters(first[1])["gradient_step"] == {"window": 1, "micro_batch": 3}[drop]


LOST = [
    spoiled(grads, bad)
    for grads, bad in zip(GOOD[4:], [jnp.nan, jnp.inf, -jnp.inf, jnp.nan], strict=True)
]
# By what is dropped: how long a window is, and micro-batches that leave four of `GOOD`, in twos.
MIXED = {
    "window": (2, [LOST[0], GOOD[7], *GOOD[:2], GOOD[7], LOST[1], *LOST[2:], *GOOD[2:4]]),
    # Two of four are bad: then the mean is exactly that of a window of the other two.
    "micro_batch": (4, [LOST[0], *GOOD[:2], *LOST[1:3], *GOOD[2:4], LOST[3]]),
}


@cases("inner, drop", itertools.product(INNERS, DROPS), fast=[("adamw_clipped", "window")])
def test_bad_micro_batches_leave_no_trace(inner, drop):
    outcomes = []
    for length, sequence, bad in ((*MIXED[drop], 4), (2, GOOD[:4], 0)):
        tx = windowed(INNERS[inner], length, drop=drop)
        step = functools.partial(jaxscale.apply_gradients, tx)
        if drop == "window":  # windows of two and of four are two programs, which may differ
            step = jax.jit(step, donate_argnums=(1, 2))
        params, state = jax.tree.map(jnp.copy, (PARAMS, tx.init(PARAMS)))
        for i, grads in enumerate(sequence, 1):
            before = jax.tree.map(jnp.copy, params)
            params, state = step(grads, state, params)
            assert avals(state) == avals(tx.init(PARAMS))
            if i % length:  # the window is not full
                assert_same_bits(params, before)
        outcomes.append((params, state.inner_state))
        assert (state.total_notfinite, state.total_steps) == (bad, len(sequence))
    assert_same_bits(*outcomes)


def test_the_accumulator_is_float32_or_wider_and_holds_only_gradients_and_overwrites():
    kinds = {
        **{"float16": "float32", "bfloat16": "float32", "float64": "float64"},
        **{"complex64": "complex64", "int32": None},
    }
    owg = "_overwrite_with_gradient"
    with x64():
        params = {kind: jnp.ones(2, kind) for kind in kinds} | {owg: jnp.ones(2, jnp.float32)}
        params |= {"key": jax.random.key(0), "none": None}
        tx = windowed(optax.GradientTransformation(lambda _: (), lambda u, s, p=None: (u, s)), 2)
        state, update = tx.init(params), jax.jit(tx.update)
        held = jax.tree.map(lambda leaf: leaf.dtype.name, state.inner_state.acc_grads)
        assert held == kinds | {owg: "float32", "key": None, "none": None}
        grads = params | {"complex64": jnp.array([1 + 2j, 3 - 4j], jnp.complex64)}
        for i in range(2):
            grads[owg] = jnp.full(2, float(i), jnp.float32)
            updates, new_state = update(grads, state, params)
            assert avals(new_state) == avals(state)
            state = new_state
    assert updates["complex64"].tolist() == grads["complex64"].tolist()
    assert updates[owg].tolist() == [0, 0]  # 1, the largest, as it was


def test_no_share_underflows():
    tx = windowed(optax.sgd(1.0), 4)
    state = tx.init(jnp.zeros((), jnp.float16))
    for _ in range(4):
        updates, state = tx.update(jnp.float16(2.0**-24), state)
    assert updates == -(2.0**-24)


def test_the_length_may_follow_a_schedule():
    tx = windowed(optax.sgd(1.0), lambda step: jnp.where(step < 2, 1, 3))
    state = tx.init(jnp.zeros(()))
    lengths = []
    for _ in range(8):
        _, state = tx.update(jnp.ones(()), state)
        lengths.append(int(state.inner_state.gradient_step))
    assert lengths == [1, 2, 2, 2, 3, 3, 3, 4]


def test_inner_is_given_the_mean_loss_of_what_counted():
    seen = []

    def update(updates, state, params=None, *, value, other):
        seen.append((float(value), other))
        return updates, state

    tx = windowed(optax.GradientTransformationExtraArgs(lambda _: (), update), 4)
    state = tx.init(jnp.zeros(()))
    for value in [1.0, jnp.nan, 5.0, jnp.inf]:
        _, state = tx.update(jnp.ones(()), state, value=jnp.float16(value), other="text")
    assert seen[-1] == (3.0, "text")
    assert state.total_notfinite_loss == 2
    assert state.inner_state.acc_value == 0


def test_train_state_counts_steps_of_the_optimizer():
    tx = windowed(optax.sgd(1.0), 3)
    state = jaxscale.flax.TrainState.create(apply_fn=None, params=jnp.zeros(2), tx=tx)
    steps = []
    for grad in [1.0, 3.0, jnp.nan, 1.0, 1.0, 1.0, jnp.inf]:
        state = state.apply_gradients(grads=jnp.full(2, grad))
        steps.append(int(state.step))
    assert steps == [0, 0, 1, 1, 1, 2, 2]
    assert state.params[0] == -3  # the mean of 1 and 3 is 2


# What happens in the nestings that optax's own accumulator allows.


def with_one_bad(tx):
    """Parameter and state after ten gradients of 1, of which the second is inf."""
    state, update = tx.init(jnp.zeros(())), jax.jit(tx.update)
    params = jnp.zeros(())
    for i in range(10):
        updates, state = update(jnp.array(jnp.inf if i == 1 else 1.0), state, params)
        params += updates
    return params, state


@cases("skip", [None, optax.skip_not_finite], fast=[None])
def test_optax_multi_steps_inside_replaces_the_bad_micro_batch(skip):
    options = {} if skip is None else {"should_skip_update_fn": skip}
    params, state = with_one_bad(
        jaxscale.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2, **options), POLICY)
    )
    assert (params, state.total_notfinite) == (-4, 1)  # nine good ones make four windows
    assert (counters(state)["mini_step"], counters(state)["gradient_step"]) == (1, 4)


def test_windows_of_windows():
    params, state = with_one_bad(windowed(optax.MultiSteps(optax.sgd(1.0), 2), 2))
    assert (params, state.inner_state.gradient_step) == (-2, 5)

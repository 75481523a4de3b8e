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
from jax.sharding import Mesh, PartitionSpec
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
    wide,
)
from training import x64

import jaxscale
import jaxscale.flax

pytestmark = pytest.mark.standard_promotion

GOOD = gradients(2, 8)
DROPS = ["micro_batch", "window"]
UNITS = ["optimizer_step", "micro_batch"]
POLICY = jaxscale.DynamicLossScale(growth_interval=2, init_scale=2.0**10, max_scale=2.0**13)

# `test_optimizer.py` has all of them.
some_inners = cases("inner", INNERS, fast=["momentum"])


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
    itertools.product(["adamw_clipped", "noisy", "multi_transform"], DROPS),
    fast=[("adamw_clipped", "window")],
)
def test_every_nesting_is_the_same(inner, drop):
    inner = INNERS[inner]
    sequence = [GOOD[0], spoiled(GOOD[1], jnp.nan), *GOOD[2:5], spoiled(GOOD[5], jnp.inf)]

    def window(inner):
        return jaxscale.multi_steps(inner, 2, drop=drop)

    for policy, nestings in {
        POLICY: (
            window(jaxscale.loss_scaled(inner, POLICY)),
            jaxscale.loss_scaled(window(inner), POLICY),
        ),
        None: (  # which is to skip, and not to scale
            window(inner),
            window(jaxscale.skip_nonfinite(inner)),
            jaxscale.skip_nonfinite(window(inner)),
            jaxscale.loss_scaled(window(inner), None),
        ),
    }.items():
        first, *others = (run(tx, sequence) for tx in nestings)
        for other in others:
            assert_same_bits(other, first)
        expected = {"window": 1, "micro_batch": 3}[drop]
        assert counters(first[1])["gradient_step"] == expected, policy


@some_inners
def test_a_step_is_that_of_the_mean_gradient_bit_for_bit_eagerly(inner):
    tx, inner = windowed(INNERS[inner], 4), INNERS[inner]
    state = tx.init(PARAMS)
    for grads in GOOD[:4]:
        updates, state = tx.update(grads, state, PARAMS)
    # The length is a power of two, so to divide by it is exact, before a sum or after.
    mean = jax.tree.map(lambda a, b, c, d: (((a + b) + c) + d) / 4, *map(wide, GOOD[:4]))
    expected, expected_state = inner.update(mean, inner.init(wide(PARAMS)), wide(PARAMS))
    assert_same_bits(updates, expected)
    opt_state = state.inner_state.inner_opt_state
    assert_same_bits(jax.tree.leaves(opt_state), jax.tree.leaves(expected_state))


@cases("inner, fused", itertools.product(INNERS, [False, True]), fast=[("adamw_clipped", True)])
def test_bad_windows_thrown_in_leave_no_trace(inner, fused):
    tx = windowed(INNERS[inner], 2, drop="window")

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        if fused:
            return jaxscale.apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    first, last = [spoiled(GOOD[6], jnp.nan), GOOD[7]], [GOOD[7], spoiled(GOOD[6], jnp.inf)]
    both = [spoiled(GOOD[6], -jnp.inf), spoiled(GOOD[7], jnp.nan)]
    outcomes = []
    for sequence in ([*first, *GOOD[:2], *last, *both, *GOOD[2:4]], GOOD[:4]):
        params, state = jax.tree.map(jnp.copy, (PARAMS, tx.init(PARAMS)))
        for i, grads in enumerate(sequence):
            before = jax.tree.map(jnp.copy, params)
            params, new_state = step(params, state, grads)
            assert avals(new_state) == avals(tx.init(PARAMS))
            if i % 2 == 0:  # the window is not full
                assert_same_bits(params, before)
            state = new_state
        outcomes.append((params, state))
    assert step._cache_size() == 1
    (params, state), (expected, expected_state) = outcomes
    assert_same_bits(params, expected)
    assert_same_bits(state.inner_state, expected_state.inner_state)
    assert (state.total_notfinite, state.total_steps) == (4, 10)


@some_inners
def test_bad_micro_batches_thrown_in_leave_no_trace(inner):
    # Two of four are bad: then the mean is exactly that of a window of the other two.
    lost = [
        spoiled(grads, bad)
        for grads, bad in zip(GOOD[4:], [jnp.nan, jnp.inf, -jnp.inf, jnp.nan], strict=True)
    ]
    orders = [
        [GOOD[0], lost[0], lost[1], GOOD[1], lost[2], GOOD[2], GOOD[3], lost[3]],
        [lost[0], lost[1], GOOD[0], GOOD[1], GOOD[2], lost[2], lost[3], GOOD[3]],
    ]
    expected, expected_state = run(windowed(INNERS[inner], 2), GOOD[:4], compiled=False)
    for order in orders:
        params, state = run(windowed(INNERS[inner], 4), order, compiled=False)
        assert_same_bits(params, expected)
        assert_same_bits(state.inner_state, expected_state.inner_state)


def test_the_accumulator_is_float32_or_wider_and_holds_only_gradients_and_overwrites():
    with x64():
        params = {
            "half": jnp.ones(2, jnp.float16),
            "brain": jnp.ones(2, jnp.bfloat16),
            "double": jnp.ones(2, jnp.float64),
            "complex": jnp.ones(2, jnp.complex64),
            "integer": jnp.ones(2, jnp.int32),
            "key": jax.random.key(0),
            "none": None,
            "_overwrite_with_gradient": jnp.ones(2, jnp.float32),
        }
        inner = optax.GradientTransformation(lambda _: (), lambda u, s, p=None: (u, s))
        tx = windowed(inner, 2)
        state = tx.init(params)
        acc = state.inner_state.acc_grads
        assert {name: getattr(leaf, "dtype", None) for name, leaf in acc.items()} == {
            "half": jnp.float32,
            "brain": jnp.float32,
            "double": jnp.float64,
            "complex": jnp.complex64,
            "integer": None,
            "key": None,
            "none": None,
            "_overwrite_with_gradient": jnp.float32,
        }
        grads = params | {"complex": jnp.array([1 + 2j, 3 - 4j], jnp.complex64)}
        for i in range(2):
            grads["_overwrite_with_gradient"] = jnp.full(2, float(i), jnp.float32)
            updates, new_state = tx.update(grads, state, params)
            assert avals(new_state) == avals(state)
            state = new_state
    assert updates["complex"].tolist() == grads["complex"].tolist()
    assert updates["_overwrite_with_gradient"].tolist() == [0, 0]  # 1, the largest, as it was


@pytest.mark.parametrize("number", [jnp.finfo(jnp.float32).max, jnp.float16(2.0**-24)])
def test_no_sum_overflows_and_no_share_underflows(number):
    tx = windowed(optax.sgd(1.0), 4)
    update, state = jax.jit(tx.update), tx.init(jnp.zeros((), number.dtype))
    for _ in range(4):
        updates, state = update(number, state)
    assert updates == -number.astype(jnp.float32)


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


def test_train_state_counts_steps_of_the_optimizer_and_keeps_good_statistics():
    class State(jaxscale.flax.TrainState):
        batch_stats: jax.Array

    state = State.create(
        apply_fn=None,
        params=jnp.zeros(2),
        tx=windowed(optax.sgd(1.0), 3),
        batch_stats=jnp.array(-1.0),
    )
    history = []
    for i, grad in enumerate([1.0, 3.0, jnp.nan, 1.0, 1.0, 1.0, jnp.inf]):
        state = state.apply_gradients(grads=jnp.full(2, grad), batch_stats=jnp.array(float(i)))
        history.append((int(state.step), float(state.params[0]), float(state.batch_stats)))
    assert history == [
        (0, 0, 0),
        (0, 0, 1),
        (1, -2, 1),  # the mean of 1 and 3; the statistics of the bad micro-batch are not kept
        (1, -2, 3),
        (1, -2, 4),
        (2, -3, 5),
        (2, -3, 5),
    ]


@pytest.mark.slow
def test_devices_agree_on_the_window():
    mesh = Mesh(np.array(jax.devices("cpu")), ("data",))
    inner = jaxscale.loss_scaled(optax.sgd(1.0), POLICY, axis_name="data")
    tx = jaxscale.multi_steps(inner, 2)

    def one_device(state, grads):
        updates, state = tx.update(grads, state)
        return jax.lax.pmean(updates, "data"), state

    state = tx.init(jnp.zeros(8))
    specs = jax.tree.map(
        lambda leaf: PartitionSpec("data") if leaf.ndim else PartitionSpec(), state
    )
    step = jax.jit(
        jax.shard_map(
            one_device,
            mesh=mesh,
            in_specs=(specs, PartitionSpec("data")),
            out_specs=(PartitionSpec(), specs),
        )
    )
    updates, state = step(state, jnp.arange(8.0))
    assert updates == 0
    updates, state = step(state, jnp.ones(8).at[3].set(jnp.nan))
    assert updates == -3.5
    assert state.inner_state.gradient_step == state.total_notfinite == 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: jaxscale.loss_scaled(jaxscale.skip_nonfinite(tx, axis_name="data"), POLICY),
        lambda tx: jaxscale.loss_scaled(jaxscale.multi_steps(tx, 1), POLICY, axis_name="data"),
    ],
    ids=["inside", "outside"],
)
def test_the_axis_name_may_be_given_to_either_wrapper(wrap):
    tx = wrap(optax.sgd(1.0))
    state = tx.init(jnp.zeros(2))

    def member(grads):
        return tx.update(grads, state)[1].step_applied

    grads = jnp.ones((3, 2)).at[1, 0].set(jnp.nan)
    assert jax.jit(jax.vmap(member, axis_name="data"))(grads).tolist() == [False] * 3


# What happens in the nestings that optax's own accumulator allows.


def micro_batches(tx, kinds):
    """Parameter, and where it went, after gradients of 1, or inf where a kind is False."""
    params, state = jnp.zeros(()), tx.init(jnp.zeros(()))
    update = jax.jit(tx.update)
    for finite in kinds:
        updates, state = update(jnp.array(1.0 if finite else jnp.inf), state, params)
        params = optax.apply_updates(params, updates)
    return float(params), state


ONE_BAD = [True, False, *[True] * 8]


@cases("skip", [None, optax.skip_not_finite], fast=[None])
def test_optax_multi_steps_inside_replaces_the_bad_micro_batch(skip):
    options = {} if skip is None else {"should_skip_update_fn": skip}
    tx = jaxscale.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2, **options), POLICY)
    params, state = micro_batches(tx, ONE_BAD)
    assert (params, state.total_notfinite) == (-4, 1)  # nine good ones make four windows
    assert state.inner_state.mini_step == 1


@cases("wrap", [jaxscale.loss_scaled, jaxscale.skip_nonfinite], fast=[jaxscale.loss_scaled])
def test_optax_multi_steps_outside_never_recovers(wrap):
    params, state = micro_batches(optax.MultiSteps(wrap(optax.sgd(1.0)), 2), ONE_BAD)
    assert jnp.isnan(state.acc_grads)
    assert state.inner_opt_state.total_notfinite == state.inner_opt_state.total_steps == 5
    assert not params < 0
    # That skips by itself, it keeps the scale from falling.
    tx = optax.MultiSteps(wrap(optax.sgd(1.0)), 2, should_skip_update_fn=optax.skip_not_finite)
    params, state = micro_batches(tx, [False] * 10)
    assert state.inner_opt_state.scaling == wrap(optax.sgd(1.0)).init(jnp.zeros(())).scaling
    assert state.inner_opt_state.total_notfinite == params == 0
    assert "accumulation go" in " ".join(jaxscale.loss_scaled.__doc__.split())


def test_windows_of_windows():
    tx = windowed(optax.MultiSteps(optax.sgd(1.0), 2), 2)
    params, state = micro_batches(tx, ONE_BAD)
    assert (params, state.inner_state.gradient_step) == (-2, 5)

"""Unusual inner optimizers, unusual numbers, and what `loss_scaled` makes of them."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import tables
from tables import (
    GRADS,
    PARAMS,
    TWO,
    assert_same_bits,
    cases,
    fused_step,
    pairs,
    spread,
    step,
    take_form_for_accelerators,
    unchanged,
    wide,
)

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_an_infinite_update_of_a_finite_gradient_is_refused_where_asked_for():
    tx = jaxscale.loss_scaled(optax.scale(jnp.inf), check_updates=True)
    params = jnp.array(1.0)
    params, state = jaxscale.apply_gradients(tx, params, tx.init(params), params)
    assert (params, state.step_applied) == (1, False)


def nan_uphill(params, _):
    """A gradient function: NaN uphill of `TWO`, and otherwise `GRADS`.

    Uphill is where a step along `GRADS` leads.
    """
    is_uphill = params["w"][0] > 1.001
    return jax.tree.map(lambda grad: jnp.where(is_uphill, jnp.nan, grad), GRADS)


class Ruinous(NamedTuple):
    """An optimizer that makes of finite gradients what is not finite."""

    inner: Any
    params: Any
    grads: Any
    wrap: Any = jaxscale.loss_scaled
    keep: Any = unchanged
    extra_args: Any = None


INFINITE_RATE = optax.chain(optax.scale_by_adam(), optax.scale(np.inf))
OPAQUE_SAM = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)
TRAINED = {"w": jnp.array([3.0, 4.0])}


def growing(dtype, start, size, keep=unchanged):
    """A parameter that becomes inf, though its update and the state are finite."""
    params = {"w": jnp.array([start, 1.0], dtype), "mask": jnp.array([-jnp.inf, 0.0])}
    grads = {"w": jnp.array([size, 0.0]), "mask": jnp.zeros(2)}
    return Ruinous(optax.scale(1.0), params, grads, jaxscale.skip_nonfinite, keep)


def ruined(inner, size):
    """A state that is ruined, for good or for all further updates, by finite updates."""
    return Ruinous(inner, TRAINED, {"w": jnp.full(2, size)})


RUINOUS = {
    "an update": Ruinous(INFINITE_RATE, PARAMS, wide(PARAMS)),
    "an update, no scale": Ruinous(
        INFINITE_RATE, PARAMS, wide(PARAMS), jaxscale.skip_nonfinite
    ),
    "an update, masters": Ruinous(
        INFINITE_RATE, PARAMS, wide(PARAMS), keep=jaxscale.master_weights
    ),
    "an update, at random": Ruinous(
        INFINITE_RATE, PARAMS, wide(PARAMS), keep=jaxscale.stochastic_rounding
    ),
    "a gradient of its own": Ruinous(
        OPAQUE_SAM,
        TWO,
        GRADS,
        extra_args={"value": jnp.float32(1), "grad_fn": nan_uphill},
    ),
    "adam": ruined(optax.adam(0.1), 1e20),
    "prodigy": ruined(optax.contrib.prodigy(), 0.0),
    "dadapt": ruined(optax.contrib.dadapt_adamw(), 0.0),
    "mechanic": ruined(optax.contrib.mechanize(optax.sgd(0.1)), 1e20),
    "float16": growing(jnp.float16, 65000.0, 1000.0),
    "bfloat16": growing(jnp.bfloat16, 3.3e38, 3e37, jaxscale.stochastic_rounding),
    "masters": growing(jnp.bfloat16, 3.3e38, 3e37, jaxscale.master_weights),
    "float32": growing(jnp.float32, 3.3e38, 3e37),
}
WAYS = {"update": step, "apply": fused_step, "eager": fused_step, "accelerator": step}


@cases(
    "name, way",
    spread(RUINOUS, WAYS),
    fast=[
        ("an update, no scale", "apply"),
        ("an update, masters", "update"),
        ("a gradient of its own", "apply"),
        ("dadapt", "apply"),
        ("float16", "update"),
    ],
)
def test_all_is_kept_where_asked_for_if_a_step_makes_something_infinite(
    name, way, monkeypatch
):
    """The gradients are fine, so that this says nothing about the scale."""
    if way == "accelerator":
        take_form_for_accelerators(monkeypatch)
    inner, params, grads, wrap, keep, extra_args = RUINOUS[name]
    for is_checked in (False, True):
        tx = keep(wrap(inner, check_updates=is_checked))
        one_step = functools.partial(WAYS[way], tx, **extra_args or {})
        if way != "eager":
            one_step = jax.jit(one_step)
        before = tx.init(params)
        after_params, after = one_step(params, before, grads)
        finite = jaxscale.all_finite((after_params["w"], after.inner_state))
        assert finite == is_checked
        assert after.step_applied != is_checked
        if is_checked:
            kept = (after_params, after.inner_state, after.weights, after.scaling)
            expected = (params, before.inner_state, before.weights, before.scaling)
            assert_same_bits(kept, expected)
            assert (after.total_notfinite, after.total_notfinite_loss) == (1, 0)


def test_an_inf_that_was_there_before_is_no_reason_to_skip():
    plateau = optax.contrib.reduce_on_plateau(accumulation_size=3)
    inner = optax.chain(optax.sgd(0.1), plateau)
    tx = jaxscale.loss_scaled(inner, check_updates=True)
    params = TRAINED | {"mask": jnp.array([-jnp.inf, 0.0])}
    before = tx.init(params)
    assert not jaxscale.all_finite(before.inner_state)
    grads = TRAINED | {"mask": jnp.zeros(2)}
    _, state = tx.update(grads, before, params, value=jnp.float32(1))
    assert state.step_applied


WRAPPED = {
    "by itself": jaxscale.loss_scaled,
    "in a window": lambda tx: jaxscale.multi_steps(tx, 1),
    "around a window": lambda tx: jaxscale.loss_scaled(jaxscale.multi_steps(tx, 1)),
    "in a window of Optax": lambda tx: jaxscale.loss_scaled(optax.MultiSteps(tx, 1)),
}


@cases("wrapped", WRAPPED)
def test_no_loss_in_is_no_loss_out(wrapped):
    """`multi_steps` must not make one up: with a loss of 0 this optimizer stands still."""
    inner = optax.polyak_sgd()
    tx = WRAPPED[wrapped](inner)
    state = tx.init(TWO)
    with pytest.raises((TypeError, ValueError), match="value"):  # optax has both
        tx.update(GRADS, state, TWO)
    loss = jnp.float32(2)
    updates, _ = tx.update(GRADS, state, TWO, value=loss)
    expected, _ = inner.update(GRADS, inner.init(TWO), TWO, value=loss)
    tables.assert_close(updates, expected)


@cases(
    "max_norm, size",
    pairs([1e39, math.inf, 3.4e38, 1e-300], [1.0, 1e30, 0.0]),
    fast=[(math.inf, 1e30), (1e-300, 1.0)],
)
def test_max_norm_may_be_any_positive_number(max_norm, size):
    tx = jaxscale.loss_scaled(optax.sgd(1.0), max_norm=max_norm)
    tx = jaxscale.multi_steps(tx, 1)
    grads = GRADS["w"] * size
    updates, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    assert state.step_applied
    assert jaxscale.all_finite(updates)
    if max_norm > 3.5e38:  # which is above all that float32 holds
        np.testing.assert_array_equal(updates, -grads)
    # A `max_norm` below float32's smallest normal number, about 1.2e-38, counts as that.
    assert np.linalg.norm(np.float64(updates)) <= max(max_norm * (1 + 1e-6), 2e-38)


@cases(
    "length, dtype",
    itertools.product([10, 22], ["float32", "bfloat16", "complex64"]),
    fast=[(10, "float32")],
)
def test_a_mean_of_the_largest_numbers_is_finite(length, dtype):
    """A bad micro-batch of the window does not count."""
    largest = float(jnp.finfo(dtype).max)
    number = -largest
    if dtype == "complex64":
        number = complex(largest, -largest)
    good = jnp.full(2, number, dtype)
    tx = jaxscale.multi_steps(optax.identity(), length)
    state = tx.init(good)
    update = jax.jit(tx.update)
    for grads in [good * jnp.nan, *[good] * (length - 1)]:
        updates, state = update(grads, state, good, value=jnp.float32(3e38))
    assert state.inner_state.gradient_step == 1
    # In NumPy, as XLA cannot divide by so large a number.
    mean = np.asarray(updates, np.complex128)
    np.testing.assert_allclose(mean / largest, number / largest, rtol=1e-5)


@cases("retries", [0, 2])
def test_a_state_may_hold_what_is_not_an_array_where_nothing_is_compiled(retries):
    """An optimizer may keep its name, or the function that it was made with."""

    def init(params):
        return {"name": "mine", "schedule": abs, "count": jnp.array(0)}

    def update(updates, state, params=None):
        return updates, state | {"count": state["count"] + 1}

    tx = jaxscale.loss_scaled(optax.GradientTransformation(init, update))
    step = jaxscale.train_step(lambda w, x: jnp.sum(w * x), tx, retries=retries)
    params = jnp.ones(2)
    state = tx.init(params)
    for x, count in ((1.0, 1), (jnp.nan, 1), (2.0, 2)):
        params, state, _ = step(params, state, x)
        assert state.inner_state == {"name": "mine", "schedule": abs, "count": count}
    np.testing.assert_array_equal(params, [4.0, 4.0])


def test_optax_can_tell_parameters_from_flags():
    tx = jaxscale.loss_scaled(optax.adam(0.1), track_leaves=True)
    state = tx.init(TWO)
    mapped = optax.tree_map_params(tx, lambda leaf: "a parameter", state)
    assert mapped.inner_state[0].mu == {"w": "a parameter", "b": "a parameter"}
    assert_same_bits(mapped.nonfinite_leaves, state.nonfinite_leaves)
    assert_same_bits(mapped.scaling, state.scaling)


FROZEN = {"base": jnp.full(3, 2.0)}
BOTH = TRAINED | FROZEN
IS_FROZEN = {"w": False, "base": True}
LABELS = {"w": "trained", "base": "frozen"}


def parted(tx):
    parts = {"trained": tx, "frozen": optax.set_to_zero()}
    return optax.partition(parts, LABELS)


# They never read the gradients of `base`.
FREEZING = {
    "partition": parted,
    "set to zero first": lambda tx: optax.chain(
        optax.masked(optax.set_to_zero(), IS_FROZEN), tx
    ),
    "partition, and decay": lambda tx: optax.chain(
        parted(tx),
        optax.masked(optax.add_decayed_weights(0.1), {"w": True, "base": False}),
    ),
    "in a chain": lambda tx: optax.chain(
        optax.identity(), parted(tx), optax.scale(1.0)
    ),
}
# These do: into an update, into a state, into a norm.
READING = {
    "masked": lambda tx: optax.masked(tx, {"w": True, "base": False}),
    "set to zero last": lambda tx: optax.chain(
        tx, optax.masked(optax.set_to_zero(), IS_FROZEN)
    ),
    "clipped before": lambda tx: optax.chain(
        optax.clip_by_global_norm(1.0), parted(tx)
    ),
}
GUARDS = {
    "norm": {"max_norm": 0.5},
    "checked": {"max_norm": 0.5, "check_updates": True},
    "spikes": {"spikes": jaxscale.SpikeRule(window=4, min_history=2)},
    "tracked": {"track_leaves": True, "max_norm": 0.5},
}


def trained_with(tx, sizes, params, jit=True):
    """Parameters and the state after steps in which the gradients of `base` have some sizes."""
    one_step = functools.partial(fused_step, tx)
    if jit:
        one_step = jax.jit(one_step)
    state = tx.init(params)
    for size in sizes:
        grads = {"w": params["w"] * 0 + 1, "base": jnp.full(3, size)}
        params, state = one_step(params, state, {name: grads[name] for name in params})
    return params, state


@pytest.mark.worlds
@cases(
    "freeze, guard, window, jit",
    pairs(FREEZING, GUARDS, (1, 2), (False, True)),
    fast=[("partition", "norm", 1, True), ("set to zero first", "spikes", 2, True)],
)
def test_gradients_that_the_optimizer_never_reads_do_not_count(
    freeze, guard, window, jit
):
    adam = optax.adam(0.1)

    def wrap(inner):
        tx = jaxscale.loss_scaled(inner, **GUARDS[guard])
        return jaxscale.multi_steps(tx, window) if window > 1 else tx

    sizes = [1.0, 2.0, 1e5, 1.0, math.inf, math.nan, 1e30, 1.0]
    params, state = trained_with(wrap(FREEZING[freeze](adam)), sizes, BOTH, jit)
    calm, calm_state = trained_with(wrap(FREEZING[freeze](adam)), [0.0] * 8, BOTH, jit)
    assert_same_bits(params, calm)
    assert_same_bits(state, calm_state)
    assert_same_bits(params["base"], FROZEN["base"])
    assert state.total_notfinite == 0
    if guard == "norm":
        np.testing.assert_allclose(state.grad_norm, math.sqrt(2), rtol=1e-6)
    if freeze == "partition":  # as if the others were not there
        alone, _ = trained_with(wrap(adam), sizes, TRAINED, jit)
        assert_same_bits(params["w"], alone["w"])


@pytest.mark.worlds
@cases("read", READING, fast=["set to zero last"])
def test_gradients_that_the_optimizer_reads_count(read):
    tx = jaxscale.loss_scaled(READING[read](optax.adam(0.1)), max_norm=0.5)
    params, state = trained_with(tx, [1.0, math.inf], BOTH)
    assert state.total_notfinite == 1
    assert jaxscale.all_finite((params, state.inner_state))
    _, state = trained_with(tx, [100.0], BOTH)
    np.testing.assert_allclose(state.grad_norm, math.sqrt(2 + 3 * 100.0**2), rtol=1e-6)


@pytest.mark.worlds
@pytest.mark.parametrize("retries", [0, 2])
def test_a_training_step_skips_nothing_for_a_frozen_parameter(retries):
    def loss_fn(params, x):
        return jnp.sum(params["w"] ** 2) + jnp.sum(jnp.sqrt(params["base"] * x))

    tx = jaxscale.loss_scaled(parted(optax.sgd(0.1)))
    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=retries))
    params, state, _ = step(BOTH, tx.init(BOTH), jnp.float32(0))  # an infinite slope
    assert state.step_applied
    assert state.total_retries == 0
    np.testing.assert_allclose(params["w"], 0.8 * BOTH["w"], rtol=1e-6)

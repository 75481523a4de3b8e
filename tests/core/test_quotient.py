"""Unscaled gradients are not stored before a branch, and nothing else is different for it."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import assert_same_bits, avals

import jaxscale
from jaxscale import _quotient

pytestmark = [pytest.mark.standard_promotion, pytest.mark.sampled(1)]

PARAMS = {f"w{i}": jnp.linspace(-1.0, 1.0, 128 * 128).reshape(128, 128) for i in range(4)}
SIZE = sum(leaf.size for leaf in PARAMS.values())
TX = jaxscale.loss_scaled(optax.adamw(1e-3))
STATE = TX.init(PARAMS)
DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16]


def scaled(dtype):
    return jax.tree.map(lambda leaf: (leaf * 2.0**10).astype(dtype), PARAMS)


def step(params, opt_state, grads, between=lambda grads: grads):
    grads = between(jaxscale.unscale(opt_state, grads))
    return jaxscale.apply_gradients(TX, grads, opt_state, params)


def forgetting(params, opt_state, grads):
    # A barrier hides from the optimizer what its gradients are quotients of.
    return step(params, opt_state, grads, jax.lax.optimization_barrier)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscaled_gradients_are_not_stored(dtype, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # where the verdict stores least

    def temporary(fun):
        lowered = jax.jit(fun, donate_argnums=(0, 1)).lower(PARAMS, STATE, scaled(dtype))
        return lowered.compile().memory_analysis().temp_size_in_bytes / SIZE

    # Four bytes a parameter less, but for the verdict's own, which depend on the version of
    # XLA: a mask, or one leaf in turn.
    assert temporary(step) < temporary(forgetting) - 2.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_makes_no_difference_to_the_numbers(dtype):
    outcomes = [
        [jax.jit(fun)(PARAMS, STATE, grads) for fun in (step, forgetting)]
        for grads in (scaled(dtype), scaled(dtype) | {"w2": jnp.full((128, 128), jnp.nan, dtype)})
    ]
    for with_it, without in outcomes:
        assert avals(with_it) == avals(without)
        assert_same_bits(with_it[1].scaling, without[1].scaling)
        for a, b in zip(jax.tree.leaves(with_it), jax.tree.leaves(without), strict=True):
            # To rounding: these are two programs.
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert_same_bits(outcomes[1][0][0], PARAMS)


def test_gradients_that_were_changed_are_taken_as_they_are():
    changed = jax.jit(lambda *args: step(*args, lambda g: jax.tree.map(jnp.negative, g)))
    expected = jax.jit(step)(PARAMS, STATE, jax.tree.map(jnp.negative, scaled(jnp.float32)))
    actual = changed(PARAMS, STATE, scaled(jnp.float32))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_an_overflow_in_the_division_is_seen():
    # A scale below 1 makes what is finite scaled an inf unscaled.
    tx = jaxscale.loss_scaled(
        optax.sgd(1.0), jaxscale.DynamicLossScale(init_scale=2.0**-20, min_scale=2.0**-30)
    )

    @jax.jit
    def one_step(params, state, grads):
        return jaxscale.apply_gradients(tx, jaxscale.unscale(state, grads), state, params)

    params = jnp.ones(4)
    kept, state = one_step(params, tx.init(params), jnp.full(4, 1e35))
    assert_same_bits(kept, params)
    assert state.total_notfinite == 1


@pytest.mark.slow
def test_nothing_is_remembered_outside_of_a_trace_or_after_it():
    gc.collect()
    before = len(_quotient._QUOTIENTS)
    quotients = jaxscale.unscale(STATE, scaled(jnp.float32))
    assert all(_quotient.recall(leaf) is None for leaf in jax.tree.leaves(quotients))
    jax.jit(step)(PARAMS, STATE, scaled(jnp.float32))
    with jax.checking_leaks():
        jax.jit(lambda *args: step(*args))(PARAMS, STATE, scaled(jnp.float32))
    jax.clear_caches()
    gc.collect()
    assert len(_quotient._QUOTIENTS) == before


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, lambda f: jax.jit(jax.vmap(f))])
def test_it_is_the_quotient_under_every_transformation(wrap):
    members = jnp.stack([jnp.full(4, 8.0), jnp.full(4, jnp.inf)])
    tx = jaxscale.loss_scaled(optax.sgd(1.0), 8)
    state = tx.init(jnp.zeros(4))

    def one_step(grads):
        return jaxscale.apply_gradients(
            tx, jaxscale.unscale(state.scaling, grads), state, jnp.zeros_like(grads)
        )[0]

    run = wrap(one_step)
    if wrap is jax.jit:
        assert run(members[0]).tolist() == [-1] * 4
        assert run(members[1]).tolist() == [0] * 4
    else:
        assert run(members).tolist() == [[-1] * 4, [0] * 4]

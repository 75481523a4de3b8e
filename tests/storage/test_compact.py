"""An optimizer's state in bfloat16: which arrays are compact, and what becomes of them."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import assert_same_bits, cases, each

import jaxscale

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
GRADS = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3), PARAMS)


def dtypes(tree):
    return [str(leaf.dtype) for leaf in jax.tree.leaves(tree)]


MOMENTS = {
    "adam": (
        optax.adam(1e-3),
        ["int32", *["float32", "bfloat16"] * 2],
    ),
    "moments of its own": (
        optax.adam(1e-3, mu_dtype=jnp.bfloat16),
        ["int32", "bfloat16", "bfloat16", "float32", "bfloat16"],
    ),
    "none": (optax.sgd(1e-3), []),
}


@cases(
    "name, compiled", product(MOMENTS, [False, True]), fast=each(MOMENTS, [False, True])
)
def test_large_float32_arrays_are_kept_in_bfloat16(name, compiled):
    inner, expected = MOMENTS[name]
    tx = jaxscale.compact_state(inner)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update) if compiled else tx.update
    for _ in range(3):
        assert dtypes(state.inner_state) == expected
        updates, state = update(GRADS, state, PARAMS)
    assert dtypes(updates) == ["float32", "float32"]


def test_moments_that_an_optimizer_rounds_itself_are_left_to_it():
    inner = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
    tx = jaxscale.compact_state(inner)
    state, own_state = tx.init(PARAMS), inner.init(PARAMS)
    for _ in range(3):
        _, state = tx.update(GRADS, state, PARAMS)
        _, own_state = inner.update(GRADS, own_state, PARAMS)
    assert_same_bits(state.inner_state[0].mu, own_state[0].mu)


def test_an_optimizer_that_takes_no_loss_is_given_none():
    """As the inner optimizer of `sam`, or one of a user's own."""
    given = []

    def update(updates, state, params=None, *, lr):
        given.append(lr)
        return jax.tree.map(lambda g: -lr * g, updates), state

    own = optax.GradientTransformationExtraArgs(optax.sgd(1.0).init, update)
    tx = jaxscale.skip_nonfinite(jaxscale.compact_state(own))
    options = {"value": jnp.float32(1), "lr": 0.5}
    params, _ = jaxscale.apply_gradients(tx, GRADS, tx.init(PARAMS), PARAMS, **options)
    assert given == [0.5]
    assert_same_bits(params["b"], PARAMS["b"] - 0.5 * GRADS["b"])


def test_a_mask_goes_over_the_state():
    def only_squares(state):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: ".nu" in jax.tree_util.keystr(path), state
        )

    tx = jaxscale.compact_state(optax.adam(1e-3), mask=only_squares)
    state = jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)[1]
    assert dtypes(state.inner_state[0].mu) == ["float32", "float32"]
    assert dtypes(state.inner_state[0].nu) == ["float32", "bfloat16"]


def test_a_mean_of_squares_does_not_stand_still():
    """What a rounding to nearest breaks: 0.999 of a number and 0.001 of another one."""
    tx = jaxscale.compact_state(optax.scale_by_rms(decay=0.999))
    grads = {"w": jnp.full((64, 64), 1.1), "b": jnp.ones(64)}
    state = tx.init(PARAMS)
    state = state._replace(inner_state=jax.tree.map(jnp.ones_like, state.inner_state))
    step = jax.jit(tx.update)
    for _ in range(1000):
        _, state = step(grads, state, PARAMS)
    nu = np.asarray(state.inner_state.nu["w"], np.float64)
    expected = 1.21 + (1 - 1.21) * 0.999**1000
    spread = nu.std() / 64
    assert nu.std() > 0
    assert abs(nu.mean() - expected) < 4 * spread
    assert spread < 0.001


@cases("wrapper", [jaxscale.master_weights, jaxscale.stochastic_rounding])
def test_a_weight_and_its_state_take_the_bytes_that_are_promised(wrapper):
    params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
    tx = wrapper(jaxscale.compact_state(optax.adamw(1e-3)))
    state = tx.init(params)
    state = jax.jit(tx.update)(params, state, params)[1]
    per_parameter = sum(x.nbytes for x in jax.tree.leaves((params, state))) / 256**2
    promised = 8 if wrapper is jaxscale.master_weights else 6
    assert promised <= per_parameter < promised + 0.01


def test_a_skipped_step_keeps_the_state_and_its_key():
    tx = jaxscale.loss_scaled(jaxscale.compact_state(optax.adam(1e-3)))
    step = jax.jit(functools.partial(jaxscale.apply_gradients, tx))
    params, state = step(GRADS, tx.init(PARAMS), PARAMS)
    bad = GRADS | {"b": jnp.full(64, jnp.nan)}
    _, after = step(bad, state, params)
    assert not after.step_applied
    assert_same_bits(after.inner_state, state.inner_state)


def test_a_float32_state_is_read_into_a_compact_one_and_back():
    inner = optax.adamw(1e-3)
    state = inner.init(PARAMS)
    grads = jax.tree.map(lambda p: jnp.linspace(0, 1, p.size).reshape(p.shape), PARAMS)
    _, state = inner.update(grads, state, PARAMS)
    for wrap in (optax.with_extra_args_support, jaxscale.loss_scaled):
        plain, tx = wrap(inner), wrap(jaxscale.compact_state(inner))
        saved = state
        if wrap is jaxscale.loss_scaled:
            saved = plain.init(PARAMS)._replace(inner_state=state)
        target = tx.init(PARAMS)
        compact = jaxscale.from_state_dict(target, jaxscale.to_state_dict(saved))
        assert jax.tree.structure(compact) == jax.tree.structure(target)
        nearest = state[0].nu["w"].astype(jnp.bfloat16)
        assert_same_bits(optax.tree.get(compact, "nu")["w"], nearest)
        assert_same_bits(optax.tree.get(compact, "nu")["b"], state[0].nu["b"])
        back = jaxscale.from_state_dict(
            plain.init(PARAMS), jaxscale.to_state_dict(compact)
        )
        wide = nearest.astype(jnp.float32)
        assert_same_bits(optax.tree.get(back, "nu")["w"], wide)


def test_gradients_of_half_precision_parameters_without_jaxscale_around():
    """optax keeps bfloat16 moments there, and those are its own."""
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = jaxscale.compact_state(optax.adam(1e-3))
    state = tx.init(half)
    updates, state = tx.update(half, state)
    assert set(dtypes(state.inner_state)) == {"int32", "bfloat16"}
    assert set(dtypes(updates)) == {"bfloat16"}

"""Clipping by the global norm: optax's rule, from the pass that gives the verdict."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import assert_same_bits, avals, cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4),
    "half": jnp.ones(5, jnp.bfloat16),
    "phase": jnp.ones(2, jnp.complex64),
    "none": None,
}
INNER = optax.sgd(1.0)
MAX_NORM = 0.5


def norm_of(tree):
    leaves = (np.asarray(leaf, np.complex128) for leaf in jax.tree.leaves(tree))
    return np.sqrt(sum(np.sum(np.abs(leaf) ** 2) for leaf in leaves))


def gradients(seed, norm):
    """Gradients of a norm, with the shapes of PARAMS, in float32."""
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda p: np.asarray(rng.standard_normal(p.shape), np.float32), PARAMS)
    grads["phase"] = grads["phase"] * np.complex64(1 + 0.5j)
    return jax.tree.map(lambda g: jnp.asarray(g * np.float32(norm / norm_of(grads))), grads)


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        # Two roundings more or less: one product by max_norm / norm here, there two operations.
        np.testing.assert_allclose(x, y, rtol=3e-7)


@cases(
    "norm, debug_nans, way, policy",
    itertools.product(
        [0.0, 0.1, 3.0, 1e10],
        [False, True],
        ["eager", "jit", "accelerator"],
        ["dynamic", "adaptive"],  # which also needs the largest gradient
    ),
    fast=[(3.0, False, "accelerator", "dynamic"), (3.0, False, "jit", "adaptive")],
)
def test_it_is_what_optax_does(norm, debug_nans, way, policy, monkeypatch):
    if way == "accelerator":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *, cpu, default: default())
    if policy == "adaptive":  # on one device nothing is squared that was not asked for
        monkeypatch.setattr(jax, "device_count", lambda: 1)
    grads, tx = gradients(0, norm), jaxscale.loss_scaled(INNER, policy, max_norm=MAX_NORM)
    update = tx.update if way == "eager" else jax.jit(tx.update)
    with jax.debug_nans(debug_nans):
        updates, state = update(grads, tx.init(PARAMS), PARAMS)
    bare = optax.chain(optax.clip_by_global_norm(MAX_NORM), INNER)
    expected, _ = bare.update(grads, bare.init(PARAMS), PARAMS)
    assert_close(updates, expected)
    assert state.step_applied
    np.testing.assert_allclose(jaxscale.metrics(state)["grad_norm"], norm, rtol=1e-6)
    assert avals(state) == avals(tx.init(PARAMS))
    if norm < MAX_NORM:  # by a factor that is 1
        assert_same_bits(updates, INNER.update(grads, INNER.init(PARAMS), PARAMS)[0])


def test_an_infinite_gradient_makes_no_nan():
    tx = jaxscale.skip_nonfinite(INNER, max_norm=MAX_NORM)
    good, state = gradients(1, 2.0), tx.init(PARAMS)
    for name in ("w", "half", "phase"):
        spoiled = good | {name: good[name].at[-1].set(jnp.inf)}
        with jax.debug_nans(True):  # which looks into each operation
            params, state = jaxscale.apply_gradients(tx, spoiled, state, PARAMS)
        assert_same_bits(params, PARAMS)
        assert jaxscale.metrics(state)["grad_norm"] == jnp.inf


def test_the_norm_is_that_of_a_window():
    # Two micro-batches that cancel but for a part: what is clipped is their mean.
    first, second = gradients(2, 40.0), gradients(3, 30.0)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    clipped = jaxscale.loss_scaled(INNER, max_norm=MAX_NORM)
    for tx in (
        jaxscale.multi_steps(clipped, 2),
        jaxscale.loss_scaled(jaxscale.multi_steps(INNER, 2), max_norm=MAX_NORM),
    ):
        state = tx.init(PARAMS)
        update = jax.jit(tx.update)
        _, state = update(first, state, PARAMS)
        assert state.grad_norm == 0  # no step yet
        updates, state = update(second, state, PARAMS)
        np.testing.assert_allclose(state.grad_norm, norm_of(mean), rtol=1e-6)
        assert update(first, state, PARAMS)[1].grad_norm == state.grad_norm
        expected, _ = jax.jit(clipped.update)(mean, clipped.init(PARAMS), PARAMS)
        assert_close(updates, expected)


def test_it_is_that_of_what_a_hook_made_and_of_a_loss_that_is_bad():
    tx = jaxscale.loss_scaled(INNER, max_norm=MAX_NORM)
    grads, params = gradients(6, 2.0), PARAMS | {"half": PARAMS["half"].astype(jnp.float32)}

    def loss_fn(params, extra):
        parts = (jnp.sum(jnp.real(jnp.conj(grads[k]) * params[k])) for k in ("w", "half", "phase"))
        return sum(parts) + extra

    step = jaxscale.train_step(loss_fn, tx, on_grads=lambda g: jax.tree.map(lambda x: 3 * x, g))
    for extra in (0.0, jnp.inf):
        state = jax.jit(step)(params, tx.init(params), extra)[1]
        np.testing.assert_allclose(state.grad_norm, 6.0, rtol=1e-6)
        assert state.step_applied == (extra == 0)


def test_it_is_kept_by_every_wrapper():
    grads = gradients(5, 10.0)
    for tx in (
        jaxscale.skip_nonfinite(INNER, max_norm=MAX_NORM),
        jaxscale.loss_scaled(jaxscale.skip_nonfinite(INNER, max_norm=7.0), max_norm=MAX_NORM),
        jaxscale.loss_scaled(INNER, None, max_norm=MAX_NORM, skip_nonfinite=False),
    ):
        updates, state = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
        np.testing.assert_allclose(norm_of(updates), MAX_NORM, rtol=1e-6)
        np.testing.assert_allclose(state.grad_norm, 10.0, rtol=1e-6)
        assert avals(state) == avals(tx.init(PARAMS))

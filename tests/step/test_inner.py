"""What the wrapped transformation may be: it returns what it likes, and knows what it knows."""

import itertools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tables import assert_close, assert_same_bits, cases, fused_step, step

import jaxscale

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.5)}
GRADS = {"w": jnp.array([0.3, -0.1, 0.2]), "b": jnp.array(1.0)}


def another_structure(updates, _):
    return updates["w"], {"bias": jnp.stack([updates["b"]] * 2)}


SLOW_AND_FAST = optax.LookaheadParams(PARAMS, jax.tree.map(jnp.ones_like, PARAMS))
# An optimizer, its parameters and its gradients, unlike which its updates are.
OTHER_UPDATES = {
    "lookahead": (optax.lookahead(optax.sgd(0.1), 2, 0.5), SLOW_AND_FAST, GRADS),
    "a gradient per example": (
        optax.contrib.differentially_private_aggregate(1.0, 0.1, 0),
        PARAMS,
        jax.tree.map(lambda g: jnp.stack([g, 2 * g]), GRADS),
    ),
    "no update for a leaf": (optax.stateless(lambda g, _: g | {"b": None}), PARAMS, GRADS),
    "another structure": (optax.stateless(another_structure), PARAMS, GRADS),
}


@cases(
    "name, mode",
    itertools.product(OTHER_UPDATES, ["eager", "jit", "accelerator", "shard_map"]),
    fast=[("another structure", "jit"), ("no update for a leaf", "accelerator")],
)
def test_a_skipped_step_is_no_update_of_what_the_inner_returns(name, mode, monkeypatch):
    inner, params, grads = OTHER_UPDATES[name]
    tx = jaxscale.loss_scaled(inner)
    if mode == "accelerator":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *, cpu, default: default())
    update = tx.update
    if mode == "shard_map":
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = {"mesh": mesh, "in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
        update = jax.shard_map(lambda g, s, p: tx.update(g, s, p), **specs)
    if mode != "eager":
        update = jax.jit(update)
    state = tx.init(params)
    expected, _ = inner.update(grads, inner.init(params), params)
    updates, new = update(grads, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(expected)
    assert_close(updates, expected)
    assert new.step_applied
    if name == "no update for a leaf":
        moved, _ = jaxscale.apply_gradients(tx, grads, state, params)
        assert_same_bits(moved["b"], params["b"])
    bad = grads | {"w": grads["w"] * jnp.nan}
    none, after = update(bad, new, params)
    minus_zeros = jax.tree.map(lambda u: jnp.full_like(u, -0.0), expected)
    assert_same_bits(none, minus_zeros)
    assert_same_bits(after.inner_state, new.inner_state)
    assert not after.step_applied


def test_what_fills_its_state_later_is_told_where_to_go():
    inner = optax.GradientTransformation(lambda _: None, lambda updates, *_: (updates, updates))
    tx = jaxscale.loss_scaled(inner)
    with pytest.raises(ValueError, match=r"optax.chain\(loss_scaled\(...\), optax.monitor"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


@cases("mode", ["eager", "jit", "accelerator"], fast=["jit"])
def test_a_gradient_that_the_inner_takes_itself_is_checked_where_asked_for(mode, monkeypatch):
    if mode == "accelerator":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *, cpu, default: default())

    def gradient(params, _):
        return jax.tree.map(lambda g: jnp.where(params["w"][0] > 1.001, jnp.nan, g), GRADS)

    def run(grads, **options):
        sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)
        tx = jaxscale.loss_scaled(sam, **options)

        def step(state, params):
            return jaxscale.apply_gradients(
                tx, grads, state, params, value=jnp.float32(1), grad_fn=gradient
            )

        return (step if mode == "eager" else jax.jit(step))(tx.init(PARAMS), PARAMS)

    params, state = run(GRADS)
    assert state.step_applied  # the verdict cannot see it
    assert jnp.isnan(params["b"])
    params, state = run(GRADS, check_updates=True)
    assert_same_bits(params, PARAMS)
    assert jaxscale.all_finite(state.inner_state)
    assert (state.step_applied, state.total_notfinite, state.total_notfinite_loss) == (False, 1, 0)
    assert state.scaling.loss_scale == 2.0**14  # as by any overflow that the loss is not part of
    # Uphill is the other way.
    params, state = run(jax.tree.map(jnp.negative, GRADS), check_updates=True)
    assert state.step_applied
    assert not jnp.array_equal(params["w"], PARAMS["w"])


def test_no_loss_in_is_no_loss_out():
    """What `multi_steps` must not make up: with a loss of 0 the optimizer stands still."""
    inner = optax.polyak_sgd()
    for wrap in (jaxscale.loss_scaled, lambda tx: jaxscale.multi_steps(tx, 1)):
        tx = wrap(inner)
        with pytest.raises((TypeError, ValueError), match="value"):  # optax has both
            tx.update(GRADS, tx.init(PARAMS), PARAMS)
        updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, value=jnp.float32(2))
        expected, _ = inner.update(GRADS, inner.init(PARAMS), PARAMS, value=jnp.float32(2))
        assert_close(updates, expected)
    transparent = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))  # whose update takes none
    tx = jaxscale.multi_steps(transparent, 1)
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS, value=jnp.float32(2))
    assert state.step_applied


@cases(
    "max_norm, window, size",
    itertools.product([1e39, math.inf, 3.4e38, 1e-300], [False, True], [1.0, 1e30, 0.0]),
    fast=[(math.inf, False, 1e30), (1e-300, False, 1.0)],
)
def test_any_largest_norm_is_a_number_to_clip_to(max_norm, window, size):
    tx = jaxscale.loss_scaled(optax.sgd(1.0), max_norm=max_norm)
    tx = jaxscale.multi_steps(tx, 1) if window else tx
    grads = jax.tree.map(lambda g: g * size, GRADS)
    updates, state = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    assert state.step_applied
    assert jaxscale.all_finite(updates)
    if max_norm > 3.5e38:
        assert jax.tree.all(jax.tree.map(lambda u, g: jnp.array_equal(u, -g), updates, grads))
    norm = np.sqrt(sum(np.sum(np.float64(u) ** 2) for u in jax.tree.leaves(updates)))
    assert norm <= max(max_norm * (1 + 1e-6), 2e-38)  # float32's smallest normal number at least


@cases(
    "length, dtype",
    itertools.product([10, 22], ["float32", "bfloat16", "complex64"]),
    fast=[(10, "float32")],
)
def test_a_mean_of_the_largest_numbers_is_finite(dtype, length):
    largest = float(jnp.finfo(dtype).max)
    number = complex(largest, -largest) if dtype == "complex64" else -largest
    for bad in (0, 1):  # of the window so many do not count
        tx = jaxscale.multi_steps(optax.identity(), length)
        update = jax.jit(tx.update)
        params = {"w": jnp.zeros(2, dtype)}
        state = tx.init(params)
        for i in range(length):
            grads = {"w": jnp.full(2, jnp.nan if i < bad else number, dtype)}
            updates, state = update(grads, state, params, value=jnp.float32(3e38))
        assert state.inner_state.gradient_step == 1
        wide = np.asarray(updates["w"], np.complex128)  # XLA cannot divide by so large a number
        np.testing.assert_allclose(wide / largest, np.full(2, number) / largest, rtol=1e-5)


@pytest.mark.slow
def test_a_step_that_is_not_compiled_compiles_nothing_under_vmap(caplog):
    tx = jaxscale.loss_scaled(optax.adam(0.1), track_leaves=True, max_norm=1.0)
    params, grads = (jax.tree.map(lambda x: jnp.stack([x] * 3), tree) for tree in (PARAMS, GRADS))
    grads["w"] = grads["w"].at[1, 1].set(jnp.inf)
    inputs = params, jax.vmap(tx.init)(params), grads

    def both(params, state, grads):
        return step(tx, *fused_step(tx, params, state, grads), grads)

    eager = jax.vmap(both)(*inputs)
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        jax.vmap(both)(*inputs)
    assert not [record for record in caplog.records if "Compiling" in record.message]
    assert eager[1].total_notfinite.tolist() == [0, 2, 0]
    assert_same_bits(eager[0]["w"][1], params["w"][1])
    assert_close(eager, jax.jit(jax.vmap(both))(*inputs))


def test_optax_can_tell_parameters_from_flags():
    tx = jaxscale.loss_scaled(optax.adam(0.1), track_leaves=True)
    state = tx.init(PARAMS)
    mapped = optax.tree_map_params(tx, lambda leaf: "a parameter", state)
    assert mapped.inner_state[0].mu == {"w": "a parameter", "b": "a parameter"}
    assert_same_bits(mapped.nonfinite_leaves, state.nonfinite_leaves)
    assert_same_bits(mapped.scaling, state.scaling)


@cases("dtype", ["float8_e4m3fn", "float4_e2m1fn"], fast=["float8_e4m3fn"])
def test_updates_of_narrow_parameters_can_be_added(dtype):
    if not hasattr(jnp, dtype):
        pytest.skip(f"this JAX has no {dtype}")
    params = {"w": jnp.array([1.0, -2.0, 0.0], dtype), "b": jnp.array(0.5)}
    tx = jaxscale.loss_scaled(optax.sgd(1.0))

    grads = {"w": jnp.array([-1.0, 1.0, 0.0], dtype), "b": jnp.array(1.0)}
    new, state = jax.jit(step, static_argnums=0)(tx, params, tx.init(params), grads)
    assert new["w"].dtype == params["w"].dtype
    assert new["w"].astype(jnp.float32).tolist() == [2, -3, 0]
    same, _ = jax.jit(step, static_argnums=0)(tx, new, state, grads | {"b": jnp.array(jnp.nan)})
    assert_same_bits(same, new)


def test_subnormal_parameters_are_kept_by_apply_gradients_alone():
    # The sum that `optax.apply_updates` takes is outside of any skip, and XLA on a CPU flushes
    # what is below the normal numbers as it adds, even -0.0.
    params = {"w": jnp.array([1e-40, -1e-45, 1.0], jnp.float32)}
    tx, bad = jaxscale.loss_scaled(optax.sgd(0.1)), {"w": jnp.array([jnp.nan, 1.0, 1.0])}
    kept, _ = jax.jit(fused_step, static_argnums=0)(tx, params, tx.init(params), bad)
    assert_same_bits(kept, params)
    flushed, _ = step(tx, params, tx.init(params), bad)
    assert np.all(np.abs(np.asarray(flushed["w"] - kept["w"])) <= 1e-40)

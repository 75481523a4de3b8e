"""The two forms of a skip: a branch on a CPU, a selection on other machines."""

import functools
import logging
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tables
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxpr_equations import equations
from tables import (
    GRADS,
    PARAMS,
    TWO,
    assert_same_bits,
    cases,
    fused_step,
    step,
    take_form_for_accelerators,
)

import jaxscale
from jaxscale._jax import varying
from jaxscale._trees.leaves import store_once

pytestmark = pytest.mark.standard_promotion


def test_a_skipped_step_keeps_the_sign_of_zero():
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    params = jnp.array([-0.0, 1.0])
    updates, _ = jax.jit(tx.update)(params * jnp.nan, tx.init(params), params)
    assert str(optax.apply_updates(params, updates)) == "[-0.  1.]"


# Both forms in one program.

GOOD = tables.gradients(0, 1)[0]
ADAM = tables.INNERS["adam"]


@cases("accelerator", [False, True])
def test_a_cpu_branches_and_an_accelerator_does_not(accelerator, monkeypatch):
    if accelerator:  # XLA takes the branch out, as it is a constant's
        take_form_for_accelerators(monkeypatch)
    tx = jaxscale.loss_scaled(ADAM)
    step = jax.jit(lambda *args: tx.update(*args))  # traced anew
    compiled = step.lower(GOOD, tx.init(PARAMS), PARAMS).compile()
    assert (" conditional(" in compiled.as_text()) != accelerator


def test_one_program_that_is_traced_once_serves_all_platforms(monkeypatch):
    # What a CPU stores is in the last test of this file.
    monkeypatch.setattr("jaxscale._step.advance.store_once", lambda tree: tree)
    traces = []

    def update(*args):
        traces.append(None)
        return ADAM.update(*args)

    tx = jaxscale.loss_scaled(optax.GradientTransformation(ADAM.init, update))
    traced = jax.jit(tx.update).trace(GOOD, tx.init(PARAMS), PARAMS)

    def lower(platform):
        return traced.lower(lowering_platforms=(platform,)).as_text().splitlines()

    cpu = lower("cpu")
    for platform in ("cuda", "tpu"):
        num_different = 0
        for line, other_line in zip(cpu, lower(platform), strict=True):
            if line != other_line:
                num_different += 1
                # Whether it is a branch or a selection is a constant when it is lowered.
                assert "stablehlo.constant" in line
                assert "stablehlo.constant" in other_line
        assert 0 < num_different <= 2, platform
    assert len(traces) == 1


# What a skipped step keeps.

NARROW = ["float8_e4m3fn", "float4_e2m1fn"]
WIDER = ["bfloat16", "float16", "float32", "complex64"]
SIGNED = [0.0, -0.0, 1.0]


def signed_numbers(dtype):
    """Numbers of each sign, zeros among them; if they are complex, in both parts."""
    if dtype == "complex64":
        return np.array([complex(*parts) for parts in product(SIGNED, SIGNED)])
    return np.array(SIGNED)


MODES = {"eager": step, "jit": jax.jit(step, static_argnums=0)}


@pytest.mark.worlds
@pytest.mark.device
@cases(
    "dtype, mode",
    # Outside of `jit` JAX has not all operations for the narrow ones.
    [*product(WIDER, MODES), *product(NARROW, ["jit"])],
    fast=[("complex64", "eager"), ("complex64", "jit"), (NARROW[0], "jit")],
)
def test_a_skipped_step_keeps_every_bit(dtype, mode):
    if not hasattr(jnp, dtype):
        pytest.skip(f"this JAX has no {dtype}")
    numbers = signed_numbers(dtype)
    params = {"w": jnp.asarray(numbers, dtype), "b": jnp.array(0.5)}
    good = jax.tree.map(jnp.ones_like, params)
    bad_leaf = "b" if dtype in NARROW else "w"  # some of the narrow ones have no inf
    infs = good[bad_leaf] * jnp.inf
    bad = good | {bad_leaf: infs}
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    start = tx.init(params)
    one_step = MODES[mode]
    kept, _ = one_step(tx, params, start, bad)
    assert_same_bits(kept, params)
    # A good step does move them.
    moved, _ = one_step(tx, params, start, good)
    assert moved["w"].dtype == dtype
    result = np.asarray(moved["w"])
    wide_result = result.astype(numbers.dtype)
    assert np.array_equal(wide_result, numbers - 1)


def test_subnormal_parameters_are_kept_by_apply_gradients_alone():
    # The sum that `optax.apply_updates` takes is outside of any skip, and XLA on a CPU flushes
    # what is below the normal numbers as it adds, even -0.0.
    params = jnp.array([1e-40, -1e-45, 1.0], jnp.float32)
    bad = jnp.array([jnp.nan, 1.0, 1.0])
    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    start = tx.init(params)
    kept, _ = jax.jit(fused_step, static_argnums=0)(tx, params, start, bad)
    assert_same_bits(kept, params)
    flushed, _ = step(tx, params, start, bad)
    np.testing.assert_allclose(flushed, kept, rtol=0, atol=1e-40)


# Updates of a skipped step are unlike what the wrapped optimizer gets, but like what it returns.


def without_b(grads, params):
    return grads | {"b": None}


def in_another_structure(grads, params):
    return grads["w"], {"2": grads["b"][None]}


SLOW_AND_FAST = optax.LookaheadParams(TWO, jax.tree.map(jnp.ones_like, TWO))
BY_EXAMPLE = jax.tree.map(lambda grad: jnp.stack([grad, 2 * grad]), GRADS)
PRIVATE = optax.contrib.differentially_private_aggregate(1.0, 0.1, 0)
# An optimizer, its parameters and its gradients, unlike which its updates are.
OTHER_UPDATES = {
    "lookahead": (optax.lookahead(optax.sgd(0.1), 2, 0.5), SLOW_AND_FAST, GRADS),
    "a gradient per example": (PRIVATE, TWO, BY_EXAMPLE),
    "no update for a leaf": (optax.stateless(without_b), TWO, GRADS),
    "another structure": (optax.stateless(in_another_structure), TWO, GRADS),
}


def update_in(mode, tx, monkeypatch):
    """The update of a transformation, run in one of several ways."""
    if mode == "accelerator":
        take_form_for_accelerators(monkeypatch)
    if mode == "eager":
        return tx.update
    if mode == "shard_map":
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

        def update(grads, state, params):
            return tx.update(grads, state, params)

        return jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P()))
    return jax.jit(tx.update)


@cases(
    "name, mode",
    product(OTHER_UPDATES, ["eager", "jit", "accelerator", "shard_map"]),
    fast=[("another structure", "jit"), ("no update for a leaf", "accelerator")],
)
def test_a_skipped_step_is_no_update_of_what_the_inner_returns(name, mode, monkeypatch):
    inner, params, grads = OTHER_UPDATES[name]
    tx = jaxscale.loss_scaled(inner)
    update = update_in(mode, tx, monkeypatch)
    expected, _ = inner.update(grads, inner.init(params), params)
    updates, state = update(grads, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(expected)
    tables.assert_close(updates, expected)
    assert state.step_applied
    bad = grads | {"w": grads["w"] * jnp.nan}
    no_updates, after = update(bad, state, params)
    minus_zeros = jax.tree.map(lambda u: jnp.full_like(u, -0.0), expected)
    assert_same_bits(no_updates, minus_zeros)
    assert_same_bits(after.inner_state, state.inner_state)
    assert not after.step_applied


@pytest.mark.device
@cases("one_step", [fused_step, jax.jit(fused_step, static_argnums=0)])
def test_a_leaf_without_an_update_stays(one_step):
    inner, params, grads = OTHER_UPDATES["no update for a leaf"]
    tx = jaxscale.loss_scaled(inner)
    moved, _ = one_step(tx, params, tx.init(params), grads)
    assert_same_bits(moved["b"], params["b"])


@pytest.mark.slow
def test_a_step_that_is_not_compiled_compiles_nothing_under_vmap(caplog):
    tx = jaxscale.loss_scaled(optax.adam(0.1), track_leaves=True, max_norm=1.0)
    params = tables.stack(TWO, TWO, TWO)
    grads = tables.stack(GRADS, GRADS, GRADS)
    grads["w"] = grads["w"].at[1, 1].set(jnp.inf)
    start = jax.vmap(tx.init)(params)

    steps_of_members = jax.vmap(functools.partial(fused_step, tx))
    moved, state = steps_of_members(params, start, grads)
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        steps_of_members(params, start, grads)
    assert "Compiling" not in caplog.text
    assert state.total_notfinite.tolist() == [0, 1, 0]
    assert_same_bits(moved["w"][1], params["w"][1])


# What a CPU stores for several readers.


def count_barriers(program):
    names = [eqn.primitive.name for eqn in equations(program)]
    return names.count("optimization_barrier")


def test_arrays_that_are_stored_vary_along_the_axes_that_they_did():
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    axes = {}

    def store(shared, own):
        stored = store_once({"shared": shared, "own": own, "other": own * 2})
        for name, leaf in stored.items():
            axes[name] = varying(jax.typeof(leaf))
        return stored["shared"]

    mapped = jax.shard_map(store, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    ones = jnp.ones(2)
    program = jax.make_jaxpr(mapped)(ones, ones)
    assert axes == {"shared": frozenset(), "own": {"d"}, "other": {"d"}}
    assert count_barriers(program) == 2


def test_arrays_share_one_barrier_on_a_cpu_alone():
    arrays = {"w": jnp.ones(3), "half": jnp.ones(2, jnp.bfloat16), "none": None}
    traced = jax.jit(store_once).trace(arrays)
    assert count_barriers(traced.jaxpr) == 1
    for platform in ("cpu", "tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.optimization_barrier" in text) == (platform == "cpu")

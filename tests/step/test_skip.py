"""How a step is skipped: by a branch on a CPU, by a selection on other machines."""

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
from jaxprs import equations
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
from jaxscale._step.skip import store_once

pytestmark = pytest.mark.standard_promotion

# Both forms in one program.

GOOD = tables.gradients(0, 1)[0]
ADAM = tables.INNERS["adam"]


def test_a_cpu_alone_branches(monkeypatch):
    tx = jaxscale.loss_scaled(ADAM)
    inputs = GOOD, tx.init(PARAMS), PARAMS
    branching = jax.jit(lambda *args: tx.update(*args)).lower(*inputs)
    assert branching.compile().as_text().count(" conditional(") == 1
    # XLA takes the branch out, as it is a constant's.
    take_form_for_accelerators(monkeypatch)
    selecting = jax.jit(lambda *args: tx.update(*args)).lower(*inputs)
    assert " conditional(" not in selecting.compile().as_text()


def test_one_program_that_is_traced_once_serves_all_platforms():
    traces = []

    def update(*args):
        traces.append(None)
        return ADAM.update(*args)

    tx = jaxscale.loss_scaled(optax.GradientTransformation(ADAM.init, update))
    traced = jax.jit(tx.update).trace(GOOD, tx.init(PARAMS), PARAMS)
    cpu, cuda, tpu = (
        traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
        for platform in ("cpu", "cuda", "tpu")
    )
    assert len(traces) == 1
    for other in (cuda, tpu):
        differing = [
            pair for pair in zip(cpu, other, strict=True) if pair[0] != pair[1]
        ]
        # Whether it is a branch or a selection is a constant when it is lowered.
        assert 0 < len(differing) <= 2
        for line, other_line in differing:
            assert "stablehlo.constant" in line
            assert "stablehlo.constant" in other_line


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
    bad = good | {bad_leaf: good[bad_leaf] * jnp.inf}
    tx = jaxscale.loss_scaled(optax.sgd(1.0))
    kept, _ = MODES[mode](tx, params, tx.init(params), bad)
    assert_same_bits(kept, params)
    moved, _ = MODES[mode](tx, params, tx.init(params), good)
    assert moved["w"].dtype == params["w"].dtype
    result = np.asarray(moved["w"]).astype(numbers.dtype)
    assert np.array_equal(result, numbers - 1)


def test_subnormal_parameters_are_kept_by_apply_gradients_alone():
    # The sum that `optax.apply_updates` takes is outside of any skip, and XLA on a CPU flushes
    # what is below the normal numbers as it adds, even -0.0.
    params = {"w": jnp.array([1e-40, -1e-45, 1.0], jnp.float32)}
    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    bad = {"w": jnp.array([jnp.nan, 1.0, 1.0])}
    kept, _ = jax.jit(fused_step, static_argnums=0)(tx, params, tx.init(params), bad)
    assert_same_bits(kept, params)
    flushed, _ = step(tx, params, tx.init(params), bad)
    assert np.all(np.abs(np.asarray(flushed["w"] - kept["w"])) <= 1e-40)


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
    no_updates, state_after = update(bad, state, params)
    minus_zeros = jax.tree.map(lambda u: jnp.full_like(u, -0.0), expected)
    assert_same_bits(
        (no_updates, state_after.inner_state), (minus_zeros, state.inner_state)
    )
    assert not state_after.step_applied


@cases("mode", ["eager", "jit", "accelerator"], fast=["eager"])
def test_a_leaf_without_an_update_stays(mode, monkeypatch):
    inner, params, grads = OTHER_UPDATES["no update for a leaf"]
    tx = jaxscale.loss_scaled(inner)
    if mode == "accelerator":
        take_form_for_accelerators(monkeypatch)
    one_step = fused_step if mode == "eager" else jax.jit(fused_step, static_argnums=0)
    moved, _ = one_step(tx, params, tx.init(params), grads)
    assert_same_bits(moved["b"], params["b"])


@pytest.mark.slow
def test_a_step_that_is_not_compiled_compiles_nothing_under_vmap(caplog):
    tx = jaxscale.loss_scaled(optax.adam(0.1), track_leaves=True, max_norm=1.0)
    params, grads = (
        jax.tree.map(lambda x: jnp.stack([x] * 3), tree) for tree in (TWO, GRADS)
    )
    grads["w"] = grads["w"].at[1, 1].set(jnp.inf)
    inputs = params, jax.vmap(tx.init)(params), grads

    def make_two_steps(params, state, grads):
        params, state = fused_step(tx, params, state, grads)
        return step(tx, params, state, grads)

    eager_params, eager_state = jax.vmap(make_two_steps)(*inputs)
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        jax.vmap(make_two_steps)(*inputs)
    assert not [record for record in caplog.records if "Compiling" in record.message]
    assert eager_state.total_notfinite.tolist() == [0, 2, 0]
    assert_same_bits(eager_params["w"][1], params["w"][1])
    compiled = jax.jit(jax.vmap(make_two_steps))(*inputs)
    tables.assert_close((eager_params, eager_state), compiled)


# What a CPU stores for both of its readers, the verdict and the step.


def barriers(program):
    """How many optimization barriers a traced program has."""
    return sum(
        eqn.primitive.name == "optimization_barrier" for eqn in equations(program)
    )


def test_gradients_share_one_barrier():
    grads = {"w": jnp.ones(3), "half": jnp.ones(2, jnp.bfloat16), "none": None}
    program = jax.make_jaxpr(store_once)(grads)
    assert barriers(program) == 1
    assert jax.tree.structure(store_once(grads)) == jax.tree.structure(grads)


def test_gradients_that_are_stored_vary_along_the_axes_that_they_did():
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    axes = {}

    def store(shared, own):
        stored = store_once({"shared": shared, "own": own, "other": own * 2})
        axes.update({name: varying(jax.typeof(leaf)) for name, leaf in stored.items()})
        return stored["shared"]

    mapped = jax.shard_map(store, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    program = jax.make_jaxpr(mapped)(jnp.ones(2), jnp.ones(2))
    assert axes == {"shared": frozenset(), "own": {"d"}, "other": {"d"}}
    assert barriers(program) == 2

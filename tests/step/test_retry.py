"""Retries: no batch is lost to a scale that is too high, and the model is compiled once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from overflowing import BAD_LOSS, FINITE, GOOD, OVERFLOW, hot, loss_fn, run
from tables import (
    PARAMS,
    assert_same_bits,
    avals,
    cases,
)

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_a_pass_that_overflows_is_made_again_at_half_the_scale():
    def loss_fn(w, x):
        return jnp.mean((w.astype(jnp.float16) * x - 1).astype(jnp.float32) ** 2)

    tx = jaxscale.loss_scaled(optax.sgd(0.1), jaxscale.DynamicLossScale())
    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=3))
    _, state, loss = step(jnp.zeros(()), tx.init(jnp.zeros(())), jnp.ones(1, "float16"))
    assert (loss, state.total_retries, state.total_notfinite) == (1, 1, 0)
    assert state.scaling.loss_scale == 2.0**14


POISON = jnp.full(3, jnp.inf)


def poisoned(params, x):
    """A loss that is finite for the batch `POISON`, although its gradients are NaN at every scale.

    The hyperbolic tangent is flat at inf, and 0 * inf is NaN.
    """
    gates = jnp.tanh(params["w"] * x)
    return loss_fn(params, jnp.where(jnp.isinf(x), 1.0, x)) + jnp.sum(gates)


@pytest.mark.worlds
@pytest.mark.device
def test_a_step_counts_its_passes_compiles_the_model_once_and_loses_no_batch():
    traces = []
    passes = []

    def counted(params, x):
        traces.append(None)
        jax.debug.callback(lambda: passes.append(None))
        return loss_fn(params, x)

    tx = hot()
    step = jax.jit(jaxscale.train_step(counted, tx, retries=30))
    _, opt_state, _ = run(step, tx.init(PARAMS), FINITE)
    jax.effects_barrier()
    assert len(traces) == step._cache_size() == 1
    assert opt_state.total_retries > 0
    assert len(passes) == len(FINITE) + opt_state.total_retries
    assert opt_state.total_notfinite == 0


def test_the_model_is_in_the_program_once():
    def loss_of_product(w, x):
        return jnp.sum(jnp.tanh(w @ x) ** 2)

    def program(**retries):
        tx = hot()
        step = jax.jit(jaxscale.train_step(loss_of_product, tx, **retries))
        w = jnp.ones((4, 3))
        return step.lower(w, tx.init(w), jnp.ones((3, 2))).as_text()

    without = program(retries=0)
    repeating = program(retries=5)
    assert without == program()
    assert "stablehlo.while" not in without
    assert "stablehlo.while" in repeating
    for operation in ("stablehlo.dot_general", "stablehlo.tanh"):
        assert repeating.count(operation) == without.count(operation) > 0


REST = {
    "n": jnp.arange(3),
    "flag": jnp.array(True),
    "key": jax.random.key(7),
    "none": None,
}
OF_ANY_TYPE = PARAMS | REST


def loss_of_any_type(params, x):
    """A loss of parameters that are not all trained, with outputs of any type."""
    noise = jax.random.normal(params["key"]) * params["n"][0] * params["flag"]
    trained = {name: params[name] for name in PARAMS}
    aux = {
        "key": jax.random.key(1),
        "int": x.astype(jnp.int8),
        "complex": x * 1j,
        "empty": jnp.zeros((0, 2)),
        "none": None,
        "text": "t",
        "number": 3,
        "function": jnp.sin,
    }
    return loss_fn(trained, x + noise), aux


def step_of_any_type(mode, scale, retries, batch=GOOD):
    """Makes one step from this scale."""
    is_trained = {name: name in PARAMS for name in OF_ANY_TYPE}
    inner = optax.masked(optax.sgd(0.1), is_trained)
    tx = jaxscale.loss_scaled(inner, jaxscale.DynamicLossScale(init_scale=scale))
    step = jaxscale.train_step(
        loss_of_any_type, tx, has_aux=True, retries=retries, allow_int=True
    )
    if mode == "jit":
        step = eqx.filter_jit(step)
    return step(OF_ANY_TYPE, tx.init(OF_ANY_TYPE), batch)


@pytest.mark.worlds
@pytest.mark.device
@cases("mode", ["jit", "eager"], fast=["jit"])
def test_leaves_of_any_type_pass_through_the_loop(mode):
    params, opt_state, (_, aux) = step_of_any_type(mode, 2.0**24, retries=30)
    assert opt_state.total_notfinite == 0
    assert opt_state.total_retries > 0
    assert_same_bits({name: params[name] for name in REST}, REST)
    assert not np.array_equal(params["w"], PARAMS["w"])

    repeated = dict(aux)
    _, _, (_, once) = step_of_any_type("eager", 2.0**4, retries=0)
    for name in ("text", "function", "number"):
        assert repeated.pop(name) == once.pop(name)
    assert_same_bits(repeated, once)

    kept, _, _ = step_of_any_type(mode, 2.0**24, retries=30, batch=BAD_LOSS)
    assert_same_bits(kept, OF_ANY_TYPE)


@pytest.mark.worlds
def test_counters_stay_at_their_largest_value():
    most = jnp.array(np.iinfo(np.int32).max)
    state = hot().init(PARAMS)
    fields = state._asdict()
    counters = [name for name in fields if avals(fields[name]) == "int32[]"]
    state = state._replace(**dict.fromkeys(counters, most))
    # One below: a step with several retries must not wrap around.
    state = state._replace(total_retries=most - 1)
    step = jax.jit(jaxscale.train_step(poisoned, hot(), retries=3))
    # Both batches are bad, so that no counter is reset.
    for batch in (POISON, BAD_LOSS):
        _, state, _ = step(PARAMS, state, batch)
        for name in counters:
            assert_same_bits(getattr(state, name), most)


def test_a_hook_gets_unscaled_gradients_in_every_pass():
    passes = []

    def hook(grads):
        passes.append(grads)
        return grads

    tx = hot(2.0**15)
    step = jaxscale.train_step(loss_fn, tx, on_grads=hook, retries=9)
    _, opt_state, _ = run(step, tx.init(PARAMS), [OVERFLOW])
    assert opt_state.total_retries > 0
    assert len(passes) == 1 + opt_state.total_retries
    assert not jaxscale.all_finite(passes[0])
    # The scale of the last pass is still that of `opt_state`.
    expected = jaxscale.grad(loss_fn, opt_state)(PARAMS, OVERFLOW)
    assert_same_bits(passes[-1], expected)
    for leaf in jax.tree.leaves(passes):
        assert leaf.dtype == jnp.float32

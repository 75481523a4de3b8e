"""What does not vary from machine to machine: traces, and what the compiled program holds."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxscale

pytestmark = pytest.mark.standard_promotion

PARAMS = {f"w{i}": jnp.ones((64, 64)) for i in range(6)}
TX = jaxscale.loss_scaled(optax.adamw(1e-3))


def loss_fn(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w.astype(jnp.float16))
    return jnp.mean(x.astype(jnp.float32))


def train_step(params, opt_state, x):
    loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, x)
    return *jaxscale.apply_gradients(TX, grads, opt_state, params, value=loss), loss


@pytest.fixture(scope="module")
def compiled():
    x = jnp.ones((8, 64), jnp.float16)
    step = jax.jit(train_step, donate_argnums=(0, 1))
    return step.lower(PARAMS, TX.init(PARAMS), x).compile()


def test_no_host_callback_and_no_transfer(compiled):
    assert not re.search(r"custom-call.*callback|infeed|outfeed|\bsend\b", compiled.as_text())


def test_donated_parameters_are_updated_in_place(compiled):
    memory = compiled.memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((PARAMS, TX.init(PARAMS).inner_state)))
    assert memory.alias_size_in_bytes >= size


def test_the_model_is_traced_once_and_inner_once():
    traces = {"model": 0, "inner": 0}

    def counted_loss(params, x):
        traces["model"] += 1
        return loss_fn(params, x)

    adam = optax.adam(0.1)

    def counted_update(updates, state, params=None):
        traces["inner"] += 1
        return adam.update(updates, state, params)

    tx = jaxscale.loss_scaled(optax.GradientTransformation(adam.init, counted_update))

    @jax.jit
    def step(params, opt_state, x):
        grads = jaxscale.grad(counted_loss, opt_state)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step(PARAMS, tx.init(PARAMS), jnp.ones((8, 64), jnp.float16))
    assert traces == {"model": 1, "inner": 1}


def test_one_program_serves_two_platforms():
    # Traced once; the branch for CPU and the selection for others part at lowering.
    traced = jax.jit(train_step).trace(PARAMS, TX.init(PARAMS), jnp.ones((8, 64), jnp.float16))
    programs = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "tpu")
    }
    selects = {platform: text.count("stablehlo.select") for platform, text in programs.items()}
    assert selects["cpu"] < selects["cuda"] == selects["tpu"]

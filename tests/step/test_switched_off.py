"""Everything switched off: what is left is the program of the bare optimizer, and the state."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jaxprs import equations
from tables import assert_same_bits, avals, cases, fused_step, step

import jaxscale

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.zeros(4)}
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
OFF = jaxscale.loss_scaled(INNER, None, skip_nonfinite=False)
ON = jaxscale.loss_scaled(INNER, None)


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def operations(tx, way):
    """The operations of a step: each with the types of what it takes and gives."""

    def one_step(params, state, x):
        if tx is INNER:
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            return *step(tx, params, state, grads), loss
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, x)
        return *way(tx, params, state, grads, value=loss), loss

    jaxpr = jax.make_jaxpr(one_step)(PARAMS, tx.init(PARAMS), jnp.ones((2, 3)))
    return [
        (eqn.primitive.name, [str(var.aval) for var in [*eqn.invars, *eqn.outvars]])
        for eqn in equations(jaxpr)
    ]


@cases("way", [step, fused_step])
def test_the_program_is_that_of_the_bare_optimizer(way):
    expected = operations(INNER, way)
    assert len(expected) > 40
    assert operations(OFF, way) == expected
    assert operations(ON, way) != expected  # what is compared does tell programs apart


def test_a_scale_of_none_has_one_state_on_and_off():
    state = OFF.init(PARAMS)
    assert avals(state) == avals(ON.init(PARAMS))
    assert jax.tree.structure(state) == jax.tree.structure(ON.init(PARAMS))
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), PARAMS)
    updates, after = OFF.update(bad, state, PARAMS, value=jnp.float32(jnp.inf))
    assert jnp.isnan(updates["w"]).all()  # off is off
    assert_same_bits(after._replace(inner_state=None), state._replace(inner_state=None))
    jaxscale.check(after)
    assert jaxscale.metrics(after)["total_steps"] == 0


def test_the_state_of_a_scale_has_the_same_fields_and_another_type():
    off, on = OFF.init(PARAMS), jaxscale.loss_scaled(INNER).init(PARAMS)
    assert jax.tree.structure(off) != jax.tree.structure(on)
    assert avals(off._replace(scaling=on.scaling)) == avals(on)
    # A dictionary of one is read into the other.
    moved = on._replace(total_steps=jnp.int32(7))
    there = jaxscale.from_state_dict(off, jaxscale.to_state_dict(moved))
    assert_same_bits(there, moved._replace(scaling=off.scaling))


def test_a_scale_that_never_moves_still_scales():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), 2.0**20, skip_nonfinite=False)
    w = jnp.ones((), jnp.float16)
    state = tx.init(w)
    grads = jaxscale.grad(lambda w: (w * 2.0**-15).astype(jnp.float32) ** 2, state)(w)
    updates, after = tx.update(grads, state, w)
    assert updates == -(2.0**-29)
    assert_same_bits(after, state)

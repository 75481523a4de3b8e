"""Everything switched off: what is left is the program of the bare optimizer, and the state."""

import jax
import jax.numpy as jnp
import optax
import pytest
from tables import assert_same_bits, avals

import jaxscale
import jaxscale.flax

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.zeros(4)}
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
OFF = jaxscale.loss_scaled(INNER, None, skip_nonfinite=False)
ON = jaxscale.loss_scaled(INNER, None)
X = jnp.ones((2, 3))


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def bare_by_update(params, state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, state = INNER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def off_by_update(params, state, x):
    loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, x)
    updates, state = OFF.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state, loss


def bare_by_apply(params, state, x):
    grads = jax.grad(loss_fn)(params, x)
    updates, state = INNER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def off_by_apply(params, state, x):
    grads = jaxscale.grad(loss_fn, state)(params, x)
    return jaxscale.apply_gradients(OFF, grads, state, params)


def on_by_apply(params, state, x):
    grads = jaxscale.grad(loss_fn, state)(params, x)
    return jaxscale.apply_gradients(ON, grads, state, params)


WAYS = {"update": (bare_by_update, off_by_update), "apply": (bare_by_apply, off_by_apply)}
ways = pytest.mark.parametrize("way", WAYS)


def operations(fun, state):
    """The operations of a program: each with its arguments, and the types of what it takes."""

    def read(jaxpr):
        lines = []
        for eqn in jaxpr.eqns:
            inner = [
                read(getattr(param, "jaxpr", param))
                for param in eqn.params.values()
                if hasattr(getattr(param, "jaxpr", param), "eqns")
            ]
            types = [str(var.aval) for var in [*eqn.invars, *eqn.outvars]]
            lines.append((eqn.primitive.name, types, inner))
        return lines

    return read(jax.make_jaxpr(fun)(PARAMS, state, X).jaxpr)


@ways
def test_the_program_is_that_of_the_bare_optimizer(way):
    bare, off = WAYS[way]
    expected = operations(bare, INNER.init(PARAMS))
    assert len(expected) > 40
    assert operations(off, OFF.init(PARAMS)) == expected
    # What is compared does tell programs apart.
    assert operations(on_by_apply, ON.init(PARAMS)) != expected


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
    assert off._fields == on._fields
    assert off.scaling._fields == on.scaling._fields
    assert avals(off) == avals(on)
    assert jax.tree.structure(off._replace(scaling=on.scaling)) == jax.tree.structure(on)
    # A dictionary of either is read into the other.
    moved = on._replace(total_steps=jnp.int32(7))
    there = jaxscale.from_state_dict(off, jaxscale.to_state_dict(moved))
    assert_same_bits(there, moved._replace(scaling=off.scaling))
    assert jax.tree.structure(there) == jax.tree.structure(off)
    back = jaxscale.from_state_dict(on, jaxscale.to_state_dict(there))
    assert jax.tree.structure(back) == jax.tree.structure(on)
    assert back.scaling.loss_scale == 1  # as saved
    assert_same_bits(back._replace(scaling=on.scaling), moved)


def test_a_scale_that_never_moves_still_scales():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), 2.0**20, skip_nonfinite=False)

    @jax.jit
    def one_step(w, state):
        grads = jaxscale.grad(lambda w: (w * 2.0**-15).astype(jnp.float32) ** 2, state)(w)
        return tx.update(grads, state, w)

    w = jnp.ones((), jnp.float16)
    updates, state = one_step(w, tx.init(w))
    assert updates == -(2.0**-29)
    assert_same_bits(state, tx.init(w))


def test_a_train_state_goes_on():
    state = jaxscale.flax.TrainState.create(apply_fn=None, params=PARAMS, tx=OFF)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    expected, _ = bare = INNER.update(grads, INNER.init(PARAMS), PARAMS)
    state = state.apply_gradients(grads=grads)
    assert state.step == 1
    assert_same_bits(state.params, optax.apply_updates(PARAMS, expected))
    assert_same_bits(state.opt_state.inner_state, bare[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxscale.loss_scaled(INNER, skip_nonfinite=False), "a DynamicLossScale"),
        (
            lambda: jaxscale.loss_scaled(INNER, 8, skip_nonfinite=False, track_leaves=True),
            "track_leaves=True",
        ),
        (
            lambda: jaxscale.loss_scaled(
                jaxscale.multi_steps(INNER, 2), None, skip_nonfinite=False
            ),
            "a window of `multi_steps`",
        ),
        (lambda: jaxscale.multi_steps(OFF, 2), "`multi_steps.*skip_nonfinite=False"),
        (lambda: jaxscale.loss_scaled(INNER, skip_nonfinite=0), "skip_nonfinite=.*got 0"),
    ],
)
def test_what_needs_a_verdict_does_not_do_without(make, message):
    with pytest.raises(ValueError, match=message):
        make()

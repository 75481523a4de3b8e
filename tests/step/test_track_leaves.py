"""Which leaves the last overflow was in: kept in the state, from the pass of the verdict."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import assert_same_bits, avals, cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

PARAMS = {
    "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3, jnp.bfloat16)},
    "phase": jnp.ones(2, jnp.complex64),
    "none": None,
    "_overwrite_with_gradient": {"amax": jnp.array(1.0)},
}
NAMES = ["dense/bias", "dense/kernel", "phase"]
TRACKING = jaxscale.loss_scaled(optax.sgd(0.1), track_leaves=True)
PLAIN = jaxscale.loss_scaled(optax.sgd(0.1))


def flagged(state):
    """The names of the leaves that the last overflow was in."""
    found = jaxscale.metrics(state)
    prefix = "nonfinite_leaves/"
    return sorted(name.removeprefix(prefix) for name in found if prefix in name and found[name])


def gradients(**bad):
    """Gradients of PARAMS with one bad element in each leaf that is named."""
    return {
        "dense": {
            "kernel": jnp.ones((2, 3)).at[1, 1].set(bad.get("kernel", 1.0)),
            "bias": jnp.ones(3).at[0].set(bad.get("bias", 1.0)),
        },
        "phase": jnp.ones(2, jnp.complex64).at[1].set(bad.get("phase", 1.0)),
        "none": None,
        "_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)},  # no gradient, so no overflow
    }


# Gradients and loss of some steps, and the leaves that the last overflow was in after each.
STEPS = [
    ({}, 1.0, []),
    ({"kernel": jnp.nan}, 1.0, ["dense/kernel"]),
    ({}, 1.0, ["dense/kernel"]),
    ({"bias": -jnp.inf, "phase": complex(0, jnp.inf)}, 1.0, ["dense/bias", "phase"]),
    ({}, jnp.nan, ["dense/bias", "phase"]),  # a bad loss is no overflow
    ({"kernel": 3e38, "bias": -3e38}, 1.0, ["dense/bias", "phase"]),  # large, and finite
    ({"kernel": jnp.inf, "bias": jnp.nan, "phase": jnp.nan}, 1.0, NAMES),
]


def by_update(tx, grads, state, params, value):
    updates, state = tx.update(grads, state, params, value=value)
    return optax.apply_updates(params, updates), state


def by_apply(tx, grads, state, params, value):
    return jaxscale.apply_gradients(tx, grads, state, params, value=value)


WINDOWS = jaxscale.multi_steps(TRACKING, 2), jaxscale.multi_steps(PLAIN, 2)
WAYS = {
    # name: (an optimizer that tracks, one that does not, how a step is made)
    "eager": (TRACKING, PLAIN, by_update),
    "update": (TRACKING, PLAIN, jax.jit(by_update, static_argnums=0)),
    "apply_gradients": (TRACKING, PLAIN, jax.jit(by_apply, static_argnums=0)),
    "multi_steps": (*WINDOWS, jax.jit(by_update, static_argnums=0)),
}


@cases("name", WAYS, fast=["apply_gradients"])
def test_the_last_overflow_is_kept_and_nothing_else_is_different(name):
    tracking, plain, one_step = WAYS[name]
    (params, state), (plain_params, plain_state) = (
        (PARAMS, tx.init(PARAMS)) for tx in WAYS[name][:2]
    )
    first = avals(state)
    for bad, loss, names in STEPS:
        grads, value = gradients(**bad), jnp.float32(loss)
        params, state = one_step(tracking, grads, state, params, value)
        plain_params, plain_state = one_step(plain, grads, plain_state, plain_params, value)
        assert flagged(state) == names
        assert plain_state.nonfinite_leaves is None
        assert_same_bits(state._replace(nonfinite_leaves=None), plain_state)
        assert_same_bits(params, plain_params)
        assert avals(state) == first


def test_check_names_them():
    def stuck(bad, steps=3, params=PARAMS, tx=TRACKING):
        state, update = tx.init(params), jax.jit(tx.update)
        for _ in range(steps):
            _, state = update(bad, state, params)
        return state

    # Of a population, the leaves of its worst member.
    states = [stuck(gradients(kernel=jnp.nan), 1), stuck(gradients(bias=jnp.nan), 4)]
    many = {f"w{i}": jnp.full(1, jnp.inf) for i in range(9)}
    for state, message in (
        (
            stuck(gradients(kernel=jnp.nan, phase=jnp.nan)),
            r"not finite: dense/kernel, phase \(2 of 3 leaves\)\. `jaxscale doctor`",
        ),
        (stuck(many, params=many), r"w0, w1, w2, w3, w4 and 4 more \(9 of"),
        (jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), r"dense/bias \(1 of 3"),
        (stuck(gradients(kernel=jnp.nan), tx=PLAIN), "^((?!leaves).)*$"),
    ):
        with pytest.raises(jaxscale.LossScaleStuckError, match=message):
            jaxscale.check(state, max_consecutive=2)


FROZEN = {"w": jnp.ones(1), "frozen": jnp.ones(1)}
TREES = {
    "empty": ({}, {}, []),
    "integers": ({"n": jnp.arange(3)}, {"n": np.zeros(3, jax.dtypes.float0)}, []),
    "the root": (jnp.ones(2), jnp.array([1.0, jnp.inf]), ["the root"]),
    "no gradient": (FROZEN, {"w": jnp.array([jnp.nan]), "frozen": None}, ["w"]),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_of_all_kinds(name):
    params, grads, names = TREES[name]
    tx = jaxscale.skip_nonfinite(optax.identity(), track_leaves=True)
    state = tx.init(params)
    _, new = tx.update(grads, state, params)
    assert flagged(new) == names
    assert avals(new) == avals(state)

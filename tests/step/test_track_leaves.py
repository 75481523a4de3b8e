"""`track_leaves=True`: which leaves the last overflow was in, from the pass of the verdict."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import NESTED as PARAMS
from tables import avals, cases, stack

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_the_leaf_with_the_inf_is_named():
    tx = jaxscale.loss_scaled(optax.sgd(0.1), track_leaves=True)
    grads = {"b": jnp.array(1.0), "w": jnp.array(jnp.inf)}
    _, state = tx.update(grads, tx.init(grads))
    metrics = jaxscale.metrics(state)
    assert metrics["nonfinite_leaves/w"]
    assert not metrics["nonfinite_leaves/b"]


ALL_LEAVES = ["dense/bias", "dense/kernel", "phase"]
INNER = optax.sgd(0.1)
TRACKING = jaxscale.loss_scaled(INNER, track_leaves=True)


def flagged(state):
    """The names of the leaves that the last overflow was in."""
    names = []
    for metric, value in jaxscale.metrics(state).items():
        kind, _, name = metric.partition("/")
        if kind == "nonfinite_leaves" and value:
            names.append(name)
    return sorted(names)


def gradients(kernel=1.0, bias=1.0, phase=1.0):
    """Gradients of PARAMS, with one element of each leaf set to a value."""
    return {
        "dense": {
            "kernel": jnp.ones((2, 3)).at[1, 1].set(kernel),
            "bias": jnp.ones(3).at[0].set(bias),
        },
        "phase": jnp.ones(2, jnp.complex64).at[1].set(phase),
        "none": None,
        "_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)},  # no overflow
    }


# Gradients and loss of some steps, and the leaves that the last overflow was in after each.
STEPS = [
    ({}, 1.0, []),
    ({"kernel": jnp.nan}, 1.0, ["dense/kernel"]),
    ({}, 1.0, ["dense/kernel"]),
    ({"bias": -jnp.inf, "phase": complex(0, jnp.inf)}, 1.0, ["dense/bias", "phase"]),
    ({}, jnp.nan, ["dense/bias", "phase"]),  # a bad loss is no overflow
    # large, and finite
    ({"kernel": 3e38, "bias": -3e38}, 1.0, ["dense/bias", "phase"]),
    ({"kernel": jnp.inf, "bias": jnp.nan, "phase": jnp.nan}, 1.0, ALL_LEAVES),
]


def test_the_last_overflow_is_kept():
    update = jax.jit(TRACKING.update)
    state = TRACKING.init(PARAMS)
    types = avals(state)
    for i, (elements, loss, names) in enumerate(STEPS):
        _, state = update(gradients(**elements), state, PARAMS, value=jnp.float32(loss))
        assert flagged(state) == names, i
        assert avals(state) == types, i


def stuck(grads, steps, params=PARAMS):
    """The state after some steps with the same gradients."""
    state = TRACKING.init(params)
    for _ in range(steps):
        _, state = jax.jit(TRACKING.update)(grads, state, params)
    return state


MANY = {f"w{i}": jnp.full(1, jnp.inf) for i in range(9)}


def test_check_names_them():
    """The first of many, and those of the worst member of a population."""
    state = stuck(gradients(bias=jnp.nan), 4)
    another = stuck(gradients(kernel=jnp.nan), 1)
    for stuck_state, message in (
        (state, r"not finite: dense/bias \(1 of 3 leaves\)\. `jaxscale doctor`"),
        (state._replace(nonfinite_leaves=None), "^((?!leaves).)*$"),
        (stuck(MANY, 3, params=MANY), r"w0, w1, w2, w3, w4 and 4 more \(9 of"),
        (stack(another, state), r"dense/bias \(1 of 3"),
    ):
        with pytest.raises(jaxscale.LossScaleStuckError, match=message):
            jaxscale.check(stuck_state, max_consecutive=2)


TREES = {  # parameters, gradients, and the leaves that overflow
    # PyTorch raises "No inf checks were recorded for this optimizer".
    "an empty dictionary": ({}, {}, []),
    "None": (None, None, []),
    "integers": ({"n": jnp.arange(3)}, {"n": np.zeros(3, jax.dtypes.float0)}, []),
    "one array": (jnp.ones(2), jnp.array([1.0, jnp.inf]), ["the root"]),
    "a leaf without a gradient": (
        {"a": jnp.ones(1), "b": jnp.ones(1)},
        {"a": jnp.array([jnp.nan]), "b": None},
        ["a"],
    ),
}


@cases("name", TREES)
def test_trees_of_all_kinds(name):
    params, grads, names = TREES[name]
    inner = optax.identity()
    if not jax.tree.leaves(params):  # then one with a state of its own
        inner = optax.inject_hyperparams(optax.sgd)(0.5, momentum=0.9)
    tx = jaxscale.skip_nonfinite(inner, track_leaves=True)
    before = tx.init(params)
    updates, after = tx.update(grads, before, params)
    assert jax.tree.structure(updates) == jax.tree.structure(grads)
    assert (after.step_applied, after.total_steps) == (not names, 1)
    assert flagged(after) == names
    assert avals(after) == avals(before)

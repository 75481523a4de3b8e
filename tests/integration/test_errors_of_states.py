"""Wrong trees to select from, states to watch, and states to save and restore."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bad_input import OPT_STATE, SCALING, TX, W, assert_says
from flax import nnx
from tables import cases

import jaxscale
from jaxscale import tree_where

pytestmark = pytest.mark.standard_promotion

SAVED = jaxscale.to_state_dict(OPT_STATE)


def bare_optimizer_of_nnx():
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    return nnx.state(nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param))


def restore_version(version):
    jaxscale.from_state_dict(OPT_STATE, SAVED | {"version": version})


CASES = {
    "predicate is an int": (
        lambda: tree_where(1, W, W),
        "TypeError: tree_where(pred ... int",
    ),
    "other structure": (
        lambda: tree_where(True, {"a": 1, "b": 2}, {"a": 1, "c": 2}),
        "ValueError: one structure ... 'b' ... 'c'",
    ),
    "other shape": (
        lambda: tree_where(True, {"a": W}, {"a": jnp.ones(3)}),
        "ValueError: shapes ... ['a'] ... (2,) ... (3,)",
    ),
    "other dtype": (
        lambda: tree_where(True, W, W.astype(jnp.float16)),
        "TypeError: dtypes ... float32 ... float16",
    ),
    "a number that is not an integer": (
        lambda: tree_where(True, {"x": [1.5]}, {"x": [jnp.int32(3)]}),
        "TypeError: tree_where ... dtypes ... ['x'][0] have float32 and int32",
    ),
    "a number that would wrap": (
        lambda: tree_where(True, jnp.uint8(3), -1),
        "OverflowError: -1 ... uint8",
    ),
    "other type": (
        lambda: tree_where(True, {"d": jnp.float16}, {"d": jnp.float32}),
        "TypeError: not arrays ... ['d'] ... float16 ... float32",
    ),
    "a type as a verdict": (
        lambda: tree_where(np.bool_, W, W),
        "TypeError: tree_where(pred= ... scalar bool, got type",
    ),
    "check of nothing": (
        lambda: jaxscale.check(SCALING),
        "ValueError: check ... LossScaledState ... none",
    ),
    "check under jit": (
        lambda: jax.jit(jaxscale.check)(OPT_STATE),
        "TypeError: check ... jit ... metrics",
    ),
    "metrics of a bare optimizer of NNX": (
        lambda: jaxscale.metrics(bare_optimizer_of_nnx()),
        (
            "ValueError: metrics ... none in a State ... `tx.init(params)` ... wrapped optimizer"
        ),
    ),
    "metrics with a number for a prefix": (
        lambda: jaxscale.metrics(OPT_STATE, prefix=1),
        'TypeError: `metrics(prefix= ... got 1 ... "train/"',
    ),
    "check of fewer than no steps": (
        lambda: jaxscale.check(OPT_STATE, max_consecutive=-1),
        "ValueError: `check(max_consecutive=...)` must be an integer ... least 0, got -1",
    ),
    "an optimizer as a target": (
        lambda: jaxscale.from_state_dict(TX, SAVED),
        (
            "TypeError: `from_state_dict(target)` must be a state, got the "
            "optimizer itself ... `tx.init(params)`"
        ),
    ),
    "a version that is an array": (
        lambda: restore_version(np.ones(3)),
        (
            "ValueError: `from_state_dict(state_dict)` must have a version from 1 "
            "to 2, got array([1., 1., 1.])"
        ),
    ),
}


@cases("name", CASES)
def test_bad_input(name):
    assert_says(*CASES[name])


def test_a_version_as_a_file_of_arrays_holds_it_is_read():
    restored = jaxscale.from_state_dict(OPT_STATE, SAVED | {"version": np.array(1)})
    assert restored.total_steps == 0

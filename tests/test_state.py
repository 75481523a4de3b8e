"""Multiplying and dividing by a scale, and finding it in a tree."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import assert_same_bits, avals
from test_tree import PASSIVE

import jaxscale

STATE = jaxscale.FixedLossScale(2.0**10).init()
WIDE = {
    "float16": "float32",
    "bfloat16": "float32",
    "float8_e5m2": "float32",
    "float32": "float32",
    "complex64": "complex64",
}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("function", [jaxscale.scale, jaxscale.unscale])
def test_results_are_float32_or_wider_and_exact(function, dtype):
    leaf = jnp.array([1.5, -2.0, 0.25], dtype)
    factor = 2.0**10 if function is jaxscale.scale else 2.0**-10
    for state in (STATE, jaxscale.NoOpLossScale().init()):
        (result,) = jax.tree.leaves(function(state, [leaf]))
        assert result.dtype == WIDE[dtype]
        expected = np.asarray(leaf, result.dtype) * (factor if state is STATE else 1)
        assert_same_bits(result, expected.astype(result.dtype))


def test_float64_stays_float64():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        assert jaxscale.unscale(STATE, jnp.array(1.0)).dtype == jnp.float64
        assert jaxscale.unscale(STATE, jnp.array(1.0, jnp.complex128)).dtype == jnp.complex128


def test_other_factors_are_right_to_rounding():
    # Twice: XLA divides by multiplying with the reciprocal.
    leaf = jnp.linspace(-1, 1, 999)
    result = jaxscale.unscale(jaxscale.FixedLossScale(3).init(), leaf)
    np.testing.assert_allclose(result, np.asarray(leaf) / np.float32(3), rtol=2**-23)


@pytest.mark.parametrize("exponent", [-126, -60, 60, 126, 127])
def test_no_scale_is_so_extreme_that_gradients_vanish(exponent):
    # The reciprocal of 2**127 is subnormal: XLA makes it 0, and 0 is finite (jmp's fate).
    state = STATE._replace(loss_scale=jnp.array(2.0**exponent, jnp.float32))
    leaf = jnp.array(1.5 * 2.0 ** (-exponent // 2), jnp.float32)
    for transform in (lambda f: f, jax.jit):
        assert (
            transform(lambda s, x: jaxscale.unscale(s, jaxscale.scale(s, x)))(state, leaf) == leaf
        )
        grad = transform(lambda s: jaxscale.grad(lambda x: x * 3.0, s)(leaf))(state)
        assert grad == 3.0


def test_an_overflow_in_one_part_of_a_complex_number_stays_there():
    leaf = jax.lax.complex(jnp.array(jnp.inf), jnp.array(2.0**10))
    result = jaxscale.unscale(STATE, leaf)
    assert (result.real, result.imag) == (jnp.inf, 1.0)


@pytest.mark.parametrize("function", [jaxscale.scale, jaxscale.unscale])
def test_other_leaves_and_overwrites_pass_through(function):
    tree = PASSIVE | {"_overwrite_with_gradient": {"amax": jnp.array(0.5)}}
    result = function(STATE, tree)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True))


def test_a_state_is_found_wherever_it_is():
    tx = optax.chain(optax.identity(), jaxscale.loss_scaled(optax.adam(0.1), 4))
    opt_state = tx.init(jnp.ones(2))
    for tree in (opt_state, {"model": jnp.ones(2), "opt": [opt_state]}, opt_state[1].scaling):
        assert jaxscale.scale(tree, jnp.array(1.0)) == 4
        assert jaxscale.metrics(tree)["loss_scale"] == 4


def test_a_field_of_that_name_that_holds_a_state_is_looked_into():
    class Mine(NamedTuple):
        params: jax.Array
        loss_scale: jaxscale.LossScaleState

    assert jaxscale.scale(Mine(jnp.ones(2), STATE), jnp.array(1.0)) == 2.0**10


def test_a_state_is_a_tree_of_strongly_typed_scalars():
    assert avals(jaxscale.DynamicLossScale().init()) == ("float32[]", "int32[]", "int32[]")
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        state = jaxscale.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
        kinds = {str(jax.typeof(leaf)) for leaf in jax.tree.leaves(state)}
    assert kinds == {"float32[]", "int32[]", "bool[]"}

"""Trees that are multiplied by a loss scale, and divided by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import PASSIVE, assert_same_bits, cases
from training import x64

import jaxscale

STATE = jaxscale.FixedLossScale(2.0**10).init()
UNIT_STATE = jaxscale.NoOpLossScale().init()
# The dtype of a leaf, and that of its product.
WIDENED = {
    "float32": "float32",
    "complex64": "complex64",
    "float64": "float64",
    "complex128": "complex128",
    "float16": "float32",
    "bfloat16": "float32",
    "float8_e5m2": "float32",
}
# A function, its state, and the factor that this is.
PRODUCTS = {
    "scale": (jaxscale.scale, STATE, 2.0**10),
    "unscale": (jaxscale.unscale, STATE, 2.0**-10),
    "scale by 1": (jaxscale.scale, UNIT_STATE, 1),
    "unscale by 1": (jaxscale.unscale, UNIT_STATE, 1),
}


@pytest.mark.device
@cases("name", PRODUCTS)
def test_results_are_float32_or_wider_and_exact(name):
    function, state, factor = PRODUCTS[name]
    with x64():
        leaves = {dtype: jnp.array([1.5, -2.0, 0.25], dtype) for dtype in WIDENED}
        results = jax.jit(function)(state, leaves)
    for dtype, leaf in leaves.items():
        expected = np.asarray(leaf, WIDENED[dtype]) * factor
        assert_same_bits(
            {dtype: results[dtype]}, {dtype: expected.astype(WIDENED[dtype])}
        )


def test_a_divisor_that_is_no_power_of_two_divides_to_rounding():
    # Twice: XLA divides by multiplying with the reciprocal.
    leaf = jnp.linspace(-1, 1, 999)
    result = jaxscale.unscale(jaxscale.FixedLossScale(3).init(), leaf)
    np.testing.assert_allclose(result, np.asarray(leaf) / np.float32(3), rtol=2**-23)


def test_an_overflow_in_one_part_of_a_complex_number_stays_there():
    number = jax.lax.complex(jnp.array(jnp.inf), jnp.array(2.0**10))
    result = jaxscale.unscale(STATE, number)
    assert (result.real, result.imag) == (jnp.inf, 1.0)


@jax.jit
def there_and_back(state, leaf):
    """A leaf that was scaled and unscaled, and a gradient of 3."""
    gradient = jaxscale.grad(lambda x: x * 3.0, state)(leaf)
    return jaxscale.unscale(state, jaxscale.scale(state, leaf)), gradient


@pytest.mark.device
@pytest.mark.parametrize("exponent", [-126, 126, 127])
def test_no_scale_is_so_extreme_that_gradients_vanish(exponent):
    # The reciprocal of 2**127 is subnormal: XLA makes it 0, and 0 is finite (jmp's fate).
    state = STATE._replace(loss_scale=jnp.array(2.0**exponent, jnp.float32))
    leaf = jnp.array(1.5 * 2.0 ** (-exponent // 2), jnp.float32)
    assert there_and_back(state, leaf) == (leaf, 3.0)


@cases("function", [jaxscale.scale, jaxscale.unscale])
def test_other_leaves_and_overwrites_pass_through(function):
    tree = PASSIVE | {"_overwrite_with_gradient": {"amax": jnp.array(0.5)}}
    result = function(STATE, tree)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    for leaf, expected in zip(
        jax.tree.leaves(result), jax.tree.leaves(tree), strict=True
    ):
        assert leaf is expected

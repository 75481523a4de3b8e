"""Operations that are objects, as users write them with `jax.experimental.hijax`.

An operation of arrays is entered. One that takes or makes values of another type runs as written.
"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import HAS_NEW_FORM
from departing import uses_what_goes
from half_programs import W, X, products
from tables import cases, warned

import jaxscale
from jaxscale import diagnostics

pytestmark = [pytest.mark.standard_promotion, uses_what_goes]

if not HAS_NEW_FORM:
    pytest.skip("this version of JAX has no such values", allow_module_level=True)

hijax = importlib.import_module("jax.experimental.hijax")


def test_a_product_in_an_operation_rounds_what_it_reads():
    class Square(hijax.HiPrim):
        def __init__(self, of):
            self.in_avals = (of,)
            self.params = {}
            self.out_aval = of
            super().__init__()

        def expand(self, x):
            return x @ x

    def square(x):
        return Square(jax.typeof(x))(x)

    x = jnp.array([[1 + 2.0**-12, 0.0], [0.0, 2.0]])
    assert square(x)[0, 0] > 1
    np.testing.assert_array_equal(jaxscale.autocast(square)(x), [[1, 0], [0, 4]])


def array_type(shape, dtype):
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


@dataclasses.dataclass
class Quantized:
    numbers: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class QuantizedType(hijax.HiType):
    shape: tuple

    def lo_ty(self):
        return [array_type(self.shape, "int8"), array_type((), "float32")]

    def lower_val(self, value):
        return [value.numbers, value.scale]

    def raise_val(self, numbers, scale):
        return Quantized(numbers, scale)

    def to_tangent_aval(self):
        return array_type(self.shape, "float32")

    def str_short(self, **options):
        return f"quantized{self.shape}"


hijax.register_hitype(Quantized, lambda value: QuantizedType(value.numbers.shape))


def full(value):
    return value.numbers.astype(jnp.float32) * value.scale


def applied(operation, *args):
    return operation(*map(jax.typeof, args))(*args)


class Dequantize(hijax.HiPrim):
    def __init__(self, of):
        self.in_avals = (of,)
        self.params = {}
        self.out_aval = array_type(of.shape, "float32")
        super().__init__()

    def expand(self, value):
        return full(value)

    def vjp_fwd(self, nonzero, value):
        return self(value), None

    def vjp_bwd_retval(self, kept, cotangent):
        return (cotangent,)


class ArrayProduct(hijax.HiPrim):
    """An operation of arrays, with a rule of its own that is not the derivative."""

    def __init__(self, left, right):
        self.in_avals = (left, right)
        self.params = {}
        self.out_aval = array_type(left.shape, "float32")
        super().__init__()

    def expand(self, left, right):
        return left @ right

    def vjp_fwd(self, nonzero, left, right):
        return self(left, right), (left, right)

    def vjp_bwd_retval(self, kept, cotangent):
        left, right = kept
        return 2 * (cotangent @ right.T), 3 * (left.T @ cotangent)


QUANTIZED = Quantized(jnp.arange(64, dtype="int8").reshape(8, 8), jnp.float32(0.01))
SCALING = jaxscale.FixedLossScale(8).init()


def dequantized(x, quantized):
    return jnp.mean(jnp.tanh(x @ applied(Dequantize, quantized)) @ W[0])


def assert_near(actual, expected, share):
    largest = float(jnp.abs(expected).max())
    np.testing.assert_allclose(actual, expected, atol=share * largest)


@pytest.mark.worlds
@cases("wrap", [jaxscale.autocast, jaxscale.scale_backward])
def test_operations_of_other_types_run_as_they_are_written(wrap):
    message = "it is a `Dequantize`, which is no program of arrays"
    with warned(message, is_due=wrap is jaxscale.autocast):
        value, gradient = jax.jit(jax.value_and_grad(wrap(dequantized)))(X, QUANTIZED)
    plain_value, plain_gradient = jax.value_and_grad(dequantized)(X, QUANTIZED)
    np.testing.assert_allclose(value, plain_value, rtol=0.01, atol=1e-3)
    assert_near(gradient, plain_gradient, share=0.02)


@pytest.mark.worlds
def test_the_trace_names_operations_of_other_types():
    report = diagnostics.trace(dequantized, SCALING)(X, QUANTIZED)
    assert report.not_entered == ("call_hi_primitive",)


def loss_of_arrays(x, w):
    return jnp.sum(applied(ArrayProduct, x @ w, w) @ w)


cast_loss_of_arrays = jaxscale.autocast(loss_of_arrays)


def test_an_operation_of_arrays_is_entered():
    assert products(cast_loss_of_arrays, X, W[0]) == ["float16"] * 3
    assert set(products(jax.grad(cast_loss_of_arrays), X, W[0])) == {"float16"}


@cases("argnum", [0, 1])
def test_an_operation_of_arrays_keeps_its_rule(argnum):
    actual = jax.grad(cast_loss_of_arrays, argnum)(X, W[0])
    assert_near(actual, jax.grad(loss_of_arrays, argnum)(X, W[0]), share=0.01)


@pytest.mark.worlds
def test_the_trace_looks_into_an_operation_of_arrays():
    assert not diagnostics.trace(cast_loss_of_arrays, SCALING)(X, W[0]).not_entered

"""Values of a type of one's own, which no operation but those of the type sees into.

JAX calls them hijax values. They go through `autocast`, `scale_backward` and `trace` as they are.
"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import HAS_NEW_FORM
from half_programs import W, X, products
from tables import cases, warned

import jaxscale
from jaxscale import diagnostics

pytestmark = pytest.mark.standard_promotion

if not HAS_NEW_FORM:
    pytest.skip("this version of JAX has no such values", allow_module_level=True)

hijax = importlib.import_module("jax.experimental.hijax")


@dataclasses.dataclass
class Quantized:
    numbers: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class QuantizedType(hijax.HiType):
    shape: tuple

    def lo_ty(self):
        shapes = (self.shape, "int8"), ((), "float32")
        return [
            jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in shapes
        ]

    def lower_val(self, value):
        return [value.numbers, value.scale]

    def raise_val(self, numbers, scale):
        return Quantized(numbers, scale)

    def to_tangent_aval(self):
        return jax.core.ShapedArray(self.shape, jnp.dtype("float32"))

    def str_short(self, **options):
        return f"quantized{self.shape}"


hijax.register_hitype(Quantized, lambda value: QuantizedType(value.numbers.shape))


def full(value):
    return value.numbers.astype(jnp.float32) * value.scale


def applied(operation, *args):
    return operation(*map(jax.typeof, args))(*args)


class Dequantize(hijax.HiPrim):
    def __init__(self, of):
        self.in_avals, self.params = (of,), {}
        self.out_aval = jax.core.ShapedArray(of.shape, jnp.dtype("float32"))
        super().__init__()

    def expand(self, value):
        return full(value)

    def vjp_fwd(self, nonzero, value):
        return self(value), None

    def vjp_bwd_retval(self, kept, cotangent):
        return (cotangent,)


class Multiply(hijax.HiPrim):
    def __init__(self, left, right):
        self.in_avals, self.params = (left, right), {}
        shape = (*left.shape[:-1], right.shape[-1])
        self.out_aval = jax.core.ShapedArray(shape, jnp.dtype("float32"))
        super().__init__()

    def expand(self, left, right):
        return left @ full(right)

    def vjp_fwd(self, nonzero, left, right):
        return self(left, right), right

    def vjp_bwd_retval(self, right, cotangent):
        of = jax.typeof(right)
        return cotangent @ applied(Dequantize, right).T, jnp.zeros(of.shape)


class ArrayProduct(hijax.HiPrim):
    """An operation of arrays, with a rule of its own that is not the derivative."""

    def __init__(self, left, right):
        self.in_avals, self.params = (left, right), {}
        self.out_aval = jax.core.ShapedArray(left.shape, jnp.dtype("float32"))
        super().__init__()

    def expand(self, left, right):
        return left @ right

    def vjp_fwd(self, nonzero, left, right):
        return self(left, right), (left, right)

    def vjp_bwd_retval(self, kept, cotangent):
        left, right = kept
        return 2 * (cotangent @ right.T), 3 * (left.T @ cotangent)


QUANTIZED = Quantized(jnp.arange(64, dtype="int8").reshape(8, 8), jnp.float32(0.01))
LOSSES = {
    "dequantized": lambda x, q: jnp.mean(jnp.tanh(x @ applied(Dequantize, q)) @ W[0]),
    "multiplied": lambda x, q: jnp.mean(jnp.tanh(applied(Multiply, x, q)) @ W[0]),
}


@cases("name", LOSSES)
def test_values_of_own_types_pass_and_a_product_in_their_operations_is_named(name):
    loss, is_hidden = LOSSES[name], name == "multiplied"
    expected, gradient = jax.value_and_grad(loss)(X, QUANTIZED)
    for wrap in (jaxscale.autocast, jaxscale.scale_backward):
        due = is_hidden and wrap is jaxscale.autocast
        with warned(
            r"type that is not an array of JAX \(it is a `Multiply`\)", is_due=due
        ):
            actual = jax.jit(jax.value_and_grad(wrap(loss)))(X, QUANTIZED)
        np.testing.assert_allclose(actual[0], expected, rtol=0.01, atol=1e-3)
        np.testing.assert_allclose(
            actual[1], gradient, atol=0.02 * float(jnp.abs(gradient).max())
        )
    report = diagnostics.trace(loss, jaxscale.FixedLossScale(8).init())(X, QUANTIZED)
    assert report.not_entered == ("call_hi_primitive",)


def test_an_operation_of_arrays_is_entered_and_keeps_its_rule():
    def loss(x, w):
        return jnp.sum(applied(ArrayProduct, x @ w, w) @ w)

    cast = jaxscale.autocast(loss)
    assert products(cast, X, W[0]) == [{"float16"}] * 3
    assert {str(kinds) for kinds in products(jax.grad(cast), X, W[0])} == {
        "{'float16'}"
    }
    for argnum in (0, 1):
        expected = jax.grad(loss, argnum)(X, W[0])
        tolerance = 0.01 * float(jnp.abs(expected).max())
        np.testing.assert_allclose(
            jax.grad(cast, argnum)(X, W[0]), expected, atol=tolerance
        )
    assert not diagnostics.trace(cast, jaxscale.FixedLossScale(8).init())(
        X, W[0]
    ).not_entered

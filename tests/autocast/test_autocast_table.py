"""Laws of the table of `autocast`: operation by operation, and functions of JAX and Optax."""

import inspect
import itertools

import jax
import jax.image
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.signal
import numpy as np
import pytest
from half_programs import products
from tables import cases

import jaxscale
from jaxscale._autocast import table

pytestmark = pytest.mark.standard_promotion


# Every operation that follows its inputs. `add_any` is the sum of two gradients, and the others
# compare for sorting: `jax.lax` has none of these.
OPERATIONS = {name: getattr(jax.lax, name, None) for name in sorted(table.ELEMENTWISE)}
assert {name for name, fun in OPERATIONS.items() if fun is None} == {
    *("add_any", "eq_to", "le_to", "lt_to")
}
OPERATIONS = {name: fun for name, fun in OPERATIONS.items() if fun is not None} | {
    "clamp": lambda x, y: jax.lax.clamp(-jnp.abs(y), x, jnp.abs(y)),
    "select_n": lambda x, y: jax.lax.select_n(x < y, x, y),
}
# What models make of those that saturate.
TAILS = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "log sigmoid": lambda x: jnp.log(jax.nn.sigmoid(x)),
    "cross entropy": lambda x: -jnp.log(1 - jax.nn.sigmoid(x) + 1e-7),
    "derivative of sigmoid": lambda x: jax.nn.sigmoid(x) * (1 - jax.nn.sigmoid(x)),
    "squashed gaussian": lambda x: jnp.log(1 - jnp.tanh(x) ** 2 + 1e-6),
}


def units(x, dtype):
    """Numbers of a half-precision type as integers: neighbours differ by one.

    NaN is one number, and so are those that are not normal, which lose digits in any case.
    """
    x = np.asarray(x).astype(dtype)
    bits = np.where(np.isnan(x), np.asarray(np.nan, dtype), x).view(np.int16).astype(np.int32)
    smallest = int(np.asarray(jnp.finfo(dtype).tiny, dtype).view(np.int16))
    return np.sign(bits) * np.maximum((bits & 0x7FFF) - smallest, 0)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@cases(
    "name, dtype",
    itertools.product(OPERATIONS | TAILS, ["float16", "bfloat16"]),
    fast=[("tanh", "float16"), ("mul", "float16"), ("select_n", "float16"), ("silu", "bfloat16")],
)
def test_operations_are_as_in_float32_over_the_whole_range(name, dtype):
    fun, dtype = (OPERATIONS | TAILS)[name], jnp.dtype(dtype)
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    # Beyond 80 the exponentials of tails leave float32, too.
    largest = 80 if name in TAILS else np.finfo(np.float32).max
    sizes = np.abs(numbers)
    x = numbers[(sizes >= jnp.finfo(dtype).tiny) & (sizes <= largest)].reshape(-1, 2)
    arity = sum(p.default is p.empty for p in inspect.signature(fun).parameters.values())
    xs = [jnp.asarray(np.roll(x, 12345 * i)) for i in range(arity)]  # various pairs of numbers

    def after_products(*xs):
        return fun(*(x @ jnp.eye(2) for x in xs))  # exact: these are in half precision

    def outputs(fun):
        # Compiled, as what is left of 1 - tanh(x) ** 2 depends on how XLA computes tanh.
        value, pull = jax.vjp(jax.jit(fun), *xs)
        return value, *(pull(jnp.ones_like(value)) if is_floating(value) else ())

    actual, expected = outputs(jaxscale.autocast(after_products, dtype)), outputs(fun)
    for a, b in zip(actual, expected, strict=True):
        # Results in half precision are rounded once. A result in float32 may differ in its last
        # bit where XLA compiles two programs differently, and so be rounded to the neighbour.
        assert np.max(np.abs(units(a, dtype) - units(b, dtype))) <= 1


ROWS, COLUMN = jnp.full((4, 300), 20.0), jnp.full((300, 1), 20.0)
POSITIONS, FREQUENCIES = jnp.arange(4096.0), 1.5 ** -jnp.arange(4.0)
# Products that sum over nothing or leave nothing: their values leave float16, or its digits.
OF_ELEMENTS = {
    "vdot": (jnp.vdot, ROWS, ROWS),
    "ij,ij->i": (lambda x, y: jnp.einsum("ij,ij->i", x, y), ROWS, ROWS),
    "mapped": (jax.vmap(jnp.dot), ROWS, ROWS),
    "row @ column": (lambda x, y: x @ y, ROWS[:1], COLUMN),
    "rows @ columns": (lambda x, y: x[:, None] @ y, ROWS, jnp.stack([COLUMN] * 4)),
    "i,j->ij": (lambda x, y: jnp.einsum("i,j->ij", x, y), POSITIONS, FREQUENCIES),
    "column @ row": (lambda x, y: x[:, None] @ y[None], POSITIONS, FREQUENCIES),
}
OF_MATRICES = {
    "matrix @ vector": (lambda x, y: x @ y, ROWS, ROWS[0]),
    "vector @ matrix": (lambda x, y: x @ y, ROWS[0], ROWS.T),
    "one query": (
        lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k),
        *(jnp.ones((2, 1, 2, 4)), jnp.ones((2, 3, 2, 4))),
    ),
    "mapped": (jax.vmap(jnp.dot, (0, None)), ROWS, ROWS[0]),
    "1x1": (lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), *(jnp.ones((1, 1, 1, 1)),) * 2),
}


@cases("name", OF_ELEMENTS, fast=["vdot", "i,j->ij", "mapped"])
def test_dots_and_outer_products_are_in_float32(name):
    fun, *args = OF_ELEMENTS[name]
    cast = jaxscale.autocast(fun)
    (value, pull), (expected, plain_pull) = jax.vjp(cast, *args), jax.vjp(fun, *args)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    # The cotangent of a loss is the loss scale: here one that float16 does not hold.
    cotangent = jnp.full_like(value, 2.0**17)
    for a, b in zip(pull(cotangent), plain_pull(cotangent), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)

    def after_products(*args):
        return fun(*(jnp.stack([x, x], -1) @ jnp.full(2, 0.5) for x in args))

    found = products(jaxscale.autocast(after_products), *args)
    assert found == [{"float16"}] * len(args) + [{"float32"}]


@cases("name", OF_MATRICES)
def test_products_of_a_matrix_are_in_half_precision(name):
    fun, *args = OF_MATRICES[name]
    assert products(jaxscale.autocast(fun), *args) == [{"float16"}]


NUMBERS = np.random.default_rng(0).standard_normal(64).astype(np.float16).astype(np.float32)


def normal(*shape):
    return jnp.asarray(NUMBERS[: np.prod(shape)].reshape(shape))


A, B, V, SIGNAL = normal(4, 4), normal(8, 4)[4:], normal(4), normal(64)
POSITIVE = (A @ A.T + jnp.eye(4)).astype(jnp.float16).astype(jnp.float32)
LINALG = jax.scipy.linalg
# Functions of JAX that are products or convolutions by name, and algorithms that are made of these,
# or have derivatives that are: of each file in `table.LIBRARIES`.
IN_HALF = {
    "matmul": (jnp.linalg.matmul, A, B),
    "multi_dot": (lambda a, b: jnp.linalg.multi_dot([a, b, a]), A, B),
    "tensordot": (lambda a, b: jnp.linalg.tensordot(a, b, axes=1), A, B),
    "convolve": (jax.scipy.signal.convolve, SIGNAL, V),
    "correlate2d": (jax.scipy.signal.correlate2d, A, B),
    "dot_product_attention": (jax.nn.dot_product_attention, *(normal(1, 4, 2, 4),) * 3),
}
ALGORITHMS = {
    "cholesky": (jnp.linalg.cholesky, POSITIVE),
    "eigh": (jnp.linalg.eigh, POSITIVE),
    "inv": (jnp.linalg.inv, A),
    "lstsq": (jnp.linalg.lstsq, A, B),
    "matrix_power": (lambda a: jnp.linalg.matrix_power(a, 2), A),
    "pinv": (jnp.linalg.pinv, A),
    "svd": (jnp.linalg.svd, A),
    "expm": (LINALG.expm, A),
    "funm": (lambda a: LINALG.funm(a, jnp.sin), A),
    "polar": (LINALG.polar, A),
    "sqrtm": (LINALG.sqrtm, A),
    "toeplitz": (LINALG.toeplitz, V),
    "detrend": (jax.scipy.signal.detrend, SIGNAL),
    "stft": (lambda x: jax.scipy.signal.stft(x, nperseg=16), SIGNAL),
    "resize": (lambda x: jax.image.resize(x, (9, 7), "cubic"), A),
}


def is_floating(x):
    return jnp.issubdtype(getattr(x, "dtype", np.bool_), np.inexact)


def floating(tree):
    return list(filter(is_floating, jax.tree.leaves(tree)))


def weighted_sum(fun):
    def weighted(x):
        return jnp.sum(jnp.abs(x) * jnp.cos(jnp.arange(x.size)).reshape(x.shape))

    return lambda *args: sum(map(weighted, floating(fun(*args))))


def assert_close(actual, expected, tolerance):
    for a, b in zip(floating(actual), floating(expected), strict=True):
        if np.isfinite(b).all():
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.max(np.abs(b)), 1e-3))


@cases("name", IN_HALF | ALGORITHMS, fast=["matmul", "pinv"])
def test_functions_of_libraries_are_as_in_float32(name):
    fun, *args = (IN_HALF | ALGORITHMS)[name]
    is_half = name in IN_HALF
    cast = jaxscale.autocast(fun)
    # Given float32, those that are not products have no rounding at all: of whatever magnitude.
    exact = 2**-8 if is_half else 1e-4
    for magnitude in (1, 8) if is_half else (1, 1000):
        given = [arg * magnitude for arg in args]
        assert_close(cast(*given), fun(*given), exact)
    assert is_half == ({"float16"} in products(cast, *args))

    def after_products(*args):
        return fun(*(x @ jnp.eye(x.shape[-1]) for x in args))

    # Given half precision, some follow it: a few roundings of 2**-11.
    assert_close(jaxscale.autocast(after_products)(*args), fun(*args), 2**-8)
    try:
        expected = jax.grad(weighted_sum(fun))(*args)
    except (NotImplementedError, TypeError, ValueError):
        return  # it has no derivative
    for differentiated in (
        jax.grad(weighted_sum(cast)),
        jaxscale.autocast(jax.grad(weighted_sum(fun))),
    ):
        assert_close(differentiated(*args), expected, exact)

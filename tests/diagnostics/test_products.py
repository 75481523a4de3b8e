"""Counts of products by their precision, with their lines."""

import collections
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import half_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas
from tables import cases

import jaxscale
from jaxscale import diagnostics
from jaxscale.diagnostics import products


def test_a_network_of_two_layers_has_two_products_in_float16():
    def network(w, x):
        return jnp.tanh(x @ w) @ w

    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    found = diagnostics.products(jaxscale.autocast(network), w, x)
    assert found.counts == {"float16": 2}
    assert str(found) == "2 matrix products and convolutions: 2 in float16."
    none = diagnostics.products(jnp.sum, x)
    assert str(none) == "No matrix products and no convolutions."


W = jnp.ones((4, 4))
X = jnp.ones((2, 4))


def product(w, x):
    return x @ w


def twice(w, x):
    block = jax.jit(product)
    return block(w, block(w, x))


def looped(w, x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ w, x)


def loss_fn(w, x):
    return jnp.sum(product(w, x) ** 2)


def ragged(w, x):
    return jax.lax.ragged_dot(x, w[None], jnp.array([2]))


# Functions and their arguments: products in all that may hold equations.
FORMS = half_programs.PROGRAMS | {
    "jit, called twice": (twice, (W, X)),
    "ragged": (ragged, (W, X)),
    "while": (looped, (W, X)),
    "both passes": (jax.value_and_grad(loss_fn, (0, 1)), (W, X)),
    "vmap": (jax.vmap(product, (None, 0)), (W, X[None])),
}
del FORMS["numbers_and_text"]  # returns what is not an array, so nothing can trace it
# How many there are in some of them, all in one precision. A loop counts once, each branch counts.
NUMBERS = {
    "jit, called twice": 2,
    "ragged": 1,
    "while": 1,
    "both passes": 3,
    "vmap": 1,
    "lstm": 8,
    "branches": 3,
    "remat_in_scan": 1,
    "custom_jvp": 2,
    "custom_vjp": 2,
    "over_devices": 2,
    "convolutions": 2,
}
FAST = ["branches", "custom_jvp", "lstm", "ragged", "while", "jit, called twice"]


@pytest.mark.standard_promotion
@cases("name", FORMS, fast=FAST)
def test_products_count_in_their_precision_wherever_they_are(name):
    fun, args = FORMS[name]
    for dtype in ("float32", "float16", "bfloat16"):
        each = fun
        if dtype != "float32":
            each = jaxscale.autocast(fun, jnp.dtype(dtype))
        found = products(each, *args)
        assert found.counts == collections.Counter(half_programs.products(each, *args))
        if name in NUMBERS:
            assert found.counts == {dtype: NUMBERS[name]}
            assert bool(found.not_half) == (dtype == "float32")
            assert not any(line.reason for line in found.lines)


@pytest.mark.standard_promotion
@cases("dtype", ["float16", "bfloat16"])
def test_a_product_of_two_formats_counts_in_the_one_that_it_is_cast_to(dtype):
    args = W.astype("bfloat16"), X
    assert products(twice, *args).counts == {"float32": 2}
    cast = jaxscale.autocast(twice, jnp.dtype(dtype))
    assert products(cast, *args).counts == {dtype: 2}


def line_of(function):
    """Name of the file and number of the only line in the body of a function."""
    code = function.__code__
    return f"{pathlib.Path(code.co_filename).name}:{code.co_firstlineno + 1}"


def marked(w, x):
    return jaxscale.full_precision(product)(w, x)


def vectors(w, x):
    return jnp.dot(w[0], x[0])


def with_algorithm(w, x):
    return jnp.dot(x, w, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32)


def of_library(w, x):
    return jax.scipy.linalg.expm(w * 0.1)


def solved(w, x):
    def solve(multiply, x):
        return x

    return jax.lax.custom_linear_solve(functools.partial(product, w), x, solve)


class Left(NamedTuple):
    """A function that is left in float32, the one with the line of its product, and the reason."""

    fun: Callable[[Any, Any], Any]
    at: Callable[[Any, Any], Any]
    reason: str


LEFT = {
    "full_precision": Left(marked, product, "full_precision"),
    "vectors": Left(vectors, vectors, "not of matrices"),
    "an algorithm": Left(with_algorithm, with_algorithm, "precision of its own"),
    "a solver": Left(solved, product, "inside of `custom_linear_solve`"),
    "a library": Left(of_library, of_library, "library"),
}


@cases("name", LEFT, fast=["full_precision", "vectors"])
def test_what_is_not_in_half_precision_is_told_with_its_line_and_why(name):
    left = LEFT[name]

    @jaxscale.autocast
    def fun(w, x):
        return x @ w, left.fun(w, x)

    found = products(fun, W, X)
    assert set(found.counts) == {"float16", "float32"}
    assert found.not_half
    for line in found.not_half:
        assert left.reason in line.reason
        assert line.where.endswith(line_of(left.at))
        assert f"{line.where}: `{line.source}` ({line.reason})" in str(found)


@pytest.mark.slow
def test_products_inside_of_a_kernel_are_told_as_such():
    def kernel(w, x, out):
        out[...] = jax.jit(product)(w[...], x[...])

    shape = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    multiply = pallas.pallas_call(kernel, shape, interpret=True)
    (line,) = products(multiply, W, X).lines
    assert line.dtype == "float32"
    assert line.number == 1
    assert line.reason == "inside of a kernel"


def test_the_report_tells_both_apart():
    @jaxscale.autocast
    def fun(w, x):
        return jaxscale.full_precision(product)(w, jnp.tanh(x @ w) @ w)

    found = products(fun, W, X)
    summary, others = str(found).split("\n")
    assert summary == "3 matrix products and convolutions: 2 in float16, 1 in float32."
    assert others.startswith("  float32: 1 at ")
    assert [line.number for line in found.lines] == [2, 1]  # two on one line


def test_modules_and_other_arguments_are_taken_as_by_autocast():
    class Model(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x, name):
            self.calls[...] += 1
            assert name == "text"
            return self.layer(x)

    @jaxscale.autocast
    def loss_fn(model, x):
        return jnp.mean(model(x, "text"))

    model = Model()
    x = np.ones((2, 4), np.float32)
    assert products(loss_fn, model, x).counts == {"float16": 1}
    assert products(jaxscale.autocast(model.layer), x).counts == {"float16": 1}
    assert model.calls[...] == 0  # it was traced, not run


def test_arguments_may_have_keywords():
    assert products(jaxscale.autocast(lambda *, x: x @ W), x=X).counts == {"float16": 1}


def test_what_is_not_a_function_is_an_error():
    message = r"`products\(fun, \*args\)` must get a function first, got"
    with pytest.raises(TypeError, match=message):
        products(X, W)

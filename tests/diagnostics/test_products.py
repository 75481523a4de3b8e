"""`products`: how many products run in which precision, wherever they are, and on which lines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas
from jax.sharding import Mesh, PartitionSpec
from tables import cases

import jaxscale
from jaxscale.diagnostics import products, to_json

W = jnp.ones((4, 4))
X = jnp.ones((2, 4))
IMAGE, KERNEL = jnp.ones((1, 6, 6, 2)), jnp.ones((3, 3, 2, 2))
BY_CHANNEL = ("NHWC", "HWIO", "NHWC")


def product(w, x):
    return x @ w


@jax.custom_vjp
def ruled(w, x):
    return x @ w


ruled.defvjp(
    lambda w, x: (x @ w, (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T)
)


@jax.custom_jvp
def derived(w, x):
    return x @ w


derived.defjvp(lambda primals, tangents: (derived(*primals), tangents[1] @ primals[0]))


def sharded(w, x):
    mesh, everywhere = Mesh(jax.devices()[:1], ("d",)), PartitionSpec()
    return jax.shard_map(product, mesh=mesh, in_specs=everywhere, out_specs=everywhere)(
        w, x
    )


def looped(w, x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ w, x)


def branched(w, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x @ w) @ w)


def convolved(kernel, image):
    return jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=BY_CHANNEL
    )


def ragged(w, x):
    return jax.lax.ragged_dot(x, w[None], jnp.array([2]))


def twice(w, x):
    block = jax.jit(product)
    return block(w, block(w, x))


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, jnp.stack([w] * 3))[0]


def nested(w, x):
    return jax.lax.scan(lambda x, _: (twice(w, x), None), x, None, 3)[0]


# name: (the function, its arguments, how many products it has)
FORMS = {
    "plain": (product, (W, X), 1),
    "none": (lambda w, x: jnp.sum(w) + jnp.sum(x), (W, X), 0),
    "jit, called twice": (twice, (W, X), 2),
    "scan, counted once": (scanned, (W, X), 1),
    "while": (looped, (W, X), 1),
    "cond, all branches": (branched, (W, X), 3),
    "remat": (jax.checkpoint(product), (W, X), 1),
    "custom_vjp": (ruled, (W, X), 1),
    "custom_jvp": (derived, (W, X), 1),
    "vmap": (jax.vmap(product, (None, 0)), (W, X[None]), 1),
    "shard_map": (sharded, (W, X), 1),
    "convolution": (convolved, (KERNEL, IMAGE), 1),
    "ragged": (ragged, (W, X), 1),
    "nested": (jax.jit(jax.checkpoint(nested)), (W, X), 2),
}  # fmt: skip


@cases("name", FORMS, fast=["nested", "shard_map", "ragged", "custom_vjp"])
def test_products_count_wherever_they_are(name):
    fun, args, count = FORMS[name]
    assert products(fun, *args).counts == ({"float32": count} if count else {})
    for dtype in (jnp.float16, jnp.bfloat16) if count else ():
        found = products(jaxscale.autocast(fun, dtype), *args)
        assert found.counts == {jnp.dtype(dtype).name: count}
        assert found.not_half == ()


def test_both_passes_count_where_the_derivative_is_given():
    def loss_fn(w, x):
        return jnp.sum((x @ w) ** 2)

    found = products(jax.value_and_grad(jaxscale.autocast(loss_fn), (0, 1)), W, X)
    assert found.counts == {"float16": 3}


def line_of(function):
    """File and line of the only line in the body of a function."""
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + 1}"


def marked(w, x):
    return jaxscale.full_precision(product)(w, x)


def vectors(w, x):
    return jnp.dot(w[0], x[0])


def with_algorithm(w, x):
    return jnp.dot(x, w, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32)


def of_library(w, x):
    return jax.scipy.linalg.expm(w * 0.1)


# name: (the function with one line, the precision, the reason)
LEFT = {
    "full_precision": (marked, "float32", "full_precision"),
    "vectors": (vectors, "float32", "not of matrices"),
    "an algorithm": (with_algorithm, "float32", "precision of its own"),
    "a library": (of_library, "float32", "library"),
}


@cases("name", LEFT, fast=["full_precision", "vectors"])
def test_what_is_not_in_half_precision_is_told_with_its_line_and_why(name):
    fun, dtype, reason = LEFT[name]
    found = products(jaxscale.autocast(lambda w, x: (x @ w, fun(w, x))), W, X)
    assert set(found.counts) == {"float16", dtype}
    assert found.not_half
    for line in found.not_half:
        assert reason in line.reason
        assert line.where.endswith(
            f"{line_of(product if fun is marked else fun).rpartition('/')[2]}"
        )
        assert f"{line.where}: `{line.source}` ({line.reason})" in str(found)


@pytest.mark.slow
def test_products_inside_of_a_kernel_are_told_as_such():
    def kernel(w, x, out):
        out[...] = jax.jit(product)(w[...], x[...])

    shape = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    multiply = pallas.pallas_call(kernel, shape, interpret=True)
    (line,) = products(multiply, W, X).lines
    assert (line.dtype, line.number, line.reason) == (
        "float32",
        1,
        "inside of a kernel",
    )


def test_the_report_tells_both_apart():
    def loss_fn(w, x):
        y = x @ w
        y = jnp.tanh(y) @ w
        return jnp.mean(jaxscale.full_precision(product)(w, y))

    found = products(jaxscale.autocast(loss_fn), W, X)
    assert found.counts == {"float16": 2, "float32": 1}
    summary, others = str(found).split("\n")
    assert summary == "3 matrix products and convolutions: 2 in float16, 1 in float32."
    assert others.startswith("  float32: 1 at ")
    assert "return x @ w" in others
    assert [line.number for line in found.lines] == [1, 1, 1]
    assert to_json(found)["counts"] == {"float16": 2, "float32": 1}
    assert str(products(lambda x: x, X)) == "No matrix products and no convolutions."
    # Without `autocast` there is nothing to explain.
    assert [line.reason for line in products(product, W, X).lines] == [""]


def test_modules_and_other_arguments_are_taken_as_by_autocast():
    class Model(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x, name):
            self.calls[...] += 1
            assert name == "text"
            return self.layer(x)

    model = Model()
    fun = jaxscale.autocast(lambda model, x: jnp.mean(model(x, "text")))
    assert products(fun, model, np.ones((2, 4), np.float32)).counts == {"float16": 1}
    layer = jaxscale.autocast(model.layer)
    assert products(layer, np.ones((2, 4), np.float32)).counts == {"float16": 1}
    assert model.calls[...] == 0  # it was traced, not run
    with_keyword = functools.partial(products, jaxscale.autocast(lambda *, x: x @ W))
    assert with_keyword(x=X).counts == {"float16": 1}


def test_what_is_not_a_function_is_an_error():
    with pytest.raises(
        TypeError, match=r"`products\(fun, \*args\)` must get a function first, got"
    ):
        products(X, W)

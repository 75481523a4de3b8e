"""Laws of `autocast`, over tables of programs, and of parts of programs."""

import functools
import inspect

import jax
import jax.custom_batching
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import DERIVATIVES
from half_programs import (
    PROGRAMS,
    W,
    X,
    assert_near_by_norm,
    computed_in_half,
    loss_of,
    primitives,
    products,
)
from tables import assert_same_bits, avals, cases, pairs, spread, warned
from training import x64

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_a_product_rounds_what_it_reads_and_returns_float32():
    x = jnp.array([[1.0, 0.5], [0.25, 1 + 2.0**-12]])
    y = jaxscale.autocast(lambda x: x @ jnp.eye(2))(x)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, [[1, 0.5], [0.25, 1]])


def assert_near(a, b):
    # float16 has 11 bits: the error of a product is a few units of 2**-11 of its terms.
    a = np.asarray(a, np.float32)
    b = np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max() + 1e-6)


every_program = cases("name", PROGRAMS, fast=["lstm", "remat_in_scan", "custom_vjp"])


def sorted_primitives(fun, *args):
    return sorted((name, *sorted(kinds)) for name, kinds in primitives(fun, *args))


@pytest.mark.worlds
@every_program
def test_twice_is_once(name):
    fun, args = PROGRAMS[name]
    once = jaxscale.autocast(loss_of(fun))
    twice = jaxscale.autocast(once)
    assert sorted_primitives(once, *args) == sorted_primitives(twice, *args)
    assert once(*args) == twice(*args)


@pytest.mark.device
@every_program
def test_outputs_keep_their_types_and_come_close(name):
    fun, args = PROGRAMS[name]
    actual_leaves, actual_tree = jax.tree.flatten(jaxscale.autocast(fun)(*args))
    expected_leaves, expected_tree = jax.tree.flatten(fun(*args))
    assert actual_tree == expected_tree
    for actual, expected in zip(actual_leaves, expected_leaves, strict=True):
        assert type(actual) is type(expected)
        if isinstance(expected, jax.Array):
            assert avals(actual) == avals(expected)
            assert actual.sharding.is_equivalent_to(expected.sharding, actual.ndim)
            if jnp.issubdtype(expected.dtype, jnp.floating):
                assert_near(actual, expected)


every_program_and_dtype = cases(
    "name, dtype",
    spread(list(PROGRAMS), ["float16", "bfloat16"], times=1),
    fast=[
        (name, "float16")
        for name in ("attention", "lstm", "remat_in_scan", "custom_vjp")
    ],
)


def gradient_of_loss(fun):
    return jax.grad(loss_of(fun))


@functools.cache
def cast_program(name, dtype):
    fun, _ = PROGRAMS[name]
    return jaxscale.autocast(fun, dtype=jnp.dtype(dtype))


def assert_products_are_in(dtype, name, differentiate):
    """No product is lost, and each is in a dtype, but for those that were written in another."""
    fun, args = PROGRAMS[name]
    dtypes = products(differentiate(cast_program(name, dtype)), *args)
    assert len(dtypes) >= len(products(differentiate(fun), *args)) > 0
    if name == "own_precision":
        assert "bfloat16" in dtypes
        assert set(dtypes) <= {"float16", "bfloat16", "float32"}
    else:
        assert set(dtypes) == {dtype}


@pytest.mark.device
@every_program_and_dtype
def test_products_are_in_half_precision_and_nothing_else_is(name, dtype):
    _, args = PROGRAMS[name]
    assert not computed_in_half(cast_program(name, dtype), *args)
    assert_products_are_in(dtype, name, loss_of)


@pytest.mark.worlds
@every_program_and_dtype
def test_backward_products_are_in_half_precision_and_nothing_else_is(name, dtype):
    _, args = PROGRAMS[name]
    assert not computed_in_half(gradient_of_loss(cast_program(name, dtype)), *args)
    # The derivative of a Cholesky decomposition has products of its own.
    if name != "linear_algebra":
        assert_products_are_in(dtype, name, gradient_of_loss)


# With weights in half precision, these have no product of two formats, or no derivative: JAX has no
# such convolution, and the rule of `custom_vjp` returns float32.
NOT_OF_TWO_FORMATS = ("convolutions", "custom_vjp", "embedding", "linear_algebra")
NOT_OF_TWO_FORMATS += ("own_precision",)
OF_TWO_FORMATS = [name for name in PROGRAMS if name not in NOT_OF_TWO_FORMATS]
HALVES = ("float16", "bfloat16")


@pytest.mark.worlds
@cases(
    "name, weights, dtype",
    pairs(OF_TWO_FORMATS, HALVES, HALVES),
    fast=[("mlp", "bfloat16", "bfloat16"), ("remat_in_scan", "bfloat16", "float16")],
)
def test_products_of_half_precision_weights_are_in_the_dtype_asked_for(
    name, weights, dtype
):
    fun, (params, *args) = PROGRAMS[name]
    params = jax.tree.map(lambda p: p.astype(weights), params)
    gradient = gradient_of_loss(cast_program(name, dtype))
    assert set(products(gradient, params, *args)) == {dtype}
    # A device has one row there, so the gradient of a weight is no product of matrices.
    if name != "over_devices":
        of_gradient = jaxscale.autocast(gradient_of_loss(fun), dtype=jnp.dtype(dtype))
        assert set(products(of_gradient, params, *args)) == {dtype}
    actual = jax.jit(gradient)(params, *args)
    plain = jax.jit(gradient_of_loss(fun))
    assert avals(actual) == avals(plain(params, *args))
    wide_params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    assert_near_by_norm(actual, plain(wide_params, *args), share=0.02)


def flatten(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


every_gradient = cases("name", PROGRAMS, fast=["attention", "custom_vjp"])


@pytest.mark.worlds
@pytest.mark.device
@every_gradient
def test_gradients_have_the_types_of_parameters_and_come_close(name):
    fun, args = PROGRAMS[name]
    step = jax.jit(gradient_of_loss(jaxscale.autocast(fun)))
    actual = step(*args)
    assert_same_bits(step(*args), actual)
    assert step._cache_size() == 1
    expected = jax.jit(gradient_of_loss(fun))(*args)
    assert avals(actual) == avals(expected)
    gradient = flatten(actual)
    wide_gradient = flatten(expected)
    norm = np.linalg.norm(gradient)
    wide_norm = np.linalg.norm(wide_gradient)
    assert np.dot(gradient, wide_gradient) >= 0.999 * norm * wide_norm
    np.testing.assert_allclose(norm, wide_norm, rtol=0.02)


# What the next value of a carry is computed from.


def add_layer(x, w):
    return x + jnp.tanh(x @ w)


def run_inner_loop(x, w):
    end, _ = jax.lax.scan(lambda x, _: (x @ w, 0), x, W[:2])
    return end


def add_product_of_constant(x, w):
    return x + X @ w


@jax.checkpoint
def keep_time(x, w):
    is_over = jnp.sum(X @ w) > jnp.inf
    return jnp.where(is_over, 0, x)


def add_in_full_precision(x, w):
    return jaxscale.full_precision(jnp.add)(x, x @ w)


CARRIED = {
    "layer": add_layer,
    "remat": jax.checkpoint(jax.jit(add_layer)),
    "inner loop": run_inner_loop,
    "sum of products": add_product_of_constant,
    "time": keep_time,
    "full_precision": add_in_full_precision,
}


def stack_products(after):
    """Carries what a function computes, a token and a sum, and stacks products."""

    def body(carry, w):
        x, token, total = carry
        token = jnp.argmax(token * X[0] @ w).astype("int32")
        total = total + jnp.sum(x @ w)
        return (after(x, w), token, total), x @ w

    def fun(x, ws):
        return jax.lax.scan(body, (x, 1, 0.0), ws)

    return fun


def gradient_of_carry(fun):
    return jax.grad(lambda *args: jnp.sum(fun(*args)[0][0]))


@pytest.mark.worlds
@cases("name", CARRIED, fast=["remat"])
def test_a_scan_carries_what_it_declares_and_stacks_products_in_half_precision(name):
    fun = stack_products(CARRIED[name])
    cast = jaxscale.autocast(fun)
    eqns = jax.make_jaxpr(cast)(X, W).eqns
    outputs = cast(X, W)
    gradient = gradient_of_carry(cast)(X, W)
    (scan,) = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    dtypes = [var.aval.dtype for var in scan.outvars]
    assert dtypes == ["float32", "int32", "float32", "float16"]
    expected = fun(X, W), gradient_of_carry(fun)(X, W)
    assert avals((outputs, gradient)) == avals(expected)
    jax.tree.map(assert_near, (outputs, gradient), expected)


def scan_integers(x):
    return jax.lax.scan(lambda c, x: (c @ c + x, c), x, jnp.stack([x, x]))


def invert_double(x):
    shifted = x @ x + jnp.eye(3, dtype=x.dtype)
    return jnp.sin(jnp.linalg.inv(shifted) / 2.0)


def multiply_complex(x):
    spectrum = jnp.fft.fft(x).real.astype("float32")
    return jnp.abs(x @ x.conj().T) + spectrum


HIDDEN, LAST = np.eye(3, dtype=np.float16), np.ones((3, 3), np.float16)


def classify_in_half(x):
    """Reads each array once, as the gradient of what several read is added in float32."""
    return jnp.tanh(x @ HIDDEN) @ LAST


def multiply_into_float32(x):
    return jnp.einsum("ij,kj->ik", x, x, preferred_element_type=jnp.float32)


UNTOUCHED = {
    "int32": scan_integers,
    "float64": invert_double,
    "complex64": multiply_complex,
    "float16": classify_in_half,
    "bfloat16": multiply_into_float32,
}


WARNED_OF = {
    "float64": "changes nothing in .*: its products are in .*float64",
    "complex64": "changes nothing in .*: its products are in .*complex64",
    "bfloat16": "leaves products of bfloat16 arrays",
}


@pytest.mark.parametrize("fun", UNTOUCHED.values(), ids=UNTOUCHED)
def test_autocast_to_float32_is_the_function_itself(fun):
    assert jaxscale.autocast(fun, dtype=jnp.float32) is fun


@cases("dtype", UNTOUCHED, fast=["complex64", "bfloat16"])
def test_other_dtypes_are_untouched(dtype):
    fun = UNTOUCHED[dtype]
    cast = jaxscale.autocast(fun)
    # float16 is what is asked for, and integers have no half precision.
    message = WARNED_OF.get(dtype, "")
    with x64():
        x = jnp.asarray(np.arange(9).reshape(3, 3), dtype)
        with warned(message, is_due=message):
            assert str(jax.make_jaxpr(cast)(x)) == str(jax.make_jaxpr(fun)(x))
        with warned(message, is_due=message):
            assert_same_bits(cast(x), fun(x))


@jaxscale.full_precision
def part(x, w, *, times):
    return (x @ w) * times


def with_a_part(w, x):
    return jnp.mean(part(x @ w[0], w[1], times=3) @ w[2])


def test_full_precision_changes_nothing_outside_of_autocast():
    np.testing.assert_array_equal(part(X, W[0], times=2), X @ W[0] * 2)


def test_full_precision_leaves_a_part_as_it_is_written():
    once = jaxscale.autocast(with_a_part)
    for cast in (once, jaxscale.autocast(once)):
        assert products(cast, W, X) == ["float16", "float32", "float16"]


# What is around it, the input, and how many products the part has then.
AROUND = {
    "grad": (jax.grad(with_a_part), X, 3),
    "vmap": (jax.vmap(with_a_part, in_axes=(None, 0)), X[None], 1),
    "jit": (jax.jit(with_a_part), X, 1),
}


@cases("name", AROUND)
def test_full_precision_is_seen_through_transformations(name):
    fun, x, number = AROUND[name]
    dtypes = products(jaxscale.autocast(fun), W, x)
    assert dtypes.count("float32") == number
    assert len(dtypes) == len(products(fun, W, x))


def test_what_is_not_an_array_reaches_the_function_as_it_is():
    def fun(x, *, number, text, array, function, none=None):
        assert type(number) is int
        assert text == "text"
        assert none is None
        assert isinstance(array, np.ndarray)
        if number > 2:
            return function(x @ x) * number
        return x

    cast = jaxscale.autocast(fun)
    arguments = {"number": 3, "text": "text", "array": np.ones(2), "function": jnp.tanh}
    expected = fun(W[0], **arguments)
    np.testing.assert_allclose(cast(W[0], **arguments), expected, atol=5e-3)
    assert inspect.signature(cast) == inspect.signature(fun)
    assert cast.__name__ == "fun"


def network(w, x):
    mlp, _ = PROGRAMS["mlp"]
    loss, _ = mlp({"w": w, "b": jnp.zeros(8)}, x)
    return loss


@cases("way", DERIVATIVES, fast=["forward over reverse"])
def test_it_composes_with_transformations(way):
    actual = DERIVATIVES[way](jaxscale.autocast(network))(W, X)
    expected = DERIVATIVES[way](network)(W, X)
    jax.tree.map(assert_near, actual, expected)


def multiply_in_batches(x):
    return jnp.einsum("bij,bjk->bik", x, W)


def multiply_one(x):
    return x[0] @ W[0]


@pytest.mark.parametrize("fun", [multiply_one, multiply_in_batches])
def test_linear_functions_can_be_transposed(fun):
    x = jnp.ones((5, 4, 8))
    cotangent = jnp.ones_like(fun(x))
    (actual,) = jax.linear_transpose(jaxscale.autocast(fun), x)(cotangent)
    (expected,) = jax.linear_transpose(fun, x)(cotangent)
    np.testing.assert_allclose(actual, expected, rtol=0.02, atol=2e-3)


def test_refs_are_read_and_written():
    def fun(ref):
        before = ref[...]
        ref[...] = before + X @ W[0]
        after = ref[...]
        return after @ W[0]

    ends = []
    for each in (jaxscale.autocast(fun), fun):
        ref = jax.new_ref(jnp.zeros((4, 8)))
        ends.append((each(ref), ref[...]))
    assert avals(ends[0]) == avals(ends[1])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=0.01), *ends)


@cases("dtype", ["float64", "float8_e4m3fn", "half a dozen", None])
def test_a_bad_dtype_is_named(dtype):
    message = r"`autocast\(dtype\)` must be float16 or bfloat16, or"
    with pytest.raises(ValueError, match=message):
        jaxscale.autocast(jnp.tanh, dtype=dtype)


@cases("dtype", [jnp.bfloat16, "float16"])
def test_a_dtype_in_place_of_the_function_is_named(dtype):
    message = r"Pass the function first.*functools\.partial"
    with pytest.raises(TypeError, match=message):
        jaxscale.autocast(dtype)


@cases("transform", [jaxscale.autocast, jaxscale.full_precision])
def test_an_array_in_place_of_the_function_is_named(transform):
    message = rf"`{transform.__name__}\(fun\)` must .*, got ArrayImpl"
    with pytest.raises(TypeError, match=message):
        transform(X)


@pytest.mark.worlds
@cases(
    "name",
    ["attention", "custom_jvp", "custom_vjp"],
    fast=["custom_vjp"],
)
def test_nothing_leaks(name):
    fun, args = PROGRAMS[name]
    with jax.checking_leaks():
        jax.jit(gradient_of_loss(jaxscale.autocast(fun)))(*args)


def test_symbolic_shapes():
    def fun(x):
        return jax.nn.softmax(x @ W[0] + W[0, 0][None])

    symbolic_shape = jax.export.symbolic_shape("n, 8")
    x = jax.ShapeDtypeStruct(symbolic_shape, jnp.float32)
    exported = jax.export.export(jax.jit(jaxscale.autocast(fun)))(x)
    np.testing.assert_allclose(exported.call(X), fun(X), atol=2e-3)

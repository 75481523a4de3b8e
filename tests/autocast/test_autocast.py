"""Laws of `autocast`, over tables of programs, and of parts of programs."""

import functools
import inspect
import itertools
import re

import jax
import jax.custom_batching
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import PROGRAMS, W, X, primitives, products
from jax.experimental import pallas
from tables import assert_same_bits, avals, cases, warned
from training import x64

import jaxscale
from jaxscale._autocast import table

pytestmark = pytest.mark.standard_promotion

SUMS = {
    name
    for name in table.FLOAT32
    if re.match("reduce_|cum|scatter|select_and|psum", name)
}


def loss_of(fun):
    return lambda *args: fun(*args)[0]


def sorted_primitives(fun, *args):
    return sorted((name, *sorted(kinds)) for name, kinds in primitives(fun, *args))


def assert_near(a, b):
    # float16 has 11 bits: the error of a product is a few units of 2**-11 of its terms.
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max() + 1e-6)


@cases("name", PROGRAMS, fast=["lstm", "remat_in_scan", "custom_vjp"])
def test_twice_is_once(name):
    fun, args = PROGRAMS[name]
    once = jaxscale.autocast(loss_of(fun))
    twice = jaxscale.autocast(once)
    assert sorted_primitives(once, *args) == sorted_primitives(twice, *args)
    assert once(*args) == twice(*args)


@cases("name", PROGRAMS, fast=["lstm", "remat_in_scan", "custom_vjp"])
def test_outputs_keep_their_types_and_come_close(name):
    fun, args = PROGRAMS[name]
    outputs, expected_outputs = jaxscale.autocast(fun)(*args), fun(*args)
    assert jax.tree.structure(outputs) == jax.tree.structure(expected_outputs)
    leaves = zip(
        jax.tree.leaves(outputs), jax.tree.leaves(expected_outputs), strict=True
    )
    for actual, expected in leaves:
        assert type(actual) is type(expected)
        if isinstance(expected, jax.Array):
            assert avals(actual) == avals(expected)
            assert actual.sharding.is_equivalent_to(expected.sharding, actual.ndim)
            if jnp.issubdtype(expected.dtype, jnp.floating):
                assert_near(actual, expected)


every_program_and_dtype = cases(
    "name, dtype",
    itertools.product(PROGRAMS, ["float16", "bfloat16"]),
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


def assert_not_in(dtype, operations, name, differentiate):
    """None of these operations has a dtype."""
    _, args = PROGRAMS[name]
    traced = primitives(differentiate(cast_program(name, dtype)), *args)
    assert not operations.intersection(op for op, kinds in traced if dtype in kinds)


def assert_products_are_in(dtype, name, differentiate):
    """No product is lost, and each is in a dtype, but for those that were written in another."""
    fun, args = PROGRAMS[name]
    kinds = products(differentiate(cast_program(name, dtype)), *args)
    assert len(kinds) >= len(products(differentiate(fun), *args)) > 0
    if name == "own_precision":
        assert {"bfloat16"} in kinds
        assert all(len(kind) == 1 for kind in kinds)
    else:
        assert [kind for kind in kinds if kind != {dtype}] == []


@every_program_and_dtype
def test_products_are_in_half_precision_and_nothing_that_needs_range_is(name, dtype):
    assert_not_in(dtype, table.FLOAT32, name, loss_of)
    assert_products_are_in(dtype, name, loss_of)


@every_program_and_dtype
def test_backward_products_are_in_half_precision_and_no_sum_is(name, dtype):
    assert_not_in(dtype, SUMS, name, gradient_of_loss)
    # The derivative of a Cholesky decomposition has products of its own.
    if name != "linear_algebra":
        assert_products_are_in(dtype, name, gradient_of_loss)


def flatten(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@cases("name", PROGRAMS, fast=["attention", "custom_vjp"])
def test_gradients_are_as_the_parameters_and_come_close_in_one_program(name):
    fun, args = PROGRAMS[name]
    step = jax.jit(jax.value_and_grad(loss_of(jaxscale.autocast(fun))))
    loss, actual = step(*args)
    loss_again, _ = step(*args)
    assert loss == loss_again
    assert step._cache_size() == 1
    expected = jax.jit(gradient_of_loss(fun))(*args)
    assert avals(actual) == avals(expected)
    gradient, wide_gradient = flatten(actual), flatten(expected)
    norm, wide_norm = np.linalg.norm(gradient), np.linalg.norm(wide_gradient)
    assert np.dot(gradient, wide_gradient) >= 0.999 * norm * wide_norm
    np.testing.assert_allclose(norm, wide_norm, rtol=0.02)


# What the next value of a carry is computed from, and its dtype with `half_carries`.
CARRIED = {
    "layer": (lambda x, w: x + jnp.tanh(x @ w), "float16"),
    "remat": (jax.checkpoint(jax.jit(lambda x, w: x + jnp.tanh(x @ w))), "float16"),
    "inner loop": (
        lambda x, w: jax.lax.scan(lambda x, _: (x @ w, 0), x, W[:2])[0],
        "float16",
    ),
    "sum of products": (lambda x, w: x + X @ w, "float32"),
    "time": (
        jax.checkpoint(lambda x, w: jnp.where(jnp.sum(X @ w) > jnp.inf, 0, x)),
        "float32",
    ),
    "full_precision": (
        lambda x, w: jaxscale.full_precision(jnp.add)(x, x @ w),
        "float32",
    ),
}


def stack_products(name):
    """Carries what a row computes, a token and a sum, and stacks products."""
    after, _ = CARRIED[name]

    def fun(x, ws):
        def body(carry, w):
            x, token, total = carry
            token = jnp.argmax(token * X[0] @ w).astype("int32")
            return (after(x, w), token, total + jnp.sum(x @ w)), jnp.abs(x @ w)

        return jax.lax.scan(body, (x, 1, 0.0), ws)

    return fun


def gradient_of_carry(fun):
    return jax.grad(lambda *args: jnp.sum(fun(*args)[0][0]))


@cases("half_carries", [False, True])
@cases("name", CARRIED, fast=["remat", "full_precision"])
def test_half_carries_are_those_that_are_computed_from_a_product_of_themselves(
    name, half_carries
):
    _, half_dtype = CARRIED[name]
    carried = half_dtype if half_carries else "float32"
    fun = stack_products(name)
    cast = jaxscale.autocast(fun, half_carries=half_carries)
    changes_nothing = half_carries and half_dtype == "float32"
    with warned("carries nothing in half precision in `fun`", is_due=changes_nothing):
        eqns = jax.make_jaxpr(cast)(X, W).eqns
        outputs = cast(X, W)
        gradient = gradient_of_carry(cast)(X, W)
    (scan,) = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    # What is stacked is in half precision in any case.
    assert [var.aval.dtype for var in scan.outvars] == [
        carried,
        "int32",
        "float32",
        "float16",
    ]
    expected = fun(X, W), gradient_of_carry(fun)(X, W)
    assert avals((outputs, gradient)) == avals(expected)
    jax.tree.map(assert_near, (outputs, gradient), expected)


UNTOUCHED = {
    "int32": lambda x: jax.lax.scan(lambda c, x: (c @ c + x, c), x, jnp.stack([x, x])),
    "float64": lambda x: jnp.sin(
        jnp.linalg.inv(x @ x + jnp.eye(3, dtype=x.dtype)) / 2.0
    ),
    "complex64": lambda x: (
        jnp.abs(x @ x.conj().T) + jnp.fft.fft(x).real.astype("float32")
    ),
    "float16": lambda x: jax.nn.softmax(x @ x) @ x,
    "bfloat16": lambda x: jnp.einsum(
        "ij,kj->ik", x, x, preferred_element_type=jnp.float32
    ),
}


@cases("dtype", UNTOUCHED, fast=["complex64", "bfloat16"])
def test_other_dtypes_are_untouched(dtype):
    fun = UNTOUCHED[dtype]
    assert jaxscale.autocast(fun, dtype=jnp.float32) is fun
    with x64():
        x = jnp.asarray(np.arange(9).reshape(3, 3), dtype)
        # Half precision is what one wants, and integers have none.
        with warned(
            f"its products are in .*{dtype}", is_due=dtype in ("float64", "complex64")
        ):
            assert str(jax.make_jaxpr(jaxscale.autocast(fun))(x)) == str(
                jax.make_jaxpr(fun)(x)
            )
        with warned("changes nothing", is_due=dtype in ("float64", "complex64")):
            assert_same_bits(jaxscale.autocast(fun)(x), fun(x))


@jaxscale.full_precision
def part(x, w, *, times):
    return (x @ w) * times


def with_a_part(w, x):
    return jnp.mean(part(x @ w[0], w[1], times=3) @ w[2])


def test_full_precision_leaves_a_part_as_it_is_written():
    assert (part(X, W[0], times=2) == X @ W[0] * 2).all()
    cast = jaxscale.autocast(with_a_part)
    assert products(cast, W, X) == [{"float16"}, {"float32"}, {"float16"}]
    assert products(jaxscale.autocast(cast), W, X) == products(cast, W, X)


# What is around it, the input, and how many products the part has then.
AROUND = {
    "grad": (jax.grad(with_a_part), X, 3),
    "vmap": (jax.vmap(with_a_part, in_axes=(None, 0)), X[None], 1),
    "jit": (jax.jit(with_a_part), X, 1),
}


@cases("name", AROUND)
def test_full_precision_is_seen_through_transformations(name):
    fun, x, number = AROUND[name]
    kinds = products(jaxscale.autocast(fun), W, x)
    assert kinds.count({"float32"}) == number
    assert len(kinds) == len(products(fun, W, x))


def test_what_is_not_an_array_reaches_the_function_as_it_is():
    def fun(x, *, number, text, array, function, none=None):
        assert type(number) is int
        assert (text, none) == ("text", None)
        assert isinstance(array, np.ndarray)
        return function(x @ x) * number if number > 2 else x

    cast = jaxscale.autocast(fun)
    arguments = {"number": 3, "text": "text", "array": np.ones(2), "function": jnp.tanh}
    np.testing.assert_allclose(
        cast(W[0], **arguments), fun(W[0], **arguments), atol=5e-3
    )
    assert inspect.signature(cast) == inspect.signature(fun)
    assert cast.__name__ == "fun"


@pytest.mark.slow
def test_it_composes_with_transformations():
    def plain(x):
        return PROGRAMS["mlp"][0]({"w": W, "b": jnp.zeros(8)}, x)[0]

    cast, xs = jaxscale.autocast(plain), jnp.stack([X, X + 1])
    gradient, batch = jax.grad(plain)(X), jax.vmap(plain)(xs)
    for actual, expected in {
        "vmap": (jax.vmap(cast)(xs), batch),
        "of a vmap": (jaxscale.autocast(jax.vmap(plain))(xs), batch),
        "map": (jax.lax.map(cast, xs), batch),
        "jvp": (jax.jvp(cast, (X,), (X,)), jax.jvp(plain, (X,), (X,))),
        "hessian": (jax.hessian(cast)(X), jax.hessian(plain)(X)),
        "of a gradient": (jaxscale.autocast(jax.grad(plain))(X), gradient),
        "remat": (jax.grad(jax.checkpoint(cast))(X), gradient),
        "closed over": (
            jax.grad(lambda x: jaxscale.autocast(lambda: plain(x))())(X),
            gradient,
        ),
        "value_and_grad": (
            jaxscale.grad(cast, jaxscale.DynamicLossScale().init())(X),
            gradient,
        ),
    }.values():
        np.testing.assert_allclose(actual, expected, rtol=0.02, atol=2e-3)


def kernel(w, x):
    def multiply(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] @ y_ref[...]

    product = pallas.pallas_call(multiply, out_shape=jax.typeof(w), interpret=True)
    return product(w @ x, x) @ x


def solver(w, x):
    b = x.T @ x @ jnp.ones(8)
    return jax.lax.custom_linear_solve(lambda v: w @ v + 3 * v, b, lambda _, b: b / 3)


@cases("fun", [kernel, solver])
def test_kernels_run_as_they_are_written_and_linear_solvers_in_float32(fun):
    cast, args = jaxscale.autocast(fun), (W[0], W[1])
    with warned("`pallas_call` run as they are written", is_due=fun is kernel):
        kinds = products(cast, *args)
    assert sorted(map(str, kinds)) == ["{'float16'}", "{'float16'}", "{'float32'}"]
    with warned("`pallas_call`", is_due=fun is kernel):
        result = jaxscale.autocast(fun)(*args)
    np.testing.assert_allclose(result, fun(*args), rtol=0.02, atol=0.01)


@cases("fun", [kernel, solver])
def test_kernels_and_solvers_in_full_precision_are_as_they_are_written(fun):
    marked = jaxscale.autocast(jaxscale.full_precision(fun))
    assert products(marked, W[0], W[1]) == products(fun, W[0], W[1])


def test_a_primitive_without_a_rule_is_named_once_and_runs_as_written():
    batched_by_hand = jax.custom_batching.custom_vmap(lambda w, x: x @ w)
    batched_by_hand.def_vmap(lambda *_: None)  # which it needs, and is not used

    def fun(w, x):
        return batched_by_hand(w, x) + batched_by_hand(w, 2 * x)

    with pytest.warns(
        UserWarning, match="`custom_vmap_call` run as they are written"
    ) as found:
        result = jaxscale.autocast(fun)(W[0], X)
    assert len(found) == 1
    np.testing.assert_allclose(result, fun(W[0], X), rtol=0.01, atol=0.01)
    # as an error, and once more
    with pytest.raises(UserWarning, match="full_precision"):
        jaxscale.autocast(fun)(W[0], X)
    jaxscale.autocast(jaxscale.full_precision(batched_by_hand))(W[0], X)


@pytest.mark.skipif(
    not hasattr(jax, "new_ref"), reason="this version of JAX has no refs"
)
def test_refs_are_read_and_written():
    def fun(ref):
        ref[...] = ref[...] + X @ W[0]
        return ref[...] @ W[0]

    ref, plain_ref = jax.new_ref(jnp.zeros((4, 8))), jax.new_ref(jnp.zeros((4, 8)))
    np.testing.assert_allclose(jaxscale.autocast(fun)(ref), fun(plain_ref), atol=0.01)
    np.testing.assert_allclose(ref[...], plain_ref[...], atol=0.01)
    assert ref[...].dtype == jnp.float32


NAMED = r"`autocast\(dtype\)` must be float16 or bfloat16, or"
FIRST = r"Pass the function first.*functools\.partial"
BAD_INPUT = {
    f"dtype={dtype}": (
        lambda dtype=dtype: jaxscale.autocast(jnp.tanh, dtype=dtype),
        NAMED,
    )
    for dtype in ["float64", "float8_e4m3fn", "half a dozen", None]
} | {
    "a type first": (lambda: jaxscale.autocast(jnp.bfloat16), FIRST),
    "text first": (lambda: jaxscale.autocast("float16"), FIRST),
    "autocast": (
        lambda: jaxscale.autocast(X),
        r"`autocast\(fun\)` must .*, got ArrayImpl",
    ),
    "full": (
        lambda: jaxscale.full_precision(X),
        r"`full_precision\(fun\)` must .*, got ArrayImpl",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_named(name):
    call, message = BAD_INPUT[name]
    with pytest.raises(ValueError if "=" in name else TypeError, match=message):
        call()


def test_help_shows_the_table():
    shown = re.findall(r"[\w-]+", inspect.getdoc(jaxscale.autocast))
    assert set(shown) >= table.PRODUCTS | table.FLOAT32
    tables = [
        table.PRODUCTS,
        table.FLOAT32,
        table.ELEMENTWISE,
        table.MOVES,
        table.CHOICES,
    ]
    # none is in two of them
    assert len(frozenset().union(*tables)) == sum(map(len, tables))


@cases(
    "name",
    ["attention", "activations", "custom_jvp", "custom_vjp"],
    fast=["custom_vjp"],
)
def test_nothing_leaks(name):
    fun, args = PROGRAMS[name]
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda *args: jaxscale.autocast(fun)(*args)[0]))(*args)


def test_symbolic_shapes():
    def fun(x):
        return jax.nn.softmax(x @ W[0] + W[0, 0][None])

    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), jnp.float32)
    exported = jax.export.export(jax.jit(jaxscale.autocast(fun)))(shape)
    np.testing.assert_allclose(exported.call(X), fun(X), atol=2e-3)

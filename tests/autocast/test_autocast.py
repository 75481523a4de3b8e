"""Laws of `autocast`, over tables of programs that are written in float32: what stays so."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import PROGRAMS, W, X, primitives, products
from jax.ad_checkpoint import checkpoint_name
from tables import avals, cases

import jaxscale
from jaxscale._autocast import table

pytestmark = pytest.mark.standard_promotion

FAST = ["attention", "lstm", "remat_in_scan", "custom_vjp"]
SUMS = {name for name in table.FLOAT32 if re.match("reduce_|cum|scatter|select_and|psum", name)}


def loss_of(fun):
    return lambda *args: fun(*args)[0]


def assert_near(a, b):
    # float16 has 11 bits: the error of a product is a few units of 2**-11 of its terms.
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max() + 1e-6)


@cases("name", PROGRAMS, fast=["lstm", "remat_in_scan"])
def test_outputs_keep_their_types_and_come_close(name):
    fun, args = PROGRAMS[name]
    expected, actual = fun(*args), jaxscale.autocast(fun)(*args)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if not isinstance(b, jax.Array):
            assert type(a) is type(b)
            continue
        assert avals(a) == avals(b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        if jnp.issubdtype(b.dtype, jnp.floating):
            assert_near(a, b)


@cases(
    "name, dtype",
    itertools.product(PROGRAMS, ["float16", "bfloat16"]),
    fast=[(name, "float16") for name in FAST],
)
def test_products_are_in_half_precision_and_nothing_that_needs_range_is(name, dtype):
    fun, args = PROGRAMS[name]
    half = jaxscale.autocast(fun, dtype=jnp.dtype(dtype))
    for differentiated in (loss_of, lambda fun: jax.grad(loss_of(fun))):
        # Forward all that is sensitive to range, and backward all sums.
        wide = table.FLOAT32 if differentiated is loss_of else SUMS
        cast = primitives(differentiated(half), *args)
        assert not [primitive for primitive, kinds in cast if primitive in wide and dtype in kinds]
        if name == "linear_algebra" and differentiated is not loss_of:
            continue  # the derivative of a Cholesky decomposition has products of its own
        kinds = products(differentiated(half), *args)
        assert len(kinds) >= len(products(differentiated(fun), *args)) > 0
        if name == "own_precision":
            assert {"bfloat16"} in kinds
            assert all(len(kind) == 1 for kind in kinds)
        else:
            assert [kind for kind in kinds if kind != {dtype}] == []


@cases("name", PROGRAMS, fast=["custom_vjp"])
def test_twice_is_once(name):
    fun, args = PROGRAMS[name]
    once = jaxscale.autocast(loss_of(fun))
    twice = jaxscale.autocast(once)
    first, second = (
        sorted((name, *sorted(kinds)) for name, kinds in primitives(f, *args))
        for f in (once, twice)
    )
    assert first == second
    assert once(*args) == twice(*args)


@cases("name", PROGRAMS, fast=["attention", "custom_vjp"])
def test_gradients_are_as_the_parameters_and_come_close_in_one_program(name):
    fun, args = PROGRAMS[name]
    step = jax.jit(jax.value_and_grad(loss_of(jaxscale.autocast(fun))))
    (loss, actual), (again, _) = step(*args), step(*args)
    assert loss == again
    assert step._cache_size() == 1
    expected = jax.jit(jax.grad(loss_of(fun)))(*args)
    assert avals(actual) == avals(expected)
    a, b = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)]) for t in (actual, expected))
    assert np.dot(a, b) >= 0.999 * np.linalg.norm(a) * np.linalg.norm(b)
    np.testing.assert_allclose(np.linalg.norm(a), np.linalg.norm(b), rtol=0.02)


def layer(x, w):
    return x + jnp.tanh(x @ w)


# What the next value of a carry is computed from, and its dtype with `half_carries`.
CARRIED = {
    "layer": (layer, "float16"),
    "remat": (jax.checkpoint(jax.jit(layer)), "float16"),
    "inner loop": (lambda x, w: jax.lax.scan(lambda x, _: (x @ w, 0), x, W[:2])[0], "float16"),
    "sum of products": (lambda x, w: x + X @ w, "float32"),
    "time": (jax.checkpoint(lambda x, w: jnp.where(jnp.sum(X @ w) > jnp.inf, 0, x)), "float32"),
    "full_precision": (lambda x, w: jaxscale.full_precision(jnp.add)(x, x @ w), "float32"),
}


@cases("name", CARRIED, fast=["remat", "full_precision"])
def test_half_carries_are_those_that_are_computed_from_a_product_of_themselves(name):
    after, dtype = CARRIED[name]

    def fun(x, ws):
        # It carries, too, a token and the sum of what a product makes of the other. What it stacks
        # is in half precision in any case.
        def body(carry, w):
            x, token, total = carry
            token = jnp.argmax(token * X[0] @ w).astype("int32")
            return (after(x, w), token, total + jnp.sum(x @ w)), jnp.abs(x @ w)

        (x, token, total), stacked = jax.lax.scan(body, (x, 1, 0.0), ws)
        return x, token, total, stacked

    for half_carries, expected in ((False, "float32"), (True, dtype)):
        cast = jaxscale.autocast(fun, half_carries=half_carries)
        (scan,) = [e for e in jax.make_jaxpr(cast)(X, W).eqns if e.primitive.name == "scan"]
        assert [var.aval.dtype for var in scan.outvars] == [expected, "int32", "float32", "float16"]
        for differentiated in (lambda f: f, lambda f: jax.grad(lambda *args: jnp.sum(f(*args)[0]))):
            actual, plain = differentiated(cast)(X, W), differentiated(fun)(X, W)
            assert avals(actual) == avals(plain)
            jax.tree.map(assert_near, actual, plain)


F32 = frozenset({"float32"})
BIG = jnp.full((4, 4), 100.0)  # their product is 40000, of which float16 holds no square
LARGE = {
    "x * x": lambda x: (lambda y: jnp.sum(y * y))(x @ x),
    "through a call": lambda x: jnp.sum(jax.jit(jnp.exp)((x @ x) / 1000.0)),
    "through a scan": lambda x: jax.lax.scan(lambda c, y: (c + y, y**2), x[0], x @ x)[1].sum(),
    "variance": lambda x: jnp.var((x @ x) * jnp.arange(4.0)[None] / 4.0),
    # Programs that an equation holds are typed in float32.
    "apply": lambda x: (x @ x).at[0].apply(jnp.square),
    "reduce": lambda x: jax.lax.reduce(x @ x, 0.0, lambda a, b: a * 1e-9 * b + a + b, (0,)),
}


@cases("name", LARGE, fast=["x * x", "apply", "reduce"])
def test_what_float16_does_not_hold_stays_in_float32(name):
    np.testing.assert_allclose(jaxscale.autocast(LARGE[name])(BIG), LARGE[name](BIG), rtol=2e-3)


CONSTANTS = {
    # The first two do not fit into float16; the others do.
    "mask": (lambda x: jax.nn.softmax(jnp.where(jnp.eye(8, dtype=bool), x @ x, -1e9)), "float32"),
    "epsilon": (lambda x: 1 / ((x - x) @ x + 1e-8), "float32"),
    "half": (lambda x: jnp.abs(x @ x) * 0.5, "float16"),
    "infinity": (lambda x: jnp.where(jnp.eye(8, dtype=bool), x @ x, -jnp.inf), "float16"),
    "array": (lambda x: jnp.maximum(x @ x, jnp.full((8, 8), 2.0)), "float16"),
}


@cases("name", CONSTANTS, fast=["mask", "half"])
def test_a_constant_that_float16_does_not_hold_makes_it_float32(name):
    fun, dtype = CONSTANTS[name]
    x = X[:1].T @ X[:1]
    result = jaxscale.autocast(fun)(x)
    np.testing.assert_allclose(result, fun(x), rtol=5e-3, atol=5e-3)
    found = primitives(jaxscale.autocast(fun), x)
    assert {dtype} in [kinds for op, kinds in found if op in ("add", "mul", "select_n", "max")]


def test_a_difference_before_an_exponential_is_not_rounded():
    found = primitives(jaxscale.autocast(lambda x: jax.nn.softmax(x @ x)), W[0])
    assert {*map(frozenset, (kinds for name, kinds in found if name == "sub"))} == {F32}


def test_derivative_rules_decide_at_their_edge():
    cast = jaxscale.autocast(lambda w: jnp.sum(jax.nn.relu(X @ w)))
    # That of a maximum would be a half.
    assert not jax.jit(jax.grad(cast))(jnp.zeros((8, 8))).any()
    large = jaxscale.autocast(lambda w: jax.nn.logsumexp(X @ w) + jax.nn.softmax(X @ w)[0, 0])
    assert jaxscale.all_finite(jax.jit(jax.value_and_grad(large))(jnp.eye(8) * 1000))


def test_what_a_loop_carries_is_not_rounded_for_the_product_that_reads_it_at_last():
    def fun(w):
        def grow(x, _):
            return x * jnp.exp(w @ w), None  # by 2**-13, of which float16 has none beside 1

        return jax.lax.scan(grow, jnp.ones((2, 2)), length=1024)[0] @ jnp.eye(2)

    cast = jaxscale.autocast(fun)(jnp.full((2, 2), 2.0**-7))
    np.testing.assert_allclose(cast, np.exp(1 / 8), rtol=1e-3)


TINY = jnp.array([2.0**-30, 2.0**-20, 0.0, -1.0, jnp.inf])


@jax.custom_jvp
def straight_through(x):
    return jax.nn.relu(x)


straight_through.defjvp(lambda x, dx: (straight_through(*x), dx[0]))
DECIDED = {
    "a product reads it": (jax.nn.relu, 1.0, [0, 1, 0, 0, 1]),
    "no product reads it": (jax.nn.relu, None, [1, 1, 0, 0, 1]),
    "a rule of its own": (straight_through, 1.0, [1, 1, 1, 1, 1]),
}


@cases("name", DECIDED)
def test_a_relu_is_decided_by_what_a_product_reads_of_it(name):
    fun, weight, expected = DECIDED[name]

    def loss(x):
        y = fun(x)
        return jnp.sum(y), y if weight is None else y @ jnp.full((5, 2), weight)

    gradient, _ = jax.grad(jaxscale.autocast(loss), has_aux=True)(TINY)
    np.testing.assert_array_equal(gradient, expected)
    value, _ = jaxscale.autocast(loss)(TINY[:4].repeat(2)[:5])
    assert value == 2.0**-29 + 2.0**-19


LARGE_BIAS = jnp.linspace(1e5, 2e5, 8)  # more than float16 holds
FIRST_MASKED = jnp.where(jnp.arange(4) < 1, -1e9, 0.0)
WHOLLY_MASKED = jnp.broadcast_to(FIRST_MASKED[:, None], (4, 4))
ADDED = {
    "row": lambda b: X @ W[0] + b,
    "whole row": lambda b: X @ W[0] + jnp.broadcast_to(b, X.shape),
    "column": lambda b: b[:4, None] + X @ W[0],
    "vector": lambda b: b + W[0] @ X[0],
    "NumPy array": lambda b: X @ W[0] + np.asarray(LARGE_BIAS) + 0 * b,
    "two products": lambda b: X @ W[0] + b + X @ W[1],
    "slice": lambda b: jnp.split(X @ W[0] + b, 2, -1)[1][:, 0].T,
    "checkpoint name": lambda b: checkpoint_name(X @ W[0] + b, "name"),
    "concatenate": lambda b: jnp.concatenate([X @ W[0] + b, X]),
    "relu": lambda b: jax.nn.relu(X @ W[0] + b),
    "softplus": lambda b: jax.nn.softplus(X @ W[0] + b),
    "residual": lambda b: (lambda y: y + jnp.tanh(y) @ W[1])(X @ W[0] + b),
    "jit": lambda b: jax.jit(lambda b: X @ W[0] + b)(b),
    "jit of a sum": lambda b: jax.jit(lambda y: jnp.max(y, 0) + 1)(X @ W[0] + b),
    "remat": lambda b: jax.checkpoint(lambda y: jnp.sin(y * 1e-5))(X @ W[0] + b),
    "scan": lambda b: jax.lax.scan(lambda c, x: (c, x @ W[0] + b), 0.0, X)[1],
    "apply": lambda b: (X @ W[0] + jax.lax.stop_gradient(b)).at[0].set(0.0),
}
MASKS = {
    "square": WHOLLY_MASKED,
    "keys": FIRST_MASKED[None, None, None],
    "queries": FIRST_MASKED[:, None],
    "all": jnp.full((4, 4), -1e9),
}


@cases("name", ADDED, fast=["whole row", "residual", "jit of a sum", "scan"])
def test_what_is_added_to_a_product_is_added_in_float32(name):
    fun, half = ADDED[name], jaxscale.autocast(ADDED[name])
    np.testing.assert_allclose(half(LARGE_BIAS), fun(LARGE_BIAS), rtol=1e-3, atol=1e-3)
    actual, expected = (jax.grad(lambda b, f=f: jnp.sum(f(b)))(LARGE_BIAS) for f in (half, fun))
    np.testing.assert_allclose(actual, expected, rtol=0.01, atol=1e-3)
    assert set(map(frozenset, products(half, LARGE_BIAS))) == {frozenset({"float16"})}


@cases("name", MASKS, fast=["keys"])
def test_a_mask_that_is_added_is_no_bias(name):
    q = jnp.reshape(W[:2], (2, 4, 2, 8))

    def fun(q, mask):
        return jax.nn.log_softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q) + mask)

    given = MASKS[name]
    for half in (
        jaxscale.autocast(fun),
        jaxscale.autocast(jax.checkpoint(fun)),
        lambda q, mask: jaxscale.autocast(lambda q: fun(q, np.asarray(mask)))(q),
    ):
        np.testing.assert_allclose(half(q, given), fun(q, given), rtol=0.01, atol=0.01)
        gradient = jax.jit(jax.grad(lambda q, half=half: jnp.sum(half(q, given))))(q)
        assert jnp.isfinite(gradient).all()


def test_what_follows_a_sum_is_half_where_only_products_read_it():
    def fun(w, b, x):
        x = jax.nn.relu(x @ w + b)
        x = checkpoint_name(jnp.concatenate([x, -x]), "name")
        return jax.checkpoint(lambda x: jnp.max(x @ w + b, 0))(x[1:].T.T) @ w + b

    found = collections.defaultdict(set)
    for name, kinds in primitives(jaxscale.autocast(fun), W[0], W[0, 0], X):
        found[name] |= kinds
    # The largest is found in float32, for its derivative, and comes back.
    assert found["add"] == found["reduce_max"] == {"float32"}
    for name in ("max", "concatenate", "name", "slice", "transpose"):
        assert found[name] == {"float16"}


def test_gradients_from_several_chains_are_added_in_float32():
    def fun(x):
        y = x @ jnp.eye(2)
        return jnp.sum(1000 * jnp.exp(y)) - jnp.sum(1000.5 * jnp.exp(y))

    gradient = jax.jit(jax.grad(jaxscale.autocast(fun)))(jnp.ones((2, 2)))
    np.testing.assert_allclose(gradient, -0.5 * np.e, rtol=2e-3)  # the spacing of halves: 2

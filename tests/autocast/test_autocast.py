"""Laws of `autocast`, over a table of programs that are written in float32."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import PROGRAMS, W, X, dtypes, equations
from tables import avals, cases

import jaxscale
from jaxscale._autocast import table

pytestmark = pytest.mark.standard_promotion

FAST = ["attention", "lstm", "remat_in_scan", "custom_vjp"]
SUMS = {name for name in table.FLOAT32 if re.match("reduce_|cum|scatter|select_and|psum", name)}


def loss_of(fun):
    return lambda *args: fun(*args)[0]


def traced(fun, args):
    return list(equations(jax.make_jaxpr(fun)(*args)))


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
            # float16 has 11 bits: the error of a product is a few units of 2**-11 of its terms.
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max() + 1e-6)


@cases(
    "name, dtype",
    itertools.product(PROGRAMS, ["float16", "bfloat16"]),
    fast=[(name, "float16") for name in FAST],
)
def test_products_are_in_half_precision_and_nothing_that_needs_range_is(name, dtype):
    fun, args = PROGRAMS[name]
    half = jaxscale.autocast(fun, dtype=jnp.dtype(dtype))
    for differentiated in (loss_of, lambda fun: jax.grad(loss_of(fun))):
        plain, cast = traced(differentiated(fun), args), traced(differentiated(half), args)
        # Forward all that is sensitive to range, and backward all sums.
        wide = table.FLOAT32 if differentiated is loss_of else SUMS
        assert not [e for e in cast if e.primitive.name in wide and dtype in dtypes(e)]
        if name == "linear_algebra" and differentiated is not loss_of:
            continue  # the derivative of a Cholesky decomposition has products of its own
        number = sum(e.primitive.name in table.PRODUCTS for e in plain)
        kinds = [dtypes(e) for e in cast if e.primitive.name in table.PRODUCTS]
        assert len(kinds) >= number > 0
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
    count = [
        sorted((e.primitive.name, *sorted(dtypes(e))) for e in traced(f, args))
        for f in (once, twice)
    ]
    assert count[0] == count[1]
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
            for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(plain), strict=True):
                np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max() + 1e-6)

"""Laws of `autocast`, over a table of programs that are written in float32."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import PROGRAMS, dtypes, equations
from tables import avals, rows

import jaxscale
from jaxscale._autocast import table

pytestmark = pytest.mark.standard_promotion

FAST = ["attention", "lstm", "remat_in_scan", "custom_vjp"]
programs = pytest.mark.parametrize("name", rows(PROGRAMS, FAST))
halves = pytest.mark.parametrize("dtype", rows(["float16", "bfloat16"], ["float16"]))


def loss_of(fun):
    return lambda *args: fun(*args)[0]


@programs
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
            b = np.asarray(b, np.float32)
            np.testing.assert_allclose(
                np.asarray(a, np.float32), b, rtol=0.02, atol=0.02 * np.abs(b).max() + 1e-6
            )


@programs
@halves
def test_all_products_are_in_half_precision_forward_and_backward(name, dtype):
    fun, args = PROGRAMS[name]
    half = jaxscale.autocast(fun, dtype=jnp.dtype(dtype))
    for differentiated in (loss_of, lambda fun: jax.grad(loss_of(fun))):
        if name == "linear_algebra" and differentiated is not loss_of:
            continue  # the derivative of a Cholesky decomposition has products of its own
        plain = list(equations(jax.make_jaxpr(differentiated(fun))(*args)))
        cast = list(equations(jax.make_jaxpr(differentiated(half))(*args)))
        number = sum(e.primitive.name in table.PRODUCTS for e in plain)
        products = [e for e in cast if e.primitive.name in table.PRODUCTS]
        assert len(products) >= number > 0
        kinds = [dtypes(eqn) for eqn in products]
        if name == "own_precision":
            assert {"bfloat16"} in kinds
            assert all(len(kind) == 1 for kind in kinds)
        else:
            assert [kind for kind in kinds if kind != {dtype}] == []


@programs
def test_nothing_range_sensitive_is_in_half_precision(name):
    fun, args = PROGRAMS[name]
    jaxpr = jax.make_jaxpr(loss_of(jaxscale.autocast(fun)))(*args)
    assert not [
        eqn
        for eqn in equations(jaxpr)
        if eqn.primitive.name in table.FLOAT32 and "float16" in dtypes(eqn)
    ]


SUMS = {name for name in table.FLOAT32 if re.match("reduce_|cum|scatter|select_and|psum", name)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_sum_of_the_backward_pass_is_in_half_precision(name):
    fun, args = PROGRAMS[name]
    jaxpr = jax.make_jaxpr(jax.grad(loss_of(jaxscale.autocast(fun))))(*args)
    sums = [e for e in equations(jaxpr) if e.primitive.name in SUMS]
    assert [e for e in sums if "float16" in dtypes(e)] == []


@programs
def test_twice_is_once(name):
    fun, args = PROGRAMS[name]
    once = jaxscale.autocast(loss_of(fun))
    twice = jaxscale.autocast(once)
    count = [
        sorted((e.primitive.name, *sorted(dtypes(e))) for e in equations(jax.make_jaxpr(f)(*args)))
        for f in (once, twice)
    ]
    assert count[0] == count[1]
    assert once(*args) == twice(*args)


@programs
def test_gradients_are_as_the_parameters_and_come_close(name):
    fun, (params, *args) = PROGRAMS[name]
    expected = jax.grad(loss_of(fun))(params, *args)
    actual = jax.grad(loss_of(jaxscale.autocast(fun)))(params, *args)
    assert avals(actual) == avals(expected)
    a, b = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)]) for t in (actual, expected))
    assert np.dot(a, b) >= 0.999 * np.linalg.norm(a) * np.linalg.norm(b)
    np.testing.assert_allclose(np.linalg.norm(a), np.linalg.norm(b), rtol=0.02)


@programs
def test_it_is_one_program_under_jit(name):
    fun, args = PROGRAMS[name]
    step = jax.jit(jax.value_and_grad(loss_of(jaxscale.autocast(fun))))
    first, _ = step(*args)
    second, _ = step(*args)
    assert first == second
    assert step._cache_size() == 1

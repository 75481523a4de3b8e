"""What stays in float32: what float16 does not hold, and all that is added to a product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import W, X, dtypes, equations, primitives, products
from jax.ad_checkpoint import checkpoint_name
from tables import cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

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
    eqns = list(equations(jax.make_jaxpr(jaxscale.autocast(fun))(x)))
    last = [e for e in eqns if e.primitive.name in ("add", "mul", "select_n", "max")]
    assert {dtype} in [dtypes(eqn) for eqn in last]


def test_a_difference_before_an_exponential_is_not_rounded():
    found = primitives(jaxscale.autocast(lambda x: jax.nn.softmax(x @ x)), W[0])
    assert {*map(frozenset, (kinds for name, kinds in found if name == "sub"))} == {F32}


def test_derivative_rules_decide_at_their_edge():
    cast = jaxscale.autocast(lambda w, x: jnp.sum(jax.nn.relu(x @ w)))
    # That of a maximum would be a half.
    assert not jax.jit(jax.grad(cast))(jnp.zeros((8, 8)), X).any()
    large = jaxscale.autocast(lambda w, x: jax.nn.logsumexp(x @ w) + jax.nn.softmax(x @ w)[0, 0])
    value, gradient = jax.jit(jax.value_and_grad(large))(jnp.eye(8) * 1000, X)
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


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

    eqns = list(equations(jax.make_jaxpr(jaxscale.autocast(fun))(W[0], W[0, 0], X)))
    for name in ("max", "concatenate", "name", "slice", "transpose", "reduce_max"):
        found = [dtypes(e) for e in eqns if e.primitive.name == name]
        assert found, name
        # The largest is found in float32, for its derivative, and comes back.
        assert all(kinds == {"float32" if name == "reduce_max" else "float16"} for kinds in found)
    assert {"float32"} == set().union(*(dtypes(e) for e in eqns if e.primitive.name == "add"))


def test_gradients_from_several_chains_are_added_in_float32():
    def fun(x):
        y = x @ jnp.eye(2)
        return jnp.sum(1000 * jnp.exp(y)) - jnp.sum(1000.5 * jnp.exp(y))

    gradient = jax.jit(jax.grad(jaxscale.autocast(fun)))(jnp.ones((2, 2)))
    np.testing.assert_allclose(gradient, -0.5 * np.e, rtol=2e-3)  # the spacing of halves: 2

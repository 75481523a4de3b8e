"""What `autocast` keeps in float32, as half precision does not hold it or would round it."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import W, X, primitives, products
from jax.ad_checkpoint import checkpoint_name
from tables import cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

# their product is 40000, of which float16 holds no square
BIG = jnp.full((4, 4), 100.0)


def squares(x):
    y = x @ x
    return jnp.sum(y * y)


def square_scanned_rows(x):
    return jax.lax.scan(lambda c, y: (c + y, y**2), x[0], x @ x)[1].sum()


def grow_slowly(x):
    # What the loop carries grows by less than 2**-12, of which float16 has none beside 1.
    factor = jnp.exp(x @ x * 2.0**-28)
    end, _ = jax.lax.scan(lambda c, _: (c * factor, None), x / 100.0, length=1024)
    return end @ jnp.eye(4)


LARGE = {
    "x * x": squares,
    "through a call": lambda x: jnp.sum(jax.jit(jnp.exp)((x @ x) / 1000.0)),
    "through a scan": square_scanned_rows,
    "last read by a product": grow_slowly,
    "variance": lambda x: jnp.var((x @ x) * jnp.arange(4.0)[None] / 4.0),
    # Programs that an equation holds are typed in float32.
    "apply": lambda x: (x @ x).at[0].apply(jnp.square),
    "reduce": lambda x: jax.lax.reduce(
        x @ x, 0.0, lambda a, b: a * 1e-9 * b + a + b, (0,)
    ),
}


@cases("name", LARGE, fast=["x * x", "last read by a product", "apply", "reduce"])
def test_what_float16_does_not_hold_stays_in_float32(name):
    np.testing.assert_allclose(
        jaxscale.autocast(LARGE[name])(BIG), LARGE[name](BIG), rtol=1e-3
    )


CONSTANTS = {
    # The first two do not fit into float16; the others do.
    "mask": (
        lambda x: jax.nn.softmax(jnp.where(jnp.eye(8, dtype=bool), x @ x, -1e9)),
        "float32",
    ),
    "epsilon": (lambda x: 1 / ((x - x) @ x + 1e-8), "float32"),
    "half": (lambda x: jnp.abs(x @ x) * 0.5, "float16"),
    "infinity": (
        lambda x: jnp.where(jnp.eye(8, dtype=bool), x @ x, -jnp.inf),
        "float16",
    ),
    "array": (lambda x: jnp.maximum(x @ x, jnp.full((8, 8), 2.0)), "float16"),
}


@cases("name", CONSTANTS, fast=["mask", "half"])
def test_a_constant_that_float16_does_not_hold_makes_it_float32(name):
    fun, dtype = CONSTANTS[name]
    x = X[:1].T @ X[:1]
    result = jaxscale.autocast(fun)(x)
    np.testing.assert_allclose(result, fun(x), rtol=5e-3, atol=5e-3)
    arithmetic = ("add", "mul", "select_n", "max")
    kinds = [
        kinds for op, kinds in primitives(jaxscale.autocast(fun), x) if op in arithmetic
    ]
    assert {dtype} in kinds


def test_a_difference_before_an_exponential_or_a_power_is_not_rounded():
    fun = jaxscale.autocast(lambda x: jnp.exp(x @ x - x @ x.T) + (x @ x.T - x @ x) ** 2)
    assert [kinds for op, kinds in primitives(fun, W[0]) if op == "sub"] == [
        {"float32"}
    ] * 2


def test_derivative_rules_decide_at_their_edge():
    cast = jaxscale.autocast(lambda w: jnp.sum(jax.nn.relu(X @ w)))
    # That of a maximum would be a half.
    assert not jax.jit(jax.grad(cast))(jnp.zeros((8, 8))).any()
    large = jaxscale.autocast(
        lambda w: jax.nn.logsumexp(X @ w) + jax.nn.softmax(X @ w)[0, 0]
    )
    assert jaxscale.all_finite(jax.jit(jax.value_and_grad(large))(jnp.eye(8) * 1000))


TINY = jnp.array([2.0**-30, 2.0**-20, 0.0, -1.0, jnp.inf])


straight_through = jax.custom_jvp(lambda x: jax.nn.relu(x))


straight_through.defjvp(lambda x, dx: (straight_through(*x), dx[0]))


DECIDED = {
    "a product reads it": (jax.nn.relu, 1.0, [0, 1, 0, 0, 1]),
    "no product reads it": (jax.nn.relu, None, [1, 1, 0, 0, 1]),
    "a rule of its own": (straight_through, 1.0, [1, 1, 1, 1, 1]),
}


@pytest.mark.filterwarnings("ignore:`autocast` changes nothing")
@cases("name", DECIDED)
def test_a_relu_is_decided_by_what_a_product_reads_of_it(name):
    fun, weight, expected = DECIDED[name]

    def loss(x):
        y = fun(x)
        if weight is None:
            return jnp.sum(y), y
        return jnp.sum(y), y @ jnp.full((5, 2), weight)

    cast = jaxscale.autocast(loss)
    gradient, _ = jax.grad(cast, has_aux=True)(TINY)
    np.testing.assert_array_equal(gradient, expected)
    total, _ = cast(TINY[:4].repeat(2)[:5])
    assert total == 2.0**-29 + 2.0**-19


LARGE_BIAS = jnp.linspace(1e5, 2e5, 8)  # more than float16 holds


FIRST_MASKED = jnp.where(jnp.arange(4) < 1, -1e9, 0.0)


def residual(b):
    y = X @ W[0] + b
    return y + jnp.tanh(y) @ W[1]


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
    "residual": residual,
    "jit": lambda b: jax.jit(lambda b: X @ W[0] + b)(b),
    "jit of a sum": lambda b: jax.jit(lambda y: jnp.max(y, 0) + 1)(X @ W[0] + b),
    "remat": lambda b: jax.checkpoint(lambda y: jnp.sin(y * 1e-5))(X @ W[0] + b),
    "scan": lambda b: jax.lax.scan(lambda c, x: (c, x @ W[0] + b), 0.0, X)[1],
    "apply": lambda b: (X @ W[0] + jax.lax.stop_gradient(b)).at[0].set(0.0),
}


MASKS = {
    "square": jnp.broadcast_to(FIRST_MASKED[:, None], (4, 4)),
    "keys": FIRST_MASKED[None, None, None],
    "queries": FIRST_MASKED[:, None],
    "all": jnp.full((4, 4), -1e9),
}


@cases("name", ADDED, fast=["whole row", "residual", "jit of a sum", "scan"])
def test_what_is_added_to_a_product_is_added_in_float32(name):
    fun = ADDED[name]
    half = jaxscale.autocast(fun)
    np.testing.assert_allclose(half(LARGE_BIAS), fun(LARGE_BIAS), rtol=1e-3, atol=1e-3)
    actual = jax.grad(lambda b: jnp.sum(half(b)))(LARGE_BIAS)
    expected = jax.grad(lambda b: jnp.sum(fun(b)))(LARGE_BIAS)
    np.testing.assert_allclose(actual, expected, rtol=0.01, atol=1e-3)
    kinds = products(half, LARGE_BIAS)
    assert kinds
    assert all(kind == {"float16"} for kind in kinds)


QUERIES = jnp.reshape(W[:2], (2, 4, 2, 8))


def attend(q, mask):
    return jax.nn.log_softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q) + mask)


def attend_with_constant(q, mask):
    return jaxscale.autocast(lambda q: attend(q, np.asarray(mask)))(q)


# `autocast` around the attention, around a remat of it, and where the mask is a constant.
ATTENDED = {
    "as it is": jaxscale.autocast(attend),
    "in a remat": jaxscale.autocast(jax.checkpoint(attend)),
    "with a constant": attend_with_constant,
}


@cases("way", ATTENDED)
@cases("name", MASKS, fast=["keys"])
def test_a_mask_that_is_added_is_no_bias(name, way):
    half, mask = ATTENDED[way], MASKS[name]
    np.testing.assert_allclose(
        half(QUERIES, mask), attend(QUERIES, mask), rtol=0.01, atol=0.01
    )
    gradient = jax.jit(jax.grad(lambda q: jnp.sum(half(q, mask))))(QUERIES)
    assert jnp.isfinite(gradient).all()


def test_what_follows_a_sum_is_half_where_only_products_read_it():
    def fun(w, b, x):
        x = jax.nn.relu(x @ w + b)
        x = checkpoint_name(jnp.concatenate([x, -x]), "name")
        return jax.checkpoint(lambda x: jnp.max(x @ w + b, 0))(x[1:].T.T) @ w + b

    dtypes = collections.defaultdict(set)
    for name, kinds in primitives(jaxscale.autocast(fun), W[0], W[0, 0], X):
        dtypes[name] |= kinds
    # The maximum is taken in float32, for its derivative, and comes back.
    assert dtypes["add"] == {"float32"}
    assert dtypes["reduce_max"] == {"float32"}
    for name in ("max", "concatenate", "name", "slice", "transpose"):
        assert dtypes[name] == {"float16"}, name


def test_gradients_from_several_chains_are_added_in_float32():
    def fun(x):
        y = x @ jnp.eye(2)
        return jnp.sum(1000 * jnp.exp(y)) - jnp.sum(1000.5 * jnp.exp(y))

    gradient = jax.jit(jax.grad(jaxscale.autocast(fun)))(jnp.ones((2, 2)))
    # the spacing of halves: 2
    np.testing.assert_allclose(gradient, -0.5 * np.e, rtol=2e-3)

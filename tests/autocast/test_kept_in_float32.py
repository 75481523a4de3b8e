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
    start = x / 100.0
    end, _ = jax.lax.scan(lambda c, _: (c * factor, None), start, length=1024)
    return end @ jnp.eye(4)


def exponential_in_a_call(x):
    return jnp.sum(jax.jit(jnp.exp)((x @ x) / 1000.0))


def variance(x):
    columns = jnp.arange(4.0)[None]
    return jnp.var((x @ x) * columns / 4.0)


def apply_square(x):
    return (x @ x).at[0].apply(jnp.square)


def reduce_by_own_sum(x):
    return jax.lax.reduce(x @ x, 0.0, lambda a, b: a * 1e-9 * b + a + b, (0,))


LARGE = {
    "x * x": squares,
    "through a call": exponential_in_a_call,
    "through a scan": square_scanned_rows,
    "last read by a product": grow_slowly,
    "variance": variance,
    # Programs that an equation holds are typed in float32.
    "apply": apply_square,
    "reduce": reduce_by_own_sum,
}


@cases("name", LARGE, fast=["x * x", "last read by a product", "apply", "reduce"])
def test_what_float16_does_not_hold_stays_in_float32(name):
    fun = LARGE[name]
    np.testing.assert_allclose(jaxscale.autocast(fun)(BIG), fun(BIG), rtol=1e-3)


DIAGONAL = jnp.eye(8, dtype=bool)


def masked_softmax(x):
    return jax.nn.softmax(jnp.where(DIAGONAL, x @ x, -1e9))


def reciprocal_of_epsilon(x):
    return 1 / ((x - x) @ x + 1e-8)


# The first two do not fit into float16; the others do, and are in float32 all the same.
CONSTANTS = {
    "mask": masked_softmax,
    "epsilon": reciprocal_of_epsilon,
    "half": lambda x: jnp.abs(x @ x) * 0.5,
    "infinity": lambda x: jnp.where(DIAGONAL, x @ x, -jnp.inf),
    "array": lambda x: jnp.maximum(x @ x, jnp.full((8, 8), 2.0)),
}


@cases("name", CONSTANTS, fast=["mask", "half"])
def test_what_meets_a_constant_is_in_float32(name):
    fun = CONSTANTS[name]
    cast = jaxscale.autocast(fun)
    x = X[:1].T @ X[:1]
    np.testing.assert_allclose(cast(x), fun(x), rtol=5e-3, atol=5e-3)
    arithmetic = ("add", "mul", "select_n", "max")
    dtypes = [kinds for op, kinds in primitives(cast, x) if op in arithmetic]
    assert dtypes
    assert "float16" not in set().union(*dtypes)


def exponential_and_power_of_differences(x):
    exponential = jnp.exp(x @ x - x @ x.T)
    return exponential + (x @ x.T - x @ x) ** 2


def test_a_difference_before_an_exponential_or_a_power_is_not_rounded():
    traced = primitives(jaxscale.autocast(exponential_and_power_of_differences), W[0])
    of_differences = [kinds for op, kinds in traced if op == "sub"]
    assert of_differences == [{"float32"}, {"float32"}]


def test_the_derivative_of_a_relu_at_0_is_0():
    cast = jaxscale.autocast(lambda w: jnp.sum(jax.nn.relu(X @ w)))
    # That of a maximum would be a half.
    assert not jax.jit(jax.grad(cast))(jnp.zeros((8, 8))).any()


def test_the_derivative_of_a_softmax_of_large_numbers_is_finite():
    def loss(w):
        return jax.nn.logsumexp(X @ w) + jax.nn.softmax(X @ w)[0, 0]

    value_and_grad = jax.jit(jax.value_and_grad(jaxscale.autocast(loss)))
    assert jaxscale.all_finite(value_and_grad(jnp.eye(8) * 1000))


TINY = jnp.array([2.0**-30, 2.0**-20, 0.0, -1.0, jnp.inf])
straight_through = jax.custom_jvp(lambda x: jax.nn.relu(x))
straight_through.defjvp(lambda x, dx: (straight_through(*x), dx[0]))


def relu_that_a_product_reads(x):
    y = jax.nn.relu(x)
    return jnp.sum(y), y @ jnp.ones((5, 2))


def relu_that_no_product_reads(x):
    y = jax.nn.relu(x)
    return jnp.sum(y), y


def relu_with_a_rule_of_its_own(x):
    y = straight_through(x)
    return jnp.sum(y), y @ jnp.ones((5, 2))


DECIDED = {
    relu_that_a_product_reads: [1, 1, 0, 0, 1],
    relu_that_no_product_reads: [1, 1, 0, 0, 1],
    relu_with_a_rule_of_its_own: [1, 1, 1, 1, 1],
}


every_relu = cases("fun", DECIDED)


@pytest.mark.filterwarnings("ignore:`autocast` changes nothing")
@every_relu
def test_the_derivative_of_a_relu_is_that_of_what_is_not_rounded(fun):
    gradient, _ = jax.grad(jaxscale.autocast(fun), has_aux=True)(TINY)
    np.testing.assert_array_equal(gradient, DECIDED[fun])


@pytest.mark.filterwarnings("ignore:`autocast` changes nothing")
@every_relu
def test_the_value_of_a_relu_is_not_rounded(fun):
    total, _ = jaxscale.autocast(fun)(TINY[jnp.array([0, 0, 1, 1, 2])])
    assert total == 2.0**-29 + 2.0**-19


LARGE_BIAS = jnp.linspace(1e5, 2e5, 8)  # more than float16 holds
FIRST_MASKED = jnp.where(jnp.arange(4) < 1, -1e9, 0.0)


def layer(b):
    return X @ W[0] + b


def scanned_layer(b):
    _, outputs = jax.lax.scan(lambda c, x: (c, x @ W[0] + b), 0.0, X)
    return outputs


def layer_without_gradient(b):
    return (X @ W[0] + jax.lax.stop_gradient(b)).at[0].set(0.0)


# Sums of a product and a bias, by the bias.
SUMS = {
    "row": layer,
    "whole row": lambda b: X @ W[0] + jnp.broadcast_to(b, X.shape),
    "column": lambda b: b[:4, None] + X @ W[0],
    "vector": lambda b: b + W[0] @ X[0],
    "NumPy array": lambda b: X @ W[0] + np.asarray(LARGE_BIAS) + 0 * b,
    "two products": lambda b: layer(b) + X @ W[1],
    "jit": jax.jit(layer),
    "scan": scanned_layer,
    "apply": layer_without_gradient,
}
# What reads the sum.
READERS_OF_SUM = {
    "slice": lambda y: jnp.split(y, 2, -1)[1][:, 0].T,
    "checkpoint name": lambda y: checkpoint_name(y, "name"),
    "concatenate": lambda y: jnp.concatenate([y, X]),
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "residual": lambda y: y + jnp.tanh(y) @ W[1],
    "jit of a sum": jax.jit(lambda y: jnp.max(y, 0) + 1),
    "remat": jax.checkpoint(lambda y: jnp.sin(y * 1e-5)),
}


def layer_read_by(name):
    return lambda b: READERS_OF_SUM[name](layer(b))


ADDED = SUMS | {name: layer_read_by(name) for name in READERS_OF_SUM}


every_sum = cases("name", ADDED, fast=["whole row", "residual", "jit of a sum", "scan"])


@every_sum
def test_what_is_added_to_a_product_is_added_in_float32(name):
    fun = ADDED[name]
    cast = jaxscale.autocast(fun)
    np.testing.assert_allclose(cast(LARGE_BIAS), fun(LARGE_BIAS), rtol=1e-3, atol=1e-3)
    assert set(products(cast, LARGE_BIAS)) == {"float16"}


@every_sum
def test_gradients_of_what_is_added_to_a_product_come_close(name):
    def gradient(fun):
        return jax.grad(lambda b: jnp.sum(fun(b)))(LARGE_BIAS)

    actual = gradient(jaxscale.autocast(ADDED[name]))
    np.testing.assert_allclose(actual, gradient(ADDED[name]), rtol=0.01, atol=1e-3)


MASKS = {
    "square": jnp.broadcast_to(FIRST_MASKED[:, None], (4, 4)),
    "keys": FIRST_MASKED[None, None, None],
    "queries": FIRST_MASKED[:, None],
    "all": jnp.full((4, 4), -1e9),
}


QUERIES = jnp.reshape(W[:2], (2, 4, 2, 8))


def attend(q, mask):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, q)
    return jax.nn.log_softmax(logits + mask)


def attend_with_constant(q, mask):
    return jaxscale.autocast(lambda q: attend(q, np.asarray(mask)))(q)


# `autocast` around the attention, around a remat of it, and where the mask is a constant.
ATTENDED = {
    "as it is": jaxscale.autocast(attend),
    "in a remat": jaxscale.autocast(jax.checkpoint(attend)),
    "with a constant": attend_with_constant,
}


@cases("way", ATTENDED, fast=["as it is"])
@cases("name", MASKS, fast=["keys"])
def test_a_mask_that_is_added_is_not_a_bias(name, way):
    cast = ATTENDED[way]
    mask = MASKS[name]
    expected = attend(QUERIES, mask)
    np.testing.assert_allclose(cast(QUERIES, mask), expected, rtol=0.01, atol=0.01)
    gradient = jax.jit(jax.grad(lambda q: jnp.sum(cast(q, mask))))(QUERIES)
    assert jnp.isfinite(gradient).all()


def test_what_only_moves_between_products_is_in_half_precision():
    def fun(w, x):
        y = x @ w
        both = jnp.concatenate([jax.lax.rev(y, (0,)), x @ w])
        padded = jnp.pad(both[1:].T.T, ((1, 0), (0, 0)))
        return padded[jnp.array([2, 0])].reshape(2, 8) @ w

    cast = jaxscale.autocast(fun)
    dtypes = collections.defaultdict(set)
    for name, kinds in primitives(cast, W[0], X):
        dtypes[name] |= kinds
    for name in ("concatenate", "rev", "slice", "transpose"):
        assert dtypes[name] == {"float16"}, name
    # The gradients of these are sums.
    for name in ("pad", "gather"):
        assert dtypes[name] == {"float32"}, name


def test_gradients_from_several_chains_are_added_in_float32():
    def fun(x):
        y = x @ jnp.eye(2)
        one = jnp.sum(1000 * jnp.exp(y))
        other = jnp.sum(1000.5 * jnp.exp(y))
        return one - other

    gradient = jax.jit(jax.grad(jaxscale.autocast(fun)))(jnp.ones((2, 2)))
    # the spacing of halves: 2
    np.testing.assert_allclose(gradient, -0.5 * np.e, rtol=2e-3)

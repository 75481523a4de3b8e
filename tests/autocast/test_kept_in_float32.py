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


@pytest.mark.worlds
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


@pytest.mark.worlds
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


@pytest.mark.worlds
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


# Numbers that must be exact. None of these products is the same in half precision.
STRIDES = jnp.array([[257.0], [1.0]])
PLACES = jnp.array([[9, 3], [15, 250], [255, 1]])
MASK = jnp.arange(70_000)[None] >= 0
POINTS = jnp.array([[0.2501, 2001.7], [3.9, 1.0]])
CODES = jnp.array([[3000.0, 3001.0, 3002.0], [1.0, 1.0, 1.0]])


def count(product, mask):
    return product(mask.astype(jnp.float32), jnp.ones((70_000, 2)))


def place(product, rows):
    return product(jax.nn.one_hot(rows[:, 0], 4096), jnp.arange(4096.0)[:, None] + 3)


def flat_index(product, places):
    return product(places.astype(jnp.float32), STRIDES).astype(jnp.int32)


def cell(product, points):
    return jnp.floor(product(points, jnp.eye(2) * 7)).astype(jnp.int32)


def nearest(product, points):
    return jnp.argmax(product(points, CODES), -1)


def order(product, points):
    return jnp.argsort(product(points, CODES) * 2, -1)


def first_two(product, points):
    return jax.lax.top_k(product(points, CODES), 2)[1]


def is_more(product, points):
    return product(points, CODES) > 6003.5


def branch(product, points):
    largest = jnp.max(product(points, CODES) - 6006.6)
    return jax.lax.cond(largest > 0, lambda: 1, lambda: 2)


def turns(product, points):
    def is_less(state):
        return jnp.max(product(points, CODES)) < 6000 + state

    return jax.lax.while_loop(is_less, lambda state: state - 1, 10)


EXACT = {
    count: MASK,
    place: PLACES + 3000,
    flat_index: PLACES,
    cell: POINTS,
    nearest: POINTS,
    order: POINTS,
    first_two: POINTS,
    is_more: POINTS,
    branch: POINTS,
    turns: POINTS,
}


def product(x, y):
    return x @ y


def with_jvp(x, y):
    return product(x, y)


def with_vjp(x, y):
    return product(x, y)


with_jvp = jax.custom_jvp(with_jvp)
with_jvp.defjvp(lambda xs, ts: (with_jvp(*xs), ts[0] @ xs[1] + xs[0] @ ts[1]))
with_vjp = jax.custom_vjp(with_vjp)
with_vjp.defvjp(lambda x, y: (x @ y, (x, y)), lambda xy, g: (g @ xy[1].T, xy[0].T @ g))


def carried(x, y):
    return jax.lax.scan(lambda x, _: (x, x @ y), x, length=2)[1][1]


def added(x, y):
    start = jnp.zeros((len(x), y.shape[1]))
    return jax.lax.scan(lambda c, _: (c + x @ y, None), start, length=1)[0]


def looped(x, y):
    start = jnp.zeros((len(x), y.shape[1]))
    return jax.lax.fori_loop(0, jnp.int32(2), lambda _, c: x @ y, start)


# Where the product is. What its operands come from, and what is made of it, is known outside.
PRODUCTS = {
    "as it is": product,
    "jit": jax.jit(product),
    "jit in jit": jax.jit(lambda x, y: jax.jit(product)(x, y)),
    "checkpoint": jax.checkpoint(product),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "carried": carried,
    "added": added,
    "map": lambda x, y: jax.lax.map(lambda row: row @ y, x),
    "fori_loop": looped,
    "cond": lambda x, y: jax.lax.cond(
        x[0, 0] > -1, product, lambda x, y: 2 * x @ y, x, y
    ),
    "vmap": jax.vmap(product, in_axes=(0, None)),
}


@pytest.mark.worlds
@pytest.mark.filterwarnings("ignore:`autocast` changes nothing")
@cases("dtype", ["float16", "bfloat16"])
@cases("way", PRODUCTS, fast=["as it is", "jit in jit", "carried", "custom_vjp"])
@cases("fun", EXACT, fast=[count, flat_index, nearest, turns])
def test_numbers_that_must_be_exact_are(fun, way, dtype):
    def call(x):
        return fun(PRODUCTS[way], x)

    cast = jaxscale.autocast(call, dtype)
    assert set(products(cast, EXACT[fun])) == {"float32"}
    np.testing.assert_array_equal(jax.jit(cast)(EXACT[fun]), jax.jit(call)(EXACT[fun]))


def test_a_shared_function_is_exact_for_integers_alone():
    multiply = jax.jit(product)

    def fun(x, ids):
        chosen = jax.nn.one_hot(ids, 8)
        return multiply(x, x), multiply(chosen, x), multiply(chosen, chosen)

    dtypes = products(jaxscale.autocast(fun), W[0], jnp.arange(8))
    assert dtypes == ["float16", "float16", "float32"]


def counted_mean(product, w):
    """A sum over groups by their sizes, which depend on no float."""
    groups = jax.nn.one_hot(jnp.arange(4096) % 3, 3).T
    sizes = PRODUCTS[product](groups, jnp.ones((4096, 8)) * 3)
    return jnp.sum(jnp.tanh(W[1][:3] @ w) / sizes)


@cases("way", PRODUCTS, fast=["custom_jvp", "custom_vjp"])
def test_numbers_in_a_model_that_is_differentiated_are_exact(way):
    """Bit for bit as where nothing but the model is in half precision."""
    value_and_grad = jax.value_and_grad(jaxscale.autocast(counted_mean), argnums=1)
    dtypes = products(lambda w: value_and_grad(way, w), W[0])
    branches = 2 if way == "cond" else 1
    assert dtypes.count("float32") == branches
    assert dtypes.count("float16") == 2


def predict(x):
    for w in W:
        x = jax.nn.relu(x @ w)
    return jnp.argmax(x, -1)


def multiply_noise(x):
    noise = jax.random.normal(jax.random.key(0), (8, 8))
    return noise @ noise


def begin_with_zeros(x):
    return jax.lax.scan(
        lambda h, x: (jnp.tanh(h @ W[0] + x), None), jnp.zeros((1, 8)), x
    )[0]


def drop_out(x):
    return (x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)) @ W[0]


def loss_and_accuracy(x):
    logits = x @ W[0]
    return jnp.sum(jax.nn.softmax(logits)), jnp.argmax(logits, -1)


def written_to_a_ref(x):
    ref = jax.new_ref(jnp.zeros((4, 8)))
    ref[...] = x @ W[0]
    return ref[...]


def read_by_nobody(x):
    return jax.jit(lambda x: (x @ W[0], jnp.sum(x)))(x)[1]


@jax.custom_jvp
def sign(x):
    return jnp.where(x > 0, 1.0, -1.0)


sign.defjvp(lambda xs, ts: (sign(*xs), *ts))  # passes gradients straight through


# Products that are no numbers of this kind, and the dtypes of all of them.
OTHERS = {
    predict: ["float16"] * 4 + ["float32"],
    multiply_noise: ["float16"],
    begin_with_zeros: ["float16"],
    drop_out: ["float16"],
    loss_and_accuracy: ["float16"],
    written_to_a_ref: ["float16"],
    read_by_nobody: ["float16"],
    lambda x: sign(x) @ sign(W[0] + x[0]): ["float16"],
    lambda x: sign(x @ W[0]): ["float16"],
    lambda x: jax.nn.one_hot(jnp.arange(8), 8) @ W[0]: ["float16"],
    lambda x: (x > 0).astype(jnp.float32) @ W[0]: ["float16"],
    lambda x: jnp.where(x @ W[0] > 0, x @ W[0], 0): ["float32", "float16"],
    lambda x: jax.grad(lambda x: jnp.sum(x @ W[0]))(x): ["float16"] * 2,
}


@cases("fun", OTHERS)
def test_other_products_are_in_half_precision(fun):
    assert products(jaxscale.autocast(fun), X) == OTHERS[fun]


OUT_OF_BOUNDS = jnp.array([1, 99])
# How a gather is told what to give for an index that is out of bounds.
FILLING = {
    "take": lambda h, fill: jnp.take(h, OUT_OF_BOUNDS, 0, mode="fill", fill_value=fill),
    "at": lambda h, fill: h.at[OUT_OF_BOUNDS].get(mode="fill", fill_value=fill),
    "jit": lambda h, fill: jax.jit(lambda h: FILLING["at"](h, fill))(h),
}


@cases("dtype", ["float16", "bfloat16"])
@cases("name", FILLING, fast=["at"])
@cases("fill", [1e9, 288.15, 1e-8, -jnp.inf, jnp.nan, 7.0])
def test_what_is_out_of_bounds_is_filled_with_the_number_that_is_given(
    fill, name, dtype
):
    def fun(x):
        return -FILLING[name](x @ W[0], fill)

    actual = jaxscale.autocast(fun, dtype)(X)[1]
    np.testing.assert_array_equal(actual, np.full(8, -fill, np.float32))

"""Products and numbers that stay in float32, as half precision does not hold them."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import (
    HOLDERS,
    W,
    X,
    autocast_scaled,
    primitives,
    products,
    with_jvp,
    with_vjp,
)
from tables import cases, half, pairs

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_an_index_that_is_computed_by_a_product_is_exact():
    def place(rows):
        places = jnp.arange(8192.0).reshape(4096, 2)
        return jax.nn.one_hot(rows, 4096) @ places

    # float16 has no 3001, nor anything between 8000 and 8008.
    with pytest.warns(UserWarning, match="numbers that must be exact"):
        found = jaxscale.autocast(place)(jnp.array([1500, 4000]))
    np.testing.assert_array_equal(found, [[3000, 3001], [8000, 8001]])


def test_programs_that_an_equation_holds_run_in_float32():
    """Numbers that float16 does not hold: it has no square of 40000."""

    def fun(x):
        y = x @ x
        return y.at[0].apply(jnp.square), jax.lax.reduce(
            y, 0.0, lambda a, b: a * 1e-9 * b + a + b, (0,)
        )

    x = jnp.full((4, 4), 100.0)
    for actual, expected in zip(jaxscale.autocast(fun)(x), fun(x), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3)


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


def carried(x, y):
    return jax.lax.scan(lambda x, _: (x, x @ y), x, length=2)[1][1]


def added(x, y):
    start = jnp.zeros((len(x), y.shape[1]))
    return jax.lax.scan(lambda c, _: (c + x @ y, None), start, length=1)[0]


def looped(x, y):
    start = jnp.zeros((len(x), y.shape[1]))
    return jax.lax.fori_loop(0, jnp.int32(2), lambda _, c: x @ y, start)


# Where the product is. What its operands come from, and what is made of it, is known outside.
PRODUCTS = {name: hold(product) for name, hold in HOLDERS.items()} | {
    "jit in jit": jax.jit(lambda x, y: jax.jit(product)(x, y)),
    "custom_jvp": with_jvp(product),
    "custom_vjp": with_vjp(product),
    "carried": carried,
    "added": added,
    "fori_loop": looped,
}
meet = half(EXACT, PRODUCTS)


@pytest.mark.worlds
@pytest.mark.filterwarnings("ignore:`autocast` changes nothing")
@cases(
    "fun, way, dtype",
    pairs(
        *(EXACT, PRODUCTS, ["float16", "bfloat16"]),
        among=lambda fun, way, _: meet(fun, way),
    ),
    fast=[
        (count, "as it is", "float16"),
        (flat_index, "jit in jit", "bfloat16"),
        (nearest, "carried", "float16"),
        (turns, "custom_vjp", "float16"),
    ],
)
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


def pool(h):
    return jnp.max(h, -1, keepdims=True) * X


def route(h):
    return h * jax.nn.one_hot(jnp.argmax(X @ W[2], -1), 8)


def scan_twice(fun):
    return lambda x, w: jax.lax.scan(lambda h, _: (fun(h, w), None), x, length=2)[0]


# What ends a checkpoint, with the number of exact products in it. The derivative of most of them
# asks of the product that comes before only where it is large.
ENDS = {
    jax.nn.relu: 0,
    jnp.abs: 0,
    lambda h: jnp.clip(h, -1, 1): 0,
    jnp.sort: 0,
    pool: 0,
    route: 1,
}
AROUND_CHECKPOINTS = HOLDERS | {"scan": scan_twice}
GRADIENTS = {
    "autocast": lambda loss: jax.grad(jaxscale.autocast(loss)),
    "gradient inside": lambda loss: jaxscale.autocast(jax.grad(loss)),
    "scale_backward inside": lambda loss: jax.grad(autocast_scaled(loss)),
    "without retries": lambda loss: jax.grad(
        jaxscale.autocast(jaxscale.scale_backward(loss, retries=0))
    ),
}


@pytest.mark.worlds
@cases(
    "end, around, gradient",
    pairs(ENDS, AROUND_CHECKPOINTS, GRADIENTS),
    fast=[(jax.nn.relu, "as it is", "without retries"), (route, "scan", "autocast")],
)
def test_what_a_checkpoint_computes_again_is_exact_where_it_was(end, around, gradient):
    block = jax.checkpoint(lambda x, w: end(x @ w))
    held = AROUND_CHECKPOINTS[around](block)

    def loss(x):
        return jnp.sum(jnp.sin(held(x, W[0]) @ W[1]))

    dtypes = products(GRADIENTS[gradient](loss), X)
    branches = 2 if around == "cond" else 1
    # going forward, and again for the backward pass
    assert dtypes.count("float32") == 2 * ENDS[end] * branches
    assert "float16" in dtypes


OUT_OF_BOUNDS = jnp.array([1, 99])
# How a gather is told what to give for an index that is out of bounds.
FILLING = {
    "take": lambda h, fill: jnp.take(h, OUT_OF_BOUNDS, 0, mode="fill", fill_value=fill),
    "at": lambda h, fill: h.at[OUT_OF_BOUNDS].get(mode="fill", fill_value=fill),
    "jit": lambda h, fill: jax.jit(lambda h: FILLING["at"](h, fill))(h),
}


@cases(
    "fill, name, dtype",
    pairs(
        [1e9, 288.15, 1e-8, -jnp.inf, jnp.nan, 7.0], FILLING, ["float16", "bfloat16"]
    ),
    fast=[(1e9, "at", "float16"), (288.15, "at", "bfloat16")],
)
def test_what_is_out_of_bounds_is_filled_with_the_number_that_is_given(
    fill, name, dtype
):
    def fun(x):
        return -FILLING[name](x @ W[0], fill)

    actual = jaxscale.autocast(fun, dtype)(X)[1]
    np.testing.assert_array_equal(actual, np.full(8, -fill, np.float32))

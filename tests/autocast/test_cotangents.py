"""The law of cotangents: they meet in float32, and are not rounded before they are used."""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from additions import find_additions, find_roundings
from autodiff import DERIVATIVES, FIRST_DERIVATIVES
from half_programs import PARAMS, PROGRAMS, W, X, assert_near_by_norm, loss_of
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import cases, half, pairs, spread

import jaxscale
from jaxscale._jax import jaxprs

pytestmark = pytest.mark.standard_promotion


def test_the_gradient_of_what_is_read_often_is_added_in_float32():
    def loss(table):
        return jnp.sum(table[jnp.zeros(3072, int)].astype(jnp.float32))

    gradient = jax.grad(jaxscale.autocast(loss, jnp.bfloat16))
    # Adding 1 to 256 changes nothing in bfloat16.
    assert gradient(jnp.ones(1, jnp.bfloat16)) == 3072


HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
logsumexp = jax.nn.logsumexp


def cross_entropy(logits):
    labels = jnp.arange(logits.shape[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def in_a_jit_called_twice(w):
    layer = jax.jit(lambda x, w: jax.nn.relu(x @ w))
    x = X @ w[0]
    return jnp.mean(layer(x, w[1]) ** 2 + layer(x, w[2]) * x)


def stacked_by_scan(w):
    def body(carry, x):
        logits = x @ w[0]
        return jnp.tanh(carry + logits), (logits, logsumexp(logits))

    carry, (logits, normalizers) = jax.lax.scan(body, X[0], X)
    return jnp.mean(normalizers - jnp.diag(logits)) + carry.sum()


def constant_of_scan(w):
    keys = X @ w[0]

    def body(carry, x):
        weights = jax.nn.softmax(x @ keys.T)
        return carry + jnp.sum(weights @ keys), weights

    carry, weights = jax.lax.scan(body, 0.0, X)
    return carry + jnp.sum(keys) + jnp.sum(weights)


def constant_read_only_in_scan(w):
    keys = X @ w[0]

    def body(carry, x):
        return carry + logsumexp(keys * x) + jnp.sum(x @ w[1]), None

    carry, _ = jax.lax.scan(body, 0.0, X)
    return carry


def sliced_by_scan(w):
    logits = X @ w[0]

    def body(carry, x):
        return carry + logsumexp(x), x * x

    carry, squares = jax.lax.scan(body, 0.0, logits)
    return carry - logits[:, 0].sum() + squares.mean()


def named(w):
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_any_names_but_these()
    )
    def block(x):
        logits = checkpoint_name(x @ w[0], "logits")
        return cross_entropy(logits) + jnp.sum(logits @ w[1])

    return block(X)


def read_by_products(w):
    x = jax.nn.relu(X @ w[0])
    first = jnp.tanh(x @ w[1])
    second = jnp.tanh(x @ w[2])
    both_signs = jnp.concatenate([x, -x], -1)
    third = both_signs @ jnp.concatenate([w[3], w[4]])
    return jnp.sum(first + second + third)


def written_in_half(w):
    x = (X @ w[0]).astype(jnp.float16).astype(jnp.float32)
    return jnp.sum(x @ w[1]) + jnp.sum(jnp.exp(x))


def cast_by_hand(w):
    x = X + w[0][:4]
    in_half = jnp.sum(x.astype(jnp.float16) * 2)
    return jnp.sum(x @ w[1]) + in_half.astype(jnp.float32)


def behind_barrier(w):
    (logits,) = jax.lax.optimization_barrier((X @ w[0],))
    return cross_entropy(logits) + jnp.sum(logits @ w[1])


FUNCTIONS = [in_a_jit_called_twice, stacked_by_scan, constant_of_scan, sliced_by_scan]
FUNCTIONS += [constant_read_only_in_scan, named, read_by_products, written_in_half]
FUNCTIONS += [cast_by_hand, behind_barrier]
# Losses, and their arguments.
MEETINGS = {fun.__name__: (fun, (W,)) for fun in FUNCTIONS}
MEETINGS |= {name: (loss_of(fun), args) for name, (fun, args) in PROGRAMS.items()}
# What rounds by hand, and reads it in float32.
BY_HAND = {"written_in_half", "cast_by_hand", "own_precision"}
AROUND = {
    "grad": lambda fun, cast: jax.grad(cast(fun)),
    "jit": lambda fun, cast: jax.grad(jax.jit(cast(fun))),
    "remat": lambda fun, cast: jax.grad(jax.checkpoint(cast(fun))),
    "of a gradient": lambda fun, cast: cast(jax.grad(fun)),
    "scale_backward": lambda fun, cast: jax.grad(jaxscale.scale_backward(cast(fun))),
}


@pytest.mark.worlds
@cases(
    "name, around",
    spread(list(MEETINGS), list(AROUND), times=1),
    fast=[
        ("in_a_jit_called_twice", "grad"),
        ("constant_of_scan", "grad"),
        ("read_by_products", "grad"),
    ],
)
def test_nothing_is_added_in_half_precision_or_rounded_but_for_products(name, around):
    fun, args = MEETINGS[name]
    gradient = AROUND[around](fun, jaxscale.autocast)
    program = jax.make_jaxpr(gradient)(*args)
    # What is in half precision by hand adds as its author chose.
    assert name == "own_precision" or not find_additions(program)
    assert name in BY_HAND or not find_roundings(program)
    if name not in PROGRAMS:  # whose gradients `test_autocast` compares
        assert_near_by_norm(jax.jit(gradient)(W), jax.grad(fun)(W), share=0.01)


# Functions of what is centered, so that its gradient is what is left of a sum. By hand each product
# casts its operands, and everything else is in float32.


def gathered_in_calls(multiply, centered, w):
    @jax.jit
    def rows_of(x):
        return x[jnp.arange(1024) % 16]

    return multiply(jax.jit(jnp.tanh)(rows_of(centered)), w) + multiply(
        rows_of(centered), w
    )


def sliced_after_a_move(multiply, centered, w):
    moved = centered.T.reshape(8, 4, 4)
    return jnp.concatenate([multiply(moved[:, i % 4].T, w) for i in range(64)])


def in_checkpoints(multiply, centered, w):
    layer = jax.checkpoint(multiply)
    return jnp.concatenate([layer(centered, w * (1 + i / 64)) for i in range(64)])


def in_many_products(multiply, centered, w):
    layers = [multiply(centered, w * (1 + i / 64)) for i in range(64)]
    return jnp.concatenate(layers)


def with_a_backward_rule(multiply, centered, w):
    """It centers the cotangents that it gets."""

    @jax.custom_vjp
    def product(x, w):
        return multiply(x, w)

    def backward(saved, cotangent):
        x, w = saved
        centered = cotangent - jnp.mean(cotangent, 0)
        return multiply(centered, w.T), multiply(x.T, centered)

    product.defvjp(lambda x, w: (multiply(x, w), (x, w)), backward)
    return product(product(centered, w), w)


def with_a_derivative_rule(multiply, centered, w):
    """It reads in float32 what is only read by products without it."""

    @jax.custom_jvp
    def product(x, w):
        return multiply(x, w)

    @product.defjvp
    def derive(primals, tangents):
        x, w = primals
        dx, dw = tangents
        x = x - jnp.mean(x, 1, keepdims=True)
        dx = dx - jnp.mean(dx, 0)
        return product(*primals), multiply(dx, w) * jnp.max(x) + multiply(x, dw)

    x = jnp.tanh(centered) + 30
    return product(product(x, w), w)


def broadcasted(multiply, centered, w):
    rows = jnp.broadcast_to(centered, (64, *centered.shape))
    return multiply(rows.reshape(-1, 8), w)


def gathered_over_devices(multiply, centered, w):
    def product(centered, w):
        centered = centered - jnp.mean(centered, 1, keepdims=True)
        return multiply(jax.lax.all_gather(centered, "data", axis=0, tiled=True), w)

    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    mapped = jax.shard_map(
        product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    return mapped(centered, w)


SUMMED = [gathered_in_calls, sliced_after_a_move, in_checkpoints]
SUMMED += [in_many_products, broadcasted, gathered_over_devices]
SUMMED += [with_a_backward_rule, with_a_derivative_rule]
SUMMED = {fun.__name__: fun for fun in SUMMED}


@pytest.mark.worlds
@cases(
    "name, dtype",
    spread(list(SUMMED), list(HALVES), times=1),
    fast=[("in_many_products", "bfloat16")],
)
def test_what_is_left_of_a_sum_is_as_with_products_in_half_by_hand(name, dtype):
    half = HALVES[dtype]
    w = jax.random.normal(jax.random.key(1), (8, 8))

    def multiply_in_half(a, b):
        return (a.astype(half) @ b.astype(half)).astype(jnp.float32)

    def gradient_of(multiply):
        def loss_fn(p):
            outputs = SUMMED[name](multiply, p - jnp.mean(p, 0), w)
            noise = jax.random.normal(jax.random.key(2), outputs.shape)
            return jnp.mean(outputs * (1 + 0.3 * noise)) * 2.0**10

        return loss_fn

    p = jax.random.normal(jax.random.key(0), (16, 8))
    exact = jax.jit(jax.grad(gradient_of(jnp.matmul)))(p)
    by_hand = jax.jit(jax.grad(gradient_of(multiply_in_half)))(p)
    cast = jax.jit(jax.grad(jaxscale.autocast(gradient_of(jnp.matmul), half)))(p)
    of_hand = np.linalg.norm(by_hand - exact)
    assert of_hand > 0
    assert np.linalg.norm(cast - exact) <= 1.05 * of_hand


# Programs that read an array in half precision many times. Each cotangent is a small integer, which
# half precision holds, so in float32 the gradient is exact.

TOKENS = (
    jnp.arange(16384) % 7 * (jnp.arange(16384) % 3)
)  # rows of 64, some of them often
ROWS = jnp.arange(32.0).reshape(4, 8) % 5


def embedded(table):
    return jnp.sum(table[TOKENS].astype(jnp.float32))


def tied_embedding(table):
    hidden = table[TOKENS].astype(jnp.float32)
    ones = jnp.ones((2048, 8))
    return jnp.sum(hidden) + jnp.sum(ones @ table.T)


def weight_over_steps(table):
    def step(carry, _):
        return carry + jnp.sum(ROWS @ table.T), None

    return jax.lax.scan(step, 0.0, length=3000)[0]


def bias_in_each_turn(table):
    def step(carry, _):
        return carry + table, None

    carry, _ = jax.lax.scan(step, jnp.zeros(table.shape), length=3000)
    return jnp.sum(carry)


def weight_of_many_layers(table):
    # Gradients of up to 4,900, with odd numbers on the way to them.
    return sum(7 * jnp.sum(ROWS @ table.T) for _ in range(100))


def added_in_a_jitted_block(table):
    @jax.jit
    def block(x):
        for _ in range(300):
            x = x + table
        return x

    return jnp.sum(block(jnp.zeros(table.shape)))


def messages(table):
    sent = table[TOKENS] * jnp.asarray(3, table.dtype)
    received = jax.ops.segment_sum(sent.astype(jnp.float32), TOKENS[::-1], 64)
    return jnp.sum(received)


def by_a_derivative_rule(table):
    @jax.custom_jvp
    def take(table):
        return table[TOKENS]

    @take.defjvp
    def derive(primals, tangents):
        return take(*primals), 2 * tangents[0][TOKENS]

    return jnp.sum(take(table).astype(jnp.float32))


def in_a_branch(table):
    def first(table):
        return table[0, 0].astype(jnp.float32)

    return jax.lax.cond(table[0, 0] > 0, embedded, first, table)


def on_two_devices(table):
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))

    def take(table, tokens):
        return jnp.sum(table[tokens].astype(jnp.float32))[None]

    mapped = jax.shard_map(
        take, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    return jnp.sum(mapped(table, TOKENS))


def rows_of_zeros(table):
    return jnp.zeros((500, 8), table.dtype)


def weigh(rows):
    """A sum whose derivatives are integers of both signs, up to 135."""
    weights = jnp.arange(500.0) * 37 % 251 - 115
    return jnp.sum(rows.astype(jnp.float32) * weights[:, None])


def bias_of_rows(table):
    return weigh(rows_of_zeros(table) + table[0])


def gain_of_columns(table):
    columns = jnp.ones((64, 500), table.dtype)
    return weigh((columns * table[:, :1]).T)


def gain_of_all(table):
    return weigh(jnp.exp(rows_of_zeros(table)) * table[0, 0])


def bound_of_rows(table):
    return weigh(jnp.clip(rows_of_zeros(table), table[0] / 2, table[1]))


def chosen_for_rows(table):
    is_chosen = jnp.arange(500)[:, None] % 8 > 0
    return weigh(jnp.where(is_chosen, table[0], 0))


def repeated_after_float32(table):
    row = (3 * table[0].astype(jnp.float32)).astype(table.dtype)
    rows = jnp.broadcast_to(row, (500, 8))
    return weigh(rows + row)


def bias_in_calls(table):
    @jax.checkpoint
    @jax.jit
    def add(rows, bias):
        return jnp.abs(rows + bias)

    return weigh(add(rows_of_zeros(table), table[0]))


def bias_in_a_loop(table):
    def layer(rows, bias):
        return rows + bias, None

    rows, _ = jax.lax.scan(layer, rows_of_zeros(table), table[:4])
    return weigh(rows)


READ_OFTEN = [embedded, tied_embedding, weight_over_steps, messages, bias_in_each_turn]
READ_OFTEN += [weight_of_many_layers, added_in_a_jitted_block, in_a_branch]
READ_OFTEN += [by_a_derivative_rule, on_two_devices]
# What an operation repeats.
READ_OFTEN += [
    bias_of_rows,
    gain_of_columns,
    gain_of_all,
    bound_of_rows,
    chosen_for_rows,
]
READ_OFTEN += [repeated_after_float32, bias_in_calls, bias_in_a_loop]
READ_OFTEN = {fun.__name__: fun for fun in READ_OFTEN}


def inside_of_a_call(fun, cast):
    """The array is closed over, and not an argument."""
    return lambda table: cast(lambda: fun(table))()


WAYS = {
    "alone": lambda fun, cast: cast(fun),
    "closed over": inside_of_a_call,
    "remat": lambda fun, cast: jax.checkpoint(cast(fun)),
    "in jit and remat": lambda fun, cast: cast(jax.jit(jax.checkpoint(fun))),
    "scale_backward": lambda fun, cast: jaxscale.scale_backward(cast(fun)),
    "scale_backward inside": lambda fun, cast: cast(jaxscale.scale_backward(fun)),
}


meet = half(READ_OFTEN, WAYS)


def is_allowed(name, way, dtype):
    """Parameters in float16 are refused by `scale_backward`."""
    return dtype == "bfloat16" or not way.startswith("scale_backward")


@pytest.mark.worlds
@cases(
    "name, way, dtype",
    pairs(
        READ_OFTEN,
        WAYS,
        HALVES,
        where=is_allowed,
        among=lambda *row: meet(row[0], row[1]),
    ),
    fast=[
        ("embedded", "alone", "bfloat16"),
        ("weight_over_steps", "closed over", "float16"),
        ("tied_embedding", "scale_backward inside", "bfloat16"),
        ("bias_of_rows", "alone", "bfloat16"),
        ("gain_of_columns", "scale_backward inside", "bfloat16"),
        ("repeated_after_float32", "in jit and remat", "float16"),
    ],
)
def test_the_gradient_of_a_half_precision_array_is_rounded_once(name, way, dtype):
    fun = READ_OFTEN[name]
    half = HALVES[dtype]
    table = 1 + jnp.arange(512.0).reshape(64, 8) % 2
    exact = jax.jit(jax.grad(fun))(table)
    cast = WAYS[way](fun, functools.partial(jaxscale.autocast, dtype=half))
    gradient = jax.jit(jax.grad(cast))(table.astype(half))
    np.testing.assert_array_equal(gradient, exact.astype(half))
    assert gradient.dtype == half


@cases(
    "name, dtype", itertools.product(READ_OFTEN, HALVES), fast=[("messages", "float16")]
)
def test_the_value_of_what_reads_a_half_precision_array_keeps_its_bits(name, dtype):
    """A computation in half precision stays so, and what is cast is not cast again."""
    fun = READ_OFTEN[name]
    half = HALVES[dtype]
    table = jax.random.normal(jax.random.key(0), (64, 8), half)
    if name in ("tied_embedding", "weight_over_steps", "weight_of_many_layers"):
        fun = jaxscale.full_precision(fun)  # their products are cast
    value = jax.jit(jaxscale.autocast(fun, half))(table)
    np.testing.assert_array_equal(value, jax.jit(fun)(table))


def test_a_gradient_with_a_literal_in_half_precision_is_rewritten():
    """The derivative of a row pads it with zeros."""

    def loss_fn(table):
        return jnp.sum((table[0] * table[1]).astype(jnp.float32))

    table = jnp.full((3, 4), 2, jnp.bfloat16)
    gradient = jaxscale.autocast(jax.grad(loss_fn), jnp.bfloat16)(table)
    np.testing.assert_array_equal(gradient, [[2] * 4, [2] * 4, [0] * 4])


def test_products_share_the_rounded_copy_of_what_they_read():
    """Of a parameter, of a number that is computed, and of the result of a product."""

    def fun(w, parameter):
        x = X @ w[0]
        of_products = x @ w[1] + x @ w[2] + x @ w[3]
        for weight in (parameter, jnp.sin(w[4])):
            of_products = of_products @ weight @ weight
        return jnp.sum(of_products) + jnp.sum(x**2)

    program = jax.make_jaxpr(jaxscale.autocast(fun))(W, W[0])
    copies = collections.Counter()
    for eqn in program.eqns:
        if jaxprs.is_stand_in(eqn):
            copies[eqn.invars[0]] += 1
    assert sorted(copies.values()) == [2, 2, 3]


# Products of small integers, which half precision holds, so each derivative is exact.
DIMENSIONS = {
    "matrices": ((4, 3), (3, 5), (((1,), (0,)), ((), ()))),
    "transposed": ((3, 4), (5, 3), (((0,), (1,)), ((), ()))),
    "batch": ((2, 4, 3), (3, 2, 5), (((2,), (0,)), ((0,), (1,)))),
    "two sums": ((3, 4, 2), (2, 5, 3), (((0, 2), (2, 0)), ((), ()))),
    "vector": ((4, 3), (3,), (((1,), (0,)), ((), ()))),
    # XLA for CPUs has no such product of two arrays in bfloat16 that returns float32.
    "large": ((2, 128, 128), (128, 2, 128), (((1,), (0,)), ((0,), (1,)))),
}
HAVE_SOURCE = [(True, True), (True, False), (False, True), (False, False)]
# The dtype that a product asks for. Without one it is that of its operands.
RESULTS = {
    "not named": lambda half: None,
    "half": lambda half: half,
    "float32": lambda half: jnp.dtype("float32"),
}


def integers(shape, seed):
    values = np.random.default_rng(seed).integers(-2, 3, shape)
    return jnp.asarray(values, jnp.float32)


def make_product(name, have_source, result, dtype):
    """A product of two float32 arrays in half precision, JAX's own in float32, and arguments."""
    *shapes, dimensions = DIMENSIONS[name]
    half = jnp.dtype(dtype)
    options = {"precision": None, "out_sharding": None}

    def multiply(*wides):
        operands = [wide.astype(half) for wide in wides]
        sources = []
        for wide, has_source in zip(wides, have_source, strict=True):
            sources.append(wide if has_source else None)
        preferred = {"preferred_element_type": RESULTS[result](half)}
        params = {"dimension_numbers": dimensions, **options, **preferred}
        return jaxprs.multiply_half(operands, sources, params).astype(jnp.float32)

    def expected(*wides):
        return jax.lax.dot_general(*wides, dimensions)

    return multiply, expected, [integers(shape, i) for i, shape in enumerate(shapes)]


def stays_exact(way, name, have_source, result, dtype):
    """Returns whether half precision holds all that a row computes: not sums of many."""
    return name != "large" or (
        way == "jit" and all(have_source) and result == "float32"
    )


@cases(
    "way, name, have_source, result, dtype",
    pairs(*(DERIVATIVES, DIMENSIONS, HAVE_SOURCE, RESULTS, HALVES), where=stays_exact),
    fast=[
        ("jit", "matrices", (False, True), "not named", "bfloat16"),
        ("both batches", "batch", (True, True), "half", "bfloat16"),
        ("second", "two sums", (True, False), "float32", "float16"),
        ("left batch", "vector", (True, True), "half", "float16"),
        ("jit", "large", (True, True), "float32", "bfloat16"),
    ],
)
def test_a_product_in_half_precision_has_the_derivatives_of_its_sources(
    way, name, have_source, result, dtype
):
    multiply, expected, args = make_product(name, have_source, result, dtype)
    transform = DERIVATIVES[way]
    actual = transform(multiply)(*args)
    exact = transform(expected)(*args)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        np.testing.assert_array_equal(a, b)


def stand_in(half, wide):
    """The value of one array, and the derivative of another."""
    value = jaxprs.stand_in(half.astype(jnp.float16), wide, jnp.float16)
    return value.astype(jnp.float32)


def stand_in_by_hand(half, wide):
    return wide + jax.lax.stop_gradient(half - wide)


@cases("way", FIRST_DERIVATIVES, fast=["eager", "left batch"])
def test_a_stand_in_has_the_value_of_one_array_and_the_derivative_of_another(way):
    args = integers((4, 3), 0), integers((4, 3), 1)
    derivatives = FIRST_DERIVATIVES[way]
    actual = derivatives(lambda *args: stand_in(*args) ** 2)(*args)
    expected = derivatives(lambda *args: stand_in_by_hand(*args) ** 2)(*args)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.worlds
def test_a_stand_in_of_an_array_is_differentiated_twice():
    wide = jnp.float32([1.0, 2.0])
    second = jax.hessian(lambda wide: jnp.sum(stand_in(wide, wide) ** 2))(wide)
    np.testing.assert_array_equal(second, 2 * np.eye(2))


# Weights that a batch over devices reads, in what holds the products.


def transposed_and_shared(p, x):
    w = p["w"]
    return jnp.mean((jnp.tanh(x @ w[0]) @ w[0].T + x @ w[1]) ** 2)


def in_attention(p, x):
    x = x.reshape(-1, 2, 8)
    heads = [(x @ p["w"][i]).reshape(-1, 2, 2, 4) for i in range(3)]
    return jnp.mean(jax.nn.dot_product_attention(*heads) ** 2)


OVER_DEVICES = {fun.__name__: fun for fun in (transposed_and_shared, in_attention)}
for name in ("mlp", "loops", "custom_jvp"):
    OVER_DEVICES[name], _ = MEETINGS[name]


@cases(
    "name, dtype",
    itertools.product(OVER_DEVICES, HALVES),
    fast=[("mlp", "float16")],
)
def test_devices_add_the_gradients_of_weights_in_float32(name, dtype):
    fun = OVER_DEVICES[name]
    x = jax.random.normal(jax.random.key(0), (64, 8))
    mesh = Mesh(np.array(jax.devices("cpu")), ("data",))
    on_each = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    batch = jax.device_put(x, NamedSharding(mesh, P("data")))
    gradient = jax.jit(jax.grad(jaxscale.autocast(fun, HALVES[dtype])))
    compiled = gradient.lower(on_each, batch).compile()
    reduced = re.findall(r" = (.*) all-reduce(?:-start)?\(", compiled.as_text())
    assert reduced
    for types in reduced:
        assert "f16[" not in types
    exact = jax.grad(fun)(PARAMS, x)
    assert_near_by_norm(compiled(on_each, batch), exact, share=0.01)

"""Derivatives of ReLUs, whose signs are read from rounded copies: the same bits, and less is kept.

The reference is the same program, whose derivatives compute the signs from what they start from.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import DERIVATIVES
from half_programs import HOLDERS, normal
from jax.sharding import PartitionSpec as P
from tables import cases, half, pairs

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_a_number_that_half_precision_rounds_to_0_has_a_derivative():
    def loss(x):
        return jnp.sum(jax.nn.relu(x) @ jnp.eye(2))

    gradient = jax.grad(jaxscale.autocast(loss))(jnp.array([[2.0**-32, -1.0]]))
    np.testing.assert_array_equal(gradient, [[1, 0]])


RECOMPUTED = sys.modules[
    "jaxscale._jax.jaxprs.recomputed"
]  # a function has the same name
W = normal((3, 8, 8), seed=0) * np.float32(0.3)
X = normal((6, 8), seed=1)


def stream(activation, w, x):
    """A sum that the next product and the next sum both read."""
    return activation(x + x @ w[0])


def within(activation, w, x):
    """A result that products alone read."""
    return activation(x @ w[0]) @ w[1]


def two_of_one(activation, w, x):
    """Two results of one segment, of which one has other signs."""
    hidden = x @ w[0] + w[1, 0]
    return activation(hidden) @ w[1] + activation(w[2, 0] - hidden) @ w[2]


def pooled(activation, w, x):
    """A result that a pooling reads, and a sum."""
    hidden = activation(x + x @ w[0])
    largest = jax.lax.reduce_window(
        hidden, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "SAME"
    )
    return hidden + largest @ w[1]


def read_by_all(activation, w, x):
    """A value that products, sums and the caller read."""
    hidden = activation(x @ w[0] - 0.1)
    return hidden @ w[1] + hidden * jnp.mean(hidden) + jax.nn.relu(hidden - 0.1) @ w[2]


LAYERS = {
    layer.__name__: layer for layer in (stream, within, two_of_one, pooled, read_by_all)
}


@jax.custom_jvp
def own_relu(x):
    return jnp.maximum(x, 0)


@own_relu.defjvp
def _derive_own_relu(primals, tangents):
    output = own_relu(*primals)
    return output, jnp.where(output > 0, *tangents, 0)


@jax.custom_jvp
def raised(x):
    """Is always positive, and has a rule that asks where what it reads is."""
    return jnp.maximum(x, 0.5)


@raised.defjvp
def _derive_raised(primals, tangents):
    return raised(*primals), jnp.where(primals[0] > 0, *tangents, 0)


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "own_relu": own_relu,
    "raised": raised,
    "relu of a jit": jax.jit(jax.nn.relu),
    "relu of a relu": lambda x: jax.nn.relu(jax.nn.relu(x) - 0.1),
    "leaky_relu": jax.nn.leaky_relu,
    "maximum": lambda x: jnp.maximum(x, 0),
    "above": lambda x: jnp.where(x > 0.1, x, 0),
}

# All are 0 in float16, and some are in float32; those that are 0 have no gradient.
TINY, ZERO = 2.0**-32, 2.0**-145
INPUTS = {
    "numbers": X,
    "tiny": X * TINY,
    "mixed": X * jnp.where(jnp.arange(8) % 2, 1, TINY),
    "zeros": jnp.where(X > 0.5, 0, -X),
    "all zeros": 0 * X,
    "not finite": X.at[0, :3].set(jnp.array([jnp.inf, -jnp.inf, jnp.nan])),
}


def scan(fun):
    return lambda x, w: jax.lax.scan(lambda x, _: (fun(x, w), None), x, length=2)[0]


def over_devices(fun):
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("rows"), P()), "out_specs": P("rows")}
    return jax.shard_map(fun, mesh=mesh, **specs)


WHERE = HOLDERS | {"scan": scan, "over devices": over_devices}
HALVES = ["float16", "bfloat16"]


meet = half(DERIVATIVES, ACTIVATIONS)
stand = half(WHERE, ACTIVATIONS)


def find_derivatives(way, where, layer, activation, dtype, inputs):
    held = WHERE[where](lambda x, w: LAYERS[layer](ACTIVATIONS[activation], w, x))

    def network(w, x):
        for i in range(3):
            x = held(x, jnp.roll(w, i, 0))
        return x

    return DERIVATIVES[way](jaxscale.autocast(network, dtype))(W, INPUTS[inputs])


@pytest.mark.worlds
@cases(
    "way, where, layer, activation, dtype, inputs",
    pairs(
        *(DERIVATIVES, WHERE, LAYERS, ACTIVATIONS, HALVES, INPUTS),
        among=lambda *row: meet(row[0], row[3]) and stand(row[1], row[3]),
    ),
    fast=[
        ("jit", "as it is", "stream", "relu", "bfloat16", "numbers"),
        ("jit", "as it is", "stream", "relu", "float16", "tiny"),
        ("eager", "as it is", "two_of_one", "relu", "float16", "mixed"),
        ("eager", "as it is", "pooled", "relu", "float16", "zeros"),
        ("jit", "as it is", "within", "raised", "bfloat16", "numbers"),
        ("eager", "as it is", "stream", "maximum", "float16", "all zeros"),
        ("second of a batch", "as it is", "within", "relu", "float16", "tiny"),
        ("second", "as it is", "two_of_one", "own_relu", "float16", "tiny"),
        ("eager", "scan", "stream", "relu of a jit", "bfloat16", "not finite"),
    ],
)
def test_derivatives_have_the_bits_that_they_have_with_signs_of_float32(
    way, where, layer, activation, dtype, inputs, monkeypatch
):
    row = way, where, layer, activation, dtype, inputs
    actual = find_derivatives(*row)
    monkeypatch.setattr(RECOMPUTED, "find_signs", lambda program, count: {})
    expected = find_derivatives(*row)
    is_zero = "zeros" in inputs or (activation, inputs) == ("above", "tiny")
    if way in ("eager", "jit") and not is_zero:
        _, (_, by_x), _ = expected
        assert by_x.any()
    # A batch of weights has one of numbers near 1, with which some rows leave float16.
    if inputs != "not finite" and way not in ("left batch", "both batches"):
        assert jaxscale.all_finite(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


KEEPING_NOTHING = ["relu", "own_relu"]


@pytest.mark.worlds
@cases("dtype", HALVES)
@cases("activation", KEEPING_NOTHING)
@cases("layer", ["stream", "within", "two_of_one"])
def test_the_backward_pass_of_relus_keeps_nothing_in_float32(layer, activation, dtype):
    def loss(w, x):
        for _ in range(3):
            x = LAYERS[layer](ACTIVATIONS[activation], w, x)
        return jnp.sum(jnp.square(ACTIVATIONS[activation](x) @ w[2]))

    _, pull = jax.vjp(jaxscale.autocast(loss, dtype), W, X)
    kept = [leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.shape == X.shape]
    assert set(kept) == {jnp.dtype(dtype)}


@cases("fun", [jnp.sum, lambda x: jnp.sum(x @ W[0])], fast=[jnp.sum])
def test_tiny_numbers_are_zero_to_all_that_reads_them(fun):
    def loss(w, x):
        return fun(jax.nn.relu(x @ w * TINY) @ w)

    value, _ = jax.value_and_grad(jaxscale.autocast(loss, "float16"))(W[0], X)
    assert value == 0

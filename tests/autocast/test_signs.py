"""Derivatives that start from half precision and statistics: the same bits, and less is kept.

Signs are read from rounded copies, means from what the forward pass returned, and what another
segment made in float32 is computed again. The reference is the same program, whose derivatives keep
all in float32 that they read, and compute the rest from it.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import DERIVATIVES
from half_programs import HOLDERS, assert_near_by_norm, normal
from jax.sharding import PartitionSpec as P
from tables import cases, half, pairs

import jaxscale
from jaxscale._jax import jaxprs

pytestmark = pytest.mark.standard_promotion


def test_a_number_that_half_precision_rounds_to_0_has_a_derivative():
    def loss(x):
        return jnp.sum(jax.nn.relu(x) @ jnp.eye(2))

    gradient = jax.grad(jaxscale.autocast(loss))(jnp.array([[2.0**-32, -1.0]]))
    np.testing.assert_array_equal(gradient, [[1, 0]])


def find_statistics(program, count):
    """What derivatives read from outputs, without the signs."""
    statistics = set(map(id, filter(jaxprs.is_statistic, program.jaxpr.eqns)))
    known = jaxprs.find_known(program, count)
    return {eqn: number for eqn, number in known.items() if eqn in statistics}


RECOMPUTED = sys.modules[
    "jaxscale._jax.jaxprs.recomputed"
]  # a function has the same name
W = normal((3, 8, 8), seed=0) * np.float32(0.3)
X = normal((6, 8), seed=1)
MANY_ROWS = normal((32, 8), seed=2)


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


def normalized(activation, w, x):
    """A sum with what was normalized over many rows, as in a ResNet."""
    hidden = x @ w[0]
    centered = hidden - jnp.mean(hidden, 0)
    return activation(x + centered * jax.lax.rsqrt(jnp.var(hidden, 0) + 1e-3))


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
    "below": lambda x: jnp.where(x < 0, x * 0.25, x),
    "of a small slope": lambda x: jnp.where(x >= 0, x, 2.0**-30 * x),
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
        ("eager", "as it is", "stream", "leaky_relu", "bfloat16", "zeros"),
        ("jit", "as it is", "within", "below", "bfloat16", "not finite"),
        ("eager", "as it is", "stream", "of a small slope", "bfloat16", "tiny"),
    ],
)
def test_derivatives_have_the_bits_that_they_have_with_signs_of_float32(
    way, where, layer, activation, dtype, inputs, monkeypatch
):
    row = way, where, layer, activation, dtype, inputs
    actual = find_derivatives(*row)
    monkeypatch.setattr(RECOMPUTED, "find_known", find_statistics)
    expected = find_derivatives(*row)
    is_zero = "zeros" in inputs or (activation, inputs) == ("above", "tiny")
    if way in ("eager", "jit") and not is_zero:
        _, (_, by_x), _ = expected
        assert by_x.any()
    # A batch of weights has one of numbers near 1, with which some rows leave float16.
    if inputs != "not finite" and way not in ("left batch", "both batches"):
        assert jaxscale.all_finite(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def network_of(layer, activation, blocks=3):
    """Blocks that begin in half precision."""

    def network(w, x):
        x = activation(x @ w[1])
        for _ in range(blocks):
            x = layer(activation, w, x)
        return jnp.sum(jnp.square(x @ w[2]))

    return network


STREAMS = [stream, within, two_of_one, normalized]
SMOOTH = [jax.nn.silu, jax.nn.gelu, jax.nn.elu, jax.nn.hard_swish]
PIECEWISE = [jax.nn.relu, own_relu, jax.nn.leaky_relu]


@pytest.mark.worlds
@cases("dtype", HALVES)
@cases("activation", PIECEWISE + SMOOTH)
@cases("layer", STREAMS, fast=[stream, normalized])
def test_the_backward_pass_keeps_nothing_large_in_float32(layer, activation, dtype):
    network = jaxscale.autocast(network_of(layer, activation), dtype)
    _, pull = jax.vjp(network, W, MANY_ROWS)
    kept = jax.tree.leaves(pull)
    dtypes = {leaf.dtype for leaf in kept if leaf.shape == MANY_ROWS.shape}
    assert dtypes == {jnp.dtype(dtype)}


def test_a_stream_that_would_be_read_too_often_is_kept():
    network = jaxscale.autocast(network_of(stream, jax.nn.silu, blocks=20))
    _, pull = jax.vjp(network, W, MANY_ROWS)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape == MANY_ROWS.shape]
    wide = [leaf for leaf in kept if leaf.dtype == jnp.float32]
    assert 4 <= len(wide) <= 7


def derivatives_without_recipes(way, network, monkeypatch):
    """The derivatives, where all is kept in float32 that a segment starts from."""
    monkeypatch.setattr(RECOMPUTED, "find_known", lambda program, count: {})
    monkeypatch.setattr(RECOMPUTED.Recomputed, "_recipe", lambda self, number: None)
    return DERIVATIVES[way](network)(W, MANY_ROWS)


@pytest.mark.worlds
@cases("dtype", HALVES)
@cases("activation", SMOOTH)
@cases("layer", STREAMS, fast=[normalized])
def test_what_is_computed_again_has_the_same_bits(
    layer, activation, dtype, monkeypatch
):
    network = jaxscale.autocast(network_of(layer, activation), dtype)
    actual = DERIVATIVES["eager"](network)(W, MANY_ROWS)
    expected = derivatives_without_recipes("eager", network, monkeypatch)
    assert jaxscale.all_finite(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.worlds
@cases("where", WHERE, fast=["scan"])
@cases("way", DERIVATIVES, fast=["second", "jit"])
def test_other_derivatives_of_what_is_computed_again_are_near(where, way, monkeypatch):
    held = WHERE[where](lambda x, w: normalized(jax.nn.silu, w, x))
    network = jaxscale.autocast(lambda w, x: held(held(x @ w[1], w), w))
    actual = DERIVATIVES[way](network)(W, MANY_ROWS)
    expected = derivatives_without_recipes(way, network, monkeypatch)
    assert_near_by_norm(actual, expected, share=0.005)


@cases("fun", [jnp.sum, lambda x: jnp.sum(x @ W[0])], fast=[jnp.sum])
def test_tiny_numbers_are_zero_to_all_that_reads_them(fun):
    def loss(w, x):
        return fun(jax.nn.relu(x @ w * TINY) @ w)

    value, _ = jax.value_and_grad(jaxscale.autocast(loss, "float16"))(W[0], X)
    assert value == 0

"""The cost of tracing, checked by counting: what is traced, and which programs are shared."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from half_programs import (
    W,
    X,
    assert_near_by_norm,
    autocast_scaled,
    equations,
    product_equations,
)
from jax.interpreters import ad
from tables import cases

import jaxscale
from jaxscale._jax import jaxprs

pytestmark = pytest.mark.standard_promotion


def test_a_second_call_of_a_jitted_model_traces_it_no_more():
    traced = []

    def model(x):
        traced.append(x)
        return x @ x

    compiled = jax.jit(jaxscale.autocast(model))
    for size in (2.0, 3.0):
        assert compiled(jnp.full((2, 2), size))[0, 0] == 2 * size**2
    assert len(traced) == 1


LAYERS = 12


def layers(activation, scopes=False):
    def network(x):
        for i in range(LAYERS):
            with jax.named_scope(f"layer{i}" if scopes else "layer"):
                x = x + activation(x @ W[0])
        return jnp.sum(x**2)

    return network


def segments(fun):
    """The programs of the segments, in their order."""
    eqns = jax.make_jaxpr(fun)(X).eqns
    return [
        jaxprs.callee(eqn).jaxpr
        for eqn in eqns
        if jaxprs.operation(eqn) == jaxprs.RECOMPUTED
    ]


def count_different(programs):
    return len(set(map(id, programs)))


@cases(
    "activation",
    [jnp.tanh, jax.nn.relu, jax.nn.relu6, jax.nn.gelu, jax.nn.silu],
    fast=[jnp.tanh, jax.nn.relu],
)
def test_equal_segments_share_a_program(activation):
    autocast_network = jaxscale.autocast(layers(activation))
    programs = segments(autocast_network)
    assert len(programs) == LAYERS
    # The last segment ends in the loss. All others are one.
    assert count_different(programs) == 2
    expected = jax.grad(layers(activation))(X)
    assert_near_by_norm(jax.grad(autocast_network)(X), expected, share=0.01)


# Each call of one of these has a jaxpr and a rule of its own.


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def steep(x, slope):
    return jnp.tanh(x)


steep.defjvp(lambda k, xs, ts: (steep(*xs, k), ts[0] * (2.5 if k is True else k)))


def with_zeros(slope):
    """A function whose rule asks which inputs have a tangent."""
    function = jax.custom_jvp(lambda x, y: jnp.tanh(x) * y)

    def derive(xs, ts):
        no_tangent = type(ts[1]) is jax.custom_derivatives.SymbolicZero
        return function(*xs), ts[0] * (slope if no_tangent else 1.0)

    function.defjvp(derive, symbolic_zeros=True)
    return lambda x: function(x, 2.0)


def with_slope(slope):
    function = jax.custom_jvp(jnp.tanh)
    function.defjvps(lambda tangent, result, x: tangent * slope)
    return function


def with_rule(rule):
    function = jax.custom_jvp(jnp.sin)
    function.defjvp(lambda xs, ts: rule(function, *xs, *ts))
    return function


class Slope:
    """A rule that is an object."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, tangent, result, x):
        return tangent * result * self.slope


def with_object(slope):
    function = jax.custom_jvp(jnp.tanh)
    function.defjvps(Slope(slope))
    return function


def cosine(factor):
    """A cosine, whose derivative has a factor."""
    function = jax.custom_jvp(jnp.cos)
    function.defjvps(lambda tangent, result, x: -factor * jnp.sin(x) * tangent)
    return function


def sine(factor):
    """A sine. The factor is only in its second derivative."""
    slope = cosine(factor)
    return with_rule(lambda function, x, t: (function(x), slope(x) * t))


def holding(factor):
    """A function with the same rule each time. The one that it holds has another."""
    inner = with_slope(factor)
    function = jax.custom_jvp(lambda x: inner(x))
    function.defjvps(multiply_result)
    return function


def multiply_result(tangent, result, x):
    return tangent * result


NN = [
    *("relu", "relu6", "silu", "gelu", "elu", "selu", "celu", "mish", "softplus"),
    *("leaky_relu", "hard_tanh", "hard_silu", "hard_sigmoid", "log_sigmoid", "sigmoid"),
    *("squareplus", "sparse_plus", "sparse_sigmoid", "soft_sign", "tanh", "softmax"),
    *("log_softmax", "standardize", "identity"),
]
EQUAL = {name: getattr(jax.nn, name) for name in NN} | {
    "exact gelu": functools.partial(jax.nn.gelu, approximate=False),
    "glu": lambda x: jax.nn.glu(jnp.concatenate([x, x], -1)),
    "log1mexp": lambda x: jax.nn.log1mexp(jnp.abs(x) + 1),
    "relu of each row": lambda x: jax.vmap(jax.nn.relu)(x),
    "relu of each number": lambda x: jax.vmap(jax.vmap(jax.nn.relu))(x),
    "an argument that is not an array": lambda x: steep(x, 0.5),
    "symbolic zeros": with_zeros(3.0),
    "second derivatives": sine(1.0),
    "a rule that raises": with_rule(lambda *args: 1 / 0),
}


@cases("name", EQUAL, fast=["relu", "relu of each row", "symbolic zeros"])
def test_layers_with_the_same_activation_share_a_program(name):
    assert count_different(segments(jaxscale.autocast(layers(EQUAL[name])))) == 2


def test_layers_share_a_program_inside_of_scale_backward():
    eqns = equations(jax.make_jaxpr(autocast_scaled(layers(jax.nn.relu)))(X))
    functions = {
        eqn.params["function"]
        for eqn in eqns
        if jaxprs.operation(eqn) == jaxprs.RECOMPUTED
    }
    assert len(functions) == 2


# Two functions that are made in the same line, and differ in one thing.
DIFFERENT = {
    "a number of the rule": (with_slope(1.0), with_slope(3.0)),
    "an array of the rule": (with_slope(jnp.ones(8)), with_slope(jnp.zeros(8))),
    "an object": (with_object(1.0), with_object(3.0)),
    "an argument": (lambda x: steep(x, 0.5), lambda x: steep(x, 3.0)),
    "a number or a bool": (lambda x: steep(x, 1), lambda x: steep(x, True)),
    "symbolic zeros": (with_zeros(1.0), with_zeros(3.0)),
    "the rule inside of the rule": (sine(1.0), sine(3.0)),
    "the rule inside of the function": (holding(1.0), holding(3.0)),
    "in a vmap": (jax.vmap(sine(1.0)), jax.vmap(sine(3.0))),
    "relu and relu6": (jax.nn.relu, jax.nn.relu6),
}


@cases("name", DIFFERENT, fast=["the rule inside of the rule", "an argument"])
def test_activations_that_differ_in_their_derivatives_do_not_share_a_program(name):
    def network(x):
        for activation in DIFFERENT[name]:
            x = activation(x @ W[0])
        return jnp.sum((x @ W[1]) ** 2)

    autocast_network = jaxscale.autocast(network)
    programs = segments(autocast_network)
    assert count_different(programs) == len(programs) == 3

    def derive_twice(fun):
        return jax.jvp(jax.grad(fun), (X,), (jnp.cos(X),))

    expected = jax.jit(derive_twice, static_argnums=0)(network)
    derivatives = jax.jit(derive_twice, static_argnums=0)(autocast_network)
    assert_near_by_norm(derivatives, expected, share=0.02)


def test_equal_equations_are_differentiated_once(monkeypatch):
    (product,) = product_equations(jaxscale.autocast(jnp.matmul), X, W[0])
    rule = mock.Mock(wraps=ad.primitive_jvps[product.primitive])
    monkeypatch.setitem(ad.primitive_jvps, product.primitive, rule)
    # A size that no other test uses, since JAX caches derivatives.
    w = jnp.ones((7, 7))

    def network(x):
        for _ in range(LAYERS):
            x = x + jnp.tanh(x @ w)
        return jnp.sum(x**2)

    gradient = jax.grad(jaxscale.autocast(network))
    program = jax.make_jaxpr(gradient)(jnp.ones((3, 7)))
    # One call now. Two would still be far from one for each layer.
    assert 1 <= rule.call_count <= 2
    # The equations are in the program itself, not inside a `jit`.
    assert "jit" not in map(jaxprs.operation, program.eqns)


def test_layers_of_different_names_share_a_program_and_keep_their_names():
    autocast_network = jaxscale.autocast(layers(jnp.tanh, scopes=True))
    programs = segments(autocast_network)
    # What ends one layer is in no scope, and begins none.
    assert count_different(programs) == 2
    lowered = jax.jit(jax.grad(autocast_network)).lower(X).as_text(debug_info=True)
    assert not re.search(r'layer\d+[^"]*layer', lowered)
    for i in range(LAYERS):
        # The last one is part of what differentiates the loss: more brackets are around it.
        assert re.search(rf"jvp\(layer{i}\)*/tanh", lowered)


def test_segments_over_different_names_do_not_share_a_program():
    def network(x):
        for i in range(3):
            with jax.named_scope(f"a{i}"):
                x = jnp.tanh(x @ W[0])
            with jax.named_scope(f"b{i}"):
                x = jnp.sin(x)
        return x

    programs = segments(jaxscale.autocast(network))
    assert count_different(programs) == len(programs) == 3
    for i, program in enumerate(programs):
        assert {f"a{i}", f"b{i}"} <= set(map(jaxprs.scope_path, program.eqns))


@cases("activation", [jnp.tanh, jax.nn.relu], fast=[jax.nn.relu])
def test_equal_segments_are_traced_and_differentiated_once(activation, monkeypatch):
    gradient = jax.grad(jaxscale.autocast(layers(activation)))
    uncounted = jax.make_jaxpr
    counting = mock.Mock(wraps=uncounted)
    monkeypatch.setattr(jax, "make_jaxpr", counting)
    jax.clear_caches()  # of what products send back, which other tests may have asked for
    uncounted(gradient)(X)
    # The network itself, both segments: what they do, forward and backward, and what a product
    # sends back.
    assert counting.call_count == 1 + 2 * 3 + 1


def test_segments_that_differ_in_a_number_do_not_share_a_program():
    def fun(x):
        for number in (0.0, -0.0, 1.0, jnp.nan):
            x = jnp.exp(x @ W[0]) * number
        return x

    programs = segments(jaxscale.autocast(fun))
    # The last returns float32.
    assert count_different(programs) == len(programs) == 4


def test_segments_pass_the_checks_of_jax():
    with jax.enable_checks():
        jax.make_jaxpr(jax.grad(jaxscale.autocast(layers(jax.nn.gelu))))(X)

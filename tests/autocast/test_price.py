"""The cost of tracing, checked by counting: what is traced, and which programs are shared."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from half_programs import W, X, assert_near_by_norm, product_equations
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


@cases("activation", [jnp.tanh, jax.nn.gelu, jax.nn.silu], fast=[jnp.tanh])
def test_equal_segments_share_a_program(activation):
    autocast_network = jaxscale.autocast(layers(activation))
    programs = segments(autocast_network)
    assert len(programs) == LAYERS
    # The last segment ends in the loss. All others are one.
    assert count_different(programs) == 2
    expected = jax.grad(layers(activation))(X)
    assert_near_by_norm(jax.grad(autocast_network)(X), expected, share=0.01)


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


def test_equal_segments_are_traced_and_differentiated_once(monkeypatch):
    gradient = jax.grad(jaxscale.autocast(layers(jnp.tanh)))
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

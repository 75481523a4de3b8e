"""What tracing costs, checked by counting: what is traced, and which programs are shared."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from half_programs import W, X, assert_near_by_norm
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad
from tables import cases

import jaxscale
from jaxscale import _jax

pytestmark = pytest.mark.standard_promotion

LAYERS = 12


def layers(activation, scopes=False):
    def network(x):
        for i in range(LAYERS):
            with jax.named_scope(f"layer{i}" if scopes else "layer"):
                x = x + activation(x @ W[0])
        return jnp.sum(x**2)

    return network


def recomputed(fun):
    """The programs inside `jax.checkpoint`, which is called `remat2` here, in their order."""
    eqns = jax.make_jaxpr(fun)(X).eqns
    return [_jax.callee(e).jaxpr for e in eqns if _jax.operation(e) == "remat2"]


def count_different(programs):
    return len(set(map(id, programs)))


@cases("activation", [jnp.tanh, jax.nn.gelu, jax.nn.silu], fast=[jnp.tanh])
def test_equal_chains_share_a_program(activation):
    autocast_network = jaxscale.autocast(layers(activation))
    programs = recomputed(autocast_network)
    assert len(programs) >= LAYERS
    # 3 programs now. The first layer adds to the input of the network, so its sum joins its chain,
    # and that is computed twice: in half precision for the next product, and in float32 for the
    # next sum. The other layers share the third. 5 leaves room for one more special case.
    assert count_different(programs) <= 5
    expected = jax.grad(layers(activation))(X)
    assert_near_by_norm(jax.grad(autocast_network)(X), expected, share=0.01)


def test_equal_equations_are_differentiated_once(monkeypatch):
    rule = mock.Mock(wraps=ad.primitive_jvps[dot_general_p])
    monkeypatch.setitem(ad.primitive_jvps, dot_general_p, rule)
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
    assert {"jit", "pjit"}.isdisjoint(map(_jax.operation, program.eqns))


def test_chains_of_different_scopes_do_not_share_a_program():
    programs = recomputed(jaxscale.autocast(layers(jnp.tanh, scopes=True)))
    assert count_different(programs) == len(programs)
    scopes = set()
    for program in programs:
        scopes.update(map(_jax.scope_path, program.eqns))
    assert scopes == {f"layer{i}" for i in range(LAYERS)}


@cases("scopes", [False, True])
def test_no_chain_is_traced_as_a_function(scopes, monkeypatch):
    network = layers(jnp.tanh, scopes)
    # A first run makes the equations that are copied into chains, once for the whole process.
    recomputed(jaxscale.autocast(network))
    uncounted = jax.make_jaxpr
    counting = mock.Mock(wraps=uncounted)
    monkeypatch.setattr(jax, "make_jaxpr", counting)
    new_function = functools.partial(network)  # a new object, which no cache knows
    uncounted(jaxscale.autocast(new_function))(X)
    # `autocast` traces the network itself, and no chain.
    assert counting.call_count == 1


def test_chains_that_differ_in_a_number_do_not_share_a_program():
    def fun(x):
        exponential = jnp.exp(x @ W[0])
        return [exponential * number for number in (0.0, -0.0, 1.0, jnp.nan)]

    programs = recomputed(jaxscale.autocast(fun))
    assert count_different(programs) == len(programs) == 4


def test_assembled_programs_pass_the_checks_of_jax():
    """JAX's own checks accept the programs that `autocast` puts together without tracing."""
    with jax.enable_checks():
        jax.make_jaxpr(jax.grad(jaxscale.autocast(layers(jax.nn.gelu))))(X)

"""What tracing costs, held by counts: what is traced, and which programs are shared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import W, X
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
    """The programs that `jax.checkpoint` holds, in the order of the equations."""
    eqns = jax.make_jaxpr(fun)(X).eqns
    return [_jax.callee(e).jaxpr for e in eqns if _jax.operation(e) == "remat2"]


@cases("activation", [jnp.tanh, jax.nn.gelu, jax.nn.silu], fast=[jnp.tanh])
def test_equal_chains_share_a_program_that_is_differentiated_once(activation):
    cast = jaxscale.autocast(layers(activation))
    programs = recomputed(cast)
    assert len(programs) >= LAYERS
    # The first layers add to what the function is given; the last is summed.
    assert len({id(program) for program in programs}) <= 5
    actual, expected = jax.grad(cast)(X), jax.grad(layers(activation))(X)
    assert np.linalg.norm(actual - expected) <= 0.01 * np.linalg.norm(expected)


def test_equal_equations_are_differentiated_once(monkeypatch):
    seen = []

    def count(*args, **kwargs):
        seen.append(kwargs)
        return rule(*args, **kwargs)

    rule = ad.primitive_jvps[dot_general_p]
    monkeypatch.setitem(ad.primitive_jvps, dot_general_p, count)
    # of a size that no other program has: JAX remembers derivatives
    w = jnp.ones((7, 7))

    def network(x):
        for _ in range(LAYERS):
            x = x + jnp.tanh(x @ w)
        return jnp.sum(x**2)

    eqns = jax.make_jaxpr(jax.grad(jaxscale.autocast(network)))(jnp.ones((3, 7))).eqns
    assert 1 <= len(seen) <= 2
    # nothing stands around them
    assert not {"jit", "pjit"} & set(map(_jax.operation, eqns))


def test_chains_of_other_scopes_do_not():
    programs = recomputed(jaxscale.autocast(layers(jnp.tanh, scopes=True)))
    assert len({id(program) for program in programs}) == len(programs)
    scopes = [{_jax.scope_path(e) for e in program.eqns} for program in programs]
    assert {scope for found in scopes for scope in found} == {
        f"layer{i}" for i in range(LAYERS)
    }


@cases("scopes", [False, True])
def test_no_chain_is_traced_as_a_function(scopes, monkeypatch):
    traced = []

    def make_jaxpr(fun, *args, **kwargs):
        traced.append(fun)
        return made(fun, *args, **kwargs)

    network = layers(jnp.tanh, scopes)
    recomputed(jaxscale.autocast(network))  # what is traced once for all
    made = jax.make_jaxpr
    monkeypatch.setattr(jax, "make_jaxpr", make_jaxpr)
    made(jaxscale.autocast(functools.partial(network)))(X)
    assert len(traced) == 1


def test_chains_that_differ_in_a_number_alone_do_not():
    def fun(x):
        return [jnp.exp(x @ W[0]) * number for number in (0.0, -0.0, 1.0, jnp.nan)]

    programs = recomputed(jaxscale.autocast(fun))
    assert len({id(program) for program in programs}) == len(programs) == 4


def test_assembled_programs_are_whole():
    with jax.enable_checks():
        jax.make_jaxpr(jax.grad(jaxscale.autocast(layers(jax.nn.gelu))))(X)

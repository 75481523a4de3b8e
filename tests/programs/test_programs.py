"""Every program through the entries of jaxscale: no worse than with its products in half alone."""

import functools

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from additions import find_additions, find_roundings
from entries import DOCTOR, ENTRIES
from half_programs import HOLDERS
from jax.experimental.ode import odeint
from law import Trial
from tables import cases, spread

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_a_program_of_one_layer_has_the_gradient_of_its_half_products():
    def loss(w):
        return jnp.sum(jnp.full((2, 2), 1 + 2**-12) @ w)

    gradient = jax.grad(jaxscale.autocast(loss))(jnp.ones((2, 2)))
    np.testing.assert_array_equal(gradient, np.full((2, 2), 2))


ROWS = corpus.load()
ALL_ENTRIES = [*ENTRIES, DOCTOR]
# Quick to compile, and most of them a form of their own.
FAST = {
    "reinforcement.deep_q_learning": "train_step",
    "physics.neural_operator": "scale_backward, bfloat16",
    "quantization.quantization_aware": "nnx",
    "sequence.diagonal_state_space": "value_and_grad",
    "speech.masked_ctc": "value_and_grad, bfloat16",
    # Modules with numbers among their leaves: a step has to take the state of a part of them.
    "quantization.adapter_on_frozen_attention": "train_step",
}
trial_of = functools.cache(lambda name: Trial(ROWS[name]))


@pytest.mark.worlds
@cases("name, entry", spread(list(ROWS), ALL_ENTRIES), fast=list(FAST.items()))
def test_a_program_is_no_worse_than_with_its_products_in_half(name, entry):
    assert trial_of(name).judge(entry) == []


def test_there_are_programs_of_each_framework():
    assert {row.framework for row in ROWS.values()} == set(corpus.FRAMEWORKS)


# The reference is no part of the package, but it must do what it says.


def half(x, dtype=jnp.float16):
    return x.astype(dtype)


X, W = corpus.normal(4, 8), corpus.normal(8, 8, seed=1)


def run_by_reference(fun, *args, **options):
    with reference.half_products("float16", **options):
        traced = jax.jit(fun).trace(*args)
    return traced.lower().compile()(*args)


def by_hand(x, w):
    return half(half(x) @ half(w), jnp.float32)


def in_everything(product):
    """A product in each form that a program may have, and a sum that stays in float32."""
    return lambda x, w: {
        name: hold(product)(x, w) + 2.0**-12 for name, hold in HOLDERS.items()
    }


@pytest.mark.worlds
def test_the_reference_rounds_products_wherever_they_stand_and_nothing_else():
    outputs = run_by_reference(in_everything(jnp.matmul), X, W)
    expected = jax.jit(in_everything(by_hand))(X, W)
    assert outputs.keys() == expected.keys()
    for form, output in outputs.items():
        assert np.array_equal(output, expected[form]), form


def dot_of_vectors(x, w):
    return jnp.dot(x[0], w[0])


def ode(x, w):
    rates = jnp.linspace(0.1, 0.9, 4)
    return odeint(lambda y, t: -rates * y, x[0, :4], jnp.linspace(0, 1, 3))


def ctc(x, w):
    labels = jnp.ones((1, 2), jnp.int32)
    return optax.ctc_loss(x[None], jnp.zeros((1, 4)), labels, jnp.zeros((1, 2)))


def exponential(x, w):
    return jax.scipy.linalg.expm(w / 8)


def product_of_integers(x, w):
    """Of numbers that float16 does not hold."""
    x, w = (jnp.round(99 * array).astype(jnp.int8) for array in (x, w))
    return jax.lax.dot(x, w, preferred_element_type=jnp.float32)


LEFT = [product_of_integers, dot_of_vectors, ode, ctc, exponential]


@cases("fun", LEFT, fast=[product_of_integers])
def test_the_reference_leaves_integers_dots_of_vectors_and_products_of_libraries(fun):
    assert np.array_equal(run_by_reference(fun, X, W), jax.jit(fun)(X, W))


# The laws of additions and of roundings.


def foreign(x, w):
    return half(x @ w) + half(x)


def in_a_branch(x, w):
    return jax.lax.cond(x[0, 0] > 0, jax.jit(foreign), lambda x, w: half(x - 1), x, w)


def rounded(x, w):
    """Both operands are rounded, one is moved, and both are read in float32."""
    return half(half(jnp.sin(x)).T, jnp.float32).T @ half(half(w), jnp.float32)


def rounded_in_a_loop(x, w):
    def turn(carry, _):
        return half(jnp.sin(half(carry, jnp.float32))), half(x) @ half(w)

    return jax.lax.scan(turn, half(x), None, length=3)


@pytest.mark.parametrize(
    ("fun", "additions", "roundings"),
    [
        (foreign, 1, 0),
        (in_a_branch, 1, 0),
        (jnp.matmul, 0, 0),
        (rounded, 0, 2),
        (rounded_in_a_loop, 0, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_additions_and_roundings_are_found(fun, additions, roundings):
    program = jax.make_jaxpr(fun)(X, W)
    assert len(find_additions(program)) == additions
    assert len(find_roundings(program)) == roundings

"""Every program through the entries of jaxscale: no worse than with its products in half alone.

The whole cross: PYTHONPATH=. python tests/programs/run.py --all
"""

import activations
import corpus
import jax
import jax.numpy as jnp
import losses
import numpy as np
import optax
import plan
import pytest
import reference
from additions import find_foreign_additions
from jax.experimental.ode import odeint
from law import Trial

pytestmark = pytest.mark.standard_promotion

ROWS = corpus.load()
SELECTED = plan.two_entries(ROWS)


@pytest.mark.parametrize(("name", "entry"), plan.FAST.items())
def test_a_program_is_no_worse_than_with_its_products_in_half(name, entry):
    assert Trial.recorded(ROWS[name], entry).judge(entry).wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_each_program_through_two_entries(name):
    trial = Trial(ROWS[name])
    assert {entry: trial.judge(entry).wrong for entry in SELECTED[name]} == {
        entry: [] for entry in SELECTED[name]
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "entry"), plan.FAST.items())
def test_what_is_recorded_is_what_is_found(name, entry):
    """To within what another CPU or another version of JAX rounds differently."""
    if entry == plan.DOCTOR:
        return
    recorded, found = Trial.recorded(ROWS[name], entry), Trial(ROWS[name]).record(entry)
    for draw, made in enumerate(recorded.exact()):
        for i, leaf in enumerate(made.grads):
            now = found[f"{name} exact {i}"][draw]
            np.testing.assert_allclose(
                leaf, now, rtol=1e-2, atol=1e-3 * np.abs(now).max()
            )
    kind = plan.ENTRIES[entry]
    errors = recorded.reference_errors(kind.dtype, kind.half_carries)
    np.testing.assert_allclose(errors, found[f"{name} reference"], rtol=0.1, atol=2e-5)


# What the corpus holds.


def test_there_are_enough_programs_and_every_family_meets_every_entry():
    assert len(ROWS) >= 100
    assert {row.framework for row in ROWS.values()} == set(corpus.FRAMEWORKS)
    met = {
        (ROWS[name].family, entry) for name, both in SELECTED.items() for entry in both
    }
    assert met == {
        (family, entry) for family in corpus.FAMILIES for entry in plan.ALL_ENTRIES
    }
    assert {ROWS[name].family for name in plan.FAST} >= {*corpus.FAMILIES} - {"vision"}


@pytest.mark.parametrize(
    ("library", "family"),
    [(optax.losses, losses), (jax.nn, activations)],
    ids=["optax", "jax"],
)
def test_all_functions_of_a_library_are_there_or_left_out_for_a_reason(library, family):
    public = {name for name in dir(library) if not name.startswith("_")}
    there = {
        name.split(".")[1] for name in ROWS if name.startswith(f"{family.__name__}.")
    }
    assert public - there - {*family.LEFT_OUT} == set()
    assert there & {*family.LEFT_OUT} == set()


# The reference, which is no part of the package: it too must be what it says.


def half(x, dtype=jnp.float16):
    return x.astype(dtype)


X, W = corpus.normal(4, 8), corpus.normal(8, 8, seed=1)


def traced_by_reference(fun, *args, **options):
    with reference.half_products("float16", **options):
        traced = jax.jit(fun).trace(*args)
    return traced.lower().compile()(*args)


def by_hand(x, w):
    return half(half(x) @ half(w), jnp.float32)


@jax.custom_vjp
def thrice(x, w):
    return x @ w


thrice.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, 3 * kept[0].T @ g)
)


def in_scan(x, w):
    return jax.lax.scan(lambda x, _: (x @ w + 1, None), x, None, length=2)[0]


def in_everything(product):
    """A product in each form that a program may have, and a sum that stays in float32."""

    def fun(x, w):
        forms = {
            "jit": jax.jit(product),
            "remat": jax.checkpoint(product),
            "vmap": jax.vmap(product, in_axes=(0, None)),
            "cond": lambda x, w: jax.lax.cond(
                x[0, 0] < 9, product, lambda x, w: x, x, w
            ),
            "while": lambda x, w: jax.lax.fori_loop(
                0, jnp.int32(2), lambda i, x: product(x, w), x
            ),
        }
        return {name: form(x, w) + 2.0**-12 for name, form in forms.items()}

    return fun


def test_the_reference_rounds_products_wherever_they_stand_and_nothing_else():
    found = traced_by_reference(in_everything(jnp.matmul), X, W)
    wanted = jax.jit(in_everything(by_hand))(X, W)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, wanted))
    plain = jax.jit(in_everything(jnp.matmul))(X, W)  # and nothing of it is left
    assert not np.array_equal(plain["jit"], found["jit"])
    np.testing.assert_allclose(plain["jit"], X @ W + 2.0**-12, rtol=1e-6)


def test_the_reference_differentiates_as_by_hand_and_keeps_custom_rules():
    def loss(product, x, w):
        return jnp.sum(jnp.tanh(product(x, w)))

    found = traced_by_reference(jax.grad(lambda w: loss(jnp.matmul, X, w)), W)
    wanted = jax.jit(jax.grad(lambda w: loss(by_hand, X, w)))(W)
    assert np.array_equal(found, wanted)
    custom = traced_by_reference(jax.grad(lambda w: loss(thrice, X, w)), W)
    np.testing.assert_allclose(custom, 3 * wanted, rtol=2e-3, atol=2e-3)


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


@pytest.mark.slow
def test_the_reference_leaves_dots_of_vectors_and_products_of_libraries():
    for fun in (dot_of_vectors, ode, ctc, exponential):
        assert np.array_equal(traced_by_reference(fun, X, W), jax.jit(fun)(X, W)), (
            fun.__name__
        )


def test_the_reference_rounds_the_carries_of_layers_if_asked():
    def by_hand_too(x, w):
        x = half(half(x), jnp.float32)
        for _ in range(2):
            x = half(half(by_hand(x, w) + 1), jnp.float32)
        return x

    def counter(xs):
        return jax.lax.scan(lambda n, x: (n + x.sum(), None), 2049.0, xs)[0]

    found = traced_by_reference(in_scan, X, W, half_carries=True)
    assert np.array_equal(found, jax.jit(by_hand_too)(X, W))
    assert traced_by_reference(counter, X, half_carries=True) == jax.jit(counter)(X)


# The law of additions.


def foreign(x, w):
    return half(x @ w) + half(x)


def of_products(x, w):
    one, other = half(x) @ half(w), half(x) @ half(w * 2)
    return jnp.flip(one, 0) + half(half(other.T.T, jnp.float32))


def over_turns(x, w):
    """What is carried starts as 0, and products are added to it."""
    start = jnp.zeros((4, 8), jnp.float16)
    return jax.lax.scan(
        lambda sum, _: (sum + half(x) @ half(w), None), start, None, length=3
    )[0]


def over_turns_from_afar(x, w):
    start = half(x)
    return jax.lax.scan(
        lambda sum, _: (sum + half(x) @ half(w), None), start, None, length=3
    )[0]


def with_zeros(x, w):
    return half(x) + jnp.zeros(x.shape, jnp.float16)


def with_a_number(x, w):
    return half(x) @ half(w) + jnp.float16(1), half(x) + jnp.float16(1)


def in_a_branch(x, w):
    return jax.lax.cond(x[0, 0] > 0, jax.jit(foreign), of_products, x, w)


@pytest.mark.parametrize(
    ("fun", "count"),
    [
        (foreign, 1),
        (of_products, 0),
        (over_turns, 0),
        (over_turns_from_afar, 1),
        (with_zeros, 0),
        (with_a_number, 1),
        (in_a_branch, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_additions_of_anything_but_products_are_found(fun, count):
    found = find_foreign_additions(jax.make_jaxpr(fun)(X, W))
    assert len(found) == count, found
    if fun is foreign:  # and nothing is said of an addition in float32
        assert (
            find_foreign_additions(jax.make_jaxpr(lambda x, w: x @ w + x)(X, W)) == []
        )

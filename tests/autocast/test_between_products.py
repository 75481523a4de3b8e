"""Between products nothing is rounded: no bound, no constant, no comparison, no ReLU.

The reference is each function with its products cast by hand, and everything else in float32.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import HOLDERS, WRAPPERS, computed_in_half
from tables import cases, pairs

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_a_bound_below_1_is_not_rounded_to_1():
    def loss(x):
        return jnp.arctanh(jnp.minimum(x @ jnp.eye(2), 1 - 1e-6)) @ jnp.eye(2)

    # log(2e6) / 2
    np.testing.assert_allclose(
        jaxscale.autocast(loss)(jnp.ones((2, 2))), 7.25, rtol=5e-3
    )


# Half precision rounds both to 1.
BELOW_1 = 1 - 1e-6
HALF_BELOW_1 = 1 - 2e-4


def arccos_of_clip(y):
    return jnp.arccos(jnp.clip(y, -BELOW_1, BELOW_1))


def log_of_minimum(y):
    return jnp.log1p(-jnp.minimum(jnp.abs(y), BELOW_1))


def arctanh_of_clip(y):
    return jnp.arctanh(jnp.clip(y, -0.999, 0.999))


def chosen_by_comparison(y):
    return jnp.where((y > BELOW_1) | ~(y > -2), 0.5, jnp.log1p(-jnp.minimum(y, 0.99)))


def smoothed(y):
    return jnp.log(jnp.abs(y) * HALF_BELOW_1 + 0.1)


def guarded_by_an_array(y):
    return jnp.arccos(jnp.minimum(y, jnp.full_like(y, BELOW_1)))


def difference_from_an_offset(y):
    return (y + 288.15 - 288.0) ** 2


def relu_of_tiny_numbers(y):
    small = jax.nn.relu(y * 2.0**-27)
    return small * 2.0**26 + jnp.sum(small) * 2.0**20


def beyond_the_range(y):
    """A bias, squares and an exponential that float16 does not hold."""
    biased = y + jnp.linspace(1e5, 2e5, y.size).reshape(y.shape)
    return jnp.log(jnp.exp(12 * y) + (300 * y) ** 2) + biased * 1e-5


def masked_softmax(y):
    masked = jnp.where(jnp.eye(*y.shape, dtype=bool), y, -1e9)
    return jax.nn.softmax(masked) + jax.nn.log_softmax(y + 1e-8)


def squashed(y):
    """Saturates: the difference from 1 cancels digits."""
    squashed = jnp.tanh(4 * y)
    return jnp.log(1 - squashed**2 + 1e-6) + jnp.log(jax.nn.sigmoid(6 * y)) * squashed


def relu_of_a_relu(y):
    return jnp.sqrt(jax.nn.relu(jax.nn.relu(y) - 0.4999) + 1e-7)


FAMILIES = [
    arccos_of_clip,
    log_of_minimum,
    arctanh_of_clip,
    chosen_by_comparison,
    smoothed,
    guarded_by_an_array,
    difference_from_an_offset,
    relu_of_tiny_numbers,
    relu_of_a_relu,
    beyond_the_range,
    masked_softmax,
    squashed,
]
FAMILIES = {fun.__name__: fun for fun in FAMILIES}


def called_twice(layer):
    jitted = jax.jit(layer)
    return lambda x, w: jitted(x, w) + jitted(x[::-1], w)


FORMS = HOLDERS | {"called twice": called_twice}

# Rows that lie along columns, whose products are 1, and others.
DIRECTIONS = np.eye(4, 8) + 0.25 * np.eye(4, 8, 2)
ROWS = jnp.asarray(np.eye(4, 8) + 0.5 * np.eye(4, 8, 1), jnp.float32)
WEIGHTS = jnp.asarray(DIRECTIONS, jnp.float32)


def round_product(x, w, dtype):
    product = x.astype(dtype) @ w.astype(dtype)
    return product.astype(jnp.float32)


def loss_of(family, form, multiply):
    def layer(x, w):
        y = FAMILIES[family](multiply(x, w.T))
        return multiply(y, jnp.linspace(0.5, 1.0, 12).reshape(4, 3))

    def loss(w, x):
        return jnp.sum(FORMS[form](layer)(x, w) ** 2)

    return loss


ENTRIES = {name: WRAPPERS[name] for name in WRAPPERS if "autocast" in name}


@pytest.mark.worlds
@cases(
    "family, form, dtype, entry",
    pairs(FAMILIES, FORMS, ["float16", "bfloat16"], ENTRIES),
    fast=[(family, "as it is", "float16", "autocast") for family in FAMILIES]
    + [
        ("arccos_of_clip", form, "bfloat16", "autocast")
        for form in ("vmap", "map", "cond")
    ]
    + [
        ("difference_from_an_offset", "as it is", "bfloat16", entry)
        for entry in ENTRIES
    ],
)
def test_between_products_nothing_is_rounded(family, form, dtype, entry):
    dtype = jnp.dtype(dtype)
    by_hand = loss_of(family, form, functools.partial(round_product, dtype=dtype))
    cast = ENTRIES[entry](loss_of(family, form, jnp.matmul), dtype)
    expected, expected_gradient = jax.jit(jax.value_and_grad(by_hand))(WEIGHTS, ROWS)
    actual, gradient = jax.jit(jax.value_and_grad(cast))(WEIGHTS, ROWS)
    # The same numbers are rounded at the same places. XLA adds them in another order, which may
    # move one of them to its neighbour.
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(actual, expected, rtol=unit / 4)
    largest = np.abs(expected_gradient).max()
    assert np.isfinite(largest)
    np.testing.assert_allclose(gradient, expected_gradient, atol=unit * largest)


@cases(
    "family, form",
    itertools.product(FAMILIES, FORMS),
    fast=[("smoothed", form) for form in FORMS],
)
def test_only_products_and_moves_are_in_half_precision(family, form):
    gradient = jax.grad(jaxscale.autocast(loss_of(family, form, jnp.matmul)))
    assert not computed_in_half(gradient, WEIGHTS, ROWS)


def report_between_products(x):
    """Effects at levels that do not rise in the order of the program."""
    reported = []

    def note(name, _):
        reported.append(name)

    deep = (x @ x) @ x
    jax.debug.callback(note, "first", deep[0, 0], ordered=True)
    jax.debug.callback(note, "second", x[0, 0], ordered=True)
    deeper = jnp.exp(deep @ x * 1e-3)
    jax.debug.callback(note, "third", deeper[0, 0], ordered=True)
    jax.debug.callback(note, "fourth", jnp.sin(x[0, 0]), ordered=True)
    return jnp.sum(deeper), reported


@cases("wrap", [lambda f: f, jax.grad])
def test_effects_keep_their_order(wrap):
    reported = []

    def loss(x):
        value, names = report_between_products(x)
        reported.append(names)
        return value

    jax.jit(wrap(jaxscale.autocast(loss)))(jnp.eye(3))
    jax.effects_barrier()
    assert reported[-1] == ["first", "second", "third", "fourth"]


def test_an_ordered_effect_of_a_derivative_rule_runs_once_for_each_derivative():
    reported = []

    @jax.custom_jvp
    def activation(x):
        return jnp.tanh(x)

    @activation.defjvp
    def derive(primals, tangents):
        y = activation(*primals)
        jax.debug.callback(lambda _: reported.append("rule"), y[0, 0], ordered=True)
        return y, (1 - y * y) * tangents[0]

    def loss(x):
        return jnp.sum(activation(activation(x @ x) @ x) @ x)

    jax.jit(jax.grad(jaxscale.autocast(loss)))(jnp.eye(3))
    jax.effects_barrier()
    assert reported == ["rule", "rule"]


def write_and_read(x):
    """A mutable array that is written and read between products, at one level and at another."""
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = x @ x @ x
    before = ref[...] * 2.0
    ref[...] = jnp.sin(x)
    after = ref[...] @ x
    return jnp.sum((before @ x) ** 2 + (after * jnp.exp(before * 1e-2)) ** 2)


@pytest.mark.worlds
def test_refs_are_read_in_their_order():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)), jnp.float32)
    expected, expected_gradient = jax.value_and_grad(write_and_read)(x)
    actual, gradient = jax.value_and_grad(jaxscale.autocast(write_and_read))(x)
    np.testing.assert_allclose(actual, expected, rtol=5e-3)
    largest = np.abs(expected_gradient).max()
    np.testing.assert_allclose(gradient, expected_gradient, atol=5e-3 * largest)

"""Faulty lines, and what the doctor's advice makes of them: pairs of models that differ in that.

`ADVICE` has the pairs by name. `A_PAIR__faulty` and `A_PAIR__cured` are targets of the doctor.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HALF = jnp.float16
FULL = jnp.float32
ROWS = jnp.array([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]])
MANY_ROWS = jnp.linspace(-1, 1, 150).reshape(50, 3)


class Pair(NamedTuple):
    """A model with a fault, and the same after the doctor's advice."""

    said: str  # the advice
    batch: Any
    faulty: Callable[[Any, Any], Any]  # of the batch and parameters in half precision
    cured: Callable[[Any, Any], Any]


ADVICE: dict[str, Pair] = {}


def advice(said, batch):
    """Enters the pair of functions that a function makes, under its name."""

    def enter(make):
        faulty, cured = make()
        ADVICE[make.__name__] = Pair(said, batch, faulty, cured)
        return make

    return enter


def __getattr__(name):
    row, _, which = name.partition("__")
    if row not in ADVICE:
        raise AttributeError(name)
    pair = ADVICE[row]
    compute = getattr(pair, which)

    def loss_fn(params, x):
        return jnp.mean(compute(x, params["w"].astype(HALF)).astype(FULL))

    return lambda: (loss_fn, {"w": jnp.array([1.0, 0.5, 2.0])}, pair.batch)


def _multiply(x, w):
    """A product in half precision."""
    return x.astype(HALF) * w


# Logarithms of probabilities and exponentials.


@advice("Write `jax.nn.log_softmax(logits)` instead", 5 * ROWS)
def log_of_softmax():
    def faulty(x, w):
        return jnp.log(jax.nn.softmax(_multiply(x, w)))  # fault

    def cured(x, w):
        return jax.nn.log_softmax(_multiply(x, w))

    return faulty, cured


@advice("Write `jax.nn.log_softmax(logits)` instead", 5 * ROWS)
def log_of_softmax_by_rows():
    def faulty(x, w):
        rows = _multiply(x, w)
        probability = jnp.stack([jax.nn.softmax(row) for row in rows])  # fault
        return jnp.log(jnp.tile(probability, 2))

    def cured(x, w):
        rows = _multiply(x, w)
        return jnp.tile(jnp.stack([jax.nn.log_softmax(row) for row in rows]), 2)

    return faulty, cured


@advice("Write `jax.nn.log_softmax(logits)` instead", 5 * ROWS)
def log_of_softmax_written_out():
    def faulty(x, w):
        z = _multiply(x, w)
        e = jnp.exp(z - jnp.max(z, 1, keepdims=True))  # fault
        return jnp.log(e / jnp.sum(e, 1, keepdims=True))  # fault

    def cured(x, w):
        return jax.nn.log_softmax(_multiply(x, w))

    return faulty, cured


@advice("Write `jax.nn.log_softmax(logits)` instead", 5 * ROWS)
def log_of_probability_that_is_cast():
    def faulty(x, w):
        return jnp.log(jax.nn.softmax((x * w).astype(FULL)).astype(HALF))  # fault

    def cured(x, w):
        return jax.nn.log_softmax((x * w).astype(HALF))

    return faulty, cured


@advice("Write `jax.nn.log_sigmoid(logits)` instead", -5 * jnp.abs(ROWS))
def log_of_sigmoid():
    def faulty(x, w):
        return jnp.log(jax.nn.sigmoid(_multiply(x, w)))  # fault

    def cured(x, w):
        return jax.nn.log_sigmoid(_multiply(x, w))

    return faulty, cured


@advice("Add up their logarithms instead", MANY_ROWS)
def product_of_probabilities():
    def faulty(x, w):
        p = jax.nn.sigmoid(_multiply(x, w))
        return jnp.log(jnp.prod(p, 0))  # fault

    def cured(x, w):
        p = jax.nn.sigmoid(_multiply(x, w))
        return jnp.sum(jnp.log(p), 0)

    return faulty, cured


@advice("Add up their logarithms instead", MANY_ROWS)
def product_in_a_loop():
    def faulty(x, w):
        def step(product, q):
            return product * q, None  # fault

        p = jax.nn.sigmoid(_multiply(x, w))
        product, _ = jax.lax.scan(step, jnp.ones(3, HALF), p)
        return jnp.log(product)

    def cured(x, w):
        def add(total, q):
            return total + q, None

        p = jax.nn.sigmoid(_multiply(x, w))
        total, _ = jax.lax.scan(add, jnp.zeros(3, HALF), jnp.log(p))
        return total

    return faulty, cured


@advice("Add up their logarithms instead", MANY_ROWS)
def products_of_the_first_probabilities():
    def faulty(x, w):
        p = jax.nn.sigmoid(_multiply(x, w))
        return jnp.log(jnp.cumprod(p, 0))  # fault

    def cured(x, w):
        p = jax.nn.sigmoid(_multiply(x, w))
        return jnp.cumsum(jnp.log(p), 0)

    return faulty, cured


@advice("in float32: that was tried", MANY_ROWS)
def root_of_a_product():
    def faulty(x, w):
        p = jax.nn.sigmoid(_multiply(x, w))
        product = jnp.prod(p, 0)  # fault
        return product.astype(FULL) ** (1 / 50)

    def cured(x, w):
        p = jax.nn.sigmoid(_multiply(x, w))
        return jnp.prod(p.astype(FULL), 0) ** (1 / 50)

    return faulty, cured


@advice("the logarithm of `exp(x)` is `x`", ROWS)
def log_of_density():
    def faulty(x, w):
        z = _multiply(x, w)
        return jnp.log(jnp.exp(-z * z / 2) / 2.5)  # fault

    def cured(x, w):
        z = _multiply(x, w)
        return -z * z / 2 - 0.92

    return faulty, cured


@advice("Write `jax.nn.logsumexp(x)` instead", -10 * jnp.abs(ROWS))
def log_of_sum_of_exponentials():
    def faulty(x, w):
        z = _multiply(x, w) - 20
        return jnp.log(jnp.sum(jnp.exp(z), 1))  # fault

    def cured(x, w):
        z = _multiply(x, w) - 20
        return jax.nn.logsumexp(z, 1)

    return faulty, cured


# Exponentials and sums that are too large.


@advice(
    "Subtract the maximum of each row before the exponential",
    jnp.array([[12.0, 14.0, 4.0], [7.0, 13.0, 6.5], [3.0, 20.0, 2.5]]),
)
def softmax_without_its_maximum():
    def faulty(x, w):
        e = jnp.exp(_multiply(x, w))  # fault
        return e / jnp.sum(e, 1, keepdims=True) * x.astype(HALF)

    def cured(x, w):
        z = _multiply(x, w)
        e = jnp.exp(z - jnp.max(z, 1, keepdims=True))
        return e / jnp.sum(e, 1, keepdims=True) * x.astype(HALF)

    return faulty, cured


@advice("clip the exponent", jnp.array([[90.0, 2.0, 3.0], [1.0, 2.0, -1.0]]))
def exponential():
    def faulty(x, w):
        return jnp.exp(_multiply(x, w).astype(FULL))  # fault

    def cured(x, w):
        return jnp.exp(jnp.minimum(_multiply(x, w).astype(FULL), 5.0))

    return faulty, cured


@advice(
    "The loss is a sum over 12,000 numbers. Take a mean instead",
    jnp.ones((4000, 3)) * 9,
)
def sum_over_many_numbers():
    def faulty(x, w):
        return jnp.sum(_multiply(x, w) ** 2)  # fault

    def cured(x, w):
        return jnp.mean(_multiply(x, w) ** 2)

    return faulty, cured


@advice(
    "The loss is a sum over 90,000 numbers, at advised.py:", jnp.ones((30000, 3)) * 60
)
def sum_whose_gradients_are_too_large():
    def faulty(x, w):
        return jnp.sum(jnp.square(_multiply(x, w).astype(FULL)))  # fault

    def cured(x, w):
        return jnp.mean(jnp.square(_multiply(x, w).astype(FULL)))

    return faulty, cured


@advice("70000 is inf in float16.", jnp.ones((1000, 3)))
def number_of_elements():
    def faulty(x, w):
        return _multiply(x, w).sum(0) / 70000  # fault

    def cured(x, w):
        return _multiply(x, w).sum(0).astype(FULL) / 70000

    return faulty, cured


# Masks, epsilons and points without a derivative.


@advice("For a mask, use -1e4 instead of -1e9", ROWS)
def mask():
    def faulty(x, w):
        return jax.nn.softmax(jnp.where(x > 5, x * w, -1e9).astype(HALF)) * w  # fault

    def cured(x, w):
        return jax.nn.softmax(jnp.where(x > 5, x * w, -1e4).astype(HALF)) * w

    return faulty, cured


@advice("Compute this line in float32", jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))
def epsilon():
    def faulty(x, w):
        z = _multiply(x, w)
        return x * z / (jnp.sum(jnp.abs(z), 1, keepdims=True) + 1e-9)  # fault

    def cured(x, w):
        z = _multiply(x, w).astype(FULL)
        return x * z / (jnp.sum(jnp.abs(z), 1, keepdims=True) + 1e-9)

    return faulty, cured


@advice("Keep the operand away from such a point: clip it", jnp.ones((2, 3)))
def arc():
    def faulty(x, w):
        return jnp.arccos(jnp.clip(_multiply(x, w), -1, 1))  # fault

    def cured(x, w):
        return jnp.arccos(jnp.clip(_multiply(x, w), -0.999, 0.999))

    return faulty, cured


@advice("An epsilon does not help", jnp.zeros((2, 3)))
def negative_variance():
    def faulty(x, w):
        z = x.astype(HALF) - w
        return jnp.sqrt(jnp.sum(z * z, 1) - jnp.sum(z, 1) ** 2 - 1)  # fault

    def cured(x, w):
        z = x.astype(HALF) - w
        return jnp.sqrt(jnp.mean((z - jnp.mean(z, 1, keepdims=True)) ** 2, 1))

    return faulty, cured


# Branches that are not taken. Their loss is finite.
INSIDE = "Put another `jnp.where` inside, around the operand"


def not_below_0(z):
    return jnp.maximum(z, 0)


def untaken(fun, taken, harmless, before=lambda z: z):
    """A function where a condition holds, and 0 elsewhere, and the same with an inner `where`."""

    def faulty(x, w):
        z = before(_multiply(x, w))
        y = 2 * fun(z)  # fault
        return jnp.where(taken(z), y, 0)

    def cured(x, w):
        z = before(_multiply(x, w))
        return jnp.where(taken(z), 2 * fun(jnp.where(taken(z), z, harmless)), 0)

    return faulty, cured


@advice(INSIDE, MANY_ROWS)
def root_that_is_not_taken():
    return untaken(jnp.sqrt, lambda z: z > 0.1, 1)


@advice(INSIDE, MANY_ROWS)
def root_of_0_that_is_not_taken():
    return untaken(jnp.sqrt, lambda z: z > 0.1, 1, not_below_0)


@advice(INSIDE, MANY_ROWS)
def power_that_is_not_taken():
    power = functools.partial(jax.lax.pow, y=HALF(0.3))
    return untaken(power, lambda z: z > 0.1, 1)


@advice(INSIDE, 2 * MANY_ROWS)
def angle_that_is_not_taken():
    return untaken(jnp.arccos, lambda z: abs(z) < 0.9, 0)


@advice(INSIDE, MANY_ROWS)
def quotient_that_is_not_taken():
    return untaken(jnp.reciprocal, lambda z: z > 0.1, 1, not_below_0)


# Positions, indices and rules of one's own.


POSITIONS = jnp.arange(5000)[::7, None]


@advice("Compute this line in float32", POSITIONS)
def positions():
    def faulty(x, w):
        return jnp.sin(x.astype(HALF) * w)  # fault

    def cured(x, w):
        return jnp.sin(x.astype(FULL) * w.astype(FULL))

    return faulty, cured


@advice("in float32: that was tried", POSITIONS)
def positions_in_a_jitted_table():
    def faulty(x, w):
        @jax.jit
        def table():
            t = jnp.arange(5000, dtype=HALF)  # fault
            return jnp.outer(t, jnp.array([1, 0.3, 0.1], HALF))  # fault

        return jnp.sin(table()[x[:, 0]]) * w

    def cured(x, w):
        return jnp.sin(x * jnp.array([1, 0.3, 0.1])) * w

    return faulty, cured


@advice("Compute this line in float32", POSITIONS)
def angles_that_are_cast():
    def faulty(x, w):
        angles = (x * 0.37).astype(HALF)  # fault
        return jnp.sin(angles) * w

    def cured(x, w):
        return jnp.sin(x * 0.37) * w

    return faulty, cured


@advice("An index is out of range", jnp.arange(4))
def index():
    def faulty(x, w):
        return jnp.take(w, x)  # fault

    def cured(x, w):
        return jnp.take(w, jnp.minimum(x, 2))

    return faulty, cured


def with_rule(backward):
    """The identity with a backward rule of its own."""
    function = jax.custom_vjp(lambda z: z)
    function.defvjp(lambda z: (z, None), lambda _, g: (backward(g),))
    return function


def too_large(g):
    return g * HALF(60000) * HALF(60000)


def too_small(g):
    down, up = HALF(2.0**-14), HALF(2.0**14)
    return g * down * down * down * up * up * up


def ruled(backward):
    def faulty(x, w):
        return with_rule(backward)(_multiply(x, w))  # fault

    return faulty, _multiply


@advice("`mul`, in the backward pass, gives inf or NaN", ROWS)
def rule_that_overflows():
    return ruled(too_large)


@advice("`mul`, in the backward pass, flushes", ROWS)
def rule_that_flushes():
    return ruled(too_small)


@advice("`mul`, in the backward pass, gives inf or NaN", ROWS)
def rule_in_a_scan():
    def faulty(x, w):
        z = _multiply(x, w)
        rule = with_rule(too_large)
        last, _ = jax.lax.scan(lambda z, _: (rule(z), None), z, None, 3)  # fault
        return last

    return faulty, _multiply


@advice("in float32: that was tried", ROWS)
def rule_whose_forward_pass_overflows():
    def faulty(x, w):
        def forward(z):
            square = (z * 300) * (z * 300)  # fault
            return z, (z, square)

        def backward(saved, g):
            z, square = saved
            return (g * jnp.abs(z * 300) / jnp.sqrt(square),)

        function = jax.custom_vjp(lambda z: z)
        function.defvjp(forward, backward)
        return function(_multiply(x, w))

    return faulty, _multiply

"""The line that the doctor names first: of backward rules, where a number became 0, in positions.

Each model has the fault on lines of its own, which end in `# fault`, and its symptom elsewhere.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases
from traced_losses import faulty_lines

from jaxscale._doctor.diagnosis import diagnose
from jaxscale._doctor.measure import examine
from jaxscale._doctor.target import load

pytestmark = pytest.mark.standard_promotion

HALF, FULL = jnp.float16, jnp.float32
HERE = pathlib.Path(__file__)


def normal(seed, *shape, scale=1.0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * scale


def multiply(x, w):
    """A product in half precision."""
    return x.astype(HALF) @ w.astype(HALF)


def layer(activation):
    """A loss of one layer in half precision."""

    def loss_fn(params, x):
        y = activation(multiply(x, params["w"]))  # fault
        return jnp.mean(jnp.square(y.astype(FULL) - 1))

    return loss_fn, {"w": normal(0, 4, 4)}, normal(1, 8, 4)


def tanh_with(backward):
    """The hyperbolic tangent with a backward rule, which gets the result and its gradient."""
    function = jax.custom_vjp(jnp.tanh)
    function.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), backward)
    return function


def too_large(y, g):
    d = (1 - y * y) * HALF(50000)
    d = d * HALF(100)
    return (g * d * HALF(2e-7),)


def too_small(y, g):
    d = (1 - y * y) * HALF(2.0**-14)
    d = d * HALF(2.0**-12)
    d = d * HALF(2.0**13) * HALF(2.0**13)
    return (g * d,)


def rule_overflows():
    return layer(tanh_with(too_large))


def rule_flushes():
    return layer(tanh_with(too_small))


def rule_in_scan():
    function = tanh_with(too_large)

    def repeat(x):
        last, _ = jax.lax.scan(lambda x, _: (function(x), None), x, None, 3)  # fault
        return last

    return layer(repeat)


def rule_forward():
    def forward(x):
        square = (x * 300) * (x * 300)  # fault
        return x, (x, square)

    def backward(saved, g):
        x, square = saved
        return (g * jnp.abs(x * 300) / jnp.sqrt(square),)

    function = jax.custom_vjp(lambda x: x)
    function.defvjp(forward, backward)
    return layer(function)


def classify(logarithm):
    """A cross-entropy of logits in half precision."""
    label = np.random.default_rng(2).integers(0, 16, 16)

    def loss_fn(params, x):
        logits = multiply(x, params["w"])
        log_p = logarithm(logits, label[:, None])
        return -jnp.mean(log_p.astype(FULL))

    return loss_fn, {"w": normal(0, 8, 16, scale=3.0)}, normal(1, 16, 8)


def picked(probability, label):
    return jnp.log(jnp.take_along_axis(probability, label, 1))


def softmax_in_half():
    def logarithm(logits, label):
        probability = jax.nn.softmax(logits)  # fault
        return picked(probability, label)

    return classify(logarithm)


def softmax_that_is_cast():
    def logarithm(logits, label):
        probability = jax.nn.softmax(logits.astype(FULL))
        probability = probability.astype(HALF)  # fault
        return picked(probability, label)

    return classify(logarithm)


def softmax_written_out():
    def logarithm(logits, label):
        e = jnp.exp(logits - jnp.max(logits, 1, keepdims=True))  # fault
        return picked(e / jnp.sum(e, 1, keepdims=True), label)  # fault

    return classify(logarithm)


def joint(multiply_all):
    """The logarithm of a product of 40 probabilities, each about a half."""

    def loss_fn(params, x):
        probability = jax.nn.sigmoid(multiply(x, params["w"]))
        log_p = jnp.log(multiply_all(probability))
        return -jnp.mean(log_p.astype(FULL))

    return loss_fn, {"w": normal(0, 8, 40, scale=0.1)}, normal(1, 4, 8)


def prod():
    return joint(lambda p: jnp.prod(p, axis=-1))  # fault


def cumprod():
    return joint(lambda p: jnp.cumprod(p, axis=-1))  # fault


def prod_in_a_loop():
    def step(product, q):
        return product * q, None  # fault

    def multiply_all(p):
        product, _ = jax.lax.scan(step, jnp.ones(4, HALF), p.T)
        return product

    return joint(multiply_all)


def prod_and_root():
    def loss_fn(params, x):
        probability = jax.nn.sigmoid(multiply(x, params["w"]))
        product = jnp.prod(probability, axis=-1)  # fault
        return -jnp.mean(product.astype(FULL) ** (1 / 40))

    _, params, x = joint(jnp.prod)
    return loss_fn, params, x


def density():
    def loss_fn(params, x):
        z = multiply(x, params["w"])
        p = jnp.exp(-z * z / 2)  # fault
        log_p = jnp.log(p / HALF(2.5))
        return -jnp.mean(log_p.astype(FULL))

    return loss_fn, {"w": normal(0, 4, 3)}, normal(1, 8, 4, scale=2.0)


def rotated(angles):
    """Scores of queries and keys that are turned by the angles of 24 positions of up to 8192."""
    rng = np.random.default_rng(3)
    position = np.sort(rng.integers(0, 8192, 24))

    def turn(z):
        angle = angles(position)
        cosine = jnp.cos(angle).astype(HALF)
        sine = jnp.sin(angle).astype(HALF)
        a, b = jnp.split(z, 2, axis=-1)
        turned_a = a * cosine - b * sine
        turned_b = b * cosine + a * sine
        return jnp.concatenate([turned_a, turned_b], axis=-1)

    def loss_fn(params, batch):
        x = batch["x"]
        queries = multiply(x, params["q"])
        q = turn(queries)
        keys = multiply(x, params["k"])
        k = turn(keys)
        scores = (q @ k.T).astype(FULL)
        return jnp.mean(scores * batch["target"])

    params = {"q": normal(0, 8, 8), "k": normal(1, 8, 8)}
    batch = {"x": normal(2, 24, 8), "target": normal(3, 24, 24)}
    return loss_fn, params, batch


FREQUENCY = 100.0 ** (-np.arange(4) / 4)


def positions_cast():
    def angles(position):
        t = jnp.asarray(position).astype(HALF)  # fault
        return t[:, None].astype(FULL) * FREQUENCY

    return rotated(angles)


def positions_in_a_jitted_table():
    @jax.jit
    def table():
        t = jnp.arange(8192, dtype=HALF)  # fault
        return jnp.outer(t, FREQUENCY.astype(HALF))  # fault

    return rotated(lambda position: table()[position])


def angles_cast():
    def angles(position):
        angle = jnp.asarray(position)[:, None] * FREQUENCY
        return angle.astype(HALF)  # fault

    return rotated(angles)


# The models, and the function whose lines are marked. Everything in a backward rule has the line
# that calls its function, as JAX has it; a finding names the rule beside it.
RULES = {rule_overflows: layer, rule_flushes: layer, rule_in_scan: rule_in_scan}
OTHERS = [
    rule_forward,
    softmax_in_half,
    softmax_that_is_cast,
    softmax_written_out,
    prod,
    cumprod,
    prod_in_a_loop,
    prod_and_root,
    density,
    positions_cast,
    positions_in_a_jitted_table,
    angles_cast,
]
FAULTS = RULES | dict(zip(OTHERS, OTHERS, strict=True))


@pytest.mark.worlds
@cases("model", FAULTS, fast=[rule_overflows])
def test_the_first_problem_is_at_the_fault(model):
    findings = diagnose(examine(load(f"{HERE}:{model.__name__}"), None))
    problems = [finding for finding in findings if finding.is_problem]
    assert problems
    assert HERE.name in problems[0].where
    assert problems[0].line in faulty_lines(FAULTS[model]), problems[0].title

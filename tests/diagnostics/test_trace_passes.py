"""Passes of one program: as it is written, in float32, shaken, and how far they are."""

import functools
import itertools
import re
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planted
import pytest
from tables import cases
from traced_losses import (
    EIGHT,
    HALF,
    assert_computed_eagerly,
    half,
    mean_square,
    normal,
    summed,
    with_backward,
)

from jaxscale.diagnostics._trace.backward import TracedBackward

pytestmark = pytest.mark.standard_promotion


def everything(key):
    """Says of each equation that it is to run in float32."""
    return True


def small(w):
    return jnp.tanh(jax.jit(lambda w: w @ w)(w))


def rewritten(w):  # XLA may give 0
    inverted_twice = 1 / (1 / w)
    divided_and_multiplied = (w / 3) * 3
    return jnp.sum(jnp.abs(inverted_twice - w)) + jnp.sum(divided_and_multiplied - w)


def stacked(w):
    def multiply(product, x):
        product = product * x
        return product, product

    _, products = jax.lax.scan(multiply, HALF(1), w, reverse=True)
    return products * half(*range(1, 9))


COMPUTED = {
    "rnn": (planted.rnn, *planted.rnn_case()),
    "small": (summed(small), np.ones((2, 2), HALF)),
    "stacked": (summed(stacked), EIGHT),
    "rewritten": (rewritten, np.linspace(1, 3, 64, dtype=np.float32)),
}


@pytest.mark.worlds
@cases("name", COMPUTED, fast=["rewritten"])
def test_what_it_computes_is_what_eager_evaluation_computes(name):
    assert_computed_eagerly(*COMPUTED[name])


# How far a pass is.


def looping(x):
    """A loss with a scan of three iterations, and a loop without a known end."""

    def sine(y, _):
        return jnp.sin(y), None

    def is_on(y):
        return y[0] < 4

    def add_one(y):
        return y + 1

    y, _ = jax.lax.scan(sine, x, None, length=3)
    counted = jax.lax.while_loop(is_on, add_one, y)
    return mean_square(y + jax.lax.stop_gradient(counted))


@pytest.fixture(scope="module")
def progress():
    """What `how_far` says at each operation of two passes of `looping`."""
    backward = TracedBackward(looping, (half(1, 1),), {})
    words = []

    def look(visit):
        words.append(backward.how_far())

    backward.run(1.0, look=look)
    backward.run(1.0, look=look)
    return words


def test_the_operations_are_counted_while_a_pass_runs(progress):
    number = len(progress) // 2
    assert "of about" not in progress[0]
    assert progress[-1] == f"operation {number} of about {number}"


def test_an_iteration_is_told_with_the_line_of_its_loop(progress):
    in_loops = [words for words in progress if "iteration" in words]
    assert in_loops
    for words in in_loops:
        assert "test_trace_passes.py:" in words


def test_the_iterations_of_a_scan_are_counted_up_in_both_directions(progress):
    iterations = re.findall(r"iteration (. of 3) at ", "\n".join(progress))
    changes = [iteration for iteration, _ in itertools.groupby(iterations)]
    assert changes == ["1 of 3", "2 of 3", "3 of 3"] * 4


def test_of_a_while_loop_no_end_is_known(progress):
    assert re.search(r"iteration \d at ", "\n".join(progress))


# What a pass keeps.


def test_numbers_are_kept_no_longer_than_something_reads_them():
    def chain(x):
        y = jax.lax.stop_gradient(x)
        for _ in range(200):
            y = jnp.sin(y)
        return mean_square(x + y)

    results = []
    numbers_alive = []

    def look(visit):
        results.append(weakref.ref(visit.outputs[0]))
        numbers_alive.append(sum(result() is not None for result in results))

    TracedBackward(chain, (half(1, 1),), {}).run(1.0, look=look)
    assert len(results) > 200
    assert max(numbers_alive) < 100


# In float32.


ARGS = (normal(0, 4, 4), normal(1, 3, 4))


def with_everything(dtype):
    """A loss whose narrow parts are in `dtype`, with everything that holds equations."""
    doubled = with_backward(lambda x: x * 2, lambda ct: ct * 2 + 1e-9)

    @jax.checkpoint
    def block(x, w):
        return x + jnp.tanh(x @ w)

    @jax.jit
    def normalize(x):
        return x / (jnp.abs(x) + 1e-9)

    def shrink(x):
        return jnp.exp(x - 5)

    def fun(params, x):
        w = params.astype(dtype)
        x = x.astype(dtype)

        def run_block(x, _):
            return block(x, w), None

        def scale_and_shift(i, x):
            return x * 0.75 + 3e-9

        x, _ = jax.lax.scan(run_block, x, length=3)
        is_shrunk = x[0, 0] > -100
        x = jax.lax.cond(is_shrunk, shrink, lambda x: x, x)
        x = jax.lax.fori_loop(0, 2, scale_and_shift, x)
        x = normalize(x) + x
        return mean_square(doubled(x))

    return fun


@pytest.mark.slow
@cases("loss_scale", [1.0, 2.0**24])
def test_a_pass_with_everything_in_float32_has_the_gradients_of_float32(loss_scale):
    loss_in_float32 = with_everything(jnp.float32)
    grad_in_float32 = jax.jit(jax.grad(loss_in_float32))
    exact = grad_in_float32(*ARGS)
    loss_in_half = with_everything(HALF)
    backward = TracedBackward(loss_in_half, ARGS, {})
    wide_pass = backward.run(loss_scale, everything)
    wide = wide_pass.grads["grads"]
    # Two compiled programs may round differently.
    np.testing.assert_allclose(wide, exact, rtol=1e-4, atol=1e-6)
    shaken_pass = backward.run(loss_scale, everything, is_shaken=True)
    shaken = shaken_pass.grads["grads"]
    assert 0 < relative_error(shaken, wide) < 1e-4


@pytest.mark.slow
def test_a_pass_as_it_is_written_is_so_whichever_passes_ran_before():
    written = TracedBackward(with_everything(HALF), ARGS, {}).run(1.0)
    backward = TracedBackward(with_everything(HALF), ARGS, {})
    for loss_scale in (1.0, 2.0**24):
        backward.run(loss_scale, everything)
        backward.run(loss_scale, everything, is_shaken=True)
    again = backward.run(1.0)
    np.testing.assert_array_equal(again.grads["grads"], written.grads["grads"])


def relative_error(leaf, exact):
    return np.linalg.norm(leaf - exact) / np.linalg.norm(exact)


def test_bits_are_those_of_the_narrow_dtype_in_float32_as_well():
    def fun(w):
        bits = jax.lax.bitcast_convert_type(w * 2, jnp.uint16)
        return w * (bits > 0x4400)  # 4 in float16

    backward = TracedBackward(summed(fun), (half(1, 3),), {})
    assert backward.run(1.0, everything).grads["grads"].tolist() == [0, 1]


def product(w):
    return w * 1e-9


def product_of_a_variable(w):
    small = 1e-9
    return jax.jit(lambda w: w * small)(w)


def product_of_an_attribute(w):
    return w * (NUMBERS.small / 2)


def product_of_a_size(w):
    batch = {"x": jnp.ones((100, 1000), HALF)}
    return w / (batch["x"].shape[0] * batch["x"].shape[1] * 10**4)


def product_of_an_element(w):
    small = [1e-9, 2.0]
    return w * small[-2]


def product_over_lines(w):
    return jnp.multiply(
        w,
        -1e-9,
    )


def product_in_a_library(w):
    return optax.tree.scale(1e-9, w)


def bound(w):
    return jnp.minimum(w, 1 - 1e-5)


NUMBERS = types.SimpleNamespace(small=2e-9)
# A number that is rounded in float16, where it becomes the second.
ROUNDED = {
    product: (1e-9, 0.0),
    product_of_a_variable: (1e-9, 0.0),
    product_of_an_attribute: (1e-9, 0.0),
    product_of_a_size: (1e-9, 0.0),
    product_of_an_element: (1e-9, 0.0),
    product_over_lines: (-1e-9, 0.0),
    product_in_a_library: (1e-9, 0.0),
    bound: (1 - 1e-5, 1.0),
}


@pytest.mark.worlds
@cases("fun", ROUNDED)
def test_numbers_of_the_source_are_exact_in_float32(fun):
    exact, rounded = ROUNDED[fun]
    backward = TracedBackward(summed(fun), (half(1, 1),), {})
    assert backward.run(1.0).report().loss == 2 * rounded
    in_float32 = backward.run(1.0, everything).report()
    assert in_float32.loss == 2 * np.float32(exact)


def test_a_number_that_a_function_returns_is_not_guessed():
    def fun(w):
        return w / (len(w) * 10**5)

    report = TracedBackward(summed(fun), (half(1, 1),), {}).run(1.0).report()
    assert report.loss == 0
    assert report.constants == ()


@pytest.mark.worlds
def test_like_calls_have_their_own_numbers_and_keep_what_is_read_of_them():
    # A program begins at each product. Like programs are compiled once.
    @functools.partial(jax.jit, static_argnums=1)
    def layer(x, scale):
        y = scale(x @ x)
        return y, jnp.sin(y)

    def small(y):
        return y * 1e-9

    def double(y):
        return y * 2e-9

    @summed
    def loss_fn(w, x):
        _, a = layer(x, small)
        _, b = layer(x, double)
        c, d = layer(x, small)
        return w + (a + b + (c + d) @ x)

    x = np.eye(2, dtype=HALF)
    backward = TracedBackward(loss_fn, (HALF(0), x), {})
    run = backward.run(1.0)
    assert run.report().loss == 0
    in_float32 = backward.run(1.0, run.findings.equations.__contains__)
    assert in_float32.report().loss == pytest.approx(2 * 5e-9, rel=1e-6)


def test_what_is_only_rounding_changes_when_float32_is_shaken():
    def fun(params, x):
        # the same for all: no effect
        weights = jax.nn.softmax(x @ params["w"] + params["shift"])
        return jnp.sum(weights**2)

    params = {"w": normal(0, 4, 4), "shift": np.ones((), np.float32)}
    backward = TracedBackward(fun, (params, normal(1, 3, 4)), {})
    exact = backward.run(1.0, everything).grads
    shaken = backward.run(1.0, everything, is_shaken=True).grads
    error = {name: relative_error(shaken[name], exact[name]) for name in exact}
    assert error["grads['w']"] < 1e-4
    assert error["grads['shift']"] > 0.3

"""The largest loss scale that does not overflow, against trying every scale."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from departing import uses_what_goes
from tables import cases

import jaxscale
from jaxscale import diagnostics

pytestmark = uses_what_goes

W = jnp.float16(1.0)


def loss_fn(w, batch):
    """A loss whose gradient with respect to `w`, in float16, is the product of both."""
    x, factor = batch
    return (w * x).astype(jnp.float32) * factor


def batch(exponent):
    """A batch with gradient 2**exponent, whose cotangents are no larger than that."""
    return jnp.float16(2.0 ** max(exponent, 0)), jnp.float32(2.0 ** min(exponent, 0))


def test_a_gradient_of_four_fits_a_scale_of_two_to_the_thirteenth():
    found = diagnostics.calibrate(loss_fn, W, [(jnp.float16(4.0), 1.0)])
    assert (found.init_scale, found.overflows_at) == (8192, 16384)
    assert (found.passes, found.batches, found.is_largest) == (5, 1, True)
    assert str(found) == (
        "The largest loss scale that does not overflow is 2**13 (batches: 1, backward passes: 5)."
    )


def calibrate(batches, fun=loss_fn, **options):
    """Without compilation, which takes longer than the passes."""
    return diagnostics.calibrate(fun, W, batches, jit=lambda fun: fun, **options)


def step_is_finite(loss_scale, size):
    state = jaxscale.FixedLossScale(loss_scale).init()
    grads = jaxscale.grad(loss_fn, state)(W, batch(size))
    return bool(jaxscale.all_finite(grads))


def random_sizes(seed):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(-9, 16, rng.integers(1, 12)).tolist())


# Five passes are enough to tell 25 scales and none apart, and 60 for all batches.
ONE = [((size,), 5) for size in range(-24, 16)]
SOME = list(itertools.product(map(random_sizes, range(12)), [10, 60]))


@cases(
    ("sizes", "max_passes"),
    ONE + SOME,
    fast=[((-24,), 5), ((15,), 5), (random_sizes(1), 10), (random_sizes(1), 60)],
)
def test_it_is_the_largest_at_which_a_step_on_each_batch_that_was_tried_is_finite(
    sizes, max_passes
):
    found = calibrate(map(batch, sizes), max_passes=max_passes)
    assert found.passes <= max_passes
    size = max(sizes[: found.batches])
    assert step_is_finite(found.init_scale, size)
    assert ("too few" in str(found)) == (not found.is_largest)
    if max_passes != 10:
        assert found.is_largest
        assert found.batches == len(sizes)
    if not found.is_largest:
        return
    # One power of two more only fits if the largest scale to try, 2**24, did.
    limit_fits = "No loss scale up to 2**24, the largest to try, ov" in str(found)
    assert limit_fits == (found.init_scale == 2.0**24)
    assert step_is_finite(2 * found.init_scale, size) == (size < -9)
    assert found.overflows_at == (None if limit_fits else 2 * found.init_scale)


def test_one_program_for_all_passes():
    traces = []

    def traced_loss_fn(w, x):
        traces.append(x)
        return loss_fn(w, x)

    batches = map(batch, [2, 1, 4, 4, 0, 1, 2, 3])
    found = diagnostics.calibrate(traced_loss_fn, W, batches)
    assert (found.passes, found.batches, len(traces)) == (10, 4, 1)
    assert len(list(batches)) == 3  # each is taken only when its turn comes


def test_even_the_least_scale_overflows():
    batches = list(jnp.float16([1, 0]))  # the gradient of the root is inf where x is 0
    found = calibrate(batches, lambda w, x: jnp.sqrt(w * x).astype(jnp.float32))
    assert (found.init_scale, found.overflows_at, found.batches) == (None, 1.0, 2)
    assert "Even loss scale 2**0 overflows on batches[1]" in str(found)
    assert found.passes <= 10


RANGES = [(0, 24), (20, 30), (-10, 126), (3, 3)]
CARRIED = itertools.product([-14, -3, 0, 4, 15], RANGES)


@cases(("size", "ends"), CARRIED, fast=[(-3, (20, 30)), (15, (-10, 126))])
def test_a_float16_loss_carries_no_more_than_it_holds(size, ends):
    low, high = np.exp2(ends)
    found = calibrate(
        [jnp.float16(2.0**size)], jnp.multiply, min_scale=low, max_scale=high
    )
    assert found.passes <= 8
    assert found.is_largest
    largest = min(high, 2.0**15, 2.0 ** (15 - size))
    if largest < min(low, 2.0**15):
        largest = None
        assert found.overflows_at <= 2.0**15
    assert found.init_scale == largest


# What is passed otherwise than by default, the error, and its message.
ERRORS = {
    "no batch": ({"batches": []}, ValueError, r"batches=.*at least one batch"),
    "one batch": (
        {"batches": jnp.ones(3)},
        TypeError,
        r"list of batches, got one.*Pass \[batch\]",
    ),
    "one dict": ({"batches": {"x": 1}}, TypeError, r"got one dict.*Pass \[batch\]"),
    "loss is NaN": (
        {"batches": [batch(0), batch(np.nan)]},
        ValueError,
        r"batches\[1\] is NaN at",
    ),
    "not a power": ({"max_scale": 1e3}, ValueError, r"max_scale.*power of two"),
    "not in order": (
        {"min_scale": 2.0**25},
        ValueError,
        r"min_scale <= max_scale",
    ),
    "few passes": ({"max_passes": 4}, ValueError, r"max_passes=.*at least 5, got 4"),
    "not a scalar": (
        {"batches": [(jnp.ones(2, jnp.float16), 1.0)]},
        TypeError,
        r"scalar, got float32\[2\]",
    ),
    "module": (
        {"params": {"w": W, "act": loss_fn}},
        TypeError,
        r"got `function` at args\[0\]\['act'\].*"
        r"transform=equinox.filter_value_and_grad and jit=equinox.filter_jit",
    ),
    "aux": ({"has_aux": True}, TypeError, r"must return a pair"),
}


@cases("name", ERRORS)
def test_errors(name):
    options, error, message = ERRORS[name]
    arguments = {"params": W, "batches": [batch(0)]} | options
    with pytest.raises(error, match=message):
        diagnostics.calibrate(loss_fn, **arguments)

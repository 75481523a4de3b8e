"""The largest scale that does not overflow, against trying every scale."""

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

import jaxscale
from jaxscale import diagnostics

W = jnp.float16(1.0)


def loss_fn(w, batch):
    """A loss whose gradient with respect to `w`, in float16, is the product of both."""
    x, factor = batch
    return (w * x).astype(jnp.float32) * factor


def batch(exponent):
    """A batch with gradient 2**exponent, whose cotangents are no larger than that."""
    return jnp.float16(2.0 ** max(exponent, 0)), jnp.float32(2.0 ** min(exponent, 0))


def calibrate(batches, fun=loss_fn, **options):
    """Without compilation, which takes longer than the passes."""
    return diagnostics.calibrate(fun, W, batches, jit=lambda fun: fun, **options)


SIZES = range(-24, 16)


def step_is_finite(loss_scale, size):
    state = jaxscale.FixedLossScale(loss_scale).init()
    grads = jaxscale.grad(loss_fn, state)(W, batch(size))
    return bool(jaxscale.all_finite(grads))


@cases("size", SIZES, fast=[-24, 15])  # no scale overflows, and all but 1
def test_it_is_the_largest_at_which_a_training_step_is_finite(size):
    # Five passes are enough to tell 25 scales and none apart.
    calibration = calibrate([batch(size)], max_passes=5)
    largest = 2.0 ** (15 - size)
    assert calibration.init_scale == min(2.0**24, largest)
    assert step_is_finite(calibration.init_scale, size)
    # One power of two more only fits if the largest scale to try, 2**24, did.
    assert step_is_finite(2 * calibration.init_scale, size) == (largest > 2.0**24)
    if largest >= 2.0**24:
        assert calibration.overflows_at is None
        words = (
            "No loss scale up to 2**24, the largest to try, overflows (batches: 1, b"
        )
        assert words in str(calibration)
    else:
        assert calibration.overflows_at == 2 * calibration.init_scale
    assert calibration.is_largest
    assert calibration.batches == 1


def random_sizes(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(-9, 16, rng.integers(1, 12)).tolist()


@cases(
    ("seed", "max_passes"),
    itertools.product(range(12), [10, 60]),
    fast=[(1, 10), (1, 60)],
)
def test_it_is_right_about_the_batches_it_was_tried_on(seed, max_passes):
    sizes = random_sizes(seed)
    calibration = calibrate(map(batch, sizes), max_passes=max_passes)
    assert calibration.passes <= max_passes
    largest = 2.0 ** (15 - max(sizes[: calibration.batches]))
    if calibration.is_largest:
        assert calibration.init_scale == largest
    else:
        assert calibration.init_scale <= largest
    assert ("too few" in str(calibration)) == (not calibration.is_largest)
    if max_passes == 60:  # enough for all
        assert calibration.is_largest
        assert calibration.batches == len(sizes)


def test_one_program_for_all_passes():
    traces = []

    def traced_loss_fn(w, x):
        traces.append(x)
        return loss_fn(w, x)

    batches = map(batch, [2, 1, 4, 4, 0, 1, 2, 3])
    calibration = diagnostics.calibrate(traced_loss_fn, W, batches)
    assert (calibration.passes, calibration.batches) == (10, 4)
    assert len(traces) == 1
    assert len(list(batches)) == 3  # each is taken only when its turn comes


def test_even_the_least_scale_overflows():
    def root(w, x):
        return jnp.sqrt(w * x).astype(jnp.float32)

    batches = list(jnp.float16([1, 0]))  # the gradient of the root is inf where x is 0
    calibration = diagnostics.calibrate(root, W, batches)
    assert (calibration.init_scale, calibration.overflows_at) == (None, 1.0)
    assert calibration.batches == 2
    assert "Even loss scale 2**0 overflows on batches[1]" in str(calibration)
    assert calibration.passes <= 10


RANGES = [(0, 24), (20, 30), (-10, 126), (3, 3)]
CARRIED = itertools.product([-14, -3, 0, 4, 15], RANGES)


@cases(("size", "ends"), CARRIED, fast=[(-3, (20, 30)), (15, (-10, 126))])
def test_a_float16_loss_carries_no_more_than_it_holds(size, ends):
    low, high = ends
    calibration = calibrate(
        [jnp.float16(2.0**size)],
        lambda w, x: w * x,
        min_scale=2.0**low,
        max_scale=2.0**high,
    )
    assert calibration.passes <= 8
    largest = min(high, 15, 15 - size)
    if largest < min(low, 15):
        assert calibration.init_scale is None
    else:
        assert calibration.init_scale == 2.0**largest


class Misuse(NamedTuple):
    """Bad arguments, and the error that they raise."""

    error: type[Exception]
    message: str
    batches: Any = (batch(0),)
    options: Mapping[str, Any] = MappingProxyType({})
    params: Any = W


ERRORS = {
    "no batch": Misuse(ValueError, r"batches=.*at least one batch", batches=[]),
    "one batch": Misuse(
        TypeError,
        r"list of batches, got one.*Pass \[batch\]",
        batches=jnp.ones(3),
    ),
    "one dict": Misuse(
        TypeError,
        r"got one dict.*Pass \[batch\]",
        batches={"x": batch(0)},
    ),
    "loss is NaN": Misuse(
        ValueError,
        r"batches\[1\] is NaN at",
        batches=[batch(0), batch(np.nan)],
    ),
    "not a power": Misuse(
        ValueError,
        r"max_scale.*power of two",
        options={"max_scale": 1e3},
    ),
    "not in order": Misuse(
        ValueError,
        r"min_scale <= max_scale",
        options={"min_scale": 2.0**25},
    ),
    "few passes": Misuse(
        ValueError,
        r"max_passes=.*at least 5, got 4",
        options={"max_passes": 4},
    ),
    "not a scalar": Misuse(
        TypeError,
        r"scalar, got float32\[2\]",
        batches=[(jnp.ones(2, jnp.float16), 1.0)],
    ),
    "module": Misuse(
        TypeError,
        r"got `function` at args\[0\]\['act'\].*"
        r"transform=equinox.filter_value_and_grad and jit=equinox.filter_jit",
        params={"w": W, "act": loss_fn},
    ),
    "aux": Misuse(TypeError, r"must return a pair", options={"has_aux": True}),
}


@cases("name", ERRORS)
def test_errors(name):
    misuse = ERRORS[name]
    with pytest.raises(misuse.error, match=misuse.message):
        diagnostics.calibrate(loss_fn, misuse.params, misuse.batches, **misuse.options)

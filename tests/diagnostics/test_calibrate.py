"""The largest scale that does not overflow, against trying every scale."""

import itertools

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


@cases("size", range(-24, 16), fast=[-24, 15])
def test_it_is_the_largest_that_does_not_overflow(size):
    found = calibrate([batch(size)], max_passes=5)  # enough to tell 25 scales and none apart
    largest = min(24, 15 - size)
    assert (found.init_scale, found.batches, found.is_largest) == (2.0**largest, 1, True)
    assert found.overflows_at == (None if largest == 24 else 2.0 ** (largest + 1))
    # As a training step computes it, and at one power of two more.
    for k, finite in ((largest, True), (largest + 1, size + largest < 15)):
        grads = jaxscale.grad(loss_fn, jaxscale.FixedLossScale(2.0**k).init())(W, batch(size))
        assert jaxscale.all_finite(grads) == finite


@cases("seed", range(12), fast=[1])
def test_several_batches_are_all_served(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(-9, 16, rng.integers(1, 12)).tolist()
    found = calibrate(map(batch, sizes), max_passes=60)
    assert found.init_scale == 2.0 ** min(15 - size for size in sizes)
    assert (found.batches, found.is_largest) == (len(sizes), True)
    few = calibrate(map(batch, sizes))
    assert few.passes <= 10
    # With fewer passes it says how many batches it knows of, and is right about those.
    least = min(15 - size for size in sizes[: few.batches])
    assert few.init_scale == 2.0**least if few.is_largest else few.init_scale <= 2.0**least
    assert ("too few" in str(few)) == (not few.is_largest)


def test_one_program_for_all_passes():
    traces, batches = [], map(batch, [2, 1, 4, 4, 0, 1, 2, 3])
    found = diagnostics.calibrate(lambda w, x: traces.append(x) or loss_fn(w, x), W, batches)
    assert (found.passes, found.batches, len(traces)) == (10, 4, 1)
    assert len(list(batches)) == 3  # each is taken only when its turn comes


def test_even_the_least_scale_overflows_or_none():
    batches = list(jnp.float16([1, 0]))  # the gradient of the root is inf where x is 0
    found = diagnostics.calibrate(lambda w, x: jnp.sqrt(w * x).astype(jnp.float32), W, batches)
    assert (found.init_scale, found.overflows_at, found.batches) == (None, 1.0, 2)
    assert "Even loss scale 2**0 overflows on batches[1]" in str(found)
    assert found.passes <= 10
    none = calibrate([batch(-24)])
    assert "No loss scale up to 2**24, the largest to try, overflows (batches: 1, b" in str(none)


RANGES = [(0, 24), (20, 30), (-10, 126), (3, 3)]
CARRIED = itertools.product([-14, -3, 0, 4, 15], RANGES)


@cases(("size", "ends"), CARRIED, fast=[(-3, (20, 30)), (15, (-10, 126))])
def test_a_float16_loss_carries_no_more_than_it_holds(size, ends):
    low, high = ends
    options = {"min_scale": 2.0**low, "max_scale": 2.0**high}
    found = calibrate([jnp.float16(2.0**size)], lambda w, x: w * x, **options)
    low, high = min(low, 15), min(high, 15)
    good = [k for k in range(low, high + 1) if size + k <= 15]
    assert found.init_scale == (2.0 ** good[-1] if good else None)
    assert found.passes <= 8


ERRORS = {
    "no batch": ([], {}, ValueError, r"batches=.*at least one batch"),
    "one batch": (jnp.ones(3), {}, TypeError, r"list of batches, got one.*Pass \[batch\]"),
    "one dict": ({"x": batch(0)}, {}, TypeError, r"got one dict.*Pass \[batch\]"),
    "loss is NaN": ([batch(0), batch(np.nan)], {}, ValueError, r"batches\[1\] is NaN at"),
    "not a power": ([batch(0)], {"max_scale": 1e3}, ValueError, r"max_scale.*power of two"),
    "not in order": ([batch(0)], {"min_scale": 2.0**25}, ValueError, r"min_scale <= max_scale"),
    "few passes": ([batch(0)], {"max_passes": 4}, ValueError, r"max_passes=.*at least 5, got 4"),
    "not a scalar": ([(jnp.ones(2, "float16"), 1.0)], {}, TypeError, r"scalar, got float32\[2\]"),
    "aux": ([batch(0)], {"has_aux": True}, TypeError, r"must return a pair"),
}  # fmt: skip


@cases("name", ERRORS)
def test_errors(name):
    batches, options, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        diagnostics.calibrate(loss_fn, W, batches, **options)

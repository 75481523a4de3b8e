"""`sizes`: counts against a plain search among all numbers of a format, and the table of them."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tables import PASSIVE, cases

from jaxscale import diagnostics


def test_five_numbers_are_counted():
    grads = {"w": jnp.array([1.5, 1e-9, 1e-6, 0.0, jnp.nan])}
    found = diagnostics.sizes(grads)
    assert found.rows == (("w", 5, 1, 0, 1, 1, 1, 0, 1.5),)
    assert (found.dtype, found.loss_scale) == ("float16", 1.0)
    (row,) = diagnostics.sizes(grads, jnp.bfloat16, loss_scale=2.0**10).rows
    assert (row.flushed, row.subnormal, row.lost) == (0, 0, 0.0)


FORMATS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]


def numbers_of(dtype):
    """The positive finite numbers of a format and 0, by their bits, and the number of bits below 1.

    Each is at the place that its bits say, so that an even place is an even number.
    """
    bits = ml_dtypes.finfo(dtype).bits
    numbers = np.arange(2 ** (bits - 1), dtype=f"uint{bits}").view(dtype)
    with np.errstate(invalid="ignore"):  # of signaling NaNs
        numbers = numbers.astype(np.float64)
    return numbers[np.isfinite(numbers)], 2 ** ml_dtypes.finfo(dtype).nmant


def between(numbers):
    """The numbers halfway between two of a format, and that beyond which its largest ends."""
    above = 2 * numbers[-1] - numbers[-2]
    return (numbers + np.append(numbers[1:], above)) / 2


def expected_counts(leaf, dtype, scale):
    """How many of the nonzero finite numbers a format makes 0, subnormal, and inf."""
    numbers, num_subnormal = numbers_of(dtype)
    halves = between(numbers)
    x = np.abs(leaf)
    x = x[np.isfinite(x) & (x > 0)] * np.float64(scale)
    place = np.searchsorted(halves, x, side="left")
    is_tie = (place < len(halves)) & (x == halves[np.minimum(place, len(halves) - 1)])
    place = place + (is_tie & (place % 2 == 1))
    return [
        np.sum(place == 0),
        np.sum((place > 0) & (place < num_subnormal)),
        np.sum(place == len(numbers)),
    ]


def random_bits(number, dtype):
    bits = jnp.finfo(dtype).bits
    rng = np.random.default_rng(0)
    return rng.integers(0, 2**bits, number, f"uint{bits}").view(jnp.dtype(dtype))


def leaf_of(kind, dtype, scale):
    """Numbers of all sizes; in float64, with all ties of a format and their neighbours."""
    if kind == "complex64":
        return random_bits(4002, "float32").view(np.complex64)
    if kind != "float64":
        return random_bits(4001, kind)
    ties = between(numbers_of(dtype)[0]) / scale
    neighbours = [np.nextafter(ties, end) for end in (0, -np.inf, np.inf)]
    return np.concatenate([ties, -ties, *neighbours, [np.nan, np.inf, -0.0, 1e200]])


KINDS = ["float64", "float32", "float16", "bfloat16", "complex64", "float8_e5m2"]
SCALES = [2.0**-20, 1.0, 2.0**15, 2.0**100]
FAST = [("float64", dtype, 2.0**15) for dtype in FORMATS]
FAST += [(kind, "float16", 1.0) for kind in KINDS[1:]]
FAST += [("float32", "bfloat16", 2.0**-20), ("float32", "float8_e4m3fn", 2.0**100)]


@cases(("kind", "dtype", "scale"), itertools.product(KINDS, FORMATS, SCALES), fast=FAST)
def test_counts_are_those_of_a_search_among_all_numbers(kind, dtype, scale):
    leaf = leaf_of(kind, dtype, scale)
    parts = leaf.view(np.float32) if kind == "complex64" else leaf
    with np.errstate(invalid="ignore"):  # of signaling NaNs
        parts = np.asarray(parts).astype(np.float64)
    (row,) = diagnostics.sizes({"w": leaf}, dtype, scale).rows
    found = [row.flushed, row.subnormal, row.overflowed]
    assert found == expected_counts(parts, dtype, scale)
    others = [np.sum(np.isnan(parts)), np.sum(np.isinf(parts)), np.sum(parts == 0)]
    assert [row.size, row.nan, row.inf, row.zero] == [parts.size, *others]
    assert row.largest == np.max(np.abs(parts), where=np.isfinite(parts), initial=0)


def test_a_scale_may_be_any_number_or_an_array():
    grads = {"w": jnp.array([2.0**-24 / 3, 65504.0 / 3])}
    for scale in (3.0, np.float32(3), jnp.float32(3)):
        (row,) = diagnostics.sizes(grads, loss_scale=scale).rows
        assert (row.flushed, row.subnormal, row.overflowed) == (0, 1, 0)


def test_what_is_not_a_gradient_is_left_out():
    grads = {"w": jnp.ones((2, 3)), "scalar": 3.0, "empty": jnp.zeros((0, 4))}
    overwritten = {"_overwrite_with_gradient": {"amax": jnp.array(jnp.nan)}}
    rows = diagnostics.sizes(grads | PASSIVE | overwritten).rows
    assert {row.path: (row.size, row.largest) for row in rows} == {
        "w": (6, 1),
        "scalar": (1, 3),
        "empty": (0, 0),
    }
    assert diagnostics.sizes(PASSIVE).rows == ()


def test_the_worst_leaf_comes_first_and_24_are_printed():
    grads = {
        "fine": jnp.ones(4),
        "large": jnp.full(4, 2.0),
        "tiny": jnp.full(4, 1e-9),
        "huge": jnp.array([1e9, 1e9, 1.0, 1.0]),
        "small": jnp.full(4, 1e-6),
        "few": jnp.ones(100).at[:3].set(jnp.nan),
        "many": jnp.array([jnp.inf, -jnp.inf, 1.0]),
    }
    found = diagnostics.sizes(grads)
    order = ["many", "few", "tiny", "huge", "small", "large", "fine"]
    assert [row.path for row in found.rows] == order
    heading, *lines = str(diagnostics.sizes([grads] * 4, jnp.bfloat16)).splitlines()
    assert heading == (
        "Leaves with inf or NaN: 8 of 28. In bfloat16 at loss scale 2**0:"
    )
    assert (len(lines), lines[-1]) == (1 + 24 + 1, "and 4 more")


BAD = {
    r"`sizes\(loss_scale=...\)` must be a finite number, got '8'": (TypeError, "8"),
    r"`sizes\(loss_scale=...\)` must be a finite number, got nan": (ValueError, np.nan),
    r"`sizes\(loss_scale=...\)` must lie in float32's normal range": (ValueError, 0.0),
}


@cases("message", BAD)
def test_another_scale_is_an_error(message):
    error, scale = BAD[message]
    with pytest.raises(error, match=message):
        diagnostics.sizes({"w": jnp.ones(2)}, loss_scale=scale)


def test_neither_integers_nor_traced_numbers_are_counted():
    with pytest.raises(ValueError, match="int8"):
        diagnostics.sizes({"w": jnp.ones(2)}, jnp.int8)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(diagnostics.sizes)({"w": jnp.ones(2)})

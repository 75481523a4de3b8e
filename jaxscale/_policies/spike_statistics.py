"""The mean and the standard deviation of a window of the last values.

A window is scaled to about 1 before its statistics are computed in float32. Otherwise its squares
could overflow: after a single 1e30 the deviation would be inf, and nothing would be a spike until
that value has left the window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._trees.numbers import (
    EXPONENT_BIAS,
    INFINITY_BITS,
    MANTISSA_BITS,
    float_bits,
    float_of_bits,
)

# The standard deviation counts as at least this fraction of the mean: float32 resolves about 1e-7.
_MIN_RELATIVE_STD = 1e-6


class Statistics(NamedTuple):
    """The mean and the standard deviation of a window, both in multiples of `unit`."""

    mean: jax.Array  # f32[]
    std: jax.Array  # f32[], with n - 1 in the divisor
    num_finite: jax.Array  # i32[], how many entries they come from: the finite ones
    unit: jax.Array  # f32[], a power of two
    inverse_unit: jax.Array  # f32[]


def min_relative_std(dtype: DTypeLike) -> float:
    """Returns the least relative standard deviation that values of a dtype are taken to have."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return _MIN_RELATIVE_STD
    half_spacing = float(jnp.finfo(dtype).eps) / 2
    return max(_MIN_RELATIVE_STD, half_spacing)


def measure(window: jax.Array, count: jax.Array) -> Statistics:
    """Measures the mean and the standard deviation of the `count` newest entries of a window.

    The window is an `f32[n]` with the newest entry last.
    """
    length = window.shape[0]
    positions = jnp.arange(length, dtype=jnp.int32)
    # An inf or a NaN in a restored window would spoil both results.
    is_entry = (positions >= length - count) & jnp.isfinite(window)
    num_finite = jnp.sum(is_entry, dtype=jnp.int32)
    sizes = jnp.where(is_entry, jnp.abs(window), 0.0)
    unit, inverse_unit = _round_down_to_power_of_two(jnp.max(sizes))

    # Two passes, with the newest entry as the origin: the first finds the mean, the second the
    # deviations from it. For equal entries this is exact, where the sum of 128 numbers would be off
    # by several roundings.
    scaled = jnp.where(is_entry, window * inverse_unit, 0.0)
    entry_positions = jnp.where(is_entry, positions, 0)
    newest = jnp.max(entry_positions)
    origin = scaled[newest]
    offsets = jnp.where(is_entry, scaled - origin, 0.0)
    # At least 2, as the squares are divided by one less. The mean of one entry is right as well,
    # since its offset is 0.
    divisor = jnp.maximum(num_finite, 2).astype(jnp.float32)
    mean_offset = jnp.sum(offsets) / divisor
    squares = jnp.where(is_entry, jnp.square(offsets - mean_offset), 0.0)
    std = jnp.sqrt(jnp.sum(squares) / (divisor - 1))
    return Statistics(
        mean=origin + mean_offset,
        std=std,
        num_finite=num_finite,
        unit=unit,
        inverse_unit=inverse_unit,
    )


def _round_down_to_power_of_two(size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest power of two up to `size`, and its inverse.

    Both are kept within the normal numbers: for 0, the power is the smallest of them. They are made
    from bits: a logarithm is rounded, and a division is not exact on every device.
    """
    smallest = 1 << MANTISSA_BITS  # the bits of the smallest normal number
    # The bits of a power of two and those of its inverse add up to twice the bits of 1.0.
    total = (2 * EXPONENT_BIAS) << MANTISSA_BITS
    bits = float_bits(size) & INFINITY_BITS  # without those of the mantissa
    bits = jnp.clip(bits, smallest, total - smallest)
    both = jnp.stack([bits, total - bits])
    power, inverse = float_of_bits(both)
    return power, inverse

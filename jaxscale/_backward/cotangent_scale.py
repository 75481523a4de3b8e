"""The scale of `scale_backward`: how large cotangents are, and which power of two it is."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._gradients.reduction import reduce_sizes
from .._gradients.scaled import Scaled
from .._gradients.verdict import agree_on_size
from .._jax.jaxprs import AxisNames
from .._trees.leaves import cast, widen
from .._trees.numbers import EXPONENT_BIAS, MANTISSA_BITS, float_bits, float_of_bits

# The magnitudes of cotangents come to sum to about 2 to this power, as those of a mean do under a
# loss scale of 2**15. The gradient of a weight is about as large as that sum at most.
_SUM_EXPONENT = 15

# But the largest comes to stand at about 2 to this power at most. On its way back it may grow by
# 2**5, and does not overflow in float16.
_MOST_EXPONENT = 10


class Sizes(NamedTuple):
    """The sizes of some cotangents, on all devices along the axes."""

    largest: jax.Array  # f32[], the largest magnitude
    largest_reciprocal: jax.Array  # f32[], of the magnitudes that are not 0
    total: (
        jax.Array
    )  # f32[], the sum of the magnitudes on one device, the largest of such


def find_sizes(cotangents: Sequence[Any], axes: AxisNames) -> Sizes:
    """Returns the sizes of cotangents."""
    sizes = jnp.stack(list(map(_find_sizes, cotangents)))
    largest, reciprocals, totals = sizes.T
    total = jnp.sum(float_of_bits(totals))
    bits = [jnp.max(largest), jnp.max(reciprocals), float_bits(total)]
    return Sizes(*agree_on_size(jnp.stack(bits), axes))


# Compiled as a function, as a block that is called a hundred times may have a hundred cotangents.
@jax.jit
def _find_sizes(cotangent: jax.Array) -> jax.Array:
    """Returns what `Sizes` holds of one cotangent, as bits, an `i32[3]`.

    What is 0 or NaN has no reciprocal.
    """
    size = magnitude(cotangent)
    smallest = jnp.finfo(size.dtype).smallest_normal
    reciprocal = jnp.where(size > 0, 1 / jnp.maximum(size, smallest), 0)
    bits = [
        reduce_sizes(Scaled([each])).largest_bits() for each in (cotangent, reciprocal)
    ]
    total = cast(jnp.sum(size), jnp.float32)
    return jnp.stack([*bits, float_bits(total)])


def magnitude(cotangent: jax.Array) -> jax.Array:
    """Returns the magnitudes of a cotangent, in float32 or wider."""
    return jnp.abs(widen(cotangent))


def choose_power(largest: jax.Array, total: jax.Array) -> jax.Array:
    """Returns the power of two to scale cotangents by.

    It brings the sum of their magnitudes to 2**15 or more, below 2**16, unless it would bring the
    largest below 1, or to 2**11 or more. It lies between 2**-126 and 2**126, so that it and its
    reciprocal are normal numbers. If a cotangent is not finite, it is 1. Exponents are taken from
    the bits: a rounded logarithm gives other numbers.
    """
    highest = _exponent(largest)
    exponent = _SUM_EXPONENT - _exponent(total)
    exponent = jnp.clip(exponent, -highest, _MOST_EXPONENT - highest)
    exponent = jnp.clip(exponent, 1 - EXPONENT_BIAS, EXPONENT_BIAS - 1)
    power = float_of_bits((exponent + EXPONENT_BIAS) << MANTISSA_BITS)
    return jnp.where(jnp.isfinite(largest), power, jnp.ones_like(power))


def _exponent(number: jax.Array) -> jax.Array:
    return (float_bits(number) >> MANTISSA_BITS) - EXPONENT_BIAS

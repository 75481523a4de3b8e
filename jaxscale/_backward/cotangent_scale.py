"""The scale of `scale_backward`: which power of two it is."""

import jax
import jax.numpy as jnp

from .._trees.numbers import EXPONENT_BIAS, MANTISSA_BITS, float_bits, float_of_bits

# The cotangents of one loss may be smaller than those of another by 2 to this power, and keep
# their accuracy in float16. If they are smaller, the scale rises.
_HARMLESS_EXPONENTS = 12

# The scale rises by 2 to this power at most: one retry takes that back.
MOST_RAISED = 4


def choose_power(largest: jax.Array, most_raised: int) -> jax.Array:
    """Returns the power of two to scale cotangents by: it brings the largest to 1 or more, below 2.

    `largest` is an `f32[n]`: for each entry, the largest magnitude of its cotangent. If some are
    so small that they would flush, the power is raised, by 2**`most_raised` at most. It lies
    between 2**-126 and 2**126, so that it and its reciprocal are normal numbers. If a cotangent is
    not finite, it is 1. Exponents are taken from the bits: a rounded logarithm gives other numbers.
    """
    exponents = float_bits(largest) >> MANTISSA_BITS
    highest = jnp.max(exponents)
    # An entry of zeros says nothing.
    lowest = jnp.min(jnp.where(largest > 0, exponents, highest))
    spread = highest - lowest
    raised = jnp.clip(spread - _HARMLESS_EXPONENTS, 0, most_raised)
    # The bias is in both exponents.
    exponent = 2 * EXPONENT_BIAS - highest + raised
    exponent = jnp.clip(exponent, 1, 2 * EXPONENT_BIAS - 1)
    power = float_of_bits(exponent << MANTISSA_BITS)
    is_finite = jnp.all(jnp.isfinite(largest))
    return jnp.where(is_finite, power, jnp.ones_like(power))

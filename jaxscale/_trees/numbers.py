"""The bits of floats."""

import jax
import jax.numpy as jnp

# The normal numbers of float32.
SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).smallest_normal)
LARGEST = float(jnp.finfo(jnp.float32).max)

INFINITY_BITS = 0x7F800000  # of float32; a NaN of that sign has larger ones

# The bits of a positive float32 are those of the exponent, to which the bias is added, and below
# them those of the mantissa.
MANTISSA_BITS = 23
EXPONENT_BIAS = 127


def float_bits(numbers: jax.Array) -> jax.Array:
    """Returns the bits of floats as integers of their width."""
    integer = jnp.dtype(f"int{jnp.finfo(numbers.dtype).bits}")
    return jax.lax.bitcast_convert_type(numbers, integer)


def float_of_bits(bits: jax.Array) -> jax.Array:
    """Returns the floats that have some bits, of the width of those."""
    floating = jnp.dtype(f"float{jnp.iinfo(bits.dtype).bits}")
    return jax.lax.bitcast_convert_type(bits, floating)

"""Counters that stop at their limit, and the bits of float32's infinity."""

import jax
import jax.numpy as jnp
import optax

INFINITY_BITS = 0x7F800000  # of float32; a NaN of that sign has larger ones


def increment(counter: jax.Array) -> jax.Array:
    """Returns a counter plus 1, or its dtype's largest number if it is there already."""
    return jnp.asarray(optax.safe_increment(counter))


def increment_if(event: jax.Array, counter: jax.Array) -> jax.Array:
    """Returns a counter plus 1 where something happened, and the counter where it did not."""
    return jnp.where(event, increment(counter), counter)

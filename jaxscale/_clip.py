"""Clipping by the global norm, which the pass that gives the verdict can give, too."""

from typing import Any

import jax
import jax.numpy as jnp

from ._finite import read
from ._tree import cast, map_gradients


def global_norm(grads: Any) -> jax.Array:
    """Returns the square root of the sum of all squares, an ``f32[]`` or wider."""
    return jnp.sqrt(read(grads, squares=True).squares())


def clip_by_global_norm(grads: Any, norm: jax.Array, max_norm: float) -> Any:
    """Returns gradients of a known norm, scaled down to ``max_norm`` if that is less.

    The rule of ``optax.clip_by_global_norm``, but by one product: a division of each gradient
    is stored where it is used twice, as XLA takes it to be expensive, and optimizers do.
    """
    info = jnp.finfo(norm.dtype)
    if max_norm > float(info.max):
        return grads  # "no clipping": as a number of the norm's dtype it would be inf
    max_norm = max(max_norm, float(info.smallest_normal))  # below it, 0 / 0
    factor = max_norm / jnp.maximum(norm, max_norm)  # exactly 1 if the norm is less
    return map_gradients(lambda leaf: leaf * cast(factor, jnp.finfo(leaf.dtype).dtype), grads)

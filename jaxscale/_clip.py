"""Clipping by the global norm, which the pass that gives the verdict can give, too."""

from typing import Any

import jax
import jax.numpy as jnp

from ._finite import combined, evidence
from ._tree import cast, map_gradients


def global_norm(grads: Any) -> jax.Array:
    """Returns the square root of the sum of all squares, an ``f32[]`` or wider."""
    return jnp.sqrt(combined(evidence(grads, squares=True))[1])


def clip_by_global_norm(grads: Any, norm: jax.Array, max_norm: float) -> Any:
    """Returns gradients of a known norm, scaled down to ``max_norm`` if that is less.

    By the rule of ``optax.clip_by_global_norm``, rounding included.
    """

    def clip(leaf: Any) -> jax.Array:
        real = jnp.finfo(leaf.dtype).dtype
        return jax.lax.select(
            norm < max_norm, leaf, leaf / cast(norm, real) * jnp.array(max_norm, real)
        )

    return map_gradients(clip, grads)

"""Checks of what policies take: their factors, and what a step has found in the gradients.

Those of arguments that others have as well are in `_trees/arguments.py`.
"""

import numbers

import jax
import jax.numpy as jnp

from .._trees.arguments import describe_value, finite_number, limited

check_growth_factor = limited(
    finite_number,
    lambda factor: factor > 1,
    "be above 1",
    " It multiplies the scale: pass 2.0 to double it, or use `FixedLossScale` for a scale that "
    "does not grow.",
)
check_backoff_factor = limited(
    finite_number,
    lambda factor: 0 < factor < 1,
    "lie between 0 and 1",
    " It multiplies the scale: pass 0.5 to halve it.",
)


def check_largest(call: str, value: object) -> jax.Array:
    """Returns the argument `largest` of a call as an `f32[]` array, or raises a `TypeError`."""
    dtype = getattr(value, "dtype", float if isinstance(value, numbers.Real) else None)
    is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    if not is_floating or getattr(value, "shape", ()):
        raise TypeError(
            f"`{call}(largest=...)` must be a floating scalar, the largest absolute value among "
            f"the gradients, got {describe_value(value)}. `update(state, grads)` finds it."
        )
    return jnp.asarray(value, jnp.float32)

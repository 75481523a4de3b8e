"""Checks of what policies take: their factors, and what a step has found in the gradients.

Those of arguments that others have as well are in `_trees/checks.py`.
"""

import numbers
from typing import Any

import jax
import jax.numpy as jnp

from .._trees.checks import describe_value, finite_number


def check_growth_factor(call: str, name: str, value: Any) -> float:
    """Returns `value` as a float above 1."""
    factor = finite_number(call, name, value)
    if not factor > 1:
        raise ValueError(
            f"`{call}({name}=...)` must be above 1, got {factor}. It multiplies the scale: "
            "pass 2.0 to double it, or use `FixedLossScale` for a scale that does not grow."
        )
    return factor


def check_backoff_factor(call: str, name: str, value: Any) -> float:
    """Returns `value` as a float between 0 and 1."""
    factor = finite_number(call, name, value)
    if not 0 < factor < 1:
        raise ValueError(
            f"`{call}({name}=...)` must lie between 0 and 1, got {factor}. It multiplies the "
            "scale: pass 0.5 to halve it."
        )
    return factor


def check_largest(call: str, value: Any) -> jax.Array:
    """Returns the argument `largest` of a call as an `f32[]` array, or raises a `TypeError`."""
    dtype = getattr(value, "dtype", None)
    is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    is_scalar_array = is_floating and value.shape == ()
    if not is_scalar_array and not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{call}(largest=...)` must be a floating scalar, the largest absolute value among "
            f"the gradients, got {describe_value(value)}. `update(state, grads)` finds it."
        )
    return jnp.asarray(value, jnp.float32)

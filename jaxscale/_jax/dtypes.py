"""What a dtype can hold. A token or an abstract value without a dtype is no number: pass `None`."""

import functools
from typing import Any

import jax.numpy as jnp

__all__ = ["has_narrow_range", "is_half", "is_inexact"]

_FLOAT32 = jnp.finfo(jnp.float32)


@functools.cache
def is_inexact(dtype: Any) -> bool:
    """Returns whether a dtype holds floating-point or complex numbers."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


@functools.cache
def is_half(dtype: Any) -> bool:
    """Returns whether a dtype is floating-point with fewer bits than float32."""
    return is_inexact(dtype) and jnp.finfo(dtype).bits < _FLOAT32.bits


@functools.cache
def has_narrow_range(dtype: Any) -> bool:
    """Returns whether a dtype is floating-point with a smaller range than float32, as float16.

    What float32 holds may overflow or flush to 0 in it. bfloat16 has the range of float32.
    """
    return is_inexact(dtype) and jnp.finfo(dtype).maxexp < _FLOAT32.maxexp

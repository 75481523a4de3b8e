"""Ranges of dtypes. `holds_*` ask an array or a type, which need not have a dtype."""

import functools

import jax.numpy as jnp

from .jaxpr_types import DTypeLike

__all__ = ["has_narrow_range", "holds_half", "holds_inexact", "is_half", "is_inexact"]

_FLOAT32 = jnp.finfo(jnp.float32)


@functools.cache
def is_inexact(dtype: DTypeLike | None) -> bool:
    """Returns whether a dtype holds floating-point or complex numbers."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


@functools.cache
def is_half(dtype: DTypeLike | None) -> bool:
    """Returns whether a dtype is floating-point with fewer bits than float32."""
    return is_inexact(dtype) and jnp.finfo(dtype).bits < _FLOAT32.bits


@functools.cache
def has_narrow_range(dtype: DTypeLike | None) -> bool:
    """Returns whether a dtype is floating-point with a smaller range than float32, as float16.

    What float32 holds may overflow or flush to 0 in it. bfloat16 has the range of float32.
    """
    return is_inexact(dtype) and jnp.finfo(dtype).maxexp < _FLOAT32.maxexp


def holds_inexact(typed: object) -> bool:
    """Returns whether an array, or a type, is of floating-point or complex numbers.

    The type of a token has no dtype, and holds none.
    """
    return is_inexact(getattr(typed, "dtype", None))


def holds_half(typed: object) -> bool:
    """Returns whether an array, or a type, is floating-point with fewer bits than float32."""
    return is_half(getattr(typed, "dtype", None))

"""Rounding of the results of one equation, where it is on."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .notes import is_floating
from .switches import Limits

_LARGEST_MASK = 1e4  # a number that stands for infinity, and that every format holds


class Rounding(NamedTuple):
    """The rounding of the results of one equation.

    Attributes:
      is_on: the switch of its place, as `bool[]`.
      limits: the limits that hold there, or `None` for a plain cast, which is all of them.
      dtype: another format in the place of half precision, or `""`.
    """

    is_on: Any
    limits: Limits | None
    dtype: str

    def round(self, x: Any, dtype: DTypeLike) -> Any:
        """Returns float32 as it is in another format, where that is on."""
        dtype = np.dtype(self.dtype or dtype)
        rounded = _limit(x, dtype, self.limits)
        # XLA would compute it once more in each of the many operations that read it: a CPU compiled
        # one program for 133 s, and for 28 s with the barrier.
        return lax.optimization_barrier(select(self.is_on, rounded, x))

    def choose(self, narrow: Any, wide: Any) -> Any:
        """Returns what was computed in the format itself, where that is on."""
        is_on = self.is_on
        if self.limits is not None:
            is_held = self.limits.largest | jnp.isfinite(narrow)
            is_on = is_on & self.limits.digits & is_held
        return select(is_on, narrow, wide)

    def clean(self, x: Any) -> Any:
        """Returns an array with 0 for inf and NaN, where that is on."""
        if self.limits is None or not is_floating(x):
            return x
        is_on = lax.bitwise_and(self.is_on, self.limits.cleaned)
        return select(is_on, jnp.where(jnp.isfinite(x), x, 0), x)


def _limit(x: Any, dtype: np.dtype, limits: Limits | None) -> Any:
    """Returns float32 within those limits of a format that are on."""
    if limits is None:
        return _round_trip(x, dtype)
    info = jnp.finfo(dtype)
    bound = np.float32(_LARGEST_MASK)
    x = select(limits.bounded, lax.clamp(-bound, x, bound), x)
    rounded = _round_trip(x, dtype)
    digits = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
    limited = select(limits.digits, digits, x)
    is_tiny = lax.lt(lax.abs(x), np.float32(info.tiny))
    limited = select(limits.smallest, lax.select(is_tiny, rounded, limited), limited)
    is_huge = lax.bitwise_not(lax.is_finite(rounded))  # NaN in some formats
    return select(limits.largest, lax.select(is_huge, rounded, limited), limited)


def _round_trip(x: Any, dtype: DTypeLike) -> Any:
    return lax.convert_element_type(lax.convert_element_type(x, dtype), jnp.float32)


def select(on: Any, chosen: Any, other: Any) -> Any:
    if not is_floating(other):
        return other
    return lax.select_n(on, jnp.asarray(other), jnp.asarray(chosen))

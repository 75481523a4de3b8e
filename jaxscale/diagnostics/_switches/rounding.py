"""Rounding of the results of one equation, where it is on."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax

from .evaluate import dtype_of
from .needs import EquationKey
from .notes import Note, count_numbers, is_floating
from .operations import Place
from .switches import Limits, Variant

_LARGEST_MASK = 1e4  # a number that stands for infinity, and that every format holds


class Run(Protocol):
    """The way through the program that an equation is a part of (see `interpreter`)."""

    @property
    def limits(self) -> Limits: ...

    @property
    def variant(self) -> Variant: ...

    def is_on(self, place: Place) -> Any: ...

    def shake(self, x: Any, place: Place) -> Any: ...

    def note(self, place: Place, note: Note) -> None: ...


class Rounding:
    """How the results of one equation are rounded."""

    def __init__(self, run: Run, place: Place, key: EquationKey) -> None:
        variant = run.variant
        self._run = run
        self.place = place
        self._dtype = variant.dtype
        self._is_limited = place in variant.limited
        self._is_measured = place in variant.measured
        self._is_exact = bool({key, place} & variant.unrounded)
        self._is_shaken = variant.is_shaken

    def round(self, x: Any, dtype: Any) -> Any:
        """Returns float32 as it is in another format, where that is on."""
        if self._is_exact:
            return x
        if self._is_shaken:
            return self._run.shake(x, self.place)
        dtype = np.dtype(self._dtype or dtype)
        if self._is_limited:
            return select(self._run.is_on(self.place), self._limit(x, dtype), x)
        return select(self._run.is_on(self.place), _round_trip(x, dtype), x)

    def choose(self, narrow: Any, wide: Any) -> Any:
        """Returns what was computed in the format itself, where that is on."""
        if self._is_exact or self._is_shaken:
            return wide
        is_on = self._run.is_on(self.place)
        if self._is_limited:
            limits = self._run.limits
            is_on = is_on & limits.digits & (limits.largest | jnp.isfinite(narrow))
        return select(is_on, narrow, wide)

    def _limit(self, x: Any, dtype: Any) -> Any:
        """Returns float32 within those limits of a format that are on."""
        info = jnp.finfo(dtype)
        limits = self._run.limits
        bound = np.float32(_LARGEST_MASK)
        x = select(limits.bounded, lax.clamp(-bound, x, bound), x)
        rounded = _round_trip(x, dtype)
        digits = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
        limited = select(limits.digits, digits, x)
        is_tiny = lax.lt(lax.abs(x), np.float32(info.tiny))
        tiny = lax.select(is_tiny, rounded, limited)
        limited = select(limits.smallest, tiny, limited)
        is_huge = lax.bitwise_not(lax.is_finite(rounded))  # NaN in some formats
        return select(limits.largest, lax.select(is_huge, rounded, limited), limited)

    def clean(self, x: Any) -> Any:
        """Returns an array with 0 for inf and NaN, where that is on."""
        if not jnp.issubdtype(dtype_of(x), jnp.floating):
            return x
        is_on = lax.bitwise_and(self._run.is_on(self.place), self._run.limits.cleaned)
        return select(is_on, jnp.where(jnp.isfinite(x), x, 0), x)

    def measure(
        self, inputs: Sequence[Any], exact: Sequence[Any], rounded: Sequence[Any]
    ) -> None:
        """Notes what became of the numbers."""
        if not self._is_measured:
            return
        operands = list(filter(is_floating, map(jnp.asarray, inputs)))
        for narrow, wide in zip(rounded, exact, strict=True):
            if is_floating(wide) and wide.size:
                self._run.note(self.place, count_numbers(operands, wide, narrow))


def _round_trip(x: Any, dtype: Any) -> Any:
    return lax.convert_element_type(lax.convert_element_type(x, dtype), jnp.float32)


def select(on: Any, chosen: Any, other: Any) -> Any:
    if not jnp.issubdtype(dtype_of(other), jnp.floating):
        return other
    return lax.select_n(on, jnp.asarray(other), jnp.asarray(chosen))

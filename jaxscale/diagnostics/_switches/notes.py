"""Notes of a program: the numbers at a place, and whether inf or NaN is made there."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .evaluate import dtype_of


class Numbers(NamedTuple):
    """The numbers at a place, and what they are in float32, made of the same operands.

    Attributes:
      largest: the largest finite magnitude in float32.
      largest_input: the largest operand.
      least_input: the least one.
      total: how many there are.
      bad: how many are inf or NaN.
      bad_in_float32: how many are so in float32.
      nonzero: how many are not 0 in float32.
      flushed: how many of those are 0.
      below_one: how many are below 1 in magnitude in float32.
      saturated: how many of those are 1 or -1.
      given: how many operands are inf or NaN.
    """

    largest: float = 0.0
    largest_input: float = -math.inf
    least_input: float = math.inf
    total: int = 0
    bad: int = 0
    bad_in_float32: int = 0
    nonzero: int = 0
    flushed: int = 0
    below_one: int = 0
    saturated: int = 0
    given: int = 0


class Note(NamedTuple):
    """What is noted at a place: numbers whose largest counts, and numbers that add up."""

    largest: Any
    sums: Any

    def add(self, other: "Note") -> "Note":
        largest = lax.max(self.largest, other.largest)
        return Note(largest, lax.add(self.sums, other.sums))


NUM_LARGEST = 3
NUM_SUMS = len(Numbers._fields) - NUM_LARGEST


def add_all(notes: Sequence[Note], more: Sequence[Note]) -> list[Note]:
    return [one.add(other) for one, other in zip(notes, more, strict=True)]


def count_numbers(operands: Sequence[Any], wide: Any, narrow: Any) -> Note:
    magnitude = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0)
    largest_input = -jnp.inf
    least_input = jnp.inf
    num_given = 0
    for operand in operands:
        if not operand.size:
            continue
        is_finite = jnp.isfinite(operand)
        highest = jnp.max(jnp.where(is_finite, operand, -jnp.inf))
        lowest = jnp.min(jnp.where(is_finite, operand, jnp.inf))
        largest_input = jnp.maximum(largest_input, highest.astype(jnp.float32))
        least_input = jnp.minimum(least_input, lowest.astype(jnp.float32))
        num_given += jnp.sum(~is_finite)
    is_below_one = (magnitude < 1) & (magnitude > 0)
    counts = [
        wide.size,
        jnp.sum(~jnp.isfinite(narrow)),
        jnp.sum(~jnp.isfinite(wide)),
        jnp.sum(magnitude > 0),
        jnp.sum((narrow == 0) & (magnitude > 0)),
        jnp.sum(is_below_one),
        jnp.sum(is_below_one & (jnp.abs(narrow) == 1)),
        num_given,
    ]
    largest = [jnp.max(magnitude), largest_input, -least_input]
    return Note(
        jnp.stack([jnp.asarray(x, jnp.float32) for x in largest]),
        jnp.stack([jnp.asarray(x, jnp.float32) for x in counts]),
    )


def makes_bad(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Returns whether inf or NaN is made of finite numbers, or NaN of infinities, as `bool[]`."""
    # Of `lax`: each function of `jax.numpy` would be a call of its own, and be traced as such.
    had_bad, had_nan = _find_bad(inputs)
    has_bad, has_nan = _find_bad(outputs)
    makes_bad = lax.bitwise_and(has_bad, lax.bitwise_not(had_bad))
    makes_nan = lax.bitwise_and(has_nan, lax.bitwise_not(had_nan))
    return lax.bitwise_or(makes_bad, makes_nan)


def _find_bad(values: Sequence[Any]) -> tuple[Any, Any]:
    """Returns whether there is inf or NaN, and whether there is NaN."""
    is_bad = np.zeros((), bool)
    is_nan = np.zeros((), bool)
    for value in values:
        if not hasattr(value, "dtype") or not np.size(value) or not is_floating(value):
            continue
        value = jnp.asarray(value)
        largest = lax.reduce_max(lax.abs(value), range(value.ndim))
        is_finite = lax.lt(largest, np.asarray(np.inf, value.dtype))
        is_bad = lax.bitwise_or(is_bad, lax.bitwise_not(is_finite))
        is_nan = lax.bitwise_or(is_nan, lax.ne(largest, largest))
    return is_bad, is_nan


def is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(dtype_of(x), jnp.floating))

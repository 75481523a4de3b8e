"""Notes of a program: the numbers at a place, and whether inf or NaN is made there."""

import math
import operator
from collections.abc import Iterable, Sequence
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
    total: float = 0
    bad: float = 0
    bad_in_float32: float = 0
    nonzero: float = 0
    flushed: float = 0
    below_one: float = 0
    saturated: float = 0
    given: float = 0

    def add(self, more: Sequence[float]) -> "Numbers":
        """Returns these numbers together with others, given in the same order."""
        return Numbers(
            max(self.largest, more[0]),
            max(self.largest_input, more[1]),
            min(self.least_input, more[2]),
            *map(operator.add, self[3:], more[3:]),
        )


def count_numbers(inputs: Iterable[Any], wide: Any, narrow: Any) -> Any:
    """Returns the fields of `Numbers` for an array in float32, and as it is rounded."""
    operands = list(filter(is_floating, inputs))
    are_finite = list(map(jnp.isfinite, operands))
    highest: Any = -jnp.inf
    lowest: Any = jnp.inf
    for x, is_finite in zip(operands, are_finite, strict=True):
        highest = jnp.maximum(highest, jnp.max(x, where=is_finite, initial=-jnp.inf))
        lowest = jnp.minimum(lowest, jnp.min(x, where=is_finite, initial=jnp.inf))
    magnitude = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0)
    is_below_one = (magnitude < 1) & (magnitude > 0)
    numbers = Numbers(
        largest=jnp.max(magnitude, initial=0),
        largest_input=highest,
        least_input=lowest,
        total=wide.size,
        bad=jnp.sum(~jnp.isfinite(narrow)),
        bad_in_float32=jnp.sum(~jnp.isfinite(wide)),
        nonzero=jnp.sum(magnitude > 0),
        flushed=jnp.sum((narrow == 0) & (magnitude > 0)),
        below_one=jnp.sum(is_below_one),
        saturated=jnp.sum(is_below_one & (jnp.abs(narrow) == 1)),
        given=sum(jnp.sum(~is_finite) for is_finite in are_finite),
    )
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers])


def makes_bad(inputs: Iterable[Any], outputs: Iterable[Any]) -> Any:
    """Returns whether inf or NaN is made of finite numbers, or NaN of infinities, as `bool[]`."""
    # Of `lax`: each function of `jax.numpy` would be a call of its own, and be traced as such.
    had_bad, had_nan = _find_bad(inputs)
    has_bad, has_nan = _find_bad(outputs)
    makes_bad = lax.bitwise_and(has_bad, lax.bitwise_not(had_bad))
    makes_nan = lax.bitwise_and(has_nan, lax.bitwise_not(had_nan))
    return lax.bitwise_or(makes_bad, makes_nan)


def _find_bad(values: Iterable[Any]) -> tuple[Any, Any]:
    """Returns whether there is inf or NaN, and whether there is NaN."""
    is_bad = np.zeros((), bool)
    is_nan = np.zeros((), bool)
    for value in values:
        if not np.size(value) or not is_floating(value):
            continue
        value = jnp.asarray(value)
        largest = lax.reduce_max(lax.abs(value), range(value.ndim))
        is_finite = lax.lt(largest, np.asarray(np.inf, value.dtype))
        is_bad = lax.bitwise_or(is_bad, lax.bitwise_not(is_finite))
        is_nan = lax.bitwise_or(is_nan, lax.ne(largest, largest))
    return is_bad, is_nan


def is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(dtype_of(x), jnp.floating))

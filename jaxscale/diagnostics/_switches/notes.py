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
    fields = {
        "largest": jnp.max(magnitude, initial=0),
        "largest_input": highest,
        "least_input": lowest,
        "total": wide.size,
        "bad": jnp.sum(~jnp.isfinite(narrow)),
        "bad_in_float32": jnp.sum(~jnp.isfinite(wide)),
        "nonzero": jnp.sum(magnitude > 0),
        "flushed": jnp.sum((narrow == 0) & (magnitude > 0)),
        "below_one": jnp.sum(is_below_one),
        "saturated": jnp.sum(is_below_one & (jnp.abs(narrow) == 1)),
        "given": sum(jnp.sum(~is_finite) for is_finite in are_finite),
    }
    numbers = [jnp.asarray(fields[name], jnp.float32) for name in Numbers._fields]
    return jnp.stack(numbers)


def makes_bad(inputs: Iterable[Any], outputs: Iterable[Any]) -> Any:
    """Returns whether inf or NaN is made of finite numbers, or NaN of infinities, as `bool[]`."""
    return lax.gt(_find_worst(outputs), _find_worst(inputs))


def _find_worst(values: Iterable[Any]) -> Any:
    """Returns 2 if there is NaN, 1 if there is inf, and else 0, as `i32[]`."""
    # Of `lax`: each function of `jax.numpy` would be a call of its own, and be traced as such.
    largest: Any = np.float32(0)
    for value in values:
        if np.size(value) and is_floating(value):
            value = lax.convert_element_type(value, np.float32)
            largest = lax.max(
                largest, lax.reduce_max(lax.abs(value), range(value.ndim))
            )
    is_bad = lax.bitwise_not(lax.is_finite(largest))
    is_nan = lax.ne(largest, largest)
    return lax.add(*(lax.convert_element_type(x, np.int32) for x in (is_bad, is_nan)))


def is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(dtype_of(x), jnp.floating))

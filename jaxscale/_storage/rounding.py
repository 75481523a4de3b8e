"""float32 numbers in 16 bits: cut in two halves, or rounded to nearest or at random.

Everything is computed in integers, or rounds nothing. So it is the same in every program: with
excess precision, with subnormal numbers that a CPU flushes to 0, eagerly and compiled. Each
function has the tangent of a cast, as the derivative of rounding would be 0.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import DTypeLike

# Of float32: all bits but the sign, and those of inf, above which are only NaNs.
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_QUIET_NAN = np.uint32(0x7FC00000)
# The upper half is that of the largest finite number of bfloat16.
_BELOW_INFINITY = np.uint32(0x7F7FFFFF)
# Half a unit of bfloat16, in bits of float32.
_HALF_UNIT = np.uint32(0x8000)
# float16 has 10 bits behind the point, and its smallest normal number is 2**-14.
_FLOAT16_DIGITS = 10
_FLOAT16_LEAST_EXPONENT = 127 - 14
_LARGEST_FLOAT16 = 65504.0

# What can be kept with the bits that it leaves out.
BFLOAT16 = jnp.dtype(jnp.bfloat16)
FLOAT16 = jnp.dtype(jnp.float16)
HALF_DTYPES = (BFLOAT16, FLOAT16)


class Halves(NamedTuple):
    """A float32 number in two parts of 16 bits."""

    high: jax.Array  # bfloat16, the number rounded to nearest
    rest: jax.Array  # int16, what is to be added to its bits


@jax.custom_jvp
def _split(numbers: jax.Array) -> Halves:
    """Cuts float32 numbers in two halves, from which `join` makes the same bits again.

    The upper half is rounded, with ties away from zero: then it follows from the bits alone which
    of two neighbours a tie went to. Numbers within half a unit of the end of the range have inf for
    their upper half. A NaN becomes inf or another NaN.
    """
    bits = _bits(numbers)
    sign = (bits >> 16) & np.uint32(0x8000)
    magnitude = bits & _MAGNITUDE
    high = (magnitude + _HALF_UNIT) >> 16
    high = jnp.minimum(high, np.uint32(0x7FFF))  # a NaN would run into the sign
    high = high | sign
    rest = bits - (high << 16)
    return Halves(
        high=_bitcast(high.astype(jnp.uint16), jnp.bfloat16),
        rest=_bitcast(rest.astype(jnp.uint16), jnp.int16),
    )


@_split.defjvp
def _split_tangent(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[Halves, Halves]:
    halves = split(*primals)
    (tangent,) = tangents
    no_tangent: Any = np.zeros(jnp.shape(halves.rest), jax.dtypes.float0)
    return halves, Halves(tangent.astype(jnp.bfloat16), no_tangent)


@jax.custom_jvp
def _join(high: jax.Array, rest: jax.Array) -> jax.Array:
    """Makes float32 numbers of their halves.

    A weight that was set to 0 still has the rest of the number that was there. A rest below 0
    beside a zero would lead to a NaN, so it counts as 0. No rest makes another finite number
    non-finite.
    """
    high_bits = _bitcast(high, jnp.uint16).astype(jnp.uint32)
    wide_rest = rest.astype(jnp.int32)
    is_zero = (high_bits & np.uint32(0x7FFF)) == 0
    wide_rest = jnp.where(is_zero, jnp.maximum(wide_rest, 0), wide_rest)
    return _float((high_bits << 16) + _bitcast(wide_rest, jnp.uint32))


@_join.defjvp
def _join_tangent(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    tangent, _ = tangents
    return join(*primals), tangent.astype(jnp.float32)


@jax.custom_jvp
def _follow(copy: jax.Array, param: jax.Array) -> jax.Array:
    """Returns float32 copies of half-precision parameters, and the parameters where they differ.

    A copy that the parameter is not rounded from is out of date: the weight was replaced. Whoever
    rounded the weight by a cast may have sent a tie to the other neighbour, so half a unit is
    allowed both ways.
    """
    if param.dtype == FLOAT16:
        wide = param.astype(jnp.float32)
        return jnp.where(_round_to_float16(copy) == wide, copy, wide)
    bits = _bits(copy)
    high_bits = _bitcast(param, jnp.uint16).astype(jnp.uint32) << 16
    # Neighbours have neighbouring bits. Across zero they do not, and there a copy is dropped.
    larger = jnp.maximum(bits, high_bits)
    distance = larger - jnp.minimum(bits, high_bits)
    return jnp.where(distance <= _HALF_UNIT, copy, _float(high_bits))


@_follow.defjvp
def _follow_tangent(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # A copy and its parameter move together. That of the parameter is also known if the copy was
    # made outside of what is differentiated.
    _, tangent = tangents
    return follow(*primals), tangent.astype(jnp.float32)


def _nearest(numbers: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds float32 numbers to the nearest in bfloat16 or float16.

    bfloat16 is rounded as by `split`. In float16 ties go to even as by a cast, and finite numbers
    end at 65504.
    """
    if jnp.dtype(dtype) == BFLOAT16:
        return split(numbers).high
    return _to_float16(numbers)


@jax.custom_jvp
def _to_float16(numbers: jax.Array) -> jax.Array:
    # What is cast is in float16's range and needs no more bits than it has.
    return _round_to_float16(numbers).astype(jnp.float16)


@_to_float16.defjvp
def _to_float16_tangent(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (tangent,) = tangents
    return _to_float16(*primals), tangent.astype(jnp.float16)


def _stochastic(numbers: jax.Array, dtype: DTypeLike, noise: jax.Array) -> jax.Array:
    """Rounds float32 numbers up or down at random, so that the mean is the number.

    The nearer a neighbour is, the more often a number is rounded to it. What bfloat16 or float16
    holds stays as it is, and so do inf and NaN; no finite number becomes inf.

    Args:
      numbers: float32 numbers.
      dtype: bfloat16 or float16.
      noise: `uint32` of the same shape, every bit at random.
    """
    if jnp.dtype(dtype) == BFLOAT16:
        return _to_bfloat16_at_random(numbers, noise)
    return _to_float16_at_random(numbers, noise)


@jax.custom_jvp
def _to_bfloat16_at_random(numbers: jax.Array, noise: jax.Array) -> jax.Array:
    bits = _bits(numbers)
    sign = bits & ~_MAGNITUDE
    magnitude = bits & _MAGNITUDE
    # As many bits at random as are dropped: their carry rounds up.
    rounded = magnitude + (noise >> 16)
    rounded = jnp.minimum(rounded, _BELOW_INFINITY)
    special = jnp.where(magnitude > _INFINITY, _QUIET_NAN, _INFINITY)
    magnitude = jnp.where(magnitude < _INFINITY, rounded, special)
    high = (sign | magnitude) >> 16
    return _bitcast(high.astype(jnp.uint16), jnp.bfloat16)


@jax.custom_jvp
def _to_float16_at_random(numbers: jax.Array, noise: jax.Array) -> jax.Array:
    unit, inverse = _float16_units(numbers)
    scaled = jnp.abs(numbers) * inverse
    below = jnp.floor(scaled)
    # Multiples of 2**-24, and so is what is left of the number, if it is not even smaller.
    threshold = (noise >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    goes_up = threshold < scaled - below
    magnitude = (below + goes_up.astype(jnp.float32)) * unit
    rounded = _saturated(numbers, jnp.copysign(magnitude, numbers))
    return rounded.astype(jnp.float16)


def _random_tangent(rounding: Callable[..., jax.Array], dtype: DTypeLike) -> Any:
    def tangent_rule(
        primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        tangent, _ = tangents
        return rounding(*primals), tangent.astype(dtype)

    return tangent_rule


_to_bfloat16_at_random.defjvp(_random_tangent(_to_bfloat16_at_random, BFLOAT16))
_to_float16_at_random.defjvp(_random_tangent(_to_float16_at_random, FLOAT16))


def _round_to_float16(numbers: jax.Array) -> jax.Array:
    """Rounds float32 numbers to float16 and returns them as float32.

    XLA may leave out a cast to float16 and back, so there is none.
    """
    unit, inverse = _float16_units(numbers)
    rounded = jnp.round(numbers * inverse) * unit
    return _saturated(numbers, rounded)


def _float16_units(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the distance of neighbours in float16 at some numbers, and its reciprocal."""
    exponents = (_bits(numbers) & _MAGNITUDE) >> 23
    exponents = jnp.clip(
        exponents, np.uint32(_FLOAT16_LEAST_EXPONENT), np.uint32(127 + 16)
    )
    unit_exponents = exponents - np.uint32(_FLOAT16_DIGITS)
    return _float(unit_exponents << 23), _float((np.uint32(254) - unit_exponents) << 23)


def _saturated(numbers: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns rounded numbers, at most float16's largest; inf and NaN as they were."""
    largest = np.float32(_LARGEST_FLOAT16)
    rounded = jnp.clip(rounded, -largest, largest)
    return jnp.where(jnp.isfinite(numbers), rounded, numbers)


def _bits(numbers: jax.Array) -> jax.Array:
    return _bitcast(numbers, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return _bitcast(bits, jnp.float32)


def _bitcast(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, dtype)


# A tree has many leaves of few types. Each function is traced once for each type, and not once for
# each leaf, which halves the time to trace a step. `inline` keeps the program as it was.
_traced_once = functools.partial(jax.jit, inline=True)
split = _traced_once(_split)
join = _traced_once(_join)
follow = _traced_once(_follow)
nearest = _traced_once(_nearest, static_argnames="dtype")
stochastic = _traced_once(_stochastic, static_argnames="dtype")

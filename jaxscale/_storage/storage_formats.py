"""Formats of a parameter that is kept in fewer bits than it is computed in.

A leaf is rounded and nothing else; the bits that it leaves out stand beside it; a float32 copy
stands beside it; or it is rounded at random. Each answers three questions: what does it need beside
the parameter, what is the float32 parameter, and what does a new one become?
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jax import ArrayLike
from .._trees.leaves import (
    cast,
    dtype_of,
    in_common_type,
    is_array_like,
    is_inexact_leaf,
    widen,
)
from . import rounding
from .noise import make_noise
from .rounding import Halves

_INT16 = jnp.dtype(jnp.int16)


# A parameter, or its shape and dtype alone.
Param = ArrayLike | jax.ShapeDtypeStruct


class Stored(NamedTuple):
    """A new parameter as it is kept."""

    param: Any
    beside: Any  # what stands beside it, `None` if nothing does


class Plain:
    """A leaf that is rounded by a cast, if its dtype is narrower than float32."""

    def start(self, param: object) -> None:
        return None

    def fits(self, beside: object) -> bool:
        return beside is None

    def widen(self, param: object, beside: None) -> Any:
        return widen(param) if is_inexact_leaf(param) else param

    def store(self, wide: object, param: object, words: object) -> Stored:
        if not is_array_like(param):
            return Stored(param, None)
        return Stored(cast(wide, dtype_of(param)), None)


class Remainder:
    """A bfloat16 leaf with the other half of float32 beside it."""

    def start(self, param: ArrayLike) -> jax.Array:
        # Made from the parameter, so that it has its sharding. All bits are 0.
        return rounding.split(cast(param, jnp.float32)).rest

    def fits(self, beside: object) -> bool:
        return getattr(beside, "dtype", None) == _INT16

    def widen(self, param: ArrayLike, beside: jax.Array) -> jax.Array:
        # With a divided state and whole parameters, each device widens only its own part.
        return rounding.join(in_common_type(param, beside, param), beside)

    def store(self, wide: jax.Array, param: Param, words: object) -> Stored:
        halves: Halves = rounding.split(wide)
        return Stored(halves.high, halves.rest)


class Copy:
    """A half-precision leaf with a float32 copy beside it."""

    def start(self, param: ArrayLike) -> jax.Array:
        return cast(param, jnp.float32)

    def fits(self, beside: object) -> bool:
        return getattr(beside, "dtype", None) == jnp.float32

    def widen(self, param: ArrayLike, beside: jax.Array) -> jax.Array:
        return rounding.follow(beside, in_common_type(param, beside, param))

    def store(self, wide: jax.Array, param: Param, words: object) -> Stored:
        return Stored(rounding.nearest(wide, dtype_of(param)), wide)


class AtRandom:
    """A half-precision leaf that is rounded at random."""

    def start(self, param: ArrayLike) -> None:
        return None

    def fits(self, beside: object) -> bool:
        return beside is None

    def widen(self, param: ArrayLike, beside: None) -> jax.Array:
        return cast(param, jnp.float32)

    def store(self, wide: jax.Array, param: Param, words: jax.Array) -> Stored:
        noise = make_noise(words, wide)
        return Stored(rounding.stochastic(wide, dtype_of(param), noise), None)


StorageFormat = Plain | Remainder | Copy | AtRandom
PLAIN = Plain()
REMAINDER = Remainder()
COPY = Copy()
AT_RANDOM = AtRandom()


def format_beside(beside: jax.Array | None) -> Plain | Remainder | Copy:
    """Returns the format to which something beside a parameter belongs."""
    if beside is None:
        return PLAIN
    if REMAINDER.fits(beside):
        return REMAINDER
    return COPY

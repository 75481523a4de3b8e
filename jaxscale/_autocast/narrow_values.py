"""The forms of a value.

It is *narrow* if half precision holds its numbers: the jaxpr declares it in half precision, or
declares it as float32, and a product returned it or it is only read to be rounded. A narrow value
is one half-precision array. If its cotangents must be added in float32, it has two views, or is
held in float32 and marked.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray

from .._jax.jaxprs import ArrayLike, Atom, DTypeLike, JaxprEqn, cast, scope_names
from .table import FULL_PRECISION, HALF_PRECISION

FLOAT32 = np.dtype("float32")
HALVES = frozenset({"float16", "bfloat16"})


class Narrow(NamedTuple):
    """A half-precision array and its cast to float32.

    Readers compute with the first, which the backward pass keeps. Their gradients go to the second,
    so that those of several readers are added in float32: in a softmax they nearly cancel.
    """

    half: jax.Array
    wide: jax.Array


class ToRound(NamedTuple):
    """A float32 array that is narrow: it is rounded where it is read in half precision.

    Its cotangents are summed with others further back, and are not to be rounded before.
    """

    wide: jax.Array


Value = ArrayLike | Narrow | ToRound


def is_float32(atom: Atom) -> bool:
    """Returns whether a variable or a literal is declared as a float32 array."""
    aval = atom.aval
    return type(aval) is ShapedArray and aval.dtype == FLOAT32


def is_half(atom: Atom) -> bool:
    """Returns whether a variable or a literal is declared as an array in half precision."""
    aval = atom.aval
    return type(aval) is ShapedArray and aval.dtype.name in HALVES


def marker_of(eqn: JaxprEqn) -> str:
    """Returns the scope of the innermost marker around an equation, or `""` without one."""
    for name in reversed(scope_names(eqn)):
        if name in (FULL_PRECISION, HALF_PRECISION):
            return name
    return ""


def is_full_precision(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is part of what `full_precision` has marked."""
    return marker_of(eqn) == FULL_PRECISION


def has_dtype(value: object, dtype: DTypeLike) -> bool:
    """Returns whether a value is of a dtype. The numbers of a jaxpr need not have one."""
    return getattr(value, "dtype", None) == dtype


def without_mark(value: Value) -> Any:
    """Returns an array, also of a value that is marked `ToRound`."""
    if isinstance(value, ToRound):
        return value.wide
    return value


def as_declared(value: Value, atom: Atom) -> Any:
    """Returns a value in the dtype that a jaxpr declares."""
    array = without_mark(value)
    if not is_float32(atom):
        return array
    weak_type = atom.aval.weak_type
    if has_dtype(array, FLOAT32) and getattr(array, "weak_type", False) == weak_type:
        return array
    return cast(array, FLOAT32, weak_type)

"""What is known of a value in a program besides its shape and dtype.

A value that the program declares as float32 may be read in half precision: it is *narrow*
then. What else is known of a value decides what a narrow one does beside it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from .._jax import JaxprEqn, Literal, cast, scope_names
from .table import FULL_PRECISION

FLOAT32 = np.dtype("float32")


class Precision(NamedTuple):
    """The precisions of a program that is rewritten, besides float32.

    Today both are the dtype that the user asks for. Another kind of operand, such as float8, is
    made of a narrow value in `as_operand`, and only products see it.

    Attributes:
      operand: that in which products read their operands.
      narrow: that of narrow values: what products return, what follows it, and what chains keep
        for the backward pass.
    """

    operand: np.dtype
    narrow: np.dtype

    def as_operand(self, array: jax.Array) -> jax.Array:
        """Returns the operand of a product that a narrow array is."""
        if self.operand == self.narrow:
            return array
        return cast(array, self.operand)


class Constant(NamedTuple):
    """A number, or an array full of it, that half precision holds without loss of range."""


class Parameter(NamedTuple):
    """An array that the function was given or closes over, or some of its elements, moved."""

    size: float  # how many elements it had before it was broadcast


class Product(NamedTuple):
    """The result of matrix products or convolutions, their biases added."""


class ToRound(NamedTuple):
    """A float32 array that is narrow: it is rounded where it is read in half precision.

    Its cotangents meet others further back, and are not to be rounded before.
    """

    wide: jax.Array


Kind = Constant | Parameter | Product | None


def count_elements(atom: Any) -> float:
    """Returns how many elements an array has, or infinity if its shape is not known yet."""
    shape = atom.aval.shape
    for size in shape:
        if type(size) is not int:
            return math.inf
    return math.prod(shape)


def is_float32(atom: Any) -> bool:
    """Returns whether a variable or a literal is declared as a float32 array."""
    aval = atom.aval
    return type(aval) is ShapedArray and aval.dtype == FLOAT32


def is_full_precision(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is part of what `full_precision` has marked."""
    return FULL_PRECISION in scope_names(eqn)


def has_dtype(value: Any, dtype: Any) -> bool:
    """Returns whether a value is of a dtype. The numbers of a program need not have one."""
    return getattr(value, "dtype", None) == dtype


def without_mark(value: Any) -> Any:
    """Returns an array, also of a value that is marked `ToRound`."""
    if isinstance(value, ToRound):
        return value.wide
    return value


def as_declared(value: Any, atom: Any) -> Any:
    """Returns a value in the dtype that a program declares."""
    array = without_mark(value)
    if not is_float32(atom):
        return array
    weak_type = atom.aval.weak_type
    if has_dtype(array, FLOAT32) and getattr(array, "weak_type", False) == weak_type:
        return array
    return cast(array, FLOAT32, weak_type)


def kind_of_input(var: Any) -> Kind:
    """Returns the kind of an array that a program is given."""
    if not is_float32(var):
        return None
    return Parameter(count_elements(var))


def kind_of_literal(literal: Literal, dtype: np.dtype) -> Kind:
    """Returns `Constant` if a half-precision dtype holds a number: it is 0, normal, inf or NaN.

    A mask of -1e9 or an epsilon of 1e-8 would become -inf or 0. They stay in float32, and the
    operation with them.
    """
    value = np.asarray(literal.val, np.float64)
    if value.ndim:
        return Parameter(value.size)
    limits = jnp.finfo(dtype)
    magnitude = abs(float(value))
    is_special = magnitude == 0 or not np.isfinite(magnitude)
    is_normal = float(limits.tiny) <= magnitude <= float(limits.max)
    if is_special or is_normal:
        return Constant()
    return None

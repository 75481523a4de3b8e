"""What is known of a value in a program besides its shape and dtype.

A value that the program declares as float32 may be computed in half precision: it is *narrow*
then. What else is known of a value decides what a narrow one does beside it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import convert_element_type_p

from .table import FULL_PRECISION

FLOAT32 = np.dtype("float32")


class Constant(NamedTuple):
    """A number, or an array full of it, that half precision holds without loss of range."""


class Parameter(NamedTuple):
    """An array that the function was given or closes over, or some of its elements, moved.

    Attributes:
      size: how many elements it had before it was broadcast.
    """

    size: float


class Product(NamedTuple):
    """The result of matrix products or convolutions, their biases added."""


Kind = Constant | Parameter | Product | None


def elements(atom: Any) -> float:
    """Returns how many elements an array has, or infinity if its shape is not known yet."""
    shape = atom.aval.shape
    return math.prod(shape) if all(type(size) is int for size in shape) else math.inf


def is_float32(atom: Any) -> bool:
    """Returns whether a variable or a literal is declared as a float32 array."""
    aval = atom.aval
    return type(aval) is ShapedArray and aval.dtype == FLOAT32


def is_floating(atom: Any) -> bool:
    """Returns whether a variable or a literal is an array of floating-point or complex numbers."""
    aval = atom.aval
    return type(aval) is ShapedArray and jnp.issubdtype(aval.dtype, jnp.inexact)


def is_full_precision(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is part of what `full_precision` has marked."""
    stack: Any = eqn.source_info.name_stack
    return any(scope.name == FULL_PRECISION for scope in stack.stack)


def has_dtype(value: Any, dtype: Any) -> bool:
    """Returns whether a value is of a dtype. The numbers of a program need not have one."""
    return getattr(value, "dtype", None) == dtype


def literal_kind(literal: Literal, dtype: Any) -> Kind:
    """Returns `Constant` if a half-precision dtype holds a number: it is 0, normal, inf or NaN.

    A mask of -1e9 or an epsilon of 1e-8 would become -inf or 0. They stay in float32, and the
    operation with them.
    """
    value, limits = np.asarray(literal.val, np.float64), jnp.finfo(dtype)
    if value.ndim:
        return Parameter(value.size)
    magnitude = abs(float(value))
    special = magnitude == 0 or not np.isfinite(magnitude)
    return Constant() if special or float(limits.tiny) <= magnitude <= float(limits.max) else None


def cast(array: Any, dtype: Any, weak_type: bool = False) -> Any:
    """Returns an array in another dtype. A program keeps this as one equation."""
    return convert_element_type_p.bind(
        array, new_dtype=np.dtype(dtype), weak_type=weak_type, sharding=None
    )


def bind(eqn: JaxprEqn, args: Sequence[Any], params: dict[str, Any] | None = None) -> Sequence[Any]:
    """Returns the outputs of an equation for other arguments, and maybe other parameters."""
    given: Any = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    if isinstance(given, tuple):  # in older versions: functions, and the other parameters
        outputs = eqn.primitive.bind(*given[0], *args, **given[1])
    else:
        outputs = eqn.primitive.bind(*args, **given)
    return outputs if eqn.primitive.multiple_results else [outputs]


def without_constants(program: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """Returns a jaxpr that takes its constants as its first inputs, and these constants."""
    jaxpr = program.jaxpr
    if not program.consts:
        return jaxpr, []
    invars = [*jaxpr.constvars, *jaxpr.invars]
    info = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(constvars=[], invars=invars, debug_info=info), list(program.consts)

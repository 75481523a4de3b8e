"""Evaluation of an equation for other inputs than its own."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import convert_element_type_p

from ..jaxpr_types import ArrayLike, DTypeLike
from . import hijax
from .equation_forms import OBJECT
from .inner_jaxprs import programs
from .shared_derivatives import bind_once, is_differentiated


def bind(
    eqn: JaxprEqn, args: Sequence[Any], params: dict[str, Any] | None = None
) -> list[Any]:
    """Returns the outputs of an equation for other arguments, and maybe other parameters."""
    if params is None:
        params = eqn.params
    params = hijax.fitted(eqn, args, params)
    if is_differentiated(args) and not eqn.effects and not any(programs(eqn)):
        outputs = bind_once(eqn.primitive, args, params)
    else:
        outputs = _bind(eqn, args, params)
    if eqn.primitive.multiple_results:
        return list(outputs)
    return [outputs]


def _bind(eqn: JaxprEqn, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Binds the primitive of an equation, and returns its result as it is: a list or one value."""
    if eqn.primitive.name == OBJECT:
        args = list(map(_as_array, args))
    bind_params: Any = eqn.primitive.get_bind_params(params)
    return eqn.primitive.bind(*args, **bind_params)


def _as_array(value: ArrayLike) -> Any:
    """Returns the number of a literal as an array of its type, and an array as it is.

    The rules of an object get what they are passed, and ask it for a shape.
    """
    if hasattr(value, "shape"):
        return value
    aval: Any = jax.typeof(value)
    return cast(value, aval.dtype, aval.weak_type)


def cast(array: ArrayLike, dtype: DTypeLike, weak_type: bool = False) -> Any:
    """Returns an array in another dtype. A jaxpr keeps this as one equation."""
    params = {"new_dtype": np.dtype(dtype), "weak_type": weak_type, "sharding": None}
    if is_differentiated((array,)):
        return bind_once(convert_element_type_p, (array,), params)
    return convert_element_type_p.bind(array, **params)


def slice_sizes(eqn: JaxprEqn) -> tuple[int, ...]:
    """Returns the shape of the slices that an equation reads, `()` if it reads none."""
    return tuple(eqn.params.get("slice_sizes") or ())


def fill_value(eqn: JaxprEqn) -> Any:
    """Returns the number that a gather gives for indices out of bounds, 0 if that is not fixed."""
    number = eqn.params.get("fill_value")
    return 0 if number is None else number

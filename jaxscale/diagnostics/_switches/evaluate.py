"""One equation run by itself: as it is written, or in another format."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..._jax import jaxprs
from ..._jax.jaxprs import JaxprEqn, Op, is_half, primitives_that

_READ_BITS = primitives_that(Op.READS_BITS)
_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
}


class IncomparableError(Exception):
    """Raised for an equation that runs in no other format, such as a kernel for one dtype."""


def evaluate(
    eqn: JaxprEqn, inputs: Sequence[Any], dtype: DTypeLike | None = None
) -> list[Any]:
    """Returns the outputs of an equation.

    Half precision is as it is written, or has another `dtype`. Inputs are cast to that.

    Raises:
      IncomparableError: if it has no outputs in that dtype.
    """
    other = None if dtype is None else np.dtype(dtype)
    taken = []
    for x, atom in zip(inputs, eqn.invars, strict=True):
        if is_half(dtype_of_atom(atom)):
            x = jax.lax.convert_element_type(x, other or dtype_of_atom(atom))
        taken.append(x)
    if other is None or not _has_half(eqn):
        return jaxprs.bind(eqn, taken)
    name = eqn.primitive.name
    params = {}
    for key, value in eqn.params.items():
        if isinstance(value, np.dtype) and is_half(value):
            value = other
        params[key] = value
    try:
        if name in _READ_BITS:
            raise TypeError(name)
        if name in _SCATTERS:
            outputs = [_scatter(name, taken, params)]
        else:
            outputs = jaxprs.bind(eqn, taken, params)
    # What JAX and XLA raise where an operation does not take the format.
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise IncomparableError(name) from error
    for output in outputs:
        if is_half(dtype_of(output)) and dtype_of(output) != other:
            raise IncomparableError(name)
    return outputs


def _has_half(eqn: JaxprEqn) -> bool:
    return any(is_half(dtype_of_atom(atom)) for atom in (*eqn.invars, *eqn.outvars))


def _scatter(name: str, inputs: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns the output of a scatter by a function of JAX, which makes the update by itself.

    That among the parameters is made for the narrow dtype.
    """
    scatter: Any = _SCATTERS[name]
    options = {
        key: value for key, value in params.items() if not key.startswith("update_")
    }
    return scatter(*inputs, **options)


def widen(value: Any) -> Any:
    """Returns an array with half precision in float32."""
    if is_half(getattr(value, "dtype", None)):
        return jax.lax.convert_element_type(value, jnp.float32)
    return value


def zeros_of(atom: Any) -> jax.Array:
    """Returns zeros in the place of a variable that is not computed."""
    return jax.lax.full(atom.aval.shape, 0, atom.aval.dtype)


def dtype_of(value: Any) -> Any:
    """Returns the dtype of an array, or the one that NumPy gives a number."""
    if hasattr(value, "dtype"):
        return value.dtype
    return np.result_type(value)


def dtype_of_atom(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)

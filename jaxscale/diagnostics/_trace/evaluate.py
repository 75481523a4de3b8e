"""One equation run by itself: as it is written, or in float32.

What refs hold is copied first, so that an equation can run again and again.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax
from ..._jax import JaxprEqn, Op, context, is_half, is_ref, primitives_that
from .needs import results

_ON_REFS = primitives_that(Op.ON_REFS)
_READ_BITS = primitives_that(Op.READS_BITS)
_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
}


class IncomparableError(Exception):
    """Raised for an equation that float32 cannot replace, such as a kernel for one dtype."""


def compute(eqn: JaxprEqn, inputs: Sequence[Any], is_wide: bool) -> list[Any]:
    """Returns the outputs of an equation, in float32 if that is asked for and possible.

    One that reads what another computed in float32 does not round it before it is used: only its
    own results are rounded, as they are written.
    """
    with context(eqn):
        if not (is_wide or _reads_wider(eqn, inputs)):
            return evaluate(eqn, inputs)
        try:
            outputs = evaluate_in_float32(eqn, inputs)
        except IncomparableError:  # such as a kernel for one dtype
            return evaluate(eqn, inputs)
        if is_wide:
            return outputs
        return list(map(_cast_as_taken, outputs, results(eqn)))


def _reads_wider(eqn: JaxprEqn, inputs: Sequence[Any]) -> bool:
    """Returns whether an input is in float32 where the equation takes half precision."""
    return any(map(_is_wider, inputs, eqn.invars))


def evaluate(
    eqn: JaxprEqn, inputs: Sequence[Any], params: dict[str, Any] | None = None
) -> list[Any]:
    """Returns the results of an equation as arrays: its outputs, then what its refs hold.

    Inputs in float32 are cast to what the equation takes, unless it has new `params`.
    """
    if params is None:
        inputs = [
            _cast_as_taken(x, atom) for x, atom in zip(inputs, eqn.invars, strict=True)
        ]

    def bind(*inputs: Any) -> list[Any]:
        return _bind_copies(eqn, inputs, params)

    has_refs = any(map(is_ref, results(eqn)))
    if has_refs and eqn.primitive.name not in _ON_REFS:
        # others, such as a `shard_map`, take refs only in `jit`
        return jax.jit(bind)(*inputs)
    return bind(*inputs)


def _bind_copies(
    eqn: JaxprEqn, inputs: Sequence[Any], params: dict[str, Any] | None
) -> list[Any]:
    """Runs an equation on new refs that hold copies, and returns its results as arrays."""
    args = []
    refs = []
    for atom, value in zip(eqn.invars, inputs, strict=True):
        if is_ref(atom):
            value = jax.new_ref(jnp.asarray(value))
            refs.append(value)
        args.append(value)
    outputs = _jax.bind(eqn, args, params)
    arrays = []
    for atom, value in zip(results(eqn), [*outputs, *refs], strict=True):
        if is_ref(atom):
            value = value[...]
        arrays.append(value)
    return arrays


def _cast_as_taken(value: Any, atom: Any) -> Any:
    if _is_wider(value, atom):
        return jax.lax.convert_element_type(value, atom.aval.dtype)
    return value


def _is_wider(value: Any, atom: Any) -> bool:
    """Returns whether a value is in float32 where a program has half precision."""
    dtype: Any = getattr(atom.aval, "dtype", None)
    return is_half(dtype) and getattr(value, "dtype", None) == np.float32


def evaluate_in_float32(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Returns the outputs of an equation in float32, or raises an `IncomparableError`."""
    name = eqn.primitive.name
    if name in _READ_BITS:
        return evaluate(eqn, inputs)
    inputs = list(map(_widen, inputs))
    params = {key: _widen_parameter(value) for key, value in eqn.params.items()}
    try:
        if name in _SCATTERS:
            outputs = [_scatter(name, inputs, params)]
        else:
            outputs = evaluate(eqn, inputs, params)
    # What JAX and XLA raise where an operation does not take float32 in the place of its dtypes.
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise IncomparableError(name) from error
    if any(is_half(dtype_of(output)) for output in outputs):
        raise IncomparableError(name)
    return outputs


def _widen(value: Any) -> Any:
    if is_half(dtype_of(value)):
        return jax.lax.convert_element_type(value, jnp.float32)
    return value


def _widen_parameter(value: Any) -> Any:
    """Returns the parameter of an equation, or float32 in the place of a narrower dtype."""
    if isinstance(value, np.dtype) and is_half(value):
        return np.dtype(np.float32)
    return value


def _scatter(name: str, inputs: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns the output of a scatter by a function of JAX, which makes the update by itself.

    That among the parameters is made for the narrow dtype.
    """
    scatter: Any = _SCATTERS[name]
    options = {
        key: value for key, value in params.items() if not key.startswith("update_")
    }
    return scatter(*inputs, **options)


def dtype_of(value: Any) -> Any:
    """Returns the dtype of an array, or the one that NumPy gives a number."""
    if hasattr(value, "dtype"):
        return value.dtype
    return np.result_type(value)

"""A primitive of our own: an array that stands for another, to which its gradient goes.

An array in half precision and its cast to float32 hold one value. Whoever reads the first has its
cotangent in half precision. Read by this primitive, the first is what is computed with and kept for
the backward pass, and the cotangent goes to the second, where cotangents are added in float32.
Functions with a `jax.custom_jvp` could do the same: each takes JAX as long to trace as a layer.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from ..jaxpr_types import Arrays, BatchDims, DTypeLike, ShapedArray
from .binding import cast
from .derivatives import tangent_type
from .shared_derivatives import bind_once, is_differentiated


def stand_in(value: jax.Array, source: jax.Array, dtype: DTypeLike) -> Any:
    """Returns an array in a dtype, whose gradient goes to another array of the same values."""
    params = {"dtype": np.dtype(dtype)}
    if is_differentiated((value, source)):
        return bind_once(_STAND_IN, (value, source), params)
    return _STAND_IN.bind(value, source, **params)


def is_stand_in(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a `stand_in`: its second input has the gradient."""
    return eqn.primitive is _STAND_IN


def value_of_stand_in(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Returns what a `stand_in` returns, without the array that has its gradient."""
    return [_compute(*inputs, **eqn.params)]


def _compute(value: jax.Array, source: jax.Array, *, dtype: np.dtype) -> Any:
    if value.dtype == dtype:
        return value
    return cast(value, dtype)


def _type_of(value: ShapedArray, source: ShapedArray, *, dtype: np.dtype) -> Any:
    return value.update(dtype=dtype, weak_type=False)


def _jvp(primals: Arrays, tangents: Sequence[Any], *, dtype: np.dtype) -> Any:
    # The value itself, and not another `stand_in`, is then kept for the backward pass: once.
    output = _compute(*primals, dtype=dtype)
    _, tangent = tangents
    if type(tangent) is ad.Zero:
        return output, ad.Zero(tangent_type(jax.typeof(output)))
    return output, cast(tangent, dtype)


def _transpose(
    cotangent: Any, value: jax.Array, source: ad.UndefinedPrimal, *, dtype: np.dtype
) -> Any:
    if type(cotangent) is ad.Zero:
        return [None, None]
    return [None, cast(cotangent, source.aval.dtype)]


def _batch(arrays: Arrays, dims: BatchDims, *, dtype: np.dtype) -> Any:
    value, source = arrays
    value_dim, source_dim = dims  # `None` for what is not batched
    batch_dim = value_dim
    if value_dim != source_dim:
        batch_size = 0
        for array, dim in zip(arrays, dims, strict=True):
            if dim is not None:
                batch_size = array.shape[dim]
        value = batching.bdim_at_front(value, value_dim, batch_size)
        source = batching.bdim_at_front(source, source_dim, batch_size)
        batch_dim = 0
    return _STAND_IN.bind(value, source, dtype=dtype), batch_dim


_STAND_IN = Primitive("jaxscale_stand_in")
_STAND_IN.def_impl(_compute)
_STAND_IN.def_abstract_eval(_type_of)
ad.primitive_jvps[_STAND_IN] = _jvp
ad.primitive_transposes[_STAND_IN] = _transpose
batching.primitive_batchers[_STAND_IN] = _batch
mlir.register_lowering(_STAND_IN, mlir.lower_fun(_compute, multiple_results=False))

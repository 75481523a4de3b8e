"""A primitive of our own: a product of matrices that multiplies in half precision.

JAX's own product gives each operand its gradient in the dtype of the operand. If that was rounded
from a weight in float32, the gradient is rounded, too, and devices add it in half precision. The
product here also takes the *source* of an operand, the float32 array that it was rounded from. The
gradient goes there, from a product of arrays in half precision that returns float32.

It has the name of JAX's own, and the same parameters, so whatever reads a jaxpr takes it for one.
Where operands and result are in half precision, derivatives are made of JAX's own.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir

from ..dtypes import holds_inexact
from ..jaxpr_types import (
    Arrays,
    BatchAxis,
    BatchDims,
    Flags,
    ShapedArray,
    Tangents,
)
from ..pruned_jaxprs import spread
from .barriers import barrier
from .binding import bind, cast
from .derivatives import tangent_type
from .shared_derivatives import bind_once, call_once, is_differentiated
from .stand_ins import is_stand_in

_NUM_OPERANDS = 2


def multiply_half(
    operands: Sequence[Any],
    sources: Sequence[Any],
    params: dict[str, Any],
    dtype: np.dtype | None = None,
) -> Any:
    """Returns a product of matrices in half precision.

    Its derivative differs from that of JAX's own in three ways:

    - It multiplies in half precision, whatever the product returns: for float32 cotangents and
      half-precision operands hardware has no fast product.
    - Gradients go to sources, in float32.
    - On a CPU the two gradients of a product with batch dimensions, as in attention, are computed
      before one is used. Each needs one operand. If XLA first computes what follows from one
      gradient, it keeps the operand of the other meanwhile: another array of queries times keys.

    Args:
      operands: two arrays in half precision. The derivative keeps them as they are, and the
        product casts one that is not in `dtype`.
      sources: for each of them, the float32 array that it was rounded from, or `None`.
      params: those of a `dot_general`.
      dtype: the half precision that it multiplies in, by default that of the first operand.
    """
    have_source = tuple(source is not None for source in sources)
    args = (*operands, *itertools.compress(sources, have_source))
    if dtype is None:
        dtype = operands[0].dtype
    # `None` means the dtype of the operands; a product of the same operands may ask for another.
    result_dtype = params["preferred_element_type"] or dtype
    own = {"dtype": dtype, "have_source": have_source}
    params = params | own | {"preferred_element_type": np.dtype(result_dtype)}
    if is_differentiated(args):
        return bind_once(_PRODUCT, args, params)
    return _PRODUCT.bind(*args, **params)


def formats_of_product(eqn: JaxprEqn) -> set[str]:
    """Names the floating-point dtypes of the operands of a product.

    Of a product of our own, that is the one that it casts them to.
    """
    if eqn.primitive is _PRODUCT:
        return {eqn.params["dtype"].name}
    operands: list[Any] = eqn.invars
    return {atom.aval.dtype.name for atom in operands if holds_inexact(atom.aval)}


def find_pulled_inputs(eqn: JaxprEqn) -> list[bool]:
    """Returns a flag for each input of an equation: cotangents may go to it.

    They do not go to an array in half precision whose gradient goes to a float32 one instead.
    """
    if is_stand_in(eqn):
        return [False, True]
    pulled = [True] * len(eqn.invars)
    if eqn.primitive is _PRODUCT:
        pulled = [False] * len(eqn.invars)
        for number in _find_targets(eqn.params["have_source"]):
            pulled[number] = True
    return pulled


def _find_targets(have_source: Sequence[bool]) -> list[int]:
    """Returns the argument, by its number, that the gradient of each operand goes to."""
    return spread(have_source, itertools.count(_NUM_OPERANDS), range(_NUM_OPERANDS))


def _multiply(operands: Sequence[Any], dtype: np.dtype, params: dict[str, Any]) -> Any:
    """Returns a product without sources: JAX's own if half precision is all that there is."""
    dtypes = {params["preferred_element_type"], *(x.dtype for x in operands)}
    if dtypes == {dtype}:
        return dot_general_p.bind(*operands, **params)
    return _PRODUCT.bind(*operands, dtype=dtype, have_source=(False, False), **params)


def _compute(
    *args: jax.Array, dtype: np.dtype, have_source: Flags, **params: Any
) -> Any:
    operands = [_in_dtype(operand, dtype) for operand in args[:_NUM_OPERANDS]]
    return dot_general_p.bind(*operands, **params)


def _compute_on_cpu(
    *args: jax.Array, dtype: np.dtype, have_source: Flags, **params: Any
) -> Any:
    operands = [_in_dtype(operand, dtype) for operand in args[:_NUM_OPERANDS]]
    if dtype == jax.numpy.bfloat16:
        # XLA for CPUs lacks some products of bfloat16 that return float32.
        result_dtype = params["preferred_element_type"]
        operands = [_in_dtype(operand, result_dtype) for operand in operands]
    return dot_general_p.bind(*operands, **params)


def _in_dtype(array: jax.Array, dtype: np.dtype) -> Any:
    if array.dtype == dtype:
        return array
    return cast(array, dtype)


def _type_of(
    *types: ShapedArray, dtype: np.dtype, have_source: Flags, **params: Any
) -> Any:
    operands = [aval.update(dtype=dtype) for aval in types[:_NUM_OPERANDS]]
    aval, _ = dot_general_p.abstract_eval(*operands, **params)
    return aval


def _jvp(
    primals: Arrays,
    tangents: Tangents,
    *,
    dtype: np.dtype,
    have_source: Flags,
    **params: Any,
) -> Any:
    operands = primals[:_NUM_OPERANDS]
    output = _multiply(operands, dtype, params)
    varied: list[Any] = [tangents[number] for number in _find_targets(have_source)]
    are_zeros = [type(tangent) is ad.Zero for tangent in varied]
    _, (has_batch, _) = params["dimension_numbers"]
    if has_batch and not any(are_zeros):
        varied = barrier(*varied)
    derivative: Any = ad.Zero(tangent_type(jax.typeof(output)))
    for number, tangent in enumerate(varied):
        if not are_zeros[number]:
            factors: list[Any] = list(operands)
            factors[number] = tangent
            term = _multiply(factors, dtype, params)
            derivative = ad.add_tangents(derivative, term)
    return output, derivative


def _transpose(
    cotangent: Any,
    *args: Any,
    dtype: np.dtype,
    have_source: Flags,
    **params: Any,
) -> list[Any]:
    cotangents: list[Any] = [None] * len(args)
    if type(cotangent) is ad.Zero:
        return cotangents
    for number, target in enumerate(_find_targets(have_source)):
        if ad.is_undefined_primal(args[target]):
            given = (_in_dtype(cotangent, dtype), args[1 - number])
            aval = args[target].aval
            own = {"number": number, "aval": aval, "dtype": dtype}
            # Another half precision is rounded to from float32.
            result_dtype = dtype if aval.dtype == dtype else np.dtype("float32")
            params |= {"preferred_element_type": result_dtype}
            cotangents[target] = call_once(_pull, given, params | own)
    return cotangents


def _pull(
    cotangent: jax.Array,
    kept: jax.Array,
    *,
    number: int,
    aval: ShapedArray,
    dtype: np.dtype,
    **params: Any,
) -> Any:
    """Returns the cotangent of one operand, of a type, given the other operand."""

    def pull(cotangent: jax.Array, kept: jax.Array) -> Any:
        operands: list[Any] = [kept, kept]
        operands[number] = ad.UndefinedPrimal(aval)
        transpose = ad.primitive_transposes[dot_general_p]
        return transpose(cotangent, *operands, **params)[number]

    def multiply(factors: Sequence[Any], params: dict[str, Any]) -> Any:
        return _multiply(factors, dtype, params)

    return _follow(pull, (cotangent, kept), multiply)


def _batch(axis: BatchAxis, args: Arrays, dims: BatchDims, **params: Any) -> Any:
    args = list(args)
    dims = list(dims)
    for number, target in enumerate(_find_targets(params["have_source"])):
        if dims[number] != dims[target]:
            for i in (number, target):
                args[i] = batching.bdim_at_front(args[i], dims[i], axis.size)
                dims[i] = 0
    out_dims = []

    def run(*operands: jax.Array) -> Any:
        batch = batching.fancy_primitive_batchers[dot_general_p]
        output, out_dim = batch(axis, operands, dims[:_NUM_OPERANDS], **own_params)
        out_dims.append(out_dim)
        return output

    def multiply(operands: Sequence[Any], changed: dict[str, Any]) -> Any:
        sources = args[_NUM_OPERANDS:]
        return _PRODUCT.bind(*operands, *sources, **params | changed)

    own_params = dict(params)
    for name in ("dtype", "have_source"):
        del own_params[name]
    return _follow(run, args[:_NUM_OPERANDS], multiply), out_dims[0]


def _follow(
    rule: Callable[..., Any], args: Sequence[Any], multiply: Callable[..., Any]
) -> Any:
    """Runs a rule of JAX's own product, with another product in its place."""
    program = jax.make_jaxpr(rule)(*args)
    values: dict[Any, Any] = dict(zip(program.jaxpr.invars, args, strict=True))
    for eqn in program.eqns:
        inputs = [values[var] for var in eqn.invars]
        if eqn.primitive is dot_general_p:
            outputs = [multiply(inputs, eqn.params)]
        else:
            outputs = bind(eqn, inputs)
        values |= zip(eqn.outvars, outputs, strict=True)
    (output,) = program.jaxpr.outvars
    return values[output]


_PRODUCT: Any = Primitive(dot_general_p.name)
_PRODUCT.def_impl(_compute)
_PRODUCT.def_abstract_eval(_type_of)
ad.primitive_jvps[_PRODUCT] = _jvp
ad.primitive_transposes[_PRODUCT] = _transpose
batching.fancy_primitive_batchers[_PRODUCT] = _batch
mlir.register_lowering(_PRODUCT, mlir.lower_fun(_compute, multiple_results=False))
mlir.register_lowering(
    _PRODUCT, mlir.lower_fun(_compute_on_cpu, multiple_results=False), platform="cpu"
)

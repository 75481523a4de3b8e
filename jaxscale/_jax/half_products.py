"""A primitive of our own: a matrix product in half precision, whatever it reads and returns.

The derivative of JAX's own product returns gradients in the dtype of the operands. So the gradient
of a weight in float32, of which the product read a rounded copy, would be rounded, and devices
would add it in half precision. This product also takes the *source* of an operand, the float32
array that it was rounded from, and the gradient goes there. It is a product of arrays in half
precision that returns float32.

Where operands and result are in half precision, and no source is given, it is JAX's own product.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir

from .barriers import barrier
from .binding import bind, cast
from .derivatives import tangent_type
from .inner_programs import ClosedJaxpr, Literal, spread
from .once import bind_once, is_differentiated

_PAIR = 2


def multiply_half(
    operands: Sequence[Any], sources: Sequence[Any], params: dict[str, Any]
) -> Any:
    """Returns a product of matrices in half precision.

    Its derivative also multiplies in half precision, whatever the product returns: for float32
    cotangents and half-precision operands hardware has no fast product. If neither operand has a
    source, both are activations, as in attention. Then on a CPU their two gradients are computed
    before one is used. Each needs one operand. If XLA first computes what follows from one
    gradient, it keeps the operand of the other meanwhile: another array of queries times keys.

    Args:
      operands: two arrays in one half-precision dtype.
      sources: for each of them, the float32 array that it was rounded from, to which its gradient
        goes, or `None`.
      params: those of a `dot_general`.
    """
    have_source = tuple(source is not None for source in sources)
    args = [*operands, *itertools.compress(sources, have_source)]
    params = params | {"dtype": operands[0].dtype, "have_source": have_source}
    if is_differentiated(args):
        return bind_once(_PRODUCT, args, params)
    return _PRODUCT.bind(*args, **params)


def _multiply(operands: Sequence[Any], dtype: Any, params: dict[str, Any]) -> Any:
    """Returns a product without sources."""
    dtypes = {params["preferred_element_type"], *(x.dtype for x in operands)}
    if dtypes == {dtype}:
        return dot_general_p.bind(*operands, **params)
    return _PRODUCT.bind(*operands, dtype=dtype, have_source=(False, False), **params)


def _find_targets(have_source: Sequence[bool]) -> list[int]:
    """Returns for each operand which argument has its gradient."""
    return spread(have_source, itertools.count(_PAIR), range(_PAIR))


def _in(dtype: Any, array: Any) -> Any:
    return array if array.dtype == dtype else cast(array, dtype)


def _compute(*args: Any, dtype: Any, have_source: Any, **params: Any) -> Any:
    operands = [_in(dtype, operand) for operand in args[:_PAIR]]
    return dot_general_p.bind(*operands, **params)


def _compute_on_cpu(*args: Any, dtype: Any, have_source: Any, **params: Any) -> Any:
    """Returns the same. XLA for CPUs lacks some products of bfloat16 that return float32."""
    operands = [_in(dtype, operand) for operand in args[:_PAIR]]
    wanted = params["preferred_element_type"]
    if dtype == jax.numpy.bfloat16:
        operands = [_in(wanted, operand) for operand in operands]
    return dot_general_p.bind(*operands, **params)


def _type_of(*types: Any, dtype: Any, have_source: Any, **params: Any) -> Any:
    halves = [aval.update(dtype=dtype, weak_type=False) for aval in types[:_PAIR]]
    aval, _ = dot_general_p.abstract_eval(*halves, **params)
    return aval


def _jvp(
    primals: Any, tangents: Any, *, dtype: Any, have_source: Any, **params: Any
) -> Any:
    operands = primals[:_PAIR]
    output = _multiply(operands, dtype, params)
    varied = [tangents[number] for number in _find_targets(have_source)]
    are_zeros = [type(tangent) is ad.Zero for tangent in varied]
    if not any(are_zeros) and not any(have_source):
        varied = barrier(*varied)
    derivative: Any = ad.Zero(tangent_type(jax.typeof(output)))
    for number, tangent in enumerate(varied):
        if not are_zeros[number]:
            factors = list(operands)
            factors[number] = tangent
            term = _multiply(factors, dtype, params)
            derivative = ad.add_tangents(derivative, term)
    return output, derivative


def _transpose(
    cotangent: Any, *args: Any, dtype: Any, have_source: Any, **params: Any
) -> list[Any]:
    cotangents: list[Any] = [None] * len(args)
    if type(cotangent) is ad.Zero:
        return cotangents
    for number, target in enumerate(_find_targets(have_source)):
        if ad.is_undefined_primal(args[target]):
            pulled = args[target].aval
            kept = args[1 - number]
            params |= {"preferred_element_type": pulled.dtype}
            pull = _pull(number, pulled, dtype, tuple(params.items()))
            cotangents[target] = pull(_in(dtype, cotangent), kept)
    return cotangents


@functools.lru_cache(maxsize=1024)
def _pull(number: int, pulled: Any, dtype: Any, params: Any) -> Callable[..., Any]:
    """Returns the function that makes the cotangent of an operand of that of a product."""
    params = dict(params)
    transpose = ad.primitive_transposes[dot_general_p]

    def run(cotangent: Any, kept: Any) -> Any:
        operands = [kept, kept]
        operands[number] = ad.UndefinedPrimal(pulled)
        return transpose(cotangent, *operands, **params)[number]

    def pull(cotangent: Any, kept: Any) -> Any:
        program = jax.make_jaxpr(run)(cotangent, kept)
        return _replay(
            program,
            (cotangent, kept),
            lambda factors, params: _multiply(factors, dtype, params),
        )

    return pull


def _batch(
    axis: Any, args: Any, dims: Any, *, dtype: Any, have_source: Any, **params: Any
) -> Any:
    args = list(args)
    dims = list(dims)
    for number, target in enumerate(_find_targets(have_source)):
        if dims[number] != dims[target]:
            for i in (number, target):
                args[i] = batching.bdim_at_front(args[i], dims[i], axis.size)
                dims[i] = 0
    batch = batching.fancy_primitive_batchers[dot_general_p]
    out_dims = []

    def run(*operands: Any) -> Any:
        output, out_dim = batch(axis, operands, dims[:_PAIR], **params)
        out_dims.append(out_dim)
        return output

    def multiply(operands: Any, params: Any) -> Any:
        return _PRODUCT.bind(
            *operands, *args[_PAIR:], dtype=dtype, have_source=have_source, **params
        )

    program = jax.make_jaxpr(run)(*args[:_PAIR])
    return _replay(program, args[:_PAIR], multiply), out_dims[0]


def _replay(
    program: ClosedJaxpr, args: Sequence[Any], multiply: Callable[..., Any]
) -> Any:
    """Returns the output of a program of JAX's, with another product in the place of JAX's."""
    values = dict(zip(program.jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in program.eqns:
        inputs = list(map(read, eqn.invars))
        if eqn.primitive is dot_general_p:
            outputs = [multiply(inputs, eqn.params)]
        else:
            outputs = bind(eqn, inputs)
        values |= zip(eqn.outvars, outputs, strict=True)
    return read(program.jaxpr.outvars[0])


_PRODUCT: Any = Primitive("jaxscale_product")
_PRODUCT.def_impl(_compute)
_PRODUCT.def_abstract_eval(_type_of)
ad.primitive_jvps[_PRODUCT] = _jvp
ad.primitive_transposes[_PRODUCT] = _transpose
batching.fancy_primitive_batchers[_PRODUCT] = _batch
mlir.register_lowering(_PRODUCT, mlir.lower_fun(_compute, multiple_results=False))
mlir.register_lowering(
    _PRODUCT, mlir.lower_fun(_compute_on_cpu, multiple_results=False), platform="cpu"
)

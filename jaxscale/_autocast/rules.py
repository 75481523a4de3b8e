"""The rules for equations that are not part of a segment, and are no calls, loops or branches.

A rule evaluates one equation of a jaxpr and returns its outputs. The words:

- A *reader* of a value is what takes it as an input: an equation, a segment, or the jaxpr if it
  returns it.
- To *round* is to cast float32 to half precision.
- A value is *narrow* if the jaxpr declares it as float32, and half precision holds its numbers.
  It was computed in half precision, or is rounded only for such readers (`ToRound`).
- A narrow value has two *views*: the *half* is in half precision, the *wide* one is in float32.
- Cotangents are *summed* in a value if several readers send one back, or if they are summed in the
  value that it was computed from. Such sums must be in float32.
- So a reader of such a value takes the wide view, or a *stand-in*: the half with a gradient that
  goes to the wide view.
- A *product* is a matrix product or a convolution.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._jax.jaxprs import (
    ArrayLike,
    JaxprEqn,
    Literal,
    Recomputed,
    bind,
    cast,
    dot_dimensions,
    fill_value,
    holds_half,
    multiply_half,
    programs,
    with_preferred_type,
    with_result_type,
)
from . import table
from .cast_products import is_attention_scores
from .environment import Environment
from .narrow_values import FLOAT32, Narrow, ToRound, has_dtype, is_float32, is_half

Outputs = Sequence[Any]
Rule = Callable[[Environment, JaxprEqn], Outputs]


def run_as_written(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in the dtypes that the jaxpr declares."""
    return bind(eqn, env.read_inputs_wide(eqn))


def multiply_matrices(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates a matrix product or a convolution, in half precision if `autocast` casts it."""
    if id(eqn) not in env.plan.products:
        return run_as_written(env, eqn)
    # In a float32 jaxpr, JAX asks products for float32 outputs. Asking for half precision instead
    # only rounds the result: hardware accumulates in float32 anyway.
    params = with_preferred_type(eqn, old=FLOAT32, new=env.dtype)
    result: Any = eqn.outvars[0]
    if not is_half(result) or has_dtype(result.aval, env.dtype):
        return _multiply(env, eqn, params)
    # What is declared in the other half precision is rounded to that once. A convolution that
    # returns float32 has no derivative.
    result_dtype = FLOAT32 if dot_dimensions(eqn) else env.dtype
    (output,) = _multiply(env, eqn, with_result_type(params, result_dtype))
    return [cast(output, result.aval.dtype)]


def _multiply(env: Environment, eqn: JaxprEqn, params: dict[str, Any]) -> Outputs:
    operands = list(map(env.read_half, eqn.invars))
    are_half = list(map(holds_half, operands))
    are_cast = [has_dtype(operand, env.dtype) for operand in operands]
    if not (all(are_half) and dot_dimensions(eqn)):
        # a convolution, or one operand is of integers
        if are_half == are_cast:
            return bind(eqn, operands, params)
        return _cast_inside(env, eqn, operands, params)
    sources = list(map(env.read_source, eqn.invars))
    is_plain = all(are_cast) and all(source is None for source in sources)
    if is_attention_scores(eqn, env.site.owner):
        # A softmax in float32 reads the scores, so they stay in float32.
        params = with_preferred_type(eqn, old=FLOAT32, new=FLOAT32)
    elif is_plain and not _has_batch_dimensions(eqn):
        return bind(eqn, operands, params)
    return [multiply_half(operands, sources, params, env.dtype)]


def _cast_inside(
    env: Environment, eqn: JaxprEqn, operands: Sequence[Any], params: dict[str, Any]
) -> Outputs:
    """Evaluates a product of JAX's own that reads the other half precision, as one equation.

    Its derivative keeps what it reads. A copy of a weight, cast, would be as large as the weight.
    """

    def multiply(*operands: jax.Array) -> Outputs:
        cast_operands = []
        for operand in operands:
            is_half = holds_half(operand)
            cast_operands.append(cast(operand, env.dtype) if is_half else operand)
        return bind(eqn, cast_operands, params)

    program = jax.make_jaxpr(multiply)(*operands)
    return Recomputed(program, env.site.in_loop).run(*operands)


def _has_batch_dimensions(eqn: JaxprEqn) -> bool:
    # for each operand: the axes that it sums over, and its batch axes
    return any(batch for _, batch in dot_dimensions(eqn))


def move(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation that moves elements: in half precision if all of them are there."""
    # The types of a jaxpr that an equation holds, such as that of `x.at[i].apply`, are fixed.
    if any(programs(eqn)) or not _moves_narrow(env, eqn):
        return run_as_written(env, eqn)
    adds_up_backward = eqn.primitive.name in table.SUMMED_BACKWARD
    # What goes to products alone comes back rounded already.
    sends_back_rounded = not adds_up_backward and all(
        map(env.is_only_rounded, filter(is_float32, eqn.outvars))
    )
    if sends_back_rounded or not (adds_up_backward or env.reads_cotangent_sum(eqn)):
        return bind(eqn, list(map(env.read_half, eqn.invars)))
    outputs = []
    wides = bind(eqn, list(map(env.read_float32, eqn.invars)))
    if any(map(is_half, eqn.outvars)):
        return list(
            map(Narrow, bind(eqn, list(map(env.read_narrow, eqn.invars))), wides)
        )
    for value, var in zip(wides, eqn.outvars, strict=True):
        if is_float32(var):
            value = ToRound(value)
        outputs.append(value)
    return outputs


def widen(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates a cast. It is one value with its input where cotangents of that are summed."""
    (atom,) = eqn.invars
    if not (env.sums_cotangents(atom) and is_half(atom) and is_float32(eqn.outvars[0])):
        return run_as_written(env, eqn)
    narrow = env.read_views(atom)
    if narrow.half.dtype == env.dtype:
        return [narrow]
    return [narrow.wide]


def _moves_narrow(env: Environment, eqn: JaxprEqn) -> bool:
    """Returns whether an equation moves narrow values, and no float32 numbers but such."""
    if not env.reads_narrow(eqn):
        return False
    if not _is_held(fill_value(eqn), env.dtype):
        return False
    for atom in filter(is_float32, eqn.invars):
        if isinstance(atom, Literal):
            if not _is_held(atom.val, env.dtype):
                return False
        elif not env.is_narrow(atom):
            return False
    return True


def _is_held(number: ArrayLike, dtype: np.dtype) -> bool:
    """Returns whether rounding to a half-precision dtype changes no bit of a number."""
    exact = np.asarray(number, np.float32)
    with np.errstate(over="ignore"):  # one that overflows is another number
        rounded = exact.astype(dtype).astype(np.float32)
    return np.array_equal(rounded, exact, equal_nan=True)


def give_name(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Names a value for a policy of `jax.checkpoint`, as `checkpoint_name` asks.

    The name goes to what the backward pass keeps: of two views, to the half.
    """
    named = eqn.invars[0]
    if not env.sums_cotangents(named):
        return move(env, eqn)
    views = env.read_views(named)
    (half,) = bind(eqn, [views.half])
    return [Narrow(half, views.wide)]


def pass_barrier(env: Environment, eqn: JaxprEqn) -> Outputs:
    """Evaluates an `optimization_barrier`, which returns its inputs, each in its precision."""
    inputs = []
    for atom in eqn.invars:
        if env.is_narrow(atom):
            inputs.append(env.read_half(atom))
        else:
            inputs.append(env.read_wide(atom))
    return bind(eqn, inputs)


# For equations outside of segments. There a move that is cheap, too, is a move.
SIMPLE_RULES: dict[str, Rule] = {
    **dict.fromkeys((table.CHEAP - table.MOVES) | table.AS_WRITTEN, run_as_written),
    **dict.fromkeys(table.PRODUCTS, multiply_matrices),
    **dict.fromkeys(table.MOVES, move),
    **dict.fromkeys(table.CASTS, widen),
    **dict.fromkeys(table.NAMES, give_name),
    **dict.fromkeys(table.BARRIERS, pass_barrier),
}

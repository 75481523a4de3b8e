"""The rules for equations that are not part of a segment, and are no calls, loops or branches.

A rule evaluates one equation of a program and returns its outputs. The words:

- A *reader* of a value is what takes it as an input: an equation, a segment, or the program if it
  returns it.
- To *round* is to cast float32 to half precision.
- A value is *narrow* if the program declares it as float32, and half precision holds its numbers.
  It was computed in half precision, or is rounded only for such readers (`ToRound`).
- A narrow value has two *views*: the *half* is in half precision, the *wide* one is in float32.
- Cotangents *meet* in a value if several readers send one back, or if they meet in the value that
  it was computed from. They must be added in float32.
- So a reader of such a value takes the wide view, or a *stand-in*: the half with a gradient that
  goes to the wide view.
- A *product* is a matrix product or a convolution.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._jax import (
    JaxprEqn,
    Literal,
    bind,
    dot_dimensions,
    fill_value,
    multiply_half,
    programs,
    with_preferred_type,
)
from . import table
from .casts import is_attention_scores
from .frame import Frame
from .values import FLOAT32, Narrow, ToRound, has_dtype, is_float32, is_half

Outputs = Sequence[Any]
Rule = Callable[[Frame, JaxprEqn], Outputs]


def run_as_written(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in the dtypes that the program declares."""
    return bind(eqn, frame.read_inputs_wide(eqn))


def multiply_matrices(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a matrix product or a convolution, in half precision if `autocast` casts it."""
    if id(eqn) not in frame.plan.products:
        return run_as_written(frame, eqn)
    operands = list(map(frame.read_half, eqn.invars))
    # In a float32 program, JAX asks products for float32 outputs. Asking for half precision instead
    # only rounds the result: hardware accumulates in float32 anyway.
    params = with_preferred_type(eqn, old=FLOAT32, new=frame.dtype)
    operands_are_half = all(has_dtype(operand, frame.dtype) for operand in operands)
    if not (operands_are_half and dot_dimensions(eqn)):
        return bind(
            eqn, operands, params
        )  # a convolution, or one operand is of integers
    sources = list(map(frame.read_source, eqn.invars))
    if is_attention_scores(eqn, frame.place.owner):
        # A softmax in float32 reads the scores, so they stay in float32.
        params = with_preferred_type(eqn, old=FLOAT32, new=FLOAT32)
    elif not _has_batch_dimensions(eqn) and all(source is None for source in sources):
        return bind(eqn, operands, params)
    return [multiply_half(operands, sources, params)]


def _has_batch_dimensions(eqn: JaxprEqn) -> bool:
    # for each operand: the axes that it sums over, and its batch axes
    return any(batch for _, batch in dot_dimensions(eqn))


def move(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation that moves elements: in half precision if all of them are there."""
    # The types of a program that an equation holds, such as that of `x.at[i].apply`, are fixed.
    if any(programs(eqn)) or not _moves_narrow(frame, eqn):
        return run_as_written(frame, eqn)
    adds_up_backward = eqn.primitive.name in table.SUMMED_BACKWARD
    # What goes to products alone comes back rounded already.
    sends_back_rounded = not adds_up_backward and all(
        map(frame.is_only_rounded, filter(is_float32, eqn.outvars))
    )
    if sends_back_rounded or not (adds_up_backward or frame.reads_meeting(eqn)):
        return bind(eqn, list(map(frame.read_half, eqn.invars)))
    outputs = []
    wides = bind(eqn, list(map(frame.read_float32, eqn.invars)))
    if any(map(is_half, eqn.outvars)):
        return list(
            map(Narrow, bind(eqn, list(map(frame.read_narrow, eqn.invars))), wides)
        )
    for value, var in zip(wides, eqn.outvars, strict=True):
        if is_float32(var):
            value = ToRound(value)
        outputs.append(value)
    return outputs


def widen(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates a cast. Where cotangents meet in what is cast to float32, both are one value."""
    (atom,) = eqn.invars
    if not (frame.meets(atom) and is_half(atom) and is_float32(eqn.outvars[0])):
        return run_as_written(frame, eqn)
    narrow = frame.read_views(atom)
    if narrow.half.dtype == frame.dtype:
        return [narrow]
    return [narrow.wide]


def _moves_narrow(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether an equation moves narrow values, and no float32 numbers but such."""
    if not frame.reads_narrow(eqn):
        return False
    if not _is_held(fill_value(eqn), frame.dtype):
        return False
    for atom in filter(is_float32, eqn.invars):
        if isinstance(atom, Literal):
            if not _is_held(atom.val, frame.dtype):
                return False
        elif not frame.is_narrow(atom):
            return False
    return True


def _is_held(number: Any, dtype: np.dtype) -> bool:
    """Returns whether rounding to a half-precision dtype changes no bit of a number."""
    exact = np.asarray(number, np.float32)
    with np.errstate(over="ignore"):  # one that overflows is another number
        rounded = exact.astype(dtype).astype(np.float32)
    return np.array_equal(rounded, exact, equal_nan=True)


def give_name(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Names a value for a policy of `jax.checkpoint`, as `checkpoint_name` asks.

    The name goes to what the backward pass keeps: of two views, to the half.
    """
    named = eqn.invars[0]
    if not frame.meets(named):
        return move(frame, eqn)
    views = frame.read_views(named)
    (half,) = bind(eqn, [views.half])
    return [Narrow(half, views.wide)]


def pass_barrier(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an `optimization_barrier`, which returns its inputs, each in its precision."""
    inputs = []
    for atom in eqn.invars:
        if frame.is_narrow(atom):
            inputs.append(frame.read_half(atom))
        else:
            inputs.append(frame.read_wide(atom))
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

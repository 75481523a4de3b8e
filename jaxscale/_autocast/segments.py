"""How a segment runs: in float32, and again in the backward pass.

A segment is what lies between products (see `parts.py`). It computes in float32 from the
half-precision arrays that products returned, inside of `jax.checkpoint`. So the backward pass keeps
these arrays, which are half as large as anything in the segment, and computes the rest again. What
only products read of it is rounded once, at its end. Nothing within it is rounded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .. import _jax
from .._jax import (
    JaxprEqn,
    Literal,
    bind,
    cast,
    context,
    operation,
    source,
    stand_in,
    walk_equation,
)
from . import table
from .frame import Frame
from .parts import Part
from .values import FLOAT32, Narrow, has_dtype, is_float32


def run_segment(frame: Frame, part: Part) -> list[Any]:
    """Returns the values of a segment that are read outside of it."""
    starts = list(map(frame.read_for_call, part.inputs))
    rounded = []
    for var in part.outputs:
        rounded.append(is_float32(var) and frame.is_only_rounded(var))
    arrays, tree = jax.tree.flatten(starts)

    def compute(*arrays: Any) -> list[Any]:
        values = _start(part, jax.tree.unflatten(tree, arrays))
        _run_equations(part.eqns, values, frame.scopes)
        outputs = []
        for var, is_rounded in zip(part.outputs, rounded, strict=True):
            output = values[var]
            if is_rounded:
                output = cast(output, frame.dtype)
            outputs.append(output)
        return outputs

    with source(part.eqns[0], frame.scopes, own=False):
        if all(map(_is_linear, part.eqns)):
            return compute(*arrays)  # the backward pass keeps nothing of it
        types = tuple(map(jax.typeof, arrays))
        key = (_key_of(part), tree, types, tuple(rounded))
        return _recomputed(frame, key, compute, types)(*arrays)


def _start(part: Part, starts: Sequence[Any]) -> dict[Any, Any]:
    """Returns the values that a segment starts from, in the dtypes that the program declares."""
    values: dict[Any, Any] = {}
    for var, start in zip(part.inputs, starts, strict=True):
        if isinstance(start, Narrow):
            start = stand_in(start.half, start.wide, FLOAT32)
        elif is_float32(var) and not has_dtype(start, FLOAT32):
            start = cast(start, FLOAT32, var.aval.weak_type)
        values[var] = start
    return values


def _run_equations(
    eqns: Sequence[JaxprEqn], values: dict[Any, Any], scopes: Any
) -> None:
    """Evaluates equations as they are written, and adds their outputs to `values`."""
    for eqn in eqns:
        inputs = []
        for atom in eqn.invars:
            inputs.append(atom.val if isinstance(atom, Literal) else values[atom])
        with context(eqn), source(eqn, scopes):
            values |= zip(eqn.outvars, bind(eqn, inputs), strict=True)


def _is_linear(eqn: JaxprEqn) -> bool:
    """Returns whether the derivative of an equation does not depend on what it reads."""
    return all(operation(inner) in table.KEEP_NOTHING for inner in walk_equation(eqn))


def _recomputed(
    frame: Frame, key: Any, compute: Callable[..., Any], types: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Returns a function that the backward pass runs again, the same one for equal segments."""

    def make() -> Callable[..., list[Any]]:
        program = jax.make_jaxpr(compute)(*types)
        return _jax.recomputed(program, in_loop=frame.place.in_loop)

    try:
        known = frame.segments.get(key)
    except TypeError:  # a parameter that has no hash
        return make()
    if known is None:
        known = frame.segments[key] = make()
    return known


def _key_of(part: Part) -> Any:
    """Returns what is equal for segments that are the same, their lines and scopes included."""
    numbers = {var: number for number, var in enumerate(part.inputs)}
    equations = []
    for eqn in part.eqns:
        inputs = []
        for atom in eqn.invars:
            inputs.append(
                _literal_key(atom) if isinstance(atom, Literal) else numbers[atom]
            )
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        info: Any = eqn.source_info
        place = (info.traceback, info.name_stack, eqn.ctx)
        params = tuple(eqn.params.items())
        equations.append((eqn.primitive, params, tuple(inputs), place))
    outputs = tuple(numbers[var] for var in part.outputs)
    return tuple(equations), outputs


def _literal_key(literal: Any) -> Any:
    value = np.asarray(literal.val)
    # as 0.0 == -0.0, and NaN equals nothing
    return literal.aval, value.dtype, value.tobytes()

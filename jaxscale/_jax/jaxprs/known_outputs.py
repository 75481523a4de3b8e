"""Outputs of a function that its derivative reads, rather than compute them again.

*Statistics*: the derivative of a norm asks for the mean and the variance. They are so small that
the forward pass returns them, and the backward pass reads its large inputs no more often for them.

*Signs*: the derivative of a ReLU asks where what it reads is positive. Its result is positive there
and nowhere else, and so is the copy of that result in half precision that the next product reads
and keeps. Read from this copy, the sign needs no array in float32, neither kept nor computed again.
So it is with what is below 0, if that is only multiplied by a slope, as in a leaky ReLU.

float16 rounds small positive numbers to 0. Those are written as -0.0, which is 0 to all that
compute with it, and tells that the number was positive. No other number becomes -0.0. There is no
such mark for numbers below 0, so the signs of those are only read from bfloat16.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..dtypes import has_narrow_range, holds_half
from ..jaxpr_types import Atom
from ..pruned_jaxprs import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    closed,
    spread,
    variables,
    without_unused,
)
from .binding import bind
from .equation_forms import Form
from .hijax import form_of
from .inner_jaxprs import programs
from .operations import Op, primitives_that
from .source_lines import context, current_scopes, source
from .stand_ins import stand_in

_CASTS = primitives_that(Op.CASTS)
_LARGER_OF = primitives_that(Op.LARGER | Op.LIMITS)
_IS_LARGER = primitives_that(Op.LARGER | Op.COMPARES)
_COMPARES = primitives_that(Op.COMPARES)
_MULTIPLIES = primitives_that(Op.MULTIPLIES | Op.CHEAP)
_SELECTS = primitives_that(Op.SELECTS)
_CALLS = {Form.JIT, Form.CUSTOM_JVP}
# More than that of a normal float32 number is not 0 in bfloat16.
_LEAST_SLOPE = 2.0**-8
_REDUCTIONS = primitives_that(Op.REDUCTION)
_SMALL = 16  # times as large is what it stands beside
# Of so many numbers a statistic is made, at least. A GPU reduces fewer again, as those of a softmax
# over some keys, for less than it costs to read them apart from what reads the result.
_REDUCED = 512


def size_of(aval: Any) -> int:
    """Returns the size of an array along the axes whose lengths are numbers, and not symbols."""
    return math.prod(length for length in aval.shape if isinstance(length, int))


def is_small(aval: Any, other: Any) -> bool:
    """Tells an array that is so small beside another that it costs little to keep it."""
    return _SMALL * size_of(aval) <= size_of(other)


def is_statistic(eqn: JaxprEqn) -> bool:
    """Tells a reduction of many numbers to few, not in half precision."""
    if eqn.primitive.name not in _REDUCTIONS:
        return False
    result = eqn.outvars[0].aval
    is_of_many = _REDUCED * size_of(result) <= size_of(eqn.invars[0].aval)
    return is_of_many and not holds_half(result)


def find_known(program: ClosedJaxpr, count: int) -> dict[int, int]:
    """Finds the equations whose results can be read from one of the first `count` outputs.

    Each is the identity of an equation, with the number of an output. That is the result of a
    reduction, or is rounded to half precision from a value that is positive exactly where the
    equation asks for it.
    """
    outputs: Any = program.jaxpr.outvars[:count]
    roots = _roots(program)
    same_sign = _find_same_sign(program)
    positive = {}
    signed = {}
    for number, eqn in _roundings(program, count).items():
        for var in variables(eqn.invars):
            positive[roots.get(var, var)] = number
            if not has_narrow_range(outputs[number].aval.dtype):
                signed[same_sign.get(var, var)] = number
    found = {}
    read = set()
    for eqn in reversed(program.jaxpr.eqns):
        name = eqn.primitive.name
        if is_statistic(eqn):
            (result,) = eqn.outvars
            if result in read and result in outputs:
                found[id(eqn)] = outputs.index(result)
        if name in _COMPARES and _is_zero(eqn.invars[1]):
            for var in variables(eqn.invars):
                if name in _IS_LARGER and roots.get(var, var) in positive:
                    found[id(eqn)] = positive[roots.get(var, var)]
                elif var in signed:
                    found[id(eqn)] = signed[var]
        read.update(variables(eqn.invars))
    return found


def read_outputs(program: ClosedJaxpr, given: Sequence[bool]) -> ClosedJaxpr:
    """Returns a jaxpr without its first outputs, of which it takes those that are `given`.

    They come before its other inputs. It reads from them the signs that they tell, and the results
    of reductions that they are.
    """
    count, taken = len(given), sum(given)
    known = find_known(program, count) if taken else {}

    def run(*args: jax.Array) -> list[Any]:
        outputs = spread(given, args, [None] * count)
        replaced = {}
        for eqn, number in known.items():
            if given[number]:
                replaced[eqn] = functools.partial(_read_output, outputs[number])
        return evaluate(program, args[taken:], replaced)[count:]

    if not taken:
        returned = [number >= count for number in range(len(program.out_avals))]
        return without_unused(program, returned=returned, kept=True).program
    types = itertools.compress(program.out_avals, given)
    return jax.make_jaxpr(run)(*types, *program.in_avals)


def tell_signs(program: ClosedJaxpr, telling: Sequence[bool]) -> ClosedJaxpr:
    """Returns a jaxpr some of whose outputs tell where they were positive when they are 0."""
    replaced = {}
    for number, eqn in _roundings(program, len(telling)).items():
        rounded: Any = eqn.outvars[0].aval
        if telling[number] and has_narrow_range(rounded.dtype):
            replaced[id(eqn)] = _round
    if not replaced:
        return program
    return jax.make_jaxpr(lambda *args: evaluate(program, args, replaced))(
        *program.in_avals
    )


def _round(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Rounds as an equation does, and lets -0.0 stand for positive numbers that become 0."""
    (value,) = inputs
    (rounded,) = bind(eqn, inputs)
    zeros = jnp.zeros_like(rounded)
    marked = jax.lax.select(value > 0, -zeros, zeros)
    marked = jax.lax.select(rounded == 0, marked, rounded)
    return [stand_in(marked, rounded, rounded.dtype)]


def _read_output(output: jax.Array, eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Returns a statistic, or how the numbers compared with 0 before they were rounded."""
    if not holds_half(jax.typeof(output)):
        return [output]
    if has_narrow_range(output.dtype):
        return [(output > 0) | ((output == 0) & jnp.signbit(output))]
    return bind(eqn, [output, jnp.zeros_like(output)])


def evaluate(
    program: ClosedJaxpr,
    args: Sequence[Any],
    replaced: Mapping[int, Callable[..., list[Any]]] = {},
) -> list[Any]:
    """Runs a jaxpr and what it calls, equation by equation.

    For some equations there are other functions, by the identities of the former.
    """
    jaxpr = program.jaxpr
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values: dict[Any, Any] = dict(zip(variables, [*program.consts, *args], strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    scopes = current_scopes()
    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        with context(eqn), source(eqn, scopes):
            if form_of(eqn) is Form.JIT:
                (called,) = programs(eqn)
                outputs = evaluate(closed(called), inputs, replaced)
            else:
                outputs = replaced.get(id(eqn), bind)(eqn, inputs)
        values |= zip(eqn.outvars, outputs, strict=True)
    return list(map(read, jaxpr.outvars))


def _roundings(program: ClosedJaxpr, count: int) -> dict[int, JaxprEqn]:
    """Returns by their numbers those of the first outputs that are rounded from float32."""
    outputs = program.jaxpr.outvars[:count]
    found = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name not in _CASTS or eqn.outvars[0] not in outputs:
            continue
        before: Any = eqn.invars[0].aval
        if before.dtype == jnp.float32 and holds_half(eqn.outvars[0].aval):
            found[outputs.index(eqn.outvars[0])] = eqn
    return found


def _roots(program: ClosedJaxpr) -> dict[Any, Any]:
    """Returns for variables the first one before them that is positive exactly where they are."""
    roots: dict[Any, Any] = {}
    for eqn in program.jaxpr.eqns:
        for var in variables(_positive_alike(eqn)):
            roots[eqn.outvars[0]] = roots.get(var, var)
    return roots


def _find_same_sign(program: ClosedJaxpr) -> dict[Any, Any]:
    """Returns for selections of a value and of positive multiples of it that value."""
    multiples = {}
    found = {}
    for eqn in program.jaxpr.eqns:
        name = eqn.primitive.name
        if name in _MULTIPLIES:
            for slope, value in itertools.permutations(eqn.invars):
                if isinstance(slope, Literal) and np.all(slope.val > _LEAST_SLOPE):
                    multiples[eqn.outvars[0]] = value
        if name in _SELECTS:
            cases = [multiples.get(var, var) for var in variables(eqn.invars[1:])]
            if len(cases) == 2 and cases[0] is cases[1]:
                found[eqn.outvars[0]] = cases[0]
    return found


def _positive_alike(eqn: JaxprEqn) -> list[Any]:
    """Returns the input of an equation that is positive exactly where its output is, if one is."""
    if eqn.primitive.name in _LARGER_OF and any(map(_is_zero, eqn.invars)):
        return eqn.invars
    alike = []
    if form_of(eqn) in _CALLS and len(eqn.outvars) == 1:
        (program,) = map(closed, programs(eqn))
        roots = _roots(program)
        for output in variables(program.jaxpr.outvars):
            for inside, outside in zip(program.jaxpr.invars, eqn.invars, strict=True):
                if inside is roots.get(output, output):
                    alike.append(outside)
    return alike


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and atom.val == 0

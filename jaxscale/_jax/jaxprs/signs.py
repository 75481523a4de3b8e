"""Signs of values that are not kept, read from rounded copies of them, which are.

The derivative of a ReLU asks where what it reads is positive. Its result is positive there and
nowhere else, and so is the copy of that result in half precision that the next product reads and
keeps. Read from this copy, the sign needs no array in float32, neither kept nor computed again.

float16 rounds small positive numbers to 0. Those are written as -0.0, which is 0 to all that
compute with it, and tells that the number was positive. No other number becomes -0.0.
"""

import functools
import itertools
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
_CALLS = {Form.JIT, Form.CUSTOM_JVP}


def find_signs(program: ClosedJaxpr, count: int) -> dict[int, int]:
    """Finds the equations that ask for signs which one of the first `count` outputs tells.

    They ask where a value is positive. Each is the identity of an equation, with the number of an
    output that is rounded to half precision from a value that is positive exactly there.
    """
    roots = _roots(program)
    tells: dict[Any, int] = {}
    for number, eqn in _roundings(program, count).items():
        for var in variables(eqn.invars):
            tells[roots.get(var, var)] = number
    found = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name in _IS_LARGER and _is_zero(eqn.invars[1]):
            for var in variables(eqn.invars):
                if roots.get(var, var) in tells:
                    found[id(eqn)] = tells[roots.get(var, var)]
    return found


def read_signs(program: ClosedJaxpr, given: Sequence[bool]) -> ClosedJaxpr:
    """Returns a jaxpr without its first outputs, of which it takes those that are `given`.

    They come before its other inputs. It reads from them the signs that they tell.
    """
    count, taken = len(given), sum(given)
    signs = find_signs(program, count) if taken else {}

    def run(*args: jax.Array) -> list[Any]:
        outputs = spread(given, args, [None] * count)
        replaced = {}
        for eqn, number in signs.items():
            if given[number]:
                replaced[eqn] = functools.partial(_is_positive, outputs[number])
        return _run(program, args[taken:], replaced)[count:]

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
    return jax.make_jaxpr(lambda *args: _run(program, args, replaced))(
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


def _is_positive(rounded: jax.Array, *_: object) -> list[Any]:
    """Returns flags of the numbers that were positive before they were rounded."""
    if has_narrow_range(rounded.dtype):
        return [(rounded > 0) | ((rounded == 0) & jnp.signbit(rounded))]
    return [rounded > 0]


def _run(
    program: ClosedJaxpr,
    args: Sequence[Any],
    replaced: Mapping[int, Callable[..., list[Any]]],
) -> list[Any]:
    """Runs a jaxpr with other functions for some equations, by the identities of these."""
    jaxpr = program.jaxpr
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values: dict[Any, Any] = dict(zip(variables, [*program.consts, *args], strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    scopes = current_scopes()
    for eqn in jaxpr.eqns:
        run = replaced.get(id(eqn), bind)
        with context(eqn), source(eqn, scopes):
            outputs = run(eqn, list(map(read, eqn.invars)))
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

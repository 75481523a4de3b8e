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

from .binding import bind
from .dtypes import has_narrow_range, holds_half
from .forms import FORMS, Form
from .inner_programs import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    closed,
    programs,
    variables,
    without_unused,
)
from .operations import Op, primitives_that
from .source_lines import context, current_scopes, source
from .stand_ins import stand_in

_CASTS = primitives_that(Op.CASTS)
_LARGER_OF = primitives_that(Op.LARGER | Op.LIMITS)
_IS_LARGER = primitives_that(Op.LARGER | Op.COMPARES)
_CALLS = {Form.JIT, Form.CUSTOM_JVP}


def find_signs(program: ClosedJaxpr, count: int) -> dict[int, int]:
    """Returns which equations ask for signs that one of the first `count` outputs tells.

    They ask where a value is positive. Each is the identity of an equation, with the number of an
    output that is rounded to half precision from a value that is positive exactly there.
    """
    makers = _makers(program)
    tells: dict[Any, int] = {}
    for number, eqn in _roundings(program, count).items():
        tells |= dict.fromkeys(_positive_alike(makers, eqn.invars[0]), number)
    found = {}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name in _IS_LARGER and _is_zero(eqn.invars[1]):
            for var in variables(eqn.invars[:1]):
                if var in tells:
                    found[id(eqn)] = tells[var]
    return found


def read_signs(program: ClosedJaxpr, given: Sequence[bool]) -> ClosedJaxpr:
    """Returns a program without its first outputs, of which it takes those that are `given`.

    They come before its other inputs. It reads from them the signs that they tell.
    """
    count = len(given)
    if not any(given):
        returned = [number >= count for number in range(len(program.out_avals))]
        return without_unused(program, returned=returned, kept=True).program
    numbers = list(itertools.compress(range(count), given))
    signs = find_signs(program, count)

    def run(*args: Any) -> list[Any]:
        outputs = dict(zip(numbers, args, strict=False))
        replaced = {}
        for eqn, number in signs.items():
            if number in outputs:
                replaced[eqn] = functools.partial(_is_positive, outputs[number])
        return _run(program, args[len(numbers) :], replaced)[count:]

    types = [program.out_avals[number] for number in numbers]
    return jax.make_jaxpr(run)(*types, *program.in_avals)


def tell_signs(program: ClosedJaxpr, telling: Sequence[bool]) -> ClosedJaxpr:
    """Returns a program some of whose outputs tell where they were positive when they are 0."""
    replaced = {}
    for number, eqn in _roundings(program, len(telling)).items():
        if telling[number] and has_narrow_range(eqn.outvars[0].aval.dtype):
            replaced[id(eqn)] = _round
    if not replaced:
        return program
    run = functools.partial(_run, program, replaced=replaced)
    return jax.make_jaxpr(lambda *args: run(args))(*program.in_avals)


def _round(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Rounds as an equation does, and lets -0.0 stand for positive numbers that become 0."""
    (value,) = inputs
    (rounded,) = bind(eqn, inputs)
    marks, zeros = jnp.full_like(rounded, -0.0), jnp.full_like(rounded, 0.0)
    marked = jax.lax.select(value > 0, marks, zeros)
    marked = jax.lax.select(rounded == 0, marked, rounded)
    return [stand_in(marked, rounded, rounded.dtype)]


def _is_positive(rounded: Any, *_: Any) -> list[Any]:
    """Returns where numbers were positive before they were rounded."""
    if has_narrow_range(rounded.dtype):
        return [(rounded > 0) | ((rounded == 0) & jnp.signbit(rounded))]
    return [rounded > 0]


def _run(
    program: ClosedJaxpr,
    args: Sequence[Any],
    replaced: Mapping[int, Callable[..., list[Any]]],
) -> list[Any]:
    """Runs a program with other functions for some equations, by the identities of these."""
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    scopes = current_scopes()
    for eqn in jaxpr.eqns:
        run = replaced.get(id(eqn), bind)
        with context(eqn), source(eqn, scopes):
            outputs = run(eqn, list(map(read, eqn.invars)))
        values |= zip(eqn.outvars, outputs, strict=True)
    return list(map(read, jaxpr.outvars))


def _makers(program: ClosedJaxpr) -> dict[Any, JaxprEqn]:
    """Returns for each variable of a program the equation that makes it."""
    makers: dict[Any, JaxprEqn] = {}
    for eqn in program.jaxpr.eqns:
        makers |= dict.fromkeys(eqn.outvars, eqn)
    return makers


def _roundings(program: ClosedJaxpr, count: int) -> dict[int, JaxprEqn]:
    """Returns by their numbers those of the first outputs that are rounded from float32."""
    makers = _makers(program)
    found: dict[int, JaxprEqn] = {}
    for number, atom in enumerate(program.jaxpr.outvars[:count]):
        for var in variables([atom]):
            eqn = makers.get(var)
            if eqn and eqn.primitive.name in _CASTS and holds_half(var.aval):
                found[number] = eqn
    return {
        number: eqn
        for number, eqn in found.items()
        if eqn.invars[0].aval.dtype == jnp.float32
    }


def _positive_alike(makers: Mapping[Any, JaxprEqn], atom: Any) -> list[Any]:
    """Returns a variable, and those before it that are positive exactly where it is."""
    alike = []
    while atom is not None and not isinstance(atom, Literal):
        alike.append(atom)
        eqn = makers.get(atom)
        atom = eqn and _as_positive(eqn, eqn.outvars.index(atom))
    return alike


def _as_positive(eqn: JaxprEqn, number: int) -> Any:
    """Returns the input of an equation that is positive exactly where an output is, if any is."""
    if eqn.primitive.name in _LARGER_OF:
        for one, other in itertools.permutations(eqn.invars):
            if _is_zero(other):
                return one
    if FORMS.get(eqn.primitive.name) in _CALLS:
        (program,) = map(closed, programs(eqn))
        alike = _positive_alike(_makers(program), program.jaxpr.outvars[number])
        for inside, outside in zip(program.jaxpr.invars, eqn.invars, strict=True):
            if inside in alike:
                return outside
    return None


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and atom.val == 0

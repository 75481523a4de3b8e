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


def find_signs(program: ClosedJaxpr, kept: Sequence[bool]) -> dict[int, int]:
    """Returns which equations ask for signs that one of the first outputs tells, which is `kept`.

    They ask where a value is positive. Each is the identity of an equation, with the number of an
    output that is positive exactly there. The last of several is taken.
    """
    makers = _makers(program)
    roundings = _roundings(program, len(kept))
    tells: dict[Any, int] = {}
    for number in itertools.compress(range(len(kept)), kept):
        output = program.jaxpr.outvars[number]
        if number in roundings:
            output = roundings[number].invars[0]
        tells |= dict.fromkeys(_positive_alike(makers, output), number)
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
    signs = find_signs(program, given)

    def run(*args: Any) -> list[Any]:
        outputs = dict(zip(numbers, args, strict=False))
        replaced = {}
        for eqn, number in signs.items():
            replaced[eqn] = functools.partial(_is_positive, outputs[number])
        return _run(program, args[len(numbers) :], replaced)[count:]

    types = [program.out_avals[number] for number in numbers]
    return jax.make_jaxpr(run)(*types, *program.in_avals)


def tell_signs(program: ClosedJaxpr, telling: Sequence[bool]) -> ClosedJaxpr:
    """Returns a program some of whose outputs tell where they were positive when they are 0."""
    replaced = {}
    for number, eqn in _roundings(program, len(telling)).items():
        if telling[number] and has_narrow_range(eqn.outvars[0].aval.dtype):
            replaced[id(eqn)] = functools.partial(_round, eqn)
    if not replaced:
        return program
    run = functools.partial(_run, program, replaced=replaced)
    return jax.make_jaxpr(lambda *args: run(args))(*program.in_avals)


def _round(eqn: JaxprEqn, value: Any) -> Any:
    (rounded,) = bind(eqn, [value])
    marked, zeros = jnp.full_like(rounded, -0.0), jnp.full_like(rounded, 0.0)
    zeros = jax.lax.select(value > 0, marked, zeros)
    telling = jax.lax.select(rounded == 0, zeros, rounded)
    return stand_in(telling, rounded, rounded.dtype)


def _is_positive(rounded: Any, *_: Any) -> Any:
    if has_narrow_range(rounded.dtype):
        return (rounded > 0) | ((rounded == 0) & jnp.signbit(rounded))
    return rounded > 0


def _run(
    program: ClosedJaxpr,
    args: Sequence[Any],
    replaced: Mapping[int, Callable[..., Any]],
) -> list[Any]:
    """Runs a program, some of whose equations are replaced, by their identities."""
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    scopes = current_scopes()
    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        with context(eqn), source(eqn, scopes):
            if id(eqn) in replaced:
                outputs = [replaced[id(eqn)](*inputs)]
            else:
                outputs = bind(eqn, inputs)
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
    found = {}
    for number, atom in enumerate(program.jaxpr.outvars[:count]):
        for var in variables([atom]):
            eqn = makers.get(var)
            if eqn and eqn.primitive.name in _CASTS and holds_half(var.aval):
                if eqn.invars[0].aval.dtype == jnp.float32:
                    found[number] = eqn
    return found


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

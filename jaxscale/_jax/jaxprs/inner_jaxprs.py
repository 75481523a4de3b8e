"""The jaxprs among the parameters of an equation, in the order of these."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ..pruned_jaxprs import ClosedJaxpr, Jaxpr, JaxprEqn, closed
from . import hijax
from .equation_forms import UnknownFormError, reads_form

# Asked of each parameter of each equation: a union takes longer.
_PROGRAMS = (Jaxpr, ClosedJaxpr)


def programs(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Yields the jaxprs that an equation holds, in the order of its parameters."""
    if hijax.holds_program(eqn):
        # Users are told of an unknown form where the equation is opened.
        with contextlib.suppress(UnknownFormError):
            yield program_of_object(eqn)
    yield from _own_programs(eqn)


def walk_program(program: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Yields all equations of a jaxpr, and of the jaxprs that these hold."""
    for eqn in program.eqns:
        yield from walk_equation(eqn)


def walk_equation(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields an equation, and all equations of the jaxprs that it holds."""
    yield eqn
    for program in programs(eqn):
        yield from walk_program(program)


@reads_form
def program_of_object(eqn: JaxprEqn) -> ClosedJaxpr:
    """Returns the jaxpr of an object, which takes the arrays that its inputs consist of."""
    return closed(hijax.program_of(eqn))


def with_programs(
    eqn: JaxprEqn, replaced: Sequence[Jaxpr | ClosedJaxpr]
) -> dict[str, Any]:
    """Returns the parameters of an equation with other jaxprs in the places of its own."""
    others = iter(replaced)

    def replace(value: object) -> Any:
        if _is_program(value):
            return next(others)
        if isinstance(value, tuple | list) and any(map(_is_program, value)):
            return type(value)(map(replace, value))
        return value

    return {name: replace(value) for name, value in eqn.params.items()}


def check_programs(eqn: JaxprEqn, *known: object) -> None:
    """Raises a `ValueError` if the parameters of an equation hold a jaxpr that is not known."""
    known_ids = set(map(id, known))
    for program in _own_programs(eqn):
        if id(program) not in known_ids:
            raise ValueError("it holds another program")


def fit(
    program: Jaxpr | ClosedJaxpr, inputs: Sequence[Any], outputs: Sequence[Any] | None
) -> ClosedJaxpr:
    """Checks that a jaxpr has as many inputs and outputs, and returns it with its constants.

    Raises:
      ValueError: if it has more or fewer.
    """
    jaxpr = closed(program).jaxpr
    _check_number(jaxpr.invars, inputs)
    if outputs is not None:
        _check_number(jaxpr.outvars, outputs)
    return closed(program)


def _own_programs(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Yields the jaxprs among the parameters themselves."""
    for value in eqn.params.values():
        if isinstance(value, _PROGRAMS):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from filter(_is_program, value)


def _is_program(value: object) -> bool:
    return isinstance(value, _PROGRAMS)


def _check_number(variables: Sequence[Any], expected: Sequence[Any]) -> None:
    if len(variables) != len(expected):
        raise ValueError(f"{len(variables)} variables for {len(expected)}")

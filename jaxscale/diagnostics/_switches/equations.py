"""Equations: what tells one from another, and the programs that they hold."""

from collections.abc import Sequence
from typing import Any

from ..._autocast.table import OPAQUE
from ..._jax import jaxprs
from ..._jax.jaxprs import Held, JaxprEqn, UnknownFormError, open_equation

# The equations that hold another one, outermost first.
Around = tuple[JaxprEqn, ...]

# An equation and those that hold it, by their numbers in memory, as long as these live.
EquationKey = tuple[int, ...]


def key_of(eqn: JaxprEqn, around: Around) -> EquationKey:
    """Returns what tells an equation from all others, and from itself in another call."""
    return tuple(map(id, (*around, eqn)))


def open_known(eqn: JaxprEqn) -> list[Held]:
    """Returns the programs of an equation; none if it has no form that is known."""
    try:
        return open_equation(eqn)
    except UnknownFormError:
        return []


def hides_equations(eqn: JaxprEqn) -> bool:
    """Returns whether there is more than one operation, or may be, in an equation that runs as one.

    The function of a `scatter` or a reduction is one operation.
    """
    if jaxprs.operation(eqn) in jaxprs.FORMS.keys() | OPAQUE:
        return True
    programs = list(jaxprs.programs(eqn))
    if not programs:
        return jaxprs.reaches_program(eqn)
    return any(len(program.eqns) > 1 for program in programs)


def split(values: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """Returns the first of some values in groups of these sizes, and then a group of the others."""
    groups = []
    for size in sizes:
        groups.append(values[:size])
        values = values[size:]
    return [*groups, values]

"""Programs, and the programs that equations hold."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.interpreters import partial_eval as pe

from . import hijax
from .forms import UnknownFormError, reads_form

if TYPE_CHECKING:  # JAX 0.12 has one class for both
    from jax.extend.core import Jaxpr as ClosedJaxpr
else:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr


# Asked of each parameter of each equation: a union takes longer.
_PROGRAMS = (Jaxpr, ClosedJaxpr)


def _is_program(value: Any) -> bool:
    return isinstance(value, _PROGRAMS)


def closed(program: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with its constants, of which an open one has none.

    Since JAX 0.12 a `Jaxpr` holds its constants, and `ClosedJaxpr` is another name of it
    (https://github.com/jax-ml/jax/pull/39009). Before, equations held now one, now the other.
    """
    if isinstance(program, ClosedJaxpr):
        return program
    return ClosedJaxpr(program, ())


def without_constants(program: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """Returns a program that takes its constants as its first inputs, and these constants."""
    jaxpr = program.jaxpr
    if not program.consts:
        return jaxpr, []
    info: Any = jaxpr.debug_info.with_unknown_names()
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=info), list(
        program.consts
    )


class Pruned(NamedTuple):
    """A program without what its outputs do not depend on, and which inputs it still takes."""

    program: ClosedJaxpr
    used: tuple[bool, ...]


def without_unused(
    program: ClosedJaxpr,
    *,
    returned: Sequence[bool] | None = None,
    kept: bool = False,
) -> Pruned:
    """Returns a program that computes some of its outputs, or all, and nothing else.

    Unless they are `kept`, inputs that these do not depend on are gone.
    """
    if returned is None:
        returned = [True] * len(program.out_avals)
    jaxpr, used = pe.dce_jaxpr(program.jaxpr, list(returned), kept)
    if isinstance(jaxpr, ClosedJaxpr):
        return Pruned(jaxpr, tuple(used))
    return Pruned(ClosedJaxpr(jaxpr, program.consts), tuple(used))


def find_dependent_outputs(
    program: ClosedJaxpr, varied: Sequence[bool]
) -> tuple[bool, ...]:
    """Returns for each output whether it depends on one of the inputs that are varied."""
    dependent = set(itertools.compress(program.jaxpr.invars, varied))
    for eqn in program.jaxpr.eqns:
        if not dependent.isdisjoint(variables(eqn.invars)):
            dependent.update(eqn.outvars)
    outputs = program.jaxpr.outvars
    return tuple(not isinstance(v, Literal) and v in dependent for v in outputs)


def programs(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Yields the programs that an equation holds, in the order of its parameters."""
    if hijax.holds_program(eqn):
        # Users are told of an unknown form where the equation is opened.
        with contextlib.suppress(UnknownFormError):
            yield program_of_object(eqn)
    yield from _own_programs(eqn)


def walk_program(program: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Yields all equations of a program, and of the programs that these hold."""
    for eqn in program.eqns:
        yield from walk_equation(eqn)


def walk_equation(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields an equation, and all equations of the programs that it holds."""
    yield eqn
    for program in programs(eqn):
        yield from walk_program(program)


def spread(
    flags: Iterable[Any], values: Iterable[Any], others: Iterable[Any]
) -> list[Any]:
    """Returns the next of some values for each flag that is set, and the other value elsewhere.

    It puts together again what `itertools.compress` has taken apart.
    """
    remaining = iter(values)
    together = []
    for flag, other in zip(flags, others, strict=False):
        together.append(next(remaining) if flag else other)
    return together


def variables(atoms: Iterable[Any]) -> Iterator[Any]:
    """Yields those of some variables and literals that are variables."""
    for atom in atoms:
        if not isinstance(atom, Literal):
            yield atom


def _own_programs(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Yields the programs among the parameters themselves."""
    for value in eqn.params.values():
        if isinstance(value, _PROGRAMS):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from filter(_is_program, value)


@reads_form
def program_of_object(eqn: JaxprEqn) -> ClosedJaxpr:
    """Returns the program of an object, which takes the arrays that its inputs consist of."""
    return closed(hijax.program_of(eqn))


def with_programs(
    eqn: JaxprEqn, replaced: Sequence[Jaxpr | ClosedJaxpr]
) -> dict[str, Any]:
    """Returns the parameters of an equation with other programs in the places of its own."""
    others = iter(replaced)

    def replace(value: Any) -> Any:
        if _is_program(value):
            return next(others)
        if isinstance(value, tuple | list) and any(map(_is_program, value)):
            return type(value)(map(replace, value))
        return value

    return {name: replace(value) for name, value in eqn.params.items()}


def check_programs(eqn: JaxprEqn, *known: Any) -> None:
    """Raises a `ValueError` if the parameters of an equation hold a program that is not known."""
    known_ids = set(map(id, known))
    for program in _own_programs(eqn):
        if id(program) not in known_ids:
            raise ValueError("it holds another program")


def fit(
    program: Any, inputs: Sequence[Any], outputs: Sequence[Any] | None
) -> ClosedJaxpr:
    """Checks that a program has as many inputs and outputs, and returns it with its constants.

    Raises:
      ValueError: if it has more or fewer.
    """
    jaxpr = closed(program).jaxpr
    _check_number(jaxpr.invars, inputs)
    if outputs is not None:
        _check_number(jaxpr.outvars, outputs)
    return closed(program)


def _check_number(variables: Sequence[Any], expected: Sequence[Any]) -> None:
    if len(variables) != len(expected):
        raise ValueError(f"{len(variables)} variables for {len(expected)}")

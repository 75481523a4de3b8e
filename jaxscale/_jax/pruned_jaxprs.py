"""Jaxprs: their classes, their variables, and jaxprs that compute a part of another."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.interpreters import partial_eval as pe

from .jaxpr_types import Flags

if TYPE_CHECKING:  # JAX 0.12 has one class for both
    from jax.extend.core import Jaxpr as ClosedJaxpr
else:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr


def closed(program: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr with its constants, of which an open one has none.

    Since JAX 0.12 a `Jaxpr` holds its constants, and `ClosedJaxpr` is another name of it
    (https://github.com/jax-ml/jax/pull/39009). Before, equations held now one, now the other.
    """
    if isinstance(program, ClosedJaxpr):
        return program
    return ClosedJaxpr(program, ())


def without_constants(program: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """Returns a jaxpr that takes its constants as its first inputs, and these constants."""
    jaxpr = program.jaxpr
    if not program.consts:
        return jaxpr, []
    info: Any = jaxpr.debug_info.with_unknown_names()
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=invars, debug_info=info), list(
        program.consts
    )


class Pruned(NamedTuple):
    """A jaxpr without what its outputs do not depend on, and which inputs it still takes."""

    program: ClosedJaxpr
    used: Flags


def without_unused(
    program: ClosedJaxpr,
    *,
    returned: Sequence[bool] | None = None,
    kept: bool = False,
) -> Pruned:
    """Returns a jaxpr that computes some of its outputs, or all, and nothing else.

    Unless they are `kept`, inputs that these do not depend on are gone.
    """
    if returned is None:
        returned = [True] * len(program.out_avals)
    jaxpr, used = pe.dce_jaxpr(program.jaxpr, list(returned), kept)
    if isinstance(jaxpr, ClosedJaxpr):
        return Pruned(jaxpr, tuple(used))
    return Pruned(ClosedJaxpr(jaxpr, program.consts), tuple(used))


def find_dependent_outputs(program: ClosedJaxpr, varied: Sequence[bool]) -> Flags:
    """Returns a flag for each output: it depends on one of the inputs that are varied."""
    dependent = set(itertools.compress(program.jaxpr.invars, varied))
    for eqn in program.jaxpr.eqns:
        if not dependent.isdisjoint(variables(eqn.invars)):
            dependent.update(eqn.outvars)
    outputs = program.jaxpr.outvars
    return tuple(not isinstance(v, Literal) and v in dependent for v in outputs)


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
    """Yields the variables among some variables and literals."""
    for atom in atoms:
        if not isinstance(atom, Literal):
            yield atom

"""Jaxprs whose refs, which are mutable arrays, are replaced by the arrays that they hold."""

from typing import Any

from jax._src.state.discharge import discharge_state

from ..pruned_jaxprs import ClosedJaxpr, Jaxpr, JaxprEqn, closed, without_constants
from ..refs import is_ref
from .inner_jaxprs import walk_program


def without_refs(program: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """Returns a jaxpr in which refs are the arrays that they hold, and its constants.

    It takes the constants as its first inputs. JAX compiles programs with refs in this form.
    Further outputs are what refs of the constants hold in the end.
    """
    jaxpr, consts = without_constants(program)
    if not any(_has_refs(eqn) for eqn in walk_program(program)):
        return jaxpr, consts
    values = []
    for var, const in zip(jaxpr.invars, consts, strict=False):
        values.append(const[...] if is_ref(var) else const)
    discharged = closed(discharge_state(closed(jaxpr), lower=False))
    jaxpr, more = without_constants(discharged)
    return jaxpr, [*more, *values]


def _has_refs(eqn: JaxprEqn) -> bool:
    return any(map(is_ref, (*eqn.invars, *eqn.outvars)))

"""Refs, which are mutable arrays, and traces."""

from typing import Any

import jax
import jax.core
from jax._src.state.discharge import discharge_state

from .jaxpr_types import Atom
from .jaxprs import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    closed,
    walk_program,
    without_constants,
)

# What a function may be given that is traced. A ref is not a `jax.Array`.
TRACED: Any = (jax.Array, jax.Ref)


def is_ref(atom: Atom) -> bool:
    """Returns whether a variable is a ref, a mutable array such as `jax.new_ref` makes."""
    return hasattr(atom.aval, "inner_aval")


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


def trace_of(value: object) -> Any:
    """Returns the trace in which a value was computed, or `None` if its number is known."""
    if not isinstance(value, jax.core.Tracer):
        return None
    return value._trace

"""Programs without the jitted functions in them, whose equations stand in their place."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from .binding import bind
from .inner_programs import ClosedJaxpr, Literal
from .source_lines import context, current_scopes, source

JITS = ("jit", "pjit")


def inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program without jitted functions, but for those that place their arrays."""

    def run(*args: Any) -> list[Any]:
        return _run(program, args)

    return jax.make_jaxpr(run)(*program.in_avals)


def is_open(eqn: JaxprEqn, side: str) -> bool:
    """Returns whether a `jit` leaves open where its inputs or outputs are, and their layout."""
    for sharding in eqn.params.get(f"{side}_shardings", ()):
        if type(sharding).__name__ != "UnspecifiedValue":
            return False
    layouts = eqn.params.get(f"{side}_layouts", ())
    return all(layout is None for layout in layouts)


def _run(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    jaxpr = program.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))
    scopes = current_scopes()

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        with context(eqn), source(eqn, scopes):
            is_jit = eqn.primitive.name in JITS
            if is_jit and is_open(eqn, "in") and is_open(eqn, "out"):
                inner: Any = eqn.params["jaxpr"]
                outputs = _run(inner, inputs)
            else:
                outputs = bind(eqn, inputs)
        values |= zip(eqn.outvars, outputs, strict=True)
    return list(map(read, jaxpr.outvars))

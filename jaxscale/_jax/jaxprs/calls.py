"""Calls: equations that run one jaxpr, of their own inputs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import JaxprEqn

from ..pruned_jaxprs import ClosedJaxpr, without_constants
from .binding import bind
from .equation_forms import OBJECT, PLAIN_CALLS, Form, primitives_of, reads_form
from .hijax import form_of
from .inner_jaxprs import check_programs, fit, program_of_object
from .recomputed import recomputed_like
from .remat import repeat_each, with_rematted

# The parameter with the jaxpr of each form of a call. An object has no such parameter.
_PROGRAM = {
    Form.JIT: "jaxpr",
    Form.INLINED: "call_jaxpr",
    Form.REMAT: "jaxpr",
    Form.RECOMPUTED: "call_jaxpr",
    Form.CUSTOM_JVP: "call_jaxpr",
    Form.CUSTOM_VJP: "call_jaxpr",
}
CALL_FORMS = {*_PROGRAM, Form.OBJECT}
CALLS = primitives_of(*CALL_FORMS)
# These could as well be two calls.
DIVISIBLE = PLAIN_CALLS - {Form.CUSTOM_JVP}


@reads_form
def callee(eqn: JaxprEqn) -> ClosedJaxpr:
    """Returns the jaxpr that an equation calls with its own inputs."""
    if eqn.primitive.name == OBJECT:
        check_programs(eqn)
        return fit(program_of_object(eqn), eqn.invars, eqn.outvars)
    program: Any = eqn.params[_PROGRAM[form_of(eqn)]]
    check_programs(eqn, program)
    return fit(program, eqn.invars, eqn.outvars)


def is_divisible(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a call that could as well be two, and places no array."""
    return form_of(eqn) in DIVISIBLE and all(map(partial(_is_open, eqn), ("in", "out")))


def _is_open(eqn: JaxprEqn, side: str) -> bool:
    """Returns whether a `jit` leaves open where its inputs or outputs are, and their layout."""
    for sharding in eqn.params.get(f"{side}_shardings", ()):
        if type(sharding).__name__ != "UnspecifiedValue":
            return False
    layouts = eqn.params.get(f"{side}_layouts", ())
    return all(layout is None for layout in layouts)


def with_inputs(params: dict[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """Returns the parameters of a `jit` that takes a number of arrays for each of its inputs."""
    changed = {}
    for name in ("in_shardings", "in_layouts", "donated_invars"):
        if name in params:
            changed[name] = repeat_each(params[name], numbers)
    return params | changed


def call_part(
    eqn: JaxprEqn, part: Callable[..., Any], args: Sequence[Any]
) -> list[Any]:
    """Calls a part of the jaxpr of a divisible equation, in the way the equation calls it."""
    form = form_of(eqn)
    if form is Form.JIT:
        return list(jax.jit(part)(*args))
    if form is Form.INLINED:
        return list(part(*args))
    program = _traced(part, tuple(map(jax.typeof, args)))
    if form is Form.RECOMPUTED:
        return recomputed_like(eqn, program)(*args)
    jaxpr, consts = without_constants(program)
    return bind(eqn, [*consts, *args], with_rematted(eqn, jaxpr))


_traced_parts: WeakKeyDictionary[Any, dict[Any, ClosedJaxpr]] = WeakKeyDictionary()


def _traced(part: Callable[..., Any], types: tuple[Any, ...]) -> ClosedJaxpr:
    """Returns the jaxpr of a part, traced once for arguments of some types."""
    known = _traced_parts.setdefault(part, {})
    if types not in known:
        known[types] = jax.make_jaxpr(part)(*types)
    return known[types]


def backward_rule(eqn: JaxprEqn) -> str | None:
    """Returns the name of the backward rule of a `custom_vjp` function, if it has one."""
    params = getattr(eqn.params.get("_prim"), "params", eqn.params)
    name = getattr(params.get("bwd"), "__name__", None)
    if name is None:
        return None
    return str(name)

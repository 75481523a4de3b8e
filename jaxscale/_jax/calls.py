"""Calls: equations that run one program, of their own inputs."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from .binding import bind
from .forms import reads_form
from .hijax import OBJECT, operation, takes_own_types
from .inlining import JITS, is_open
from .inner_programs import (
    ClosedJaxpr,
    check_programs,
    fit,
    program_of_object,
    without_constants,
)
from .remat import repeat_each, with_rematted

# Calls: the name of the equation, and the parameter with the program.
CALLS = {
    "jit": "jaxpr",  # since JAX 0.7
    "pjit": "jaxpr",  # before
    "closed_call": "call_jaxpr",
    "call": "call_jaxpr",  # before JAX 0.12
    # since: what a traced function leaves where it is called
    "eval_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    OBJECT: "_prim",
}
# Calls that do nothing but run their program, and could as well be two calls.
_INLINED = ("closed_call", "call", "eval_jaxpr")
_DIVISIBLE = (*JITS, *_INLINED, "remat2")


@reads_form
def callee(eqn: JaxprEqn) -> ClosedJaxpr:
    """Returns the program that an equation calls with its own inputs."""
    if eqn.primitive.name == OBJECT:
        if takes_own_types(eqn):
            raise ValueError("its program takes what these values consist of")
        check_programs(eqn)
        return fit(program_of_object(eqn), eqn.invars, eqn.outvars)
    program: Any = eqn.params[CALLS[eqn.primitive.name]]
    check_programs(eqn, program)
    return fit(program, eqn.invars, eqn.outvars)


def is_placed(eqn: JaxprEqn) -> bool:
    """Returns whether a `jit` says where its inputs are, or how they are laid out."""
    return not is_open(eqn, "in")


def is_divisible(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a call that could as well be two, and places no array."""
    is_call = operation(eqn) in _DIVISIBLE
    return is_call and is_open(eqn, "in") and is_open(eqn, "out")


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
    """Calls a part of the program of a divisible equation, in the way the equation calls it."""
    name = operation(eqn)
    if name in JITS:
        return list(jax.jit(part)(*args))
    if name in _INLINED:
        return list(part(*args))
    types = tuple(map(jax.typeof, args))
    jaxpr, consts = _traced(part, types)
    return bind(eqn, [*consts, *args], with_rematted(eqn, jaxpr))


_traced_parts: WeakKeyDictionary[Any, dict[Any, tuple[Jaxpr, list[Any]]]] = (
    WeakKeyDictionary()
)


def _traced(
    part: Callable[..., Any], types: tuple[Any, ...]
) -> tuple[Jaxpr, list[Any]]:
    """Returns the program of a part and its constants, traced once for arguments of some types."""
    known = _traced_parts.setdefault(part, {})
    if types not in known:
        known[types] = without_constants(jax.make_jaxpr(part)(*types))
    return known[types]


def backward_rule(eqn: JaxprEqn) -> str | None:
    """Returns the name of the backward rule of a `custom_vjp` function, if it has one."""
    params = getattr(eqn.params.get("_prim"), "params", eqn.params)
    name = getattr(params.get("bwd"), "__name__", None)
    if name is None:
        return None
    return str(name)

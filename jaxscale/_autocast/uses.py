"""How a program uses its variables, as far as that can be told before it runs."""

from typing import Any

from .._jax import Jaxpr, Literal
from .table import FLOAT32 as FLOAT32_OPERATIONS


def last_uses(jaxpr: Jaxpr) -> dict[int, list[Any]]:
    """Returns the variables that can be forgotten after each equation, by its index."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        for atom in (*eqn.invars, *eqn.outvars):
            if not isinstance(atom, Literal):
                last[atom] = index
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal):
            last.pop(atom, None)
    forgotten: dict[int, list[Any]] = {}
    for var, index in last.items():
        forgotten.setdefault(index, []).append(var)
    return forgotten


def only_float32(jaxpr: Jaxpr) -> set[Any]:
    """Returns the differences that are read by operations in float32 alone."""
    differences = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "sub"}
    if differences:
        for eqn in jaxpr.eqns:
            is_power = eqn.primitive.name == "mul" and eqn.invars[0] is eqn.invars[1]
            if eqn.primitive.name not in FLOAT32_OPERATIONS and not is_power:
                differences.difference_update(a for a in eqn.invars if not isinstance(a, Literal))
        differences.difference_update(a for a in jaxpr.outvars if not isinstance(a, Literal))
    return differences

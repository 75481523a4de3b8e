"""Which equations may be part of a chain: elementwise operations that are computed when needed.

What a chain is, and how it is computed, is in `recompute.py`.
"""

from collections.abc import Iterator
from typing import Any

from .._jax import JaxprEqn, operation, programs, walk_equation
from . import table
from .frame import Frame
from .recompute import collect
from .values import Constant, Parameter, is_float32


def is_call_for_chain(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a call is of elementwise operations in float32, and may be in a chain."""
    has_float32 = not table.FLOAT32_ELEMENTWISE.isdisjoint(_walk_operations(eqn))
    if not has_float32 and not frame.reads_link(eqn):
        return False
    return fits_chain(frame, eqn)


def fits_chain(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether an equation may be part of a chain, as its start or further on."""
    if operation(eqn) not in table.CHAINED:
        return False
    if not all(map(is_float32, eqn.outvars)):
        return False
    is_call = any(programs(eqn))
    if is_call and not table.CHAINED.issuperset(_walk_operations(eqn)):
        return False
    if eqn.primitive.name == "add":
        return _sum_fits_chain(frame, eqn)
    return frame.reads_link(eqn) or frame.reads_narrow(eqn)


def _walk_operations(eqn: JaxprEqn) -> Iterator[str]:
    """Yields the names of the operations of an equation and of the programs that it holds."""
    return map(operation, walk_equation(eqn))


def _sum_fits_chain(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a sum may be part of a chain: it goes on with one, but never starts it."""
    if not frame.reads_link(eqn) or _is_residual(frame, eqn):
        return False
    for atom in eqn.invars:
        is_constant = isinstance(frame.kind_of(atom), Constant | Parameter)
        if not (is_constant or frame.is_narrow(atom) or frame.link_of(atom)):
            return False
    return True


def _is_residual(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a sum is that of a residual connection, from which the next layer starts.

    One of its inputs is also read elsewhere, and they are computed from different arrays.
    """
    is_shared = False
    for atom in eqn.invars:
        if frame.link_of(atom) is not None and frame.readers.numbers[atom] > 1:
            is_shared = True
    first, second = eqn.invars
    return is_shared and _find_starts(frame, first) != _find_starts(frame, second)


def _find_starts(frame: Frame, atom: Any) -> set[Any]:
    """Returns the identities of the arrays that a value is computed from."""
    link = frame.link_of(atom)
    if link is None:
        return {frame.identity_of(atom)}
    return set(collect(link).starts)

"""How a program uses its variables, as far as that can be told before it runs."""

import collections
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from .._jax import CALLS, Jaxpr, JaxprEqn, Literal, UnknownFormError, callee, programs
from .table import FLOAT32 as FLOAT32_OPERATIONS
from .table import ROUNDED_ALIKE
from .values import is_full_precision

# They mean nothing but the program in them. The backward rule of a `custom_vjp` is not in it.
_CALLS = CALLS.keys() - {"custom_vjp_call", "custom_vjp_call_jaxpr"}


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


def readers(jaxpr: Jaxpr) -> collections.Counter[Any]:
    """Returns how often each variable is read."""
    atoms = itertools.chain(*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
    return collections.Counter(atom for atom in atoms if not isinstance(atom, Literal))


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


def rounded_reads(
    jaxpr: Jaxpr, reads_half: Callable[[JaxprEqn], bool], wanted: Sequence[bool] = ()
) -> tuple[set[Any], set[Any]]:
    """Returns the variables that are read to be rounded to half precision, and those only read so.

    What commutes with that, and whose result is read only so, counts. Nothing is lost if one that
    is read only so is rounded at once.

    Args:
      jaxpr: the program.
      reads_half: whether an equation rounds its inputs.
      wanted: for each output whether it is. Those without one are not.
    """
    rounded: set[Any] = set()
    others: set[Any] = set()

    def read(atom: Any, is_rounded: bool) -> None:
        if not isinstance(atom, Literal):
            (rounded if is_rounded else others).add(atom)

    for atom, is_wanted in itertools.zip_longest(jaxpr.outvars, wanted, fillvalue=False):
        read(atom, is_wanted)
    for eqn in reversed(jaxpr.eqns):
        kept = [var in rounded and var not in others for var in eqn.outvars]
        alike = eqn.primitive.name in ROUNDED_ALIKE and all(kept) and not any(programs(eqn))
        halves = [alike or reads_half(eqn)] * len(eqn.invars)
        if eqn.primitive.name in _CALLS:
            with contextlib.suppress(UnknownFormError):
                program = callee(eqn).jaxpr
                _, found = rounded_reads(program, reads_half, kept)
                halves = [var in found for var in program.invars]
        for atom, is_rounded in zip(eqn.invars, halves, strict=True):
            read(atom, is_rounded)
    return rounded, rounded - others


def through_products(
    jaxpr: Jaxpr, reads_half: Callable[[JaxprEqn], bool], first: int, number: int
) -> list[bool]:
    """Returns for each carry whether its next value is computed from a product that reads it.

    The residual stream of a scan over layers is, and the state of an RNN; a counter, a time or a
    sum of losses is not, nor is what `full_precision` returns.

    Args:
      jaxpr: the body of a loop. Its first outputs are what it carries.
      reads_half: whether an equation is a product in half precision.
      first: the first input that it carries.
      number: how many it carries.
    """
    carried = range(first, first + number)
    given = [{(i, False)} if i in carried else set() for i in range(len(jaxpr.invars))]
    outputs = _sources(jaxpr, reads_half, given)
    return [(i, True) in found for i, found in zip(carried, outputs, strict=False)]


def _sources(
    jaxpr: Jaxpr, reads_half: Callable[[JaxprEqn], bool], given: Sequence[set[Any]]
) -> list[set[Any]]:
    """Returns which inputs each output is computed from, and whether through a product."""
    found = dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> set[Any]:
        return set() if isinstance(atom, Literal) else found.get(atom, set())

    for eqn in jaxpr.eqns:
        if is_full_precision(eqn):
            continue
        inputs = [*map(read, eqn.invars)]
        outputs = [set().union(*inputs)] * len(eqn.outvars)
        if eqn.primitive.name in _CALLS:
            with contextlib.suppress(UnknownFormError):
                outputs = _sources(callee(eqn).jaxpr, reads_half, inputs)
        elif _holds(eqn, reads_half):
            outputs = [{(i, True) for i, _ in each} for each in outputs]
        found |= zip(eqn.outvars, outputs, strict=True)
    return [*map(read, jaxpr.outvars)]


def _holds(eqn: JaxprEqn, reads_half: Callable[[JaxprEqn], bool]) -> bool:
    inner = (inner for each in programs(eqn) for inner in each.eqns)
    return reads_half(eqn) or any(_holds(each, reads_half) for each in inner)

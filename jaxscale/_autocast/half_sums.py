"""Sums of half-precision cotangents: a search for those that a derivative makes.

The cotangent of a half-precision array is in half precision. A sum of many stops growing in it, as
that to a row of an embedding, or to a weight that each turn of a loop reads.
"""

import collections
import itertools
from collections.abc import Iterator
from typing import Any

from .._jax import jaxprs
from .._jax.jaxprs import (
    Form,
    Jaxpr,
    JaxprEqn,
    Literal,
    UnknownFormError,
    form_of,
    holds_inexact,
    once_for_each_program,
    programs,
    variables,
)
from . import table
from .narrow_values import is_full_precision, is_half


def has_gradient(eqn: JaxprEqn) -> bool:
    """Returns whether cotangents may go through an equation."""
    if eqn.primitive.name in table.WITHOUT_GRADIENT:
        return False
    return any(holds_inexact(var.aval) for var in eqn.outvars)


def find_pulled(eqn: JaxprEqn) -> Iterator[Any]:
    """Yields the variables that cotangents may come back to through an equation, each time.

    A segment of another `autocast` reads a half-precision array as a stand-in, without a cotangent.
    """
    if not has_gradient(eqn):
        return
    if form_of(eqn) is Form.RECOMPUTED:
        segment = jaxprs.callee(eqn).jaxpr
        pulled = set(variables(segment.outvars))
        for inner in segment.eqns:
            pulled.update(find_pulled(inner))
        for atom, var in zip(eqn.invars, segment.invars, strict=True):
            if var in pulled:
                yield from variables([atom])
    else:
        pulled_inputs = jaxprs.find_pulled_inputs(eqn)
        yield from variables(itertools.compress(eqn.invars, pulled_inputs))


def find_pulled_halves(eqn: JaxprEqn) -> list[Any]:
    """Returns the half-precision ones, once for each cotangent that must be added.

    The two of a square count once: half precision rounds a sum of two no more often than float32.
    """
    halves = list(filter(is_half, find_pulled(eqn)))
    if len(halves) == 2 and halves[0] is halves[1]:
        halves.pop()
    return halves


def find_repeated(eqn: JaxprEqn) -> list[bool]:
    """Flags the inputs in half precision that an elementwise equation repeats along an axis.

    JAX repeats a bias in the addition itself, and adds what comes back to it.
    """
    is_elementwise = eqn.primitive.name in table.ELEMENTWISE and has_gradient(eqn)
    if not is_elementwise or is_full_precision(eqn):
        return [False] * len(eqn.invars)
    output: Any = eqn.outvars[0]
    flags = []
    for atom in eqn.invars:
        aval: Any = atom.aval
        is_variable = is_half(atom) and not isinstance(atom, Literal)
        flags.append(is_variable and aval.shape != output.aval.shape)
    return flags


@once_for_each_program
def adds_halves(program: Jaxpr) -> bool:
    """Returns whether the derivative of a jaxpr adds up cotangents in half precision."""
    reads = collections.Counter(filter(is_half, variables(program.outvars)))
    for eqn in program.eqns:
        reads.update(find_pulled_halves(eqn))
        if not is_full_precision(eqn) and (_adds(eqn) or adds_halves_inside(eqn)):
            return True
    return any(number > 1 for number in reads.values())


def adds_halves_inside(eqn: JaxprEqn) -> bool:
    """Returns whether the derivative of a call, a loop or branches adds up such cotangents.

    That of a function with a backward rule of its own adds what the rule says.
    """
    form = form_of(eqn)
    if (
        form is Form.CUSTOM_VJP
        or eqn.primitive.name in table.KERNELS | table.AS_WRITTEN
    ):
        return False
    return _adds(eqn) or any(map(adds_halves, programs(eqn)))


def _adds(eqn: JaxprEqn) -> bool:
    """Returns whether what an equation does makes a sum of what comes back to its input."""
    summed: Any = eqn.invars
    match form_of(eqn):
        case Form.SCAN:
            try:
                summed = eqn.invars[: jaxprs.scan(eqn).consts]
            except UnknownFormError:
                return False
        case Form.SHARD_MAP:
            pass
        case _ if eqn.primitive.name not in table.SUMMED_BACKWARD:
            return any(find_repeated(eqn))
    return any(map(is_half, variables(summed)))

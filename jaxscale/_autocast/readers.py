"""Who reads each value of a program. All of this is known before the program runs."""

import collections
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import _jax
from .._jax import (
    Jaxpr,
    JaxprEqn,
    Literal,
    UnknownFormError,
    callee,
    holds_inexact,
    operation,
    programs,
    variables,
)
from . import table
from .callers import Owner, owner_of
from .casts import reads_half

# They do nothing but run their program. A `custom_vjp` also has a backward rule, outside of it.
CALLS = _jax.CALLS.keys() - {"custom_vjp_call", _jax.OBJECT}


class Readers(NamedTuple):
    """Who reads the variables of a program.

    Attributes:
      numbers: how often each variable is read.
      products: the identities of the equations that cast their inputs to half precision.
      rounded: the variables that anything reads to round them to half precision.
      only_rounded: those of them that nothing reads in another way. Rounding one at once loses
        nothing.
      only_float32: the differences that only operations in float32 read.
      meeting: the variables whose cotangents come from several readers, not all of them products.
    """

    numbers: collections.Counter[Any]
    products: set[int]
    rounded: set[Any]
    only_rounded: set[Any]
    only_float32: set[Any]
    meeting: set[Any]


def find_readers(
    jaxpr: Jaxpr, rounded_outputs: Sequence[bool], owner: Owner
) -> Readers:
    """Finds who reads the variables of a program.

    Args:
      jaxpr: the program.
      rounded_outputs: for each of its first outputs, whether whoever called it rounds it to half
        precision. The others are not rounded.
      owner: of the products that do not say it themselves.
    """
    products = _find_products(jaxpr, owner)
    rounded = _find_rounded(jaxpr, rounded_outputs, owner, products)
    return Readers(
        numbers=_count_reads(jaxpr),
        products=products,
        rounded=rounded.rounded,
        only_rounded=rounded.rounded - rounded.others,
        only_float32=_find_only_float32(jaxpr),
        meeting=_find_meeting(jaxpr, products),
    )


def _find_products(jaxpr: Jaxpr, owner: Owner) -> set[int]:
    return {id(eqn) for eqn in jaxpr.eqns if reads_half(eqn, owner)}


def _count_reads(jaxpr: Jaxpr) -> collections.Counter[Any]:
    numbers = collections.Counter(variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        numbers.update(variables(eqn.invars))
    return numbers


def find_last_uses(jaxpr: Jaxpr) -> list[set[Any]]:
    """Returns for each equation the variables that can be forgotten after it."""
    read_later = set(variables(jaxpr.outvars))
    forgotten = []
    for eqn in reversed(jaxpr.eqns):
        last_used = set(variables((*eqn.invars, *eqn.outvars))) - read_later
        forgotten.append(last_used)
        read_later |= last_used
    forgotten.reverse()
    return forgotten


def has_gradient(eqn: JaxprEqn) -> bool:
    """Returns whether cotangents may go through an equation."""
    if eqn.primitive.name in table.WITHOUT_GRADIENT:
        return False
    return any(holds_inexact(var.aval) for var in eqn.outvars)


def _find_meeting(jaxpr: Jaxpr, products: set[int]) -> set[Any]:
    """Returns the variables whose cotangents come from several readers, not all products."""
    reads = collections.Counter(variables(jaxpr.outvars))
    reads_of_products: collections.Counter[Any] = collections.Counter()
    for eqn in jaxpr.eqns:
        if has_gradient(eqn):
            reads.update(variables(eqn.invars))
        if id(eqn) in products:
            reads_of_products.update(variables(eqn.invars))
    meeting = set()
    for var, number in reads.items():
        if number > 1 and number > reads_of_products[var]:
            meeting.add(var)
    return meeting


def _find_only_float32(jaxpr: Jaxpr) -> set[Any]:
    """Returns the differences that only operations in float32 read."""
    differences = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "sub"}
    if not differences:
        return differences  # most programs have none: this saves them the second loop
    read_otherwise = set(variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in table.FLOAT32 and not _is_square(eqn):
            read_otherwise.update(variables(eqn.invars))
    return differences - read_otherwise


def _is_square(eqn: JaxprEqn) -> bool:
    """Returns whether a product is of an array with itself, which is a power."""
    return eqn.primitive.name == "mul" and eqn.invars[0] is eqn.invars[1]


class _RoundedReads:
    """The variables that are read to be rounded, and those that are read otherwise.

    A reader rounds what it reads also if it commutes with rounding and everything that reads its
    result rounds that.
    """

    def __init__(self) -> None:
        self.rounded: set[Any] = set()
        self.others: set[Any] = set()

    def note(self, atom: Any, is_rounded: bool) -> None:
        if isinstance(atom, Literal):
            return
        if is_rounded:
            self.rounded.add(atom)
        else:
            self.others.add(atom)

    def is_only_rounded(self, var: Any) -> bool:
        return var in self.rounded and var not in self.others


def _find_rounded(
    jaxpr: Jaxpr, rounded_outputs: Sequence[bool], owner: Owner, products: set[int]
) -> _RoundedReads:
    """Finds what is read to be rounded, from the last reader to the first."""
    reads = _RoundedReads()
    outputs = itertools.zip_longest(jaxpr.outvars, rounded_outputs, fillvalue=False)
    for atom, is_rounded in outputs:
        reads.note(atom, is_rounded)
    for eqn in reversed(jaxpr.eqns):
        only_rounded = list(map(reads.is_only_rounded, eqn.outvars))
        if id(eqn) in products:
            rounds_inputs = [True] * len(eqn.invars)
        else:
            rounds_inputs = _find_rounded_inputs(eqn, only_rounded, owner)
        for atom, is_rounded in zip(eqn.invars, rounds_inputs, strict=True):
            reads.note(atom, is_rounded)
    return reads


def _find_rounded_inputs(
    eqn: JaxprEqn, only_rounded: Sequence[bool], owner: Owner
) -> list[bool]:
    """Returns for each input whether an equation reads it only to round it.

    `only_rounded` says for each of its outputs whether all of its readers round it.
    """
    if operation(eqn) in CALLS:
        with contextlib.suppress(UnknownFormError):
            return _find_rounded_by_call(eqn, only_rounded, owner)
    commutes = operation(eqn) in table.ROUNDED_ALIKE and not any(programs(eqn))
    return [commutes and all(only_rounded)] * len(eqn.invars)


def _find_rounded_by_call(
    eqn: JaxprEqn, only_rounded: Sequence[bool], owner: Owner
) -> list[bool]:
    called = callee(eqn).jaxpr
    inner_owner = owner_of(eqn, owner)
    products = _find_products(called, inner_owner)
    reads = _find_rounded(called, only_rounded, inner_owner, products)
    return list(map(reads.is_only_rounded, called.invars))

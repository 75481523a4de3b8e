"""What can be told of a program before it runs: which products are cast, and who reads what.

Cast are the products of matrices, and the convolutions, that the user's model asks for.
"""

import collections
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jax.core import ShapedArray

from .. import _jax
from .._jax import (
    CALLS,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    UnknownFormError,
    callee,
    operation,
    programs,
)
from . import table
from .callers import Owner, owner_of
from .values import is_float32, is_full_precision, is_inexact

# They mean nothing but the program in them. The backward rule of a `custom_vjp` is not in it.
_CALLS = CALLS.keys() - {"custom_vjp_call", _jax.OBJECT}

# Whether what is traced now is traced for an `autocast`.
under_autocast: ContextVar[bool] = ContextVar("under_autocast", default=False)


def is_cast(eqn: JaxprEqn, around: Owner = Owner.MODEL) -> bool:
    """Returns whether an equation is a product of float32 arrays, without a demand of its own.

    It is not a step of a library's algorithm; `around` is as in `owner_of`.
    """
    if eqn.primitive.name not in table.PRODUCTS or not is_float32(eqn.outvars[0]):
        return False
    for atom in eqn.invars:
        is_array = type(atom.aval) is ShapedArray
        if is_array and not is_float32(atom) and is_inexact(atom.aval):
            return False
    if _jax.demands_precision(eqn):
        return False
    return _is_of_matrices(eqn) and owner_of(eqn, around) is not Owner.LIBRARY


def _is_of_matrices(eqn: JaxprEqn) -> bool:
    """Returns whether a product has something to sum over, and a row or a column left over.

    Otherwise it is a product of elements, or a sum of such products. Half precision makes these no
    faster, and a sum that is a loss gets the loss scale itself as its cotangent.
    """
    if eqn.primitive.name != "dot_general":
        return True
    has_sum = False
    has_free = False
    operands: list[Any] = eqn.invars
    for atom, (contracted, batch) in zip(operands, _jax.dot_dimensions(eqn), strict=True):
        for i, size in enumerate(atom.aval.shape):
            is_one = type(size) is int and size == 1  # it is not a number if it is not known yet
            if i in batch or is_one:
                continue
            if i in contracted:
                has_sum = True
            else:
                has_free = True
    return has_sum and has_free


def why_not_cast(eqn: JaxprEqn, around: Owner = Owner.MODEL) -> str:
    """Returns why `autocast` leaves a product of float32 arrays alone, or `""` if it does not."""
    if is_full_precision(eqn):
        return "marked by `jaxscale.full_precision`"
    if is_cast(eqn, around):
        return ""
    if not _is_of_matrices(eqn):
        return "of vectors or elements, not of matrices"
    if owner_of(eqn, around) is Owner.LIBRARY:
        return "a step of a library that is written for float32"
    return "it asks for a precision of its own"


def reads_half(eqn: JaxprEqn, around: Owner = Owner.MODEL) -> bool:
    """Returns whether an equation casts its inputs to half precision, whatever they are."""
    return is_cast(eqn, around) and not is_full_precision(eqn)


def is_logits(eqn: JaxprEqn, around: Owner) -> bool:
    """Returns whether a product is that of queries and keys in JAX's attention."""
    if eqn.primitive.name != "dot_general":
        return False
    operands: list[Any] = eqn.invars
    for atom, (summed, _) in zip(operands, _jax.dot_dimensions(eqn), strict=True):
        # Of the weights and the values, one is summed over another dimension than its last.
        if tuple(summed) != (atom.aval.ndim - 1,):
            return False
    return owner_of(eqn, around) is Owner.ATTENTION


# For each program, by the owner of what does not say it itself.
_with_products: WeakKeyDictionary[Jaxpr, dict[Owner, bool]] = WeakKeyDictionary()


def has_products(eqn: JaxprEqn, around: Owner = Owner.MODEL) -> bool:
    """Returns whether an equation holds programs with anything that `autocast` casts by itself."""
    inner_programs = list(programs(eqn))
    if not inner_programs:
        return False
    owner = owner_of(eqn, around)
    return any(_has_products(program, owner) for program in inner_programs)


def casts_anything(program: ClosedJaxpr) -> bool:
    """Returns whether a program has anything that `autocast` casts by itself."""
    return _has_products(program, Owner.MODEL)


def _has_products(program: Jaxpr | ClosedJaxpr, owner: Owner) -> bool:
    jaxpr = _jax.closed(program).jaxpr
    known = _with_products.setdefault(jaxpr, {})
    if owner not in known:
        eqns = [eqn for eqn in jaxpr.eqns if not is_full_precision(eqn)]
        known[owner] = any(is_cast(eqn, owner) or _is_entered(eqn, owner) for eqn in eqns)
    return known[owner]


def _is_entered(eqn: JaxprEqn, owner: Owner) -> bool:
    is_left = eqn.primitive.name in table.KERNELS | table.FLOAT32
    return not is_left and has_products(eqn, owner)


def equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields an equation, and all equations of the programs that it holds."""
    yield eqn
    for program in programs(eqn):
        for inner in program.eqns:
            yield from equations(inner)


def variables(atoms: Iterable[Any]) -> Iterator[Any]:
    """Returns those of some variables and literals that are variables."""
    return (atom for atom in atoms if not isinstance(atom, Literal))


def last_uses(jaxpr: Jaxpr) -> list[set[Any]]:
    """Returns for each equation the variables that can be forgotten after it."""
    read_later = set(variables(jaxpr.outvars))
    forgotten = []
    for eqn in reversed(jaxpr.eqns):
        last_used = set(variables((*eqn.invars, *eqn.outvars))) - read_later
        forgotten.append(last_used)
        read_later |= last_used
    forgotten.reverse()
    return forgotten


def readers(jaxpr: Jaxpr) -> collections.Counter[Any]:
    """Returns how often each variable is read."""
    atoms = itertools.chain(*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
    return collections.Counter(variables(atoms))


def has_gradient(eqn: JaxprEqn) -> bool:
    """Returns whether cotangents may go through an equation."""
    if eqn.primitive.name in table.WITHOUT_GRADIENT:
        return False
    return any(is_inexact(var.aval) for var in eqn.outvars)


def find_half_readers(jaxpr: Jaxpr, owner: Owner) -> set[int]:
    """Returns the identities of the equations that cast their inputs to half precision."""
    return {id(eqn) for eqn in jaxpr.eqns if reads_half(eqn, owner)}


def meeting(jaxpr: Jaxpr, half_readers: set[int]) -> set[Any]:
    """Returns the variables to which cotangents come from several readers, not all products."""
    reads: list[Any] = list(jaxpr.outvars)
    of_products: list[Any] = []
    for eqn in jaxpr.eqns:
        if has_gradient(eqn):
            reads += eqn.invars
        if id(eqn) in half_readers:
            of_products += eqn.invars
    numbers = collections.Counter(variables(reads))
    numbers_of_products = collections.Counter(variables(of_products))
    return {var for var, number in numbers.items() if number > max(1, numbers_of_products[var])}


def only_float32(jaxpr: Jaxpr) -> set[Any]:
    """Returns the differences that are read by operations in float32 alone."""
    differences = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "sub"}
    if not differences:
        return differences
    for eqn in jaxpr.eqns:
        is_power = eqn.primitive.name == "mul" and eqn.invars[0] is eqn.invars[1]
        if eqn.primitive.name not in table.FLOAT32 and not is_power:
            differences.difference_update(variables(eqn.invars))
    return differences.difference(variables(jaxpr.outvars))


def rounded_reads(
    jaxpr: Jaxpr, wanted: Sequence[bool], owner: Owner, half_readers: set[int]
) -> tuple[set[Any], set[Any]]:
    """Returns the variables that are read to be rounded to half precision, and those only read so.

    What commutes with that, and whose result is read only so, counts. Nothing is lost if one that
    is read only so is rounded at once. `wanted` says for each output whether it is rounded;
    `half_readers` are the equations that `find_half_readers` found.
    """
    rounded: set[Any] = set()
    others: set[Any] = set()

    def note_read(atom: Any, is_rounded: bool) -> None:
        if isinstance(atom, Literal):
            return
        if is_rounded:
            rounded.add(atom)
        else:
            others.add(atom)

    for atom, is_wanted in itertools.zip_longest(jaxpr.outvars, wanted, fillvalue=False):
        note_read(atom, is_wanted)
    for eqn in reversed(jaxpr.eqns):
        only_rounded = [var in rounded and var not in others for var in eqn.outvars]
        commutes = operation(eqn) in table.ROUNDED_ALIKE and not any(programs(eqn))
        rounds_all = (commutes and all(only_rounded)) or id(eqn) in half_readers
        inputs_rounded = [rounds_all] * len(eqn.invars)
        if operation(eqn) in _CALLS:
            with contextlib.suppress(UnknownFormError):
                inputs_rounded = _rounded_by_call(eqn, only_rounded, owner)
        for atom, is_rounded in zip(eqn.invars, inputs_rounded, strict=True):
            note_read(atom, is_rounded)
    return rounded, rounded - others


def _rounded_by_call(eqn: JaxprEqn, wanted: Sequence[bool], owner: Owner) -> list[bool]:
    """Returns for each input of a call whether it is only read to be rounded."""
    program = callee(eqn).jaxpr
    inner_owner = owner_of(eqn, owner)
    half_readers = find_half_readers(program, inner_owner)
    _, only_rounded = rounded_reads(program, wanted, inner_owner, half_readers)
    return [var in only_rounded for var in program.invars]


def half_carries(loop: _jax.Scan, owner: Owner = Owner.MODEL) -> list[bool]:
    """Returns for each carry of a loop whether it may be in half precision.

    It may if its next value is computed from a product that reads it, as the residual stream of a
    scan over layers and the state of an RNN are; not so a counter, a time or a sum of losses.
    """
    body = loop.body.jaxpr
    inputs: list[set[_Source]] = [set() for _ in body.invars]
    carried = range(loop.consts, loop.consts + loop.carries)
    for i in carried:
        inputs[i] = {_Source(i, through_product=False)}
    may_be_half = []
    for i, sources in zip(carried, _trace_sources(body, inputs, owner), strict=False):
        is_multiplied = _Source(i, through_product=True) in sources
        may_be_half.append(is_multiplied and is_float32(body.invars[i]))
    return may_be_half


class _Source(NamedTuple):
    """An input of a program that a value is computed from."""

    number: int
    through_product: bool


def _trace_sources(
    jaxpr: Jaxpr, inputs: Sequence[set[_Source]], owner: Owner
) -> list[set[_Source]]:
    """Returns what each output is computed from, given that of each input."""
    sources = dict(zip(jaxpr.invars, inputs, strict=True))

    def sources_of(atom: Any) -> set[_Source]:
        if isinstance(atom, Literal):
            return set()
        return sources.get(atom, set())

    for eqn in jaxpr.eqns:
        if is_full_precision(eqn):
            continue
        read = list(map(sources_of, eqn.invars))
        of_all_inputs = set().union(*read)
        outputs = [of_all_inputs] * len(eqn.outvars)
        if operation(eqn) in _CALLS:
            with contextlib.suppress(UnknownFormError):
                outputs = _trace_sources(callee(eqn).jaxpr, read, owner_of(eqn, owner))
        elif reads_half(eqn, owner) or has_products(eqn, owner):
            multiplied = {_Source(source.number, True) for source in of_all_inputs}
            outputs = [multiplied] * len(eqn.outvars)
        sources |= zip(eqn.outvars, outputs, strict=True)
    return list(map(sources_of, jaxpr.outvars))

"""The plan of a jaxpr: its parts, and how its variables are read."""

import collections
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._jax.jaxprs import (
    DIVISIBLE,
    Flags,
    Jaxpr,
    JaxprEqn,
    called_program,
    once_for_each_program,
    operation,
    programs,
    variables,
)
from . import table
from .cast_products import is_cast
from .half_sums import find_pulled, find_pulled_halves
from .narrow_values import is_half
from .product_owner import CallSite, Owner
from .segmentation import Part, cut


class Plan(NamedTuple):
    """A jaxpr in parts, with what is known of its variables.

    Attributes:
      parts: the parts, in the order in which they run.
      products: the identities of the equations that read half precision.
      only_rounded: the variables that are only read to be rounded to half precision, as by a
        product, and whose cotangent is rounded before it comes back. To round one at once loses
        nothing.
      kept: the variables that products read, or a pooling, and keep for the backward pass.
      cotangent_sums: the variables whose cotangents come from several readers, and are added in
        float32.
    """

    parts: Sequence[Part]
    products: set[int]
    only_rounded: set[Any]
    kept: set[Any]
    cotangent_sums: set[Any]


@once_for_each_program
def plan(jaxpr: Jaxpr, rounded_outputs: Flags, site: CallSite) -> Plan:
    """Plans a jaxpr.

    Args:
      jaxpr: one without its constants.
      rounded_outputs: for each of its first outputs, whether whoever called it rounds it to half
        precision. The others are not rounded.
      site: what is known of it from where it is called.
    """
    products = {id(eqn) for eqn in jaxpr.eqns if is_cast(eqn, site)}
    parts = cut(jaxpr, products, has_segments=site.owner is not Owner.UNCAST)
    cotangent_sums = _find_cotangent_sums(jaxpr, parts)
    rounded = _find_rounded(
        jaxpr, parts, products, cotangent_sums, rounded_outputs, site
    )
    kept: set[Any] = set()
    for eqn in jaxpr.eqns:
        if id(eqn) in products or operation(eqn) in table.POOLINGS:
            kept.update(variables(eqn.invars))
    return Plan(parts, products, rounded, kept, cotangent_sums)


def _find_cotangent_sums(jaxpr: Jaxpr, parts: Sequence[Part]) -> set[Any]:
    """Returns the variables whose cotangents come from several readers.

    A segment is one reader of what is declared as float32: within it everything is in float32.
    """
    reads = collections.Counter(variables(jaxpr.outvars))
    for part in parts:
        if part.is_segment:
            reads.update(itertools.filterfalse(is_half, part.inputs))
        for eqn in part.eqns:
            reads.update(find_pulled_halves(eqn))
            if not part.is_segment:
                reads.update(itertools.filterfalse(is_half, find_pulled(eqn)))
    return {var for var, number in reads.items() if number > 1}


def _find_rounded(
    jaxpr: Jaxpr,
    parts: Sequence[Part],
    products: set[int],
    cotangent_sums: set[Any],
    rounded_outputs: Sequence[bool],
    site: CallSite,
) -> set[Any]:
    """Returns the variables that are only read to be rounded, from the last reader to the first.

    A move rounds what it reads if everything that reads its result rounds that. Not so where
    cotangents are added on their way back, as to a table of embeddings: their sum in float32 would
    be rounded before the derivative of what made the table.
    """
    rounded: set[Any] = set()
    others = set(cotangent_sums)
    outputs = itertools.zip_longest(jaxpr.outvars, rounded_outputs, fillvalue=False)
    for atom, is_rounded in outputs:
        (rounded if is_rounded else others).update(variables([atom]))
    for part in reversed(parts):
        if part.is_segment:
            others.update(part.inputs)
            continue
        (eqn,) = part.eqns
        if id(eqn) in products:
            rounded.update(variables(eqn.invars))
            continue
        only_rounded = [var in rounded and var not in others for var in eqn.outvars]
        rounds = _rounds_inputs(eqn, only_rounded, site)
        for atom, is_rounded in zip(eqn.invars, rounds, strict=True):
            (rounded if is_rounded else others).update(variables([atom]))
    return rounded - others


def _rounds_inputs(
    eqn: JaxprEqn, only_rounded: Sequence[bool], site: CallSite
) -> list[bool]:
    """Returns a flag for each input of an equation: it is only read to be rounded.

    `only_rounded` says for each of its outputs whether all of its readers round it.
    """
    # Not of a function with a derivative rule, which may read what it gets in float32.
    called = called_program(eqn, DIVISIBLE)
    if called is not None:
        inside = plan(called, tuple(only_rounded), site.inside(eqn, called))
        return [var in inside.only_rounded for var in called.jaxpr.invars]
    moves = operation(eqn) in table.MOVES - table.SUMMED_BACKWARD
    rounds = moves and all(only_rounded) and not any(programs(eqn))
    return [rounds] * len(eqn.invars)

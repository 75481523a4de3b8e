"""The carries of a `scan` that may be in half precision, with `half_carries`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import _jax
from .._jax import Jaxpr, JaxprEqn, Literal, called_program
from .callers import Place
from .casts import has_products, is_cast
from .values import is_float32, is_full_precision


class _Source(NamedTuple):
    """An input of a program that a value is computed from.

    Attributes:
      number: which input it is.
      through_product: whether a product is on the way from it to the value.
    """

    number: int
    through_product: bool


def find_half_carries(loop: _jax.Scan, place: Place) -> list[bool]:
    """Returns for each carry of a loop whether it may be in half precision.

    `place` is that of its body.

    It may if its next value is computed from a product that reads it, as the residual stream of a
    scan over layers and the state of an RNN are; not so a counter, a time or a sum of losses.
    """
    body = loop.body.jaxpr
    carried = range(loop.consts, loop.consts + loop.carries)
    inputs: list[set[_Source]] = [set() for _ in body.invars]
    for number in carried:
        inputs[number].add(_Source(number, through_product=False))
    outputs = _trace_sources(body, inputs, place)
    may_be_half = []
    # of outputs, carries come first
    for number, sources in zip(carried, outputs, strict=False):
        reads_itself = _Source(number, through_product=True) in sources
        may_be_half.append(reads_itself and is_float32(body.invars[number]))
    return may_be_half


def _trace_sources(
    jaxpr: Jaxpr, inputs: Sequence[set[_Source]], place: Place
) -> list[set[_Source]]:
    """Returns what each output is computed from, given that of each input."""
    sources: dict[Any, set[_Source]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def sources_of(atom: Any) -> set[_Source]:
        if isinstance(atom, Literal):
            return set()
        return sources.get(atom, set())

    for eqn in jaxpr.eqns:
        if is_full_precision(eqn):
            continue
        of_inputs = list(map(sources_of, eqn.invars))
        of_outputs = _sources_after(eqn, of_inputs, place)
        sources |= zip(eqn.outvars, of_outputs, strict=True)
    return list(map(sources_of, jaxpr.outvars))


def _sources_after(
    eqn: JaxprEqn, inputs: Sequence[set[_Source]], place: Place
) -> list[set[_Source]]:
    """Returns what each output of an equation is computed from, given that of each input."""
    called = called_program(eqn)
    if called is not None:
        return _trace_sources(called.jaxpr, inputs, place.inside(eqn, called))
    of_all_inputs = set().union(*inputs)
    if is_cast(eqn, place) or has_products(eqn, place):
        of_all_inputs = {
            _Source(source.number, through_product=True) for source in of_all_inputs
        }
    return [of_all_inputs] * len(eqn.outvars)

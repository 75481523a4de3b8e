"""A search for half-precision values that a cotangent comes back to."""

import itertools
from collections.abc import Sequence
from typing import Any

from .._autocast.cast_products import has_products, is_cast
from .._autocast.half_sums import has_gradient
from .._autocast.product_owner import CallSite
from .._jax import jaxprs
from .._jax.jaxprs import ClosedJaxpr, JaxprEqn, Search, variables
from .jaxpr_parts import find_divisible, refs_of


class HalfFinder:
    """Finds the equations with half-precision values that a cotangent comes back to.

    A value in half precision that is only kept, for what is computed again, has no cotangent that
    could flush. With `casts`, products in float32 count as half precision.

    An equation of a jaxpr that is called many times counts if it does in one of these calls.
    """

    def __init__(self, casts: bool) -> None:
        self._casts = casts
        self._found: set[int] = set()  # identities of equations
        self._known: dict[Any, list[bool]] = {}

    def holds_half(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation of a jaxpr that was searched was found."""
        return id(eqn) in self._found

    def search(
        self, program: ClosedJaxpr, pulled_outputs: Sequence[bool], site: CallSite
    ) -> list[bool]:
        """Searches a jaxpr, and those that its divisible calls hold.

        Args:
          program: a jaxpr.
          pulled_outputs: for each of its outputs, whether a cotangent comes back to it.
          site: what is known of it from where it is called.

        Returns:
          For each input of the jaxpr, whether a cotangent comes back to it.
        """
        key = program.jaxpr, tuple(pulled_outputs), site
        if key not in self._known:
            pulled = self._find_pulled(program, pulled_outputs, site)
            for eqn in program.jaxpr.eqns:
                if self._is_half(eqn, pulled, site):
                    self._found.add(id(eqn))
            self._known[key] = [var in pulled for var in program.jaxpr.invars]
        return self._known[key]

    def _find_pulled(
        self, program: ClosedJaxpr, pulled_outputs: Sequence[bool], site: CallSite
    ) -> set[Any]:
        """Returns the variables that a cotangent comes back to, and searches the calls."""
        pulled = set(
            variables(itertools.compress(program.jaxpr.outvars, pulled_outputs))
        )
        for eqn in reversed(program.jaxpr.eqns):
            inner = find_divisible(eqn)
            if inner is not None:
                of_call = [var in pulled for var in eqn.outvars]
                pulled_inputs = self.search(inner, of_call, site.inside(eqn, inner))
            elif not pulled.isdisjoint(refs_of(eqn)):
                pulled_inputs = [True] * len(eqn.invars)  # what it writes is read later
            elif pulled.isdisjoint(eqn.outvars) or not has_gradient(eqn):
                continue
            else:
                pulled_inputs = jaxprs.find_pulled_inputs(eqn)
            pulled.update(variables(itertools.compress(eqn.invars, pulled_inputs)))
        return pulled

    def _is_half(self, eqn: JaxprEqn, pulled: set[Any], site: CallSite) -> bool:
        """Returns whether an equation belongs to the half-precision part.

        `pulled` are the variables that a cotangent comes back to.
        """
        inner = find_divisible(eqn)
        touched = set(eqn.outvars)
        if inner is None:
            touched.update(variables(eqn.invars))
        if any(jaxprs.holds_half(var.aval) for var in touched & pulled):
            return True
        if inner is not None:
            return any(map(self.holds_half, inner.jaxpr.eqns))
        if _holds_half.inside(eqn):
            return True
        return self._casts and (is_cast(eqn, site) or has_products(eqn, site))


def counts_products(program: ClosedJaxpr, under_autocast: bool) -> bool:
    """Returns whether matrix products in float32 count as half precision.

    They do if an `autocast` may yet make them that: if the jaxpr was traced for one, or if
    nothing else in it is in half precision.
    """
    return under_autocast or not _holds_half.in_program(program)


def may_flush(program: ClosedJaxpr, with_products: bool) -> bool:
    """Returns whether the half precision of a jaxpr flushes what float32 holds.

    float16 does, and bfloat16 does not. `with_products` is what `counts_products` says: the dtype
    of such products is not known yet.
    """
    return with_products or _holds_narrow.in_program(program)


def _is_half(eqn: JaxprEqn) -> bool:
    """Returns whether an equation reads or returns a value in half precision."""
    return any(jaxprs.holds_half(atom.aval) for atom in (*eqn.invars, *eqn.outvars))


def _is_narrow(eqn: JaxprEqn) -> bool:
    """Returns whether an equation reads or returns a value that may flush, as in float16."""
    dtypes = [getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)]
    return any(map(jaxprs.has_narrow_range, dtypes))


_holds_half = Search(_is_half)
_holds_narrow = Search(_is_narrow)

"""Searches of jaxprs: each jaxpr is searched once, however many equations hold it."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from jax.extend.core import JaxprEqn

from ..pruned_jaxprs import ClosedJaxpr, Jaxpr
from .inner_jaxprs import programs
from .products import precision_of_all

_Found = TypeVar("_Found")


def once_for_each_program(fun: Callable[..., _Found]) -> Callable[..., _Found]:
    """Makes a function of a jaxpr remember its results for as long as the jaxpr lives.

    Its other arguments must have a hash. What it returns is shared by all who ask.
    """
    known: WeakKeyDictionary[Jaxpr, dict[Any, _Found]] = WeakKeyDictionary()

    @functools.wraps(fun)
    def look_up(program: Jaxpr | ClosedJaxpr, *args: Hashable) -> _Found:
        # One without its constants cannot be closed.
        jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
        results = known.setdefault(jaxpr, {})
        # An old JAX has one jaxpr under all settings of the precision of all products.
        key = (args, precision_of_all())
        if key not in results:
            results[key] = fun(jaxpr, *args)
        return results[key]

    return look_up


class Search:
    """Says whether an equation, or one in the jaxprs that it holds, has a property."""

    def __init__(self, has: Callable[[JaxprEqn], bool]) -> None:
        self._has = has
        self.in_program = once_for_each_program(self._in_program)

    def __call__(self, eqn: JaxprEqn) -> bool:
        return self._has(eqn) or self.inside(eqn)

    def inside(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation in the jaxprs that this one holds has the property."""
        return any(map(self.in_program, programs(eqn)))

    def _in_program(self, program: Jaxpr) -> bool:
        return any(map(self, program.eqns))

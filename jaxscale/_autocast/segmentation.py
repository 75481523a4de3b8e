"""A jaxpr in parts: segments of cheap equations, and the others one by one.

The equations between two products are cheap, and what they compute in float32 is larger than the
half-precision arrays that they start from. So they run together, as one *segment*, of which the
backward pass keeps only what it reads.

Each equation has a *level*: how many equations that are not cheap lie before it. Cheap equations of
one level that read one another are a segment. No path leads out of a segment and back into it, as
it would have to pass through an equation that is not cheap, and end at a higher level. So the
levels are also an order in which everything can run.
"""

import collections
import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._jax.jaxprs import Jaxpr, JaxprEqn, Search, holds_inexact, operation, variables
from . import table
from .half_sums import find_repeated
from .narrow_values import is_float32, is_full_precision

_CHEAP_OR_CALL = table.CHEAP | table.CHEAP_CALLS


class Part(NamedTuple):
    """Equations that run at once: a segment, or one alone.

    Attributes:
      eqns: its equations, in the order of the jaxpr.
      is_segment: whether it is a segment.
      inputs: the variables that it reads, and does not make itself.
      outputs: the variables that it makes, and that are read outside of it.
      last_used: those that nothing reads after it.
    """

    eqns: Sequence[JaxprEqn]
    is_segment: bool
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    last_used: Sequence[Any]


class _Kind(enum.IntEnum):
    """The kind of an equation: within a level, kinds run in this order."""

    INACTIVE = (
        0  # it depends on no number that the jaxpr is given, as masks and random bits
    )
    CHEAP = 1
    OTHER = 2


class _Position(NamedTuple):
    """The position of an equation. Those of one level and kind run in the order of the jaxpr."""

    level: int
    kind: _Kind


class _Segments:
    """The segment of each cheap equation: two become one where an equation reads both."""

    def __init__(self) -> None:
        self._joined_to: dict[int, int] = {}

    def add(self, number: int, neighbors: Sequence[int]) -> None:
        """Adds an equation to the segments of its neighbors, which are one from now on."""
        self._joined_to[number] = number
        for neighbor in neighbors:
            self._joined_to[self.find(neighbor)] = number

    def find(self, number: int) -> int:
        """Returns the number of the segment that an equation is in."""
        path = []
        while self._joined_to[number] != number:
            path.append(number)
            number = self._joined_to[number]
        for passed in path:
            self._joined_to[passed] = number
        return number


class _Planner:
    """Gives each equation of a jaxpr its position, and each cheap one its segment.

    Attributes:
      products: the identities of the equations that read half precision.
      has_segments: whether cheap equations run together.
      active: the variables that depend on numbers that the jaxpr is given.
      levels: for each variable, the level of what can read it first.
      makers: for each variable that a cheap equation makes, the number of that equation.
      segments: which cheap equations belong together.
      last_effect: the level of the last equation with an effect. Effects keep their order.
    """

    def __init__(self, jaxpr: Jaxpr, products: set[int], has_segments: bool) -> None:
        self.products = products
        self.has_segments = has_segments
        given = (*jaxpr.constvars, *jaxpr.invars)
        self.active = {var for var in given if holds_inexact(var.aval)}
        self.levels: dict[Any, int] = {}
        self.makers: dict[Any, int] = {}
        self.segments = _Segments()
        self.last_effect = 0

    def position(self, number: int, eqn: JaxprEqn) -> _Position:
        """Returns the position of an equation, given those of all before it."""
        inputs = list(variables(eqn.invars))
        level = max((self.levels.get(var, 0) for var in inputs), default=0)
        if eqn.effects:
            level = max(level, self.last_effect)
            self.last_effect = level
            kind = _Kind.OTHER
        elif self.active.isdisjoint(inputs):
            kind = _Kind.INACTIVE
        else:
            kind = self._kind_of_active(number, eqn, inputs, level)
        if kind is not _Kind.INACTIVE:
            self.active.update(eqn.outvars)
        level_of_outputs = level + (kind is _Kind.OTHER)
        self.levels |= dict.fromkeys(eqn.outvars, level_of_outputs)
        return _Position(level, kind)

    def _kind_of_active(
        self, number: int, eqn: JaxprEqn, inputs: Sequence[Any], level: int
    ) -> _Kind:
        neighbors = []
        for var in inputs:
            if var in self.makers and self.levels[var] == level:
                neighbors.append(self.makers[var])
        # A move alone is as good in half precision, and keeps nothing.
        may_start = operation(eqn) not in table.MOVES and any(map(is_float32, inputs))
        if not self.has_segments or not (neighbors or may_start):
            return _Kind.OTHER
        if id(eqn) in self.products or is_full_precision(eqn) or not _is_cheap(eqn):
            return _Kind.OTHER
        self.segments.add(number, neighbors)
        self.makers |= dict.fromkeys(eqn.outvars, number)
        return _Kind.CHEAP


def _is_cheap(eqn: JaxprEqn) -> bool:
    """Returns whether an equation, and all that a call of it holds, may be computed twice.

    A name may be part of a segment, which gives it to what it starts from, but not of a call in it.
    """
    return operation(eqn) in table.NAMES or not _holds_costly(eqn)


def _is_costly(eqn: JaxprEqn) -> bool:
    return operation(eqn) not in _CHEAP_OR_CALL


_holds_costly = Search(_is_costly)


def cut(jaxpr: Jaxpr, products: set[int], *, has_segments: bool) -> list[Part]:
    """Returns a jaxpr in parts, in the order in which they run.

    `products` has the identities of the equations that read half precision. Without segments, each
    part is one equation.
    """
    planner = _Planner(jaxpr, products, has_segments)
    positions = [planner.position(i, eqn) for i, eqn in enumerate(jaxpr.eqns)]
    # by level and kind, and then by the number of a segment or of an equation alone
    numbers: dict[tuple[_Position, int], list[int]] = {}
    for number, position in enumerate(positions):
        of_part = number
        if position.kind is _Kind.CHEAP:
            of_part = planner.segments.find(number)
        numbers.setdefault((position, of_part), []).append(number)
    # A segment stands where its first equation does.
    in_order = sorted(numbers, key=lambda key: (key[0], numbers[key][0]))
    equations = []
    for key in in_order:
        equations.append([jaxpr.eqns[number] for number in numbers[key]])
    are_segments = []
    for (position, _), (first, *_) in zip(in_order, equations, strict=True):
        # What one equation repeats is repeated again backward, and not kept.
        is_segment = position.kind is _Kind.CHEAP or any(find_repeated(first))
        are_segments.append(is_segment)
    return list(_describe(equations, are_segments, jaxpr))


def _describe(
    equations: Sequence[Sequence[JaxprEqn]], are_segments: Sequence[bool], jaxpr: Jaxpr
) -> Iterator[Part]:
    """Yields the parts of a jaxpr, given their equations."""
    inputs = list(map(_find_inputs, equations))
    times_read = collections.Counter(set(variables(jaxpr.outvars)))
    for of_part in inputs:
        times_read.update(of_part)
    # Each input of a part is one time fewer to be read after it.
    triples = zip(equations, are_segments, inputs, strict=True)
    for eqns, is_segment, of_part in triples:
        times_read.subtract(of_part)
        made = [var for eqn in eqns for var in eqn.outvars]
        outputs = [var for var in made if times_read[var]]
        unused = [var for var in made if not times_read[var] and not is_segment]
        last_used = [var for var in of_part if not times_read[var]]
        yield Part(eqns, is_segment, of_part, outputs, last_used + unused)


def _find_inputs(eqns: Sequence[JaxprEqn]) -> list[Any]:
    """Returns the variables that equations read from outside, each once."""
    made: set[Any] = set()
    inputs: dict[Any, None] = {}
    for eqn in eqns:
        for var in variables(eqn.invars):
            if var not in made:
                inputs[var] = None
        made.update(eqn.outvars)
    return list(inputs)

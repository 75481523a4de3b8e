"""Searches over switches, for lines that lose numbers and the limits that lose them.

Nothing here knows an operation. A line is to blame if the gradients are right without its limits,
a limit if they are right without it, and a loss scale fits if the gradients are finite.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .board import Outcome, Switchboard
from .notes import Numbers
from .operations import Place, places_at
from .places import Line
from .switches import ALL_LIMITS, NO_LIMITS, PLAIN, Limits, Variant

CLOSE = 0.1  # a leaf is right if its error is at most this
# What changes by a larger share, or by a larger part of its error, when float32 is shaken by as
# much as it rounds, is nothing but the rounding of float32, as the gradient of a bias before a
# normalization is. It says nothing about narrower formats, and cannot be compared.
STABLE = 0.3
_SHAKES = 4  # one alone may leave a number on the side of a bound on which it is
MOST_LINES = 6  # in float32: beyond that it is not a line that is at fault
# Times a loss scale: others at which a cure is tried. Without a fault, gradients may be larger than
# with it, or smaller.
_FACTORS = (1.0, 2.0**-8, 2.0**6, 2.0**12)
_WITHOUT = {
    "overflow": Limits(largest=False),
    "underflow": Limits(smallest=False),
    "rounding": Limits(digits=False),
    "range": Limits(largest=False, smallest=False),
}


class ErrorOf(Protocol):
    """Gives the error of the model with some places in half precision."""

    def __call__(
        self,
        on: Collection[Place],
        limits: Limits = ALL_LIMITS,
        variant: Variant = PLAIN,
    ) -> float: ...


class Blame(NamedTuple):
    """The lines at which numbers are lost.

    Attributes:
      lines: those without whose limits the gradients are right, the most harmful first.
      place: of the first of them, the operations that do it.
      limit: which limit of the format is to blame there: `"overflow"`, `"underflow"`,
        `"rounding"`, `"range"` for the first two together, or `""` if it is more than that.
      error: the error with these lines in float32.
    """

    lines: tuple[Line, ...]
    place: Place
    limit: str
    error: float


class Birth(NamedTuple):
    """A place where inf or NaN is made in float32.

    Attributes:
      place: the operations that make it.
      numbers: their numbers.
      is_tried: whether all is finite with 0 in its place.
    """

    place: Place
    numbers: Numbers
    is_tried: bool


class Search:
    """Evaluates the switchboard of a model, and searches."""

    def __init__(self, board: Switchboard) -> None:
        self.board = board
        self.lines = board.lines

    @functools.cached_property
    def exact(self) -> Outcome:
        """The loss and the gradients in float32, which are the same at each loss scale."""
        return self.board.evaluate(1.0, [])

    def as_written(self, loss_scale: float) -> Outcome:
        return self.board.evaluate(loss_scale, self.board.places)

    def errors(self, grads: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the relative errors of the gradients that are more than noise."""
        errors = compare(grads, self.exact.grads)
        if max(errors.values(), default=0.0) <= CLOSE:
            return errors
        certain = {}
        for name, error in errors.items():
            is_noise = self.noise[name] > STABLE * min(error, 1.0)
            if error <= CLOSE or not is_noise:
                certain[name] = error
        return certain

    def worst_error(self, grads: Mapping[str, np.ndarray]) -> float:
        """Returns the largest error of the gradients that are more than noise."""
        return max(self.errors(grads).values(), default=0.0)

    @functools.cached_property
    def noise(self) -> dict[str, float]:
        """By how much each gradient changes when float32 is shaken, at most."""
        changes = [compare(outcome.grads, self.exact.grads) for outcome in self.shaken]
        return {name: max(each[name] for each in changes) for name in changes[0]}

    @functools.cached_property
    def shaken(self) -> list[Outcome]:
        # No power of two, so that the backward pass rounds others even if all arguments are whole.
        return [self.board.evaluate(1.1, [], seed=seed) for seed in range(_SHAKES)]

    def error_at(
        self, loss_scale: float, factors: Sequence[float] = _FACTORS
    ) -> ErrorOf:
        """Returns what gives the error at this scale or a better one."""

        def error_of(
            on: Collection[Place], limits: Limits = ALL_LIMITS, variant: Variant = PLAIN
        ) -> float:
            least = math.inf
            for factor in factors:
                outcome = self.board.evaluate(loss_scale * factor, on, limits, variant)
                is_loss_finite = math.isfinite(outcome.loss)
                if outcome.has_finite_grads and is_loss_finite:
                    least = min(least, self.worst_error(outcome.grads))
                if least <= CLOSE or (factor >= 1 and not is_loss_finite):
                    break
            return least

        return error_of

    @property
    def compares_nothing(self) -> bool:
        """All gradients are noise."""
        return all(change > STABLE for change in self.noise.values())

    def overflows_at(self, loss_scale: float) -> ErrorOf:
        """Returns what gives inf where the gradients at a scale are not finite, and 0 elsewhere."""

        def error_of(
            on: Collection[Place], limits: Limits = ALL_LIMITS, variant: Variant = PLAIN
        ) -> float:
            outcome = self.board.evaluate(loss_scale, on, limits, variant)
            return 0.0 if outcome.has_finite_grads else math.inf

        return error_of

    def find_lines(self, error_of: ErrorOf, most: int = MOST_LINES) -> list[Line]:
        """Returns the lines without whose limits all is right, or those that were tried in vain.

        They are found by bisection. If it is one, it is the first of those that do harm in the
        order of `Switchboard.lines`.
        """
        chosen: list[Line] = []
        while len(chosen) < min(most, len(self.lines)):
            error = error_of(self.places_without(chosen))
            if error <= CLOSE:
                break
            others = [line for line in self.lines if line not in chosen]
            chosen.append(self._find_next(error_of, others, error))
        for line in list(chosen):
            fewer = [other for other in chosen if other != line]
            if fewer and error_of(self.places_without(fewer)) <= CLOSE:
                chosen = fewer
        return chosen

    def blame(
        self, error_of: ErrorOf, loss_scale: float = 1.0, most: int = MOST_LINES
    ) -> Blame | None:
        """Returns the lines to blame, and the limit to blame there, if there are any."""
        if error_of(self.board.places) <= CLOSE:
            return None
        lines = self.find_lines(error_of, most)
        others = self.places_without(lines)
        error = error_of(others)
        variant = Variant(limited=frozenset(self._places(lines)))
        found = {}  # of each line: how much harm it does alone, and at which place
        for line in lines:
            harm = 0.0
            if len(lines) > 1:
                harm = error_of(self._places([line]))
            place = self._find_place(line, others, variant, error_of)
            found[line] = (-harm, self.board.places.index(place))
        lines.sort(key=lambda line: found[line])
        place = self.board.places[found[lines[0]][1]]
        everywhere = self.board.places
        limit = ""
        for name, limits in _WITHOUT.items():
            if error_of(everywhere, limits, variant) <= CLOSE:
                limit = name
                break
        return Blame(tuple(lines), place, limit, error)

    def _find_place(
        self, line: Line, others: list[Place], variant: Variant, error_of: ErrorOf
    ) -> Place:
        """Returns the operations of a line at which the error comes in, beside other places."""
        places = self.board.places_of([line])

        def is_bad(number: int) -> bool:
            on = [*others, *places[:number]]
            return _is_most(error_of(on, variant=variant), error)

        error = error_of([*others, *places], variant=variant)
        if error <= CLOSE or is_bad(0):
            return max(places, key=lambda place: error_of([place], variant=variant))
        return places[_bisect(len(places), is_bad) - 1]

    def _find_next(
        self, error_of: ErrorOf, lines: Sequence[Line], error: float
    ) -> Line:
        """Returns the line at which an error comes in, if the first lines are as written."""

        def is_bad(number: int) -> bool:
            return _is_most(error_of(self._places(lines[:number])), error)

        return lines[_bisect(len(lines), is_bad) - 1]

    def measure(
        self, place: Place, loss_scale: float, on: Collection[Place] | None = None
    ) -> Numbers:
        """Returns the numbers at a place as the model is written, or with other places `on`."""
        if on is None:
            on = self.board.places
        return self.board.measure(place, loss_scale, on)

    def find_first_birth(self, loss_scale: float) -> Place | None:
        """Returns the first operations that make inf or NaN as the model is written."""
        places = self.board.places
        variant = Variant(notes_births=True)
        births = self.board.evaluate(loss_scale, places, variant=variant).births
        return next(iter(births), None)

    def find_birth(self) -> Birth | None:
        """Returns the first line that makes inf or NaN in float32, if it is to blame.

        With 0 in the place of all inf and NaN of the line, loss and gradients are finite. If no
        line is enough by itself, it is the first of those that are enough together.
        """
        evaluate = self.board.evaluate
        births = evaluate(1.0, [], variant=Variant(notes_births=True)).births
        if not births:
            return None
        lines = list(dict.fromkeys(place.line for place in births))
        places = self._places(lines)
        variant = Variant(limited=frozenset(places))
        cleaned = NO_LIMITS._replace(cleaned=True)

        def is_enough(on: Sequence[Place]) -> bool:
            return evaluate(1.0, on, cleaned, variant).is_finite

        for line in lines:
            if is_enough(self._places([line])):
                place = next(birth for birth in births if birth.line == line)
                return Birth(place, self.measure(place, 1.0, []), is_tried=True)
        first = births[0]
        return Birth(first, self.measure(first, 1.0, []), is_enough(places))

    def _places(self, lines: Collection[Line]) -> list[Place]:
        return places_at(self.board.places, lines)

    def places_without(self, lines: Collection[Line]) -> list[Place]:
        """Returns all places but those at some lines."""
        return [place for place in self.board.places if place.line not in lines]


def _is_most(part: float, error: float) -> bool:
    """Returns whether a part of an error, which may be inf, is most of it."""
    return part > CLOSE and part >= error / 2


def _bisect(number: int, is_bad: Callable[[int], bool]) -> int:
    """Returns a bad number that follows a good one. 0 is good, and `number` is bad."""
    good = 0
    bad = number
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_bad(middle):
            bad = middle
        else:
            good = middle
    return bad


def compare(
    grads: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Returns the relative error of each leaf."""
    return {name: find_error(grads[name], leaf) for name, leaf in exact.items()}


def find_error(value: Any, exact: Any) -> float:
    """Returns the norm of the difference, divided by the norm of what it should be."""
    wide_dtype = np.complex128 if np.iscomplexobj(exact) else np.float64
    wide = np.asarray(value, wide_dtype)
    wide_exact = np.asarray(exact, wide_dtype)
    if not np.isfinite(wide).all():
        return math.inf
    norm = np.linalg.norm(wide_exact.ravel())
    if not norm:
        return 0.0
    return float(np.linalg.norm((wide - wide_exact).ravel()) / norm)

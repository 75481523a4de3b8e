"""Which lines lose numbers, and by which limit of their format: searches over switches.

Nothing here knows an operation. A line is to blame if the gradients are right without its limits,
a limit if they are right without it, and a loss scale fits if the gradients are finite.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ._switchboard import ALL_LIMITS, Limits, Outcome, Switchboard, Variant
from ._trace.places import Line

CLOSE = 0.1  # a leaf is right if its error is at most this
STABLE = 0.3  # and is noise if rounding in float32 alone changes it by this share
LEAST_EXPONENT = -14  # of the loss scales to try
LARGEST_EXPONENT = 24
# Times a loss scale: others at which a cure is tried. Without a fault, gradients may be larger than
# with it, or smaller.
_FACTORS = (1.0, 2.0**-8, 2.0**6, 2.0**12)
_WITHOUT = {
    "overflow": Limits(largest=False),
    "underflow": Limits(smallest=False),
    "rounding": Limits(digits=False),
    "range": Limits(largest=False, smallest=False),
}

ErrorOf = Callable[
    ..., float
]  # of the lines in half precision, and options of the evaluation


class Blame(NamedTuple):
    """The lines at which numbers are lost.

    Attributes:
      lines: those without whose limits the gradients are right, the most harmful first.
      limit: which limit of the format is to blame there: `"overflow"`, `"underflow"`,
        `"rounding"`, `"range"` for the first two together, or `""` if it is more than that.
    """

    lines: tuple[Line, ...]
    limit: str


class Search:
    """Evaluates the switchboard of a model, and searches."""

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._lines = list(board.lines)

    @functools.cached_property
    def exact(self) -> Outcome:
        """The loss and the gradients in float32, which are the same at each loss scale."""
        return self._board.evaluate(1.0, [])

    def as_written(self, loss_scale: float) -> Outcome:
        return self._board.evaluate(loss_scale, self._lines)

    def find_largest_scale(self) -> float | None:
        """Returns the largest loss scale at which the gradients are finite, if there is one."""

        def overflows(number: int) -> bool:
            return not self.as_written(
                2.0 ** (LEAST_EXPONENT + number)
            ).has_finite_grads

        most = LARGEST_EXPONENT - LEAST_EXPONENT
        if overflows(0):
            return None
        if not overflows(most):
            return 2.0**LARGEST_EXPONENT
        return 2.0 ** (LEAST_EXPONENT + _bisect(most, overflows) - 1)

    def errors(self, outcome: Outcome) -> dict[str, float]:
        """Returns the relative errors of the leaves and the loss that are more than noise."""
        errors = _compare(outcome, self.exact)
        if max(errors.values()) <= CLOSE:
            return errors
        certain = {}
        for name, error in errors.items():
            is_noise = self._noise[name] > STABLE * min(error, 1.0)
            if error <= CLOSE or not is_noise:
                certain[name] = error
        return certain

    @functools.cached_property
    def _noise(self) -> dict[str, float]:
        return _compare(self._board.evaluate(1.0, [], is_shaken=True), self.exact)

    def error_at(self, loss_scale: float) -> ErrorOf:
        """Returns the error of some lines in half precision, at this scale or a better one."""

        def error_of(
            lines: Sequence[Line], limits: Limits = ALL_LIMITS, **options: Variant
        ) -> float:
            least = math.inf
            for factor in _FACTORS:
                outcome = self._board.evaluate(
                    loss_scale * factor, lines, limits, **options
                )
                if outcome.has_finite_grads:
                    least = min(least, max(self.errors(outcome).values(), default=0.0))
                is_lost = factor >= 1 and not math.isfinite(outcome.loss)
                if least <= CLOSE or is_lost:
                    break
            return least

        return error_of

    def blame(self, error_of: ErrorOf) -> Blame:
        """Returns the lines to blame, found by bisection, and the limit to blame there."""
        chosen: list[Line] = []
        while error_of(self._without(chosen)) > CLOSE and len(chosen) < len(
            self._lines
        ):
            chosen.append(self._find_next(error_of, self._without(chosen)))
        for line in list(chosen):
            fewer = [other for other in chosen if other != line]
            if fewer and error_of(self._without(fewer)) <= CLOSE:
                chosen = fewer
        harm = {line: error_of([line]) for line in chosen}
        chosen.sort(key=lambda line: -harm[line])
        return Blame(tuple(chosen), self._find_limit(chosen, error_of))

    def _find_next(self, error_of: ErrorOf, lines: Sequence[Line]) -> Line:
        """Returns the line at which the error comes in, if the first lines are as written."""
        return lines[_bisect(len(lines), lambda n: error_of(lines[:n]) > CLOSE) - 1]

    def _find_limit(self, lines: Sequence[Line], error_of: ErrorOf) -> str:
        variant = Variant(limited=frozenset(lines))
        for limit, limits in _WITHOUT.items():
            if error_of(self._lines, limits, variant=variant) <= CLOSE:
                return limit
        return ""

    def _without(self, lines: Sequence[Line]) -> list[Line]:
        return [line for line in self._lines if line not in lines]


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


def _compare(outcome: Outcome, exact: Outcome) -> dict[str, float]:
    """Returns the relative error of each leaf, and of the loss."""
    errors = {"loss": _find_error(outcome.loss, exact.loss)}
    for name, leaf in exact.grads.items():
        errors[name] = _find_error(outcome.grads[name], leaf)
    return errors


def _find_error(value: object, exact: object) -> float:
    wide = np.asarray(value, np.float64)
    wide_exact = np.asarray(exact, np.float64)
    if not np.isfinite(wide).all():
        return math.inf
    norm = np.linalg.norm(wide_exact.ravel())
    if not norm:
        return 0.0
    return float(np.linalg.norm((wide - wide_exact).ravel()) / norm)

"""Which line a wrong gradient comes from, and which lines in float32 make it right.

Both are found by trying. With all equations in float32 the gradients are right. `find_culprit`
runs the first n equations as they are written and the others in float32, and bisects n: the
gradients go wrong at one equation. `find_remedy` computes the faulty line in float32, forwards
and backwards, and adds the next line at which something goes wrong until nothing does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..diagnostics._trace.backward import Run, TracedBackward
from ..diagnostics._trace.interpreter import EquationKey, Visit, key_of
from ..diagnostics._trace.places import Line, lines
from ..diagnostics._trace.plan import compute
from ..diagnostics._trace.report import Place
from .gradients import CLOSE, are_finite

_MOST_LINES = 6  # in float32: beyond that it is not a line that is at fault
_MOST_RELIEVED = 4  # lines in float32 for a higher loss scale
_BLAME = 0.5  # one equation is to blame if it makes this share of the error
_FLUSHED = 0.5  # it flushes if it makes this share of its nonzero numbers 0


class Culprit(NamedTuple):
    """The equation at which gradients go wrong, although they stay finite."""

    place: Place
    # `"overflow"` if it makes inf, which becomes finite later, `"underflow"` if most of its
    # numbers become 0, otherwise `"rounding"`.
    kind: str
    largest: float  # the largest finite magnitude among its results
    error: float  # the error of the gradients from there on


class Remedy(NamedTuple):
    """The lines that were computed in float32, and what became of the gradients."""

    lines: tuple[str, ...]  # file and line of each, the first at fault first
    works: bool  # whether the gradients are then finite and right
    error: float  # the largest error of a leaf of the gradients; inf if they are not finite


class Relief(NamedTuple):
    """A higher loss scale, and the lines that must be in float32 for it to fit."""

    loss_scale: float
    lines: tuple[str, ...]


def find_relief(
    backward: TracedBackward, run: Run, first: Place, loss_scale: float
) -> Relief | None:
    trials = Trials(backward, run, lambda grads: 0.0 if are_finite(grads) else math.inf, loss_scale)
    found = trials.find_remedy(first, _MOST_RELIEVED)
    return Relief(loss_scale, found.lines) if found.works else None


class Trials:
    """Passes in which some lines, and the end of the program, are computed in float32.

    `first` is a pass as it is written. `error_of` gives the error of gradients, inf if they are not
    finite; up to `CLOSE` they are right. Lines are pairs of a file and a number.
    """

    def __init__(
        self,
        backward: TracedBackward,
        first: Run,
        error_of: Callable[[Mapping[str, Any]], float],
        loss_scale: float,
    ) -> None:
        self._backward, self._error_of, self._loss_scale = backward, error_of, loss_scale
        self._keys = list(first.findings.visits)  # in the order of execution, in all passes
        self._order = {key: i for i, key in enumerate(self._keys)}
        self._lines = {
            key: (line.file, line.number)
            for key, (eqn, around) in first.findings.equations.items()
            for line in lines(eqn, around)[:1]
        }

    def find_culprit(self, wide: Sequence[tuple[str, int]] = ()) -> Culprit | None:
        """Returns the one equation, if there is one, at which gradients go wrong."""
        low, high = 0, len(self._keys)  # with so many equations as written: right, and wrong
        below, above = 0.0, self._error_of(self._run(wide).grads)
        middle_error = above / 2 if math.isfinite(above) else CLOSE
        while high - low > 1:
            middle = (low + high) // 2
            error = self._error_of(self._run(wide, middle).grads)
            if error > middle_error:
                high, above = middle, error
            else:
                low, below = middle, error
        if above - below < _BLAME * min(2 * middle_error, above):
            return None
        return self._culprit(self._keys[high - 1], wide, above)

    def find_remedy(self, first: Place, most: int = _MOST_LINES) -> Remedy:
        """Returns at most so many lines, that of `first` among them, and how well they do."""
        wide: list[tuple[str, int]] = []
        following = first.file, first.line
        error = math.inf
        while following:
            wide.append(following)
            run = self._run(wide)
            error = self._error_of(run.grads)
            is_over = error <= CLOSE or len(wide) == most
            following = None if is_over else self._find_next(run, wide)
        return Remedy(tuple(str(Line(*line, "")) for line in wide), error <= CLOSE, error)

    def _find_next(self, run: Run, wide: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
        """Returns the next line at fault with some lines in float32, if there is another one."""
        report = run.report()
        if report.nonfinite_outputs:
            # The forward pass first: what goes wrong there explains the backward pass.
            reaching = [place for place in report.nonfinite if place.reaches]
            reaching.sort(key=lambda place: place.direction != "forward")
            places = [(place.file, place.line) for place in reaching]
        else:
            culprit = self.find_culprit(wide)
            places = [(culprit.place.file, culprit.place.line)] if culprit else []
        return next((line for line in places if line[0] and line not in wide), None)

    def _run(
        self,
        wide: Sequence[tuple[str, int]],
        start: float = math.inf,
        look: Callable[[Visit], None] | None = None,
    ) -> Run:
        """Returns a pass with some lines, and all equations from one on, in float32."""

        def is_wide(key: EquationKey) -> bool:
            return self._order.get(key, -1) >= start or self._lines.get(key) in wide

        return self._backward.run(self._loss_scale, is_wide, look=look, is_brief=True)

    def _culprit(self, key: EquationKey, wide: Sequence[tuple[str, int]], error: float) -> Culprit:
        found: list[Visit] = []

        def look(visit: Visit) -> None:
            if not found and key_of(visit.eqn, visit.around) == key:
                found.append(visit)

        run = self._run(wide, look=look)
        (visit,) = found
        outputs = [np.asarray(output) for output in visit.outputs]
        inputs = [value.array for value in visit.inputs]
        exact = [np.asarray(each) for each in compute(visit.eqn, inputs, True)]
        numbers = [(a, b) for a, b in zip(outputs, exact, strict=True) if a.dtype.kind in "fV"]
        nonzero = sum(np.count_nonzero(b) for _, b in numbers)
        zeros = sum(np.count_nonzero((a == 0) & (b != 0)) for a, b in numbers)
        kind = "rounding"
        if not all(np.isfinite(a).all() for a, _ in numbers):
            kind = "overflow"
        elif zeros > _FLUSHED * nonzero:
            kind = "underflow"
        largest = max((float(np.abs(b).max(initial=0)) for _, b in numbers), default=0.0)
        place = run.findings.place(visit, share=zeros / max(nonzero, 1))
        return Culprit(place, kind, largest, error)

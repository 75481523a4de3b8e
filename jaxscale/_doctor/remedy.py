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
from ..diagnostics._trace.evaluate import compute
from ..diagnostics._trace.interpreter import EquationKey, Visit, key_of
from ..diagnostics._trace.places import Line, lines
from ..diagnostics._trace.report import Place
from . import pattern
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
    # What made its numbers, as a softmax, where that has a cure of its own: see `pattern`. Or `""`.
    made_by: str


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
        self._first = first
        self._keys = list(first.findings.visits)  # in the order of execution, in all passes
        self._order = {key: i for i, key in enumerate(self._keys)}
        self._lines = {
            key: (line.file, line.number)
            for key, (eqn, around) in first.findings.equations.items()
            for line in lines(eqn, around)[:1]
        }

    def find_culprit(self, wide: Sequence[tuple[str, int]] = ()) -> Culprit | None:
        """Returns the one equation, if there is one, at which gradients go wrong."""
        error = self._error_of(self._run(wide).grads)
        errors = {0: 0.0, len(self._keys): error}  # with so many equations as written
        middle_error = error / 2 if math.isfinite(error) else CLOSE

        def is_wrong(number: int) -> bool:
            errors[number] = self._error_of(self._run(wide, number).grads)
            return errors[number] > middle_error

        wrong = _bisect(len(self._keys), is_wrong)
        above, below = errors[wrong], errors[wrong - 1]
        if above - below < _BLAME * min(2 * middle_error, above):
            return None
        return self._culprit(self._keys[wrong - 1], wide, above, _FLUSHED)

    def find_flush(self, wide: Sequence[tuple[str, int]] = ()) -> Culprit | None:
        """Returns the equation that makes the zeros, if any, of which inf or NaN comes later.

        They are not zero in float32: with all up to this equation as written, and all after it in
        float32, the outputs are not finite.
        """
        bad = self._first.report().nonfinite_outputs

        def is_bad(number: int) -> bool:
            values = self._run(wide, number).values
            return not are_finite({name: np.asarray(values[name].array) for name in bad})

        if is_bad(0):
            return None
        key = self._keys[_bisect(len(self._keys), is_bad) - 1]
        culprit = self._culprit(key, wide, math.inf, 0.0)
        return culprit if culprit.kind == "underflow" else None

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
            if set(places) <= set(wide):  # zeros come from a line between them
                flush = self.find_flush(wide)
                places = [(flush.place.file, flush.place.line)] if flush else []
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

    def _culprit(
        self, key: EquationKey, wide: Sequence[tuple[str, int]], error: float, flushed: float
    ) -> Culprit:
        """Returns an equation as a culprit: it flushes if more than a share `flushed` becomes 0."""
        found: list[tuple[_Loss, Visit]] = []  # of each iteration, if it is in a loop

        def look(visit: Visit) -> None:
            if key_of(visit.eqn, visit.around) == key:
                found.append((_compare_with_float32(visit), visit))

        run = self._run(wide, look=look)
        # The first of those that do the worst.
        loss, visit = max(found, key=lambda pair: (pair[0].is_infinite, pair[0].share))
        kind = "rounding"
        if loss.is_infinite:
            kind = "overflow"
        elif loss.share > flushed:
            kind = "underflow"
        place = run.findings.place(visit, share=loss.share)
        operations = pattern.Operations(self._first.findings)
        made_by = operations.find_origin(key) if kind != "overflow" else ""
        if made_by != pattern.PRODUCT and not operations.is_read_by_logarithm(key):
            made_by = ""
        return Culprit(place, kind, loss.largest, error, made_by)


class _Loss(NamedTuple):
    """What an equation makes of its numbers, compared with what float32 makes of them."""

    is_infinite: bool  # whether there is inf or NaN among them
    share: float  # of those that are not 0 in float32: how many are 0
    largest: float  # the largest magnitude in float32


def _compare_with_float32(visit: Visit) -> _Loss:
    outputs = [np.asarray(output) for output in visit.outputs]
    inputs = [value.array for value in visit.inputs]
    exact = [np.asarray(each) for each in compute(visit.eqn, inputs, True)]
    numbers = [(a, b) for a, b in zip(outputs, exact, strict=True) if a.dtype.kind in "fV"]
    nonzero = sum(np.count_nonzero(b) for _, b in numbers)
    zeros = sum(np.count_nonzero((a == 0) & (b != 0)) for a, b in numbers)
    return _Loss(
        is_infinite=not all(np.isfinite(a).all() for a, _ in numbers),
        share=zeros / max(nonzero, 1),
        largest=max((float(np.abs(b).max(initial=0)) for _, b in numbers), default=0.0),
    )


def _bisect(number: int, is_bad: Callable[[int], bool]) -> int:
    """Returns a number that is bad while the one before is not; 0 is not, and the last is."""
    good, bad = 0, number
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_bad(middle):
            bad = middle
        else:
            good = middle
    return bad

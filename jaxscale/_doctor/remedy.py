"""Which line a wrong gradient comes from, and which lines in float32 make it right.

Both are found by trying. With all equations in float32 the gradients are right. `find_culprit`
runs the first n equations as they are written and the others in float32, and bisects n: the
gradients go wrong at one equation, or at one of its line, which is then tried as a whole.
`find_remedy` computes the faulty line in float32, forwards and backwards, and adds the next line at
which something goes wrong until nothing does. What reads a line in float32 does not round it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..diagnostics._trace.backward import Run, TracedBackward
from ..diagnostics._trace.evaluate import compute
from ..diagnostics._trace.interpreter import EquationKey, IsWide, Visit, key_of
from ..diagnostics._trace.places import Line, lines
from ..diagnostics._trace.report import Place, TraceReport
from . import origins
from .gradients import CLOSE, are_finite

_MOST_LINES = 6  # in float32: beyond that it is not a line that is at fault
_MOST_LINES_OF_RELIEF = 4  # in float32, for a higher loss scale
_BLAME = 0.5  # one equation is to blame if it makes this share of the error
_FLUSHED = 0.5  # it flushes if it makes this share of its nonzero numbers 0


class Culprit(NamedTuple):
    """The equation at which gradients go wrong.

    Attributes:
      place: the equation and its line.
      kind: `"overflow"` if it makes inf, which becomes finite later, `"underflow"` if most of its
        numbers become 0, otherwise `"rounding"`. Where inf or NaN is made later, of any 0 or of any
        1 or -1: `"underflow"` if some become 0, and `"saturation"` if some become 1 or -1.
      largest: the largest magnitude among its results in float32.
      error: the error of the gradients if this equation and all before it run as written, and the
        others in float32. If no one equation is to blame: if only its line runs as written.
      made_by: what made its numbers, such as a softmax, if that has a cure of its own: one of the
        names in `origins`, or `""`.
    """

    place: Place
    kind: str
    largest: float
    error: float
    made_by: str


class Remedy(NamedTuple):
    """The lines that were computed in float32, and what became of the gradients.

    Attributes:
      first: the first at fault.
      lines: file and line of each, the first at fault first.
      works: whether the gradients are then finite and right.
      error: the largest error of a leaf of the gradients; inf if they are not finite, and `None` if
        they are finite and none can be compared.
    """

    first: "SourcePlace"
    lines: tuple[str, ...]
    works: bool
    error: float | None


class Relief(NamedTuple):
    """A higher loss scale, and the lines that must be in float32 for it to fit."""

    loss_scale: float
    lines: tuple[str, ...]


class SourcePlace(NamedTuple):
    """A line of the model."""

    file: str  # or `""`
    line: int

    def __str__(self) -> str:
        return self.where

    @property
    def where(self) -> str:
        """File and line, as a place of a trace has it."""
        return Line(self.file, self.line, function="").where


def find_relief(
    backward: TracedBackward, run: Run, first: Place, loss_scale: float
) -> Relief | None:
    """Returns the lines with which a loss scale fits, if few lines are enough.

    `run` is a pass as it is written, and `first` where the loss scale overflows.
    """

    def error_of(grads: Mapping[str, np.ndarray]) -> float:
        if are_finite(grads):
            return 0.0
        return math.inf

    search = FaultSearch(backward, run, error_of, loss_scale)
    remedy = search.find_remedy(first, _MOST_LINES_OF_RELIEF)
    if not remedy.works:
        return None
    return Relief(loss_scale, remedy.lines)


class FaultSearch:
    """Passes in which some lines, and the end of the program, are computed in float32.

    `as_written` is a pass as it is written. `error_of` gives the error of gradients, inf if they
    are not finite; up to `CLOSE` they are right.
    """

    def __init__(
        self,
        backward: TracedBackward,
        as_written: Run,
        error_of: Callable[[Mapping[str, np.ndarray]], float],
        loss_scale: float,
    ) -> None:
        self._backward = backward
        self._as_written = as_written
        self._error_of = error_of
        self._loss_scale = loss_scale
        findings = as_written.findings
        # in the order of execution
        self._keys: list[EquationKey] = list(findings.visits)
        self._positions = {key: i for i, key in enumerate(self._keys)}
        self._lines: dict[EquationKey, SourcePlace] = {}
        for key, (eqn, around) in findings.equations.items():
            for line in lines(eqn, around)[:1]:
                self._lines[key] = SourcePlace(line.file, line.number)

    def find_culprit(self, wide: Sequence[SourcePlace] = ()) -> Culprit | None:
        """Returns the equation at which gradients go wrong, if it or its line is to blame."""
        error = self._error_of(self._run(wide).grads)
        # By the number of equations, from the first on, that run as written.
        errors = {0: 0.0, len(self._keys): error}
        middle_error = CLOSE
        if math.isfinite(error):
            middle_error = error / 2

        def is_wrong(number: int) -> bool:
            errors[number] = self._error_of(self._run(wide, number).grads)
            return errors[number] > middle_error

        wrong = _bisect(len(self._keys), is_wrong)
        error_with = errors[wrong]
        error_without = errors[wrong - 1]
        whole_error = min(2 * middle_error, error_with)
        key = self._keys[wrong - 1]
        least_error = _BLAME * whole_error
        if error_with - error_without < least_error:
            # A line may round more than once, as a product does with its operands and its result.
            error_with = self._find_error_of_line(key, wide)
        if error_with < least_error:
            return None
        return self._describe_culprit(key, wide, error_with, is_source=False)

    def _find_error_of_line(
        self, key: EquationKey, wide: Sequence[SourcePlace]
    ) -> float:
        """Returns the error if only the line of an equation is as written, and the rest float32."""
        line = self._lines.get(key)
        if line is None or line in wide:
            return 0.0

        def is_wide(key: EquationKey) -> bool:
            return self._lines.get(key) != line

        return self._error_of(self._run_with(is_wide).grads)

    def find_source(self, wide: Sequence[SourcePlace] = ()) -> Culprit | None:
        """Returns the equation that rounds what later becomes inf or NaN, if there is one.

        If all equations up to this one run as written, and the others in float32, the outputs are
        not finite. If this one runs in float32 as well, they are.
        """
        names = self._as_written.report().nonfinite_outputs

        def is_nonfinite(number: int) -> bool:
            outputs = self._run(wide, number).outputs
            return not are_finite({name: outputs[name] for name in names})

        if is_nonfinite(0):
            return None
        last = self._keys[_bisect(len(self._keys), is_nonfinite) - 1]
        culprit = self._describe_culprit(last, wide, math.inf, is_source=True)
        if culprit.kind == "overflow":
            return None
        return culprit

    def find_remedy(self, first: Place, most: int = _MOST_LINES) -> Remedy:
        """Tries up to `most` lines in float32, beginning with that of `first`."""
        wide = [SourcePlace(first.file, first.line)]
        while True:
            run = self._run(wide)
            error = self._error_of(run.grads)
            if error <= CLOSE or len(wide) == most:
                break
            following = self._find_next(run, wide)
            if following is None:
                break
            wide.append(following)
        return _make_remedy(wide, error)

    def find_compiled_remedy(self) -> Remedy | None:
        """Returns lines in float32 that make the gradients of the compiled program right.

        `None` if these are right as it is written, if no lines were found, or it cannot be tried.
        """
        if self._find_compiled_error([]) <= CLOSE:
            return None
        wide: list[SourcePlace] = []
        while len(wide) < _MOST_LINES:
            following = self._find_next_compiled(wide)
            if following is None:
                return None
            wide.append(following)
            error = self._find_compiled_error(wide)
            if error <= CLOSE:
                return _make_remedy(wide, error)
        return None

    def _find_next_compiled(self, wide: Sequence[SourcePlace]) -> SourcePlace | None:
        """Returns the last of the first lines that make the compiled program right in float32."""
        candidates = []  # in the order of execution
        for key in self._keys:
            line = self._lines.get(key)
            if line is not None and line not in candidates:
                candidates.append(line)

        def is_right(number: int) -> bool:
            return self._find_compiled_error([*wide, *candidates[:number]]) <= CLOSE

        if not is_right(len(candidates)):
            return None
        return candidates[_bisect(len(candidates), is_right) - 1]

    def _find_compiled_error(self, wide: Sequence[SourcePlace]) -> float:
        """Returns the error of the compiled program with some lines in float32."""
        grads = self._backward.run_compiled(
            self._loss_scale, lambda key: self._lines.get(key) in wide
        )
        if grads is None:
            return 0.0
        return self._error_of(grads)

    def _find_next(self, run: Run, wide: Sequence[SourcePlace]) -> SourcePlace | None:
        """Returns the next line at fault with some lines in float32, if there is another one."""
        report = run.report()
        if report.nonfinite_outputs:
            places = self._list_nonfinite_places(report, wide)
        else:
            places = _place_culprit(self.find_culprit(wide))
        for place in places:
            if place.file and place not in wide:
                return place
        return None

    def _list_nonfinite_places(
        self, report: TraceReport, wide: Sequence[SourcePlace]
    ) -> list[SourcePlace]:
        """Returns the lines that make the outputs inf or NaN, the first to look at first."""
        reaching = [place for place in report.nonfinite if place.reaches]
        # The forward pass first: what goes wrong there explains the backward pass.
        reaching.sort(key=lambda place: place.direction != "forward")
        places = [SourcePlace(place.file, place.line) for place in reaching]
        # If all are in float32 already, the zeros come from a line between them.
        if set(places) <= set(wide):
            return _place_culprit(self.find_source(wide))
        return places

    def _run(
        self,
        wide: Sequence[SourcePlace],
        start: float = math.inf,
        look: Callable[[Visit], None] | None = None,
    ) -> Run:
        """Returns a pass with some lines, and all equations from one on, in float32."""

        def is_wide(key: EquationKey) -> bool:
            return self._positions.get(key, -1) >= start or self._lines.get(key) in wide

        return self._run_with(is_wide, look)

    def _run_with(
        self, is_wide: IsWide, look: Callable[[Visit], None] | None = None
    ) -> Run:
        return self._backward.run(self._loss_scale, is_wide, look=look, is_brief=True)

    def _describe_culprit(
        self,
        key: EquationKey,
        wide: Sequence[SourcePlace],
        error: float,
        *,
        is_source: bool,
    ) -> Culprit:
        """Returns an equation as a culprit, which may be the source of what becomes inf or NaN."""
        visits: list[_MeasuredVisit] = []  # one for each iteration, if it is in a loop

        def look(visit: Visit) -> None:
            if key_of(visit.eqn, visit.around) == key:
                visits.append(_MeasuredVisit(visit, _measure_loss(visit)))

        run = self._run(wide, look=look)
        # The first of those that do the worst.
        visit, loss = max(
            visits,
            key=lambda pair: (
                pair.loss.is_infinite,
                pair.loss.share,
                pair.loss.saturated,
            ),
        )
        kind = loss.find_kind(is_source=is_source)
        share = loss.share
        if kind == "saturation":
            share = loss.saturated
        return Culprit(
            place=run.findings.place(visit, share=share),
            kind=kind,
            largest=loss.largest,
            error=error,
            made_by=self._find_maker(key, kind, is_source=is_source),
        )

    def _find_maker(self, key: EquationKey, kind: str, *, is_source: bool) -> str:
        """Returns what made the numbers of an equation, if that has a cure of its own, or `""`."""
        if kind == "overflow":
            return ""
        operations = origins.Operations(self._as_written.findings)
        origin = operations.find_origin(key)
        # The logarithm of 1 minus a probability has a cure for a sigmoid alone.
        is_near_one = is_source and kind != "underflow"
        if is_near_one and origin != origins.SIGMOID:
            return ""
        if origin == origins.PRODUCT or operations.is_read_by_logarithm(key):
            return origin
        return ""


class _Loss(NamedTuple):
    """What an equation makes of its numbers, compared with what float32 makes of them."""

    is_infinite: bool  # whether there is inf or NaN among them
    share: float  # of those that are not 0 in float32: how many are 0
    saturated: float  # of those below 1 in magnitude in float32: how many are 1 or -1
    largest: float  # the largest magnitude in float32

    def find_kind(self, *, is_source: bool) -> str:
        """Returns the kind of a culprit, as `Culprit.kind` names it."""
        if self.is_infinite:
            return "overflow"
        if self.share > _FLUSHED:
            return "underflow"
        # Most zeros do no harm, as those in the tail of a softmax. So a 1 explains more.
        if is_source and self.saturated:
            return "saturation"
        if is_source and self.share:
            return "underflow"
        return "rounding"


class _MeasuredVisit(NamedTuple):
    """One run of an equation, and what it lost."""

    visit: Visit
    loss: _Loss


def _measure_loss(visit: Visit) -> _Loss:
    exact_outputs = compute(visit.eqn, visit.arrays, True)
    is_infinite = False
    num_nonzero = 0
    num_flushed = 0
    num_below_one = 0
    num_saturated = 0
    magnitudes = []
    for output, exact in zip(visit.outputs, exact_outputs, strict=True):
        numbers = np.asarray(output)
        exact_numbers = np.asarray(exact)
        if numbers.dtype.kind not in "fV":
            continue
        if not np.isfinite(numbers).all():
            is_infinite = True
        num_nonzero += np.count_nonzero(exact_numbers)
        num_flushed += np.count_nonzero((numbers == 0) & (exact_numbers != 0))
        is_below_one = (np.abs(exact_numbers) < 1) & (exact_numbers != 0)
        num_below_one += np.count_nonzero(is_below_one)
        num_saturated += np.count_nonzero(is_below_one & (np.abs(numbers) == 1))
        magnitudes.append(float(np.abs(exact_numbers).max(initial=0)))
    return _Loss(
        is_infinite=is_infinite,
        share=num_flushed / max(num_nonzero, 1),
        saturated=num_saturated / max(num_below_one, 1),
        largest=max(magnitudes, default=0.0),
    )


def _make_remedy(wide: Sequence[SourcePlace], error: float) -> Remedy:
    return Remedy(
        first=wide[0],
        lines=tuple(map(str, wide)),
        works=error <= CLOSE,
        error=error,
    )


def _place_culprit(culprit: Culprit | None) -> list[SourcePlace]:
    if culprit is None:
        return []
    return [SourcePlace(culprit.place.file, culprit.place.line)]


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

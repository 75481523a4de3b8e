"""A search for the line of a wrong gradient, and for lines whose cast makes it right.

Both are found by trying. With all equations in float32 the gradients are right. `find_culprit`
runs the first n equations as they are written and the others in float32, and bisects n: the
gradients go wrong at one equation, or at one of its line, which is then tried as a whole.
`find_remedy` computes the faulty line in float32, forwards and backwards, and adds the next line at
which something goes wrong until nothing does. What reads a line in float32 does not round it.

A line is its file and number, as in the text, or `""` if it is not known.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..diagnostics._trace.backward import Run, TracedBackward
from ..diagnostics._trace.interpreter import EquationKey, IsWide, Visit, key_of
from ..diagnostics._trace.places import find_line
from .culprit import Culprit, Loss, find_maker, measure_loss
from .gradients import CLOSE, are_finite
from .origins import Operations

_MOST_LINES = 6  # in float32: beyond that it is not a line that is at fault
_MOST_LINES_OF_RELIEF = 4  # in float32, for a higher loss scale
_BLAME = 0.5  # one equation is to blame if it makes this share of the error


class Remedy(NamedTuple):
    """The lines that were computed in float32, and what became of the gradients.

    Attributes:
      lines: the first at fault first.
      works: whether the gradients are then finite and right.
      error: the largest error of a leaf of the gradients; inf if they are not finite, and `None` if
        they are finite and none can be compared.
    """

    lines: tuple[str, ...]
    works: bool
    error: float | None


class Relief(NamedTuple):
    """A higher loss scale, and the lines that must be in float32 for it to fit."""

    loss_scale: float
    lines: tuple[str, ...]


def find_relief(
    backward: TracedBackward, run: Run, first: str, loss_scale: float
) -> Relief | None:
    """Returns the lines with which a loss scale fits, if few lines are enough.

    `run` is a pass as it is written, and `first` the line at which the loss scale overflows.
    """

    def error_of(grads: Mapping[str, np.ndarray]) -> float:
        if are_finite(grads):
            return 0.0
        return math.inf

    search = LineSearch(backward, run, error_of, loss_scale)
    remedy = search.find_remedy(first, _MOST_LINES_OF_RELIEF)
    if not remedy.works:
        return None
    return Relief(loss_scale, remedy.lines)


class LineSearch:
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
        # in the order of execution
        self._lines: dict[EquationKey, str] = {}
        for key, (eqn, around) in as_written.findings.equations.items():
            self._lines[key] = find_line(eqn, around).where
        self._keys = list(self._lines)
        self._positions = {key: i for i, key in enumerate(self._keys)}

    def find_culprit(self, wide: Sequence[str] = ()) -> Culprit | None:
        """Returns the equation at which gradients go wrong, if it or its line is to blame."""

        def find_error(number: int) -> float:
            return self._error_of(self._run(self._widen(wide, number)).grads)

        error = find_error(len(self._keys))
        # By the number of equations, from the first on, that run as written.
        errors = {0: 0.0, len(self._keys): error}
        middle_error = CLOSE
        if math.isfinite(error):
            middle_error = error / 2

        def is_wrong(number: int) -> bool:
            errors[number] = find_error(number)
            return errors[number] > middle_error

        wrong = _bisect(len(self._keys), is_wrong)
        error_with = errors[wrong]
        error_without = errors[wrong - 1]
        whole_error = min(2 * middle_error, error_with)
        key = self._keys[wrong - 1]
        least_error = _BLAME * whole_error
        if error_with - error_without < least_error:
            # A line may round more than once, as a product does with its operands and its result.
            error_with = self._find_error_of_line(self._lines[key], wide)
        if error_with < least_error:
            return None
        return self._describe_culprit(key, wide, error_with, is_source=False)

    def _find_error_of_line(self, line: str, wide: Sequence[str]) -> float:
        """Returns the error if only a line is as written, and the rest float32."""
        if not line or line in wide:
            return 0.0
        run = self._run(lambda key: self._lines.get(key) != line)
        return self._error_of(run.grads)

    def find_source(self, wide: Sequence[str] = ()) -> Culprit | None:
        """Returns the equation that rounds what later becomes inf or NaN, if there is one.

        If all equations up to this one run as written, and the others in float32, the outputs are
        not finite. If this one runs in float32 as well, they are.
        """
        names = self._as_written.report().nonfinite_outputs

        def is_nonfinite(number: int) -> bool:
            outputs = self._run(self._widen(wide, number)).outputs
            return not are_finite({name: outputs[name] for name in names})

        if is_nonfinite(0):
            return None
        last = self._keys[_bisect(len(self._keys), is_nonfinite) - 1]
        culprit = self._describe_culprit(last, wide, math.inf, is_source=True)
        if culprit.kind == "overflow":
            return None
        return culprit

    def find_remedy(self, first: str, most: int = _MOST_LINES) -> Remedy:
        """Tries up to `most` lines in float32, beginning with the `first`."""
        wide = [first]
        while True:
            run = self._run(self._widen(wide))
            error = self._error_of(run.grads)
            if error <= CLOSE or len(wide) == most:
                break
            following = self._find_next(run, wide)
            if not following or following in wide:
                break
            wide.append(following)
        return Remedy(tuple(wide), error <= CLOSE, error)

    def _find_next(self, run: Run, wide: Sequence[str]) -> str:
        """Returns the next line at fault with some lines in float32, if there is another one."""
        report = run.report()
        if not report.nonfinite_outputs:
            return _find_line(self.find_culprit(wide))
        reaching = [place for place in report.nonfinite if place.reaches]
        # The forward pass first: what goes wrong there explains the backward pass.
        reaching.sort(key=lambda place: place.direction != "forward")
        others = [place.where for place in reaching if place.where not in wide]
        # If all are in float32 already, the zeros come from a line between them.
        if not others:
            return _find_line(self.find_source(wide))
        return next(filter(None, others), "")

    def find_compiled_remedy(self) -> Remedy | None:
        """Returns lines in float32 that make the gradients of the compiled program right.

        `None` if these are right as it is written, if no lines were found, or it cannot be tried.
        """
        if self._find_compiled_error([]) <= CLOSE:
            return None
        wide: list[str] = []
        while len(wide) < _MOST_LINES:
            following = self._find_next_compiled(wide)
            if not following:
                return None
            wide.append(following)
            error = self._find_compiled_error(wide)
            if error <= CLOSE:
                return Remedy(tuple(wide), works=True, error=error)
        return None

    def _find_next_compiled(self, wide: Sequence[str]) -> str:
        """Returns the last of the first lines that make the compiled program right in float32."""
        candidates = list(dict.fromkeys(filter(None, self._lines.values())))

        def is_right(number: int) -> bool:
            return self._find_compiled_error([*wide, *candidates[:number]]) <= CLOSE

        if not is_right(len(candidates)):
            return ""
        return candidates[_bisect(len(candidates), is_right) - 1]

    def _find_compiled_error(self, wide: Sequence[str]) -> float:
        """Returns the error of the compiled program with some lines in float32."""
        grads = self._backward.run_compiled(self._loss_scale, self._widen(wide))
        if grads is None:
            return 0.0
        return self._error_of(grads)

    def _widen(self, wide: Sequence[str], start: float = math.inf) -> IsWide:
        """Returns that some lines, and all equations from one on, are in float32."""

        def is_wide(key: EquationKey) -> bool:
            return self._positions.get(key, -1) >= start or self._lines.get(key) in wide

        return is_wide

    def _run(self, is_wide: IsWide, look: Callable[[Visit], None] | None = None) -> Run:
        return self._backward.run(self._loss_scale, is_wide, look=look, is_brief=True)

    def _describe_culprit(
        self,
        key: EquationKey,
        wide: Sequence[str],
        error: float,
        *,
        is_source: bool,
    ) -> Culprit:
        """Returns an equation as a culprit, which may be the source of what becomes inf or NaN."""
        visits: list[tuple[Loss, Visit]] = []  # one for each iteration

        def look(visit: Visit) -> None:
            if key_of(visit.eqn, visit.around) == key:
                visits.append((measure_loss(visit), visit))

        run = self._run(self._widen(wide), look)
        # The first of those that do the worst.
        loss, visit = max(visits, key=lambda pair: pair[0].badness)
        kind = loss.find_kind(is_source=is_source)
        share = loss.share
        if kind == "saturation":
            share = loss.saturated
        operations = Operations(self._as_written.findings)
        return Culprit(
            place=run.findings.place(visit, share=share),
            kind=kind,
            largest=loss.largest,
            error=error,
            made_by=find_maker(operations, key, kind, is_source=is_source),
        )


def _find_line(culprit: Culprit | None) -> str:
    if culprit is None:
        return ""
    return culprit.place.where


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

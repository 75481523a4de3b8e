"""An interpreter that looks closely only where a number is inf or NaN.

To look at each equation, all results must be kept apart, and that takes XLA several times as long
to compile as the same program without. So segments in a row run as one program first, which only
gives what crosses from one to the next. Where that is not finite, the segment runs again by itself.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..._jax import ClosedJaxpr, JaxprEqn
from .constants import Constants
from .interpreter import Interpreter, Value, Watch
from .jaxpr import Needs
from .numbers import nonfinite_mask
from .plan import Plan, Planner, Read, Segment, compiled


class Row(Segment):
    """Segments in a row as one. It has all that they write, and no program of its own."""

    segments: tuple[Segment, ...]
    run: Callable[[list[Any]], list[Any]]


class RowPlanner(Planner):
    """Makes plans whose segments stand in rows."""

    def __init__(self, constants: Constants | None = None) -> None:
        super().__init__(constants)
        self._in_rows: dict[tuple[int, Needs], Plan] = {}

    def plan(self, closed: ClosedJaxpr, needs: Needs) -> Plan:
        """Returns what to run for a jaxpr whose results are needed for `needs`."""
        key = id(closed), needs
        if key not in self._in_rows:
            self._in_rows[key] = _in_rows(super().plan(closed, needs))
        return self._in_rows[key]


def _in_rows(plan: Plan) -> Plan:
    parts, forgotten = [], []
    pairs = zip(plan.parts, plan.forgotten, strict=True)
    for _, group in itertools.groupby(pairs, key=lambda pair: isinstance(pair[0], Segment)):
        together = list(group)
        segments = [part for part, _ in together if isinstance(part, Segment)]
        if segments:
            together = [(_row(segments), tuple(place for _, of in together for place in of))]
        parts += [part for part, _ in together]
        forgotten += [of for _, of in together]
    return plan._replace(parts=tuple(parts), forgotten=tuple(forgotten))


def _row(segments: Sequence[Segment]) -> Row:
    writes = tuple(place for segment in segments for place in segment.writes)
    given = dict.fromkeys(place for segment in segments for place in segment.reads)
    reads = tuple(place for place in given if place not in writes)

    def run(inputs: list[Any]) -> list[Any]:
        values = dict(zip(reads, inputs, strict=True))
        for segment in segments:
            made = segment.program.run_within([values[place] for place in segment.reads])
            values |= zip(segment.writes, made, strict=True)
        return [values[place] for place in writes]

    steps = tuple(step for segment in segments for step in segment.steps)
    row = Row(steps, segments[0].program, reads, writes)
    row.segments, row.run = tuple(segments), compiled(run)
    return row


class Hurried(Interpreter):
    """Runs jaxprs, and shows `watch` the equations of segments that give inf or NaN.

    Args:
      planner: makes the plans.
      watch: that of `Interpreter`.
      tell: is told before a row is run: how many equations it has, and what is around it, which
        iteration of each loop.
    """

    def __init__(
        self,
        planner: RowPlanner,
        watch: Watch,
        tell: Callable[[int, tuple[JaxprEqn, ...], tuple[int, ...]], None],
    ) -> None:
        super().__init__(planner, watch)
        self._tell = tell

    def _segment(
        self,
        segment: Segment,
        values: dict[int, Any],
        read: Callable[[Read], Any],
        around: tuple[JaxprEqn, ...],
        iteration: tuple[int, ...],
    ) -> None:
        if not isinstance(segment, Row):
            super()._segment(segment, values, read, around, iteration)
            return
        self._tell(len(segment.steps), around, iteration)
        arrays = segment.run([values[place].array for place in segment.reads])
        made = dict(zip(segment.writes, arrays, strict=True))
        for part in segment.segments:
            if any(nonfinite_mask(made[place]).any() for place in part.writes):
                super()._segment(part, values, read, around, iteration)
                continue
            scaled = {place for place in part.reads if values[place].scaled}
            for step in part.steps:
                if any(isinstance(place, int) and place in scaled for place in step.reads):
                    scaled.update(step.writes)
            values |= {place: Value(made[place], place in scaled) for place in part.writes}

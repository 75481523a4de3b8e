"""An interpreter that looks closely only where a number is inf or NaN.

To look at each equation, all results must be kept apart, and that takes XLA several times as long
to compile as the same program without. So segments in a row run as one program first, which only
gives what crosses from one to the next. Where that is not finite, the segment runs again by itself.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..._jax import ClosedJaxpr
from .constants import Constants
from .interpreter import Inside, Interpreter, Value, Watch
from .jaxpr import Needs
from .numbers import nonfinite_mask
from .plan import Plan, Planner, Read, Segment, compile_fast


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
    made = []
    pairs = zip(plan.parts, plan.forgotten, strict=True)
    for is_segment, group in itertools.groupby(pairs, lambda pair: isinstance(pair[0], Segment)):
        parts, forgotten = zip(*group, strict=True)
        if is_segment:
            parts, forgotten = (_row(parts),), (tuple(itertools.chain(*forgotten)),)
        made += zip(parts, forgotten, strict=True)
    parts, forgotten = zip(*made, strict=True) if made else ((), ())
    return plan._replace(parts=parts, forgotten=forgotten)


def _row(segments: Sequence[Segment]) -> Row:
    writes = tuple(slot for segment in segments for slot in segment.writes)
    given = dict.fromkeys(slot for segment in segments for slot in segment.reads)
    reads = tuple(slot for slot in given if slot not in writes)

    def run(inputs: list[Any]) -> list[Any]:
        values = dict(zip(reads, inputs, strict=True))
        for segment in segments:
            made = segment.program.run_within([values[slot] for slot in segment.reads])
            values |= zip(segment.writes, made, strict=True)
        return [values[slot] for slot in writes]

    steps = tuple(step for segment in segments for step in segment.steps)
    row = Row(steps, segments[0].program, reads, writes)
    row.segments, row.run = tuple(segments), compile_fast(run)
    return row


class Hurried(Interpreter):
    """Runs jaxprs, and shows `watch` the equations of segments that give inf or NaN.

    Before a row is run, `tell` is told how many equations it has, and what it is inside of.
    """

    def __init__(
        self,
        planner: RowPlanner,
        watch: Watch,
        tell: Callable[[int, Inside], None],
    ) -> None:
        super().__init__(planner, watch)
        self._tell = tell

    def _segment(
        self,
        segment: Segment,
        values: dict[int, Any],
        read: Callable[[Read], Any],
        inside: Inside,
    ) -> None:
        if not isinstance(segment, Row):
            super()._segment(segment, values, read, inside)
            return
        self._tell(len(segment.steps), inside)
        arrays = segment.run([values[slot].array for slot in segment.reads])
        made = dict(zip(segment.writes, arrays, strict=True))
        for part in segment.segments:
            if any(nonfinite_mask(made[slot]).any() for slot in part.writes):
                super()._segment(part, values, read, inside)
                continue
            scaled = {slot for slot in part.reads if values[slot].scaled}
            for step in part.steps:
                if any(isinstance(slot, int) and slot in scaled for slot in step.reads):
                    scaled.update(step.writes)
            values |= {slot: Value(made[slot], slot in scaled) for slot in part.writes}

"""What was seen in a pass: where inf and NaN were made, and where small values were lost.

`numbers` tells of each equation whether it did so. `report` turns what was noted into a
`TraceReport`: there `places` finds the lines of the model.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..._jax import JaxprEqn
from .interpreter import Value, Visit, key_of
from .jaxpr import EFFECT, FORWARD, HOLDERS
from .numbers import Birth, IncomparableError, Lost, birth, lost_values, nonfinite_mask
from .places import layer, lines
from .plan import RoundedAt
from .report import Place, TracedConstant, TracedNonfinite, TracedUnderflow, TraceReport

# A place is reported if it loses a larger share of the nonzero values.
_LOST_SHARE = 0.5


class Found(Exception):
    """Raised to end a pass at the first overflow."""


class Findings:
    """What was seen at each place. A place is an equation and the equations that hold it."""

    def __init__(
        self, look: Callable[[Visit], None] | None, is_brief: bool, is_hasty: bool = False
    ) -> None:
        self._look, self._is_brief, self._is_hasty = look, is_brief, is_hasty
        self.visits: collections.Counter[Any] = collections.Counter()  # in order of execution
        self.equations: dict[Any, tuple[JaxprEqn, tuple[JaxprEqn, ...]]] = {}
        self.times: collections.Counter[Any] = collections.Counter()
        self.births: dict[Any, tuple[Visit, Birth]] = {}
        self.lost: dict[Any, tuple[Visit, Lost]] = {}
        self.not_compared: set[str] = set()
        self.not_entered: set[str] = set()

    def watch(self, visit: Visit) -> list[frozenset[Any]]:
        """Returns where the inf and NaN of each output come from, and notes new ones."""
        place = key_of(visit.eqn, visit.around)
        self.visits[place] += 1
        self.equations[place] = visit.eqn, visit.around
        if visit.eqn.primitive.name in HOLDERS:
            self.not_entered.add(visit.eqn.primitive.name)
        if self._look:
            self._look(visit)
        if visit.need == EFFECT:  # only printed: it reaches no output
            return [frozenset()] * len(visit.outputs)
        if not self._is_hasty:
            self._note_lost(place, visit)
        bad = [nonfinite_mask(output) for output in visit.outputs]
        if not any(mask.any() for mask in bad):
            return [frozenset()] * len(bad)
        origins = frozenset().union(*(value.origins for value in visit.inputs))
        explained = any(self.births[origin][1].cause != "given" for origin in origins)
        born = None
        if not (explained and self._is_brief):
            arrays = [value.array for value in visit.inputs]
            born = birth(visit.eqn, arrays, visit.outputs, explained=explained)
        if born is None and not origins:
            output = next(i for i, mask in enumerate(bad) if mask.any())
            born = Birth(output, int(bad[output].sum()), "given")
        if born is not None:
            self.times["birth", place] += 1
            if place not in self.births or self.births[place][1].cause == "given" != born.cause:
                self.births.pop(place, None)  # so that it moves to the end: order of execution
                self.births[place] = visit, born
            if self._is_hasty and born.cause != "given" and any(v.scaled for v in visit.inputs):
                raise Found
            origins |= {place}
        return [origins if mask.any() else frozenset() for mask in bad]

    def _note_lost(self, place: Any, visit: Visit) -> None:
        try:
            arrays = [value.array for value in visit.inputs]
            lost = lost_values(visit.eqn, arrays, visit.outputs, least=_LOST_SHARE)
        except IncomparableError:
            self.not_compared.add(visit.eqn.primitive.name)
            return
        if lost is not None:
            self.times["lost", place] += 1
            if place not in self.lost or lost.share > self.lost[place][1].share:
                self.lost[place] = visit, lost

    def born(self, reached: Mapping[Any, Sequence[str]]) -> list[TracedNonfinite]:
        """Returns where inf and NaN were made or given, in the order of execution.

        Args:
          reached: the outputs that those of each place reach.
        """
        return [
            TracedNonfinite(
                **self._place("birth", place, visit, born.output, _share(visit, born)),
                elements=born.elements,
                cause=born.cause,
                least_input=born.least_input,
                largest_input=born.largest_input,
                float32_result=born.float32_result,
                reaches=tuple(reached.get(place, ())),
            )
            for place, (visit, born) in self.births.items()
        ]

    def report(
        self,
        outputs: dict[str, Value],
        arguments: dict[str, Any],
        rounded: Sequence[RoundedAt],
        loss_scale: float,
    ) -> TraceReport:
        """Returns all that was seen, as Python values."""
        reached = collections.defaultdict(list)
        for name, value in outputs.items():
            for origin in value.origins:
                reached[origin].append(name)
        births = self.born(reached)
        made = [birth for birth in births if birth.cause != "given"]
        # A given inf or NaN is of interest if a NaN was made of infinities, or if no place that
        # made one explains the outputs.
        explained = any(birth.reaches and birth.cause != "infinities" for birth in made)
        given = [birth for birth in births if birth.cause == "given" and birth.reaches]
        underflows = [
            TracedUnderflow(
                **self._place("lost", place, visit, lost.output, lost.share),
                nonzero=lost.nonzero,
                zeros=lost.zeros,
                subnormals=lost.subnormals,
                lost_sum=lost.lost_sum,
            )
            for place, (visit, lost) in self.lost.items()
        ]
        return TraceReport(
            loss=float(np.mean(np.asarray(outputs["loss"].array), dtype=np.float64)),
            loss_scale=loss_scale,
            equations=self.visits.total(),
            nonfinite=_without_repeats(made if explained else made + given),
            underflows=_without_repeats(underflows),
            nonfinite_arguments=_nonfinite_names(arguments),
            nonfinite_outputs=_nonfinite_names({k: v.array for k, v in outputs.items()}),
            not_compared=tuple(sorted(self.not_compared)),
            not_entered=tuple(sorted(self.not_entered)),
            constants=_traced_constants(rounded),
        )

    def place(self, visit: Visit, share: float) -> Place:
        """Returns a visited equation as a place of a report.

        Args:
          visit: the equation.
          share: the share of its numbers that was lost.
        """
        place = key_of(visit.eqn, visit.around)
        return Place(**self._place("", place, visit, 0, share))

    def _place(
        self, kind: str, place: Any, visit: Visit, output: int, share: float
    ) -> dict[str, Any]:
        eqn = visit.eqn
        line, *callers = lines(eqn, visit.around) or [None]
        return {
            "primitive": eqn.primitive.name,
            "dtype": str(visit.outputs[output].dtype),
            "shape": tuple(map(int, visit.outputs[output].shape)),
            "inputs": tuple(atom.aval.str_short() for atom in eqn.invars),
            "direction": "forward" if visit.need & FORWARD else "backward",
            "scaled": any(value.scaled for value in visit.inputs),
            "where": str(line) if line else "",
            "file": line.file if line else "",
            "line": line.number if line else 0,
            "source": line.text if line else "",
            "called_from": tuple(map(str, callers)),
            "layer": layer(eqn, visit.around),
            "iteration": visit.iteration,
            "times": self.times[kind, place],
            "visits": self.visits[place],
            "share": share,
        }


def _traced_constants(rounded: Sequence[RoundedAt]) -> tuple[TracedConstant, ...]:
    found: dict[Any, TracedConstant] = {}
    for eqn, around, number in rounded:
        line = lines(eqn, around)[0]
        constant = TracedConstant(
            value=number.exact,
            became=float(number.literal.val),
            dtype=str(np.asarray(number.literal.val).dtype),
            primitive=eqn.primitive.name,
            where=str(line),
            file=line.file,
            line=line.number,
            source=line.text,
        )
        found.setdefault((line.file, line.number, constant.value, constant.dtype), constant)
    return tuple(found.values())


def _share(visit: Visit, born: Birth) -> float:
    return born.elements / visit.outputs[born.output].size


def _without_repeats(places: Sequence[Any]) -> tuple[Any, ...]:
    """Returns places without the repeats that `remat` runs in the backward pass."""
    kept: dict[Any, Any] = {}
    for place in places:
        key = place.primitive, place.dtype, place.shape, place.file, place.line, place.share
        first = kept.get(key)
        if first is None or place.scaled or first.direction == place.direction:
            kept[(*key, len(kept)) if first else key] = place
        elif isinstance(place, TracedNonfinite):
            reaches = tuple(dict.fromkeys(first.reaches + place.reaches))
            kept[key] = dataclasses.replace(first, reaches=reaches)
    return tuple(kept.values())


def _nonfinite_names(leaves: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, leaf in leaves.items() if nonfinite_mask(leaf).any())

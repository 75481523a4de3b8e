"""What was seen in a pass: where inf and NaN were made, and where small values were lost."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._jax import JaxprEqn
from .interpreter import EquationKey, Value, Visit, key_of
from .jaxpr import EFFECT, FORWARD, hides_equations
from .numbers import Birth, IncomparableError, Lost, birth, lost_values, nonfinite_mask
from .places import Line, layer, lines
from .plan import RoundedAt
from .report import Place, TracedConstant, TracedNonfinite, TracedUnderflow, TraceReport

# A place is reported if it loses a larger share of the nonzero values.
_LOST_SHARE = 0.5


class Found(Exception):
    """Raised to end a pass at the first overflow."""


class Findings:
    """What was seen at each equation, by its key."""

    def __init__(
        self, look: Callable[[Visit], Any] | None, is_brief: bool, is_hasty: bool = False
    ) -> None:
        self._look, self._is_brief, self._is_hasty = look, is_brief, is_hasty
        self.visits: collections.Counter[Any] = collections.Counter()  # in order of execution
        self.equations: dict[Any, tuple[JaxprEqn, tuple[JaxprEqn, ...]]] = {}
        # What made the inputs of each equation, `()` for an argument or a number. In a loop: when
        # it was visited last, so that what is carried comes from the iteration before.
        self.makers: dict[EquationKey, tuple[EquationKey, ...]] = {}
        self.times: collections.Counter[Any] = collections.Counter()
        self.births: dict[EquationKey, tuple[Visit, Birth]] = {}
        self.lost: dict[EquationKey, tuple[Visit, Lost]] = {}
        self.not_compared: set[str] = set()
        self.not_entered: set[str] = set()

    def watch(self, visit: Visit) -> list[frozenset[Any]]:
        """Returns where the inf and NaN of each output come from, and notes new ones."""
        key = key_of(visit.eqn, visit.around)
        if key not in self.visits and hides_equations(visit.eqn):
            self.not_entered.add(visit.eqn.primitive.name)
        self.visits[key] += 1
        self.equations[key] = visit.eqn, visit.around
        self.makers[key] = tuple(value.maker for value in visit.inputs)
        if self._look:
            self._look(visit)
        if visit.need == EFFECT:  # only printed: it reaches no output
            return [frozenset()] * len(visit.outputs)
        if not self._is_hasty:
            self._note_lost(key, visit)
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
            born = Birth(output, int(bad[output].sum()), float(bad[output].mean()), "given")
        if born is not None:
            self.times["birth", key] += 1
            if key not in self.births or self.births[key][1].cause == "given" != born.cause:
                self.births.pop(key, None)  # so that it moves to the end: order of execution
                self.births[key] = visit, born
            if self._is_hasty and born.cause != "given" and any(v.scaled for v in visit.inputs):
                raise Found
            origins |= {key}
        return [origins if mask.any() else frozenset() for mask in bad]

    def _note_lost(self, key: EquationKey, visit: Visit) -> None:
        try:
            arrays = [value.array for value in visit.inputs]
            lost = lost_values(visit.eqn, arrays, visit.outputs, least=_LOST_SHARE)
        except IncomparableError:
            self.not_compared.add(visit.eqn.primitive.name)
            return
        if lost is not None:
            self.times["lost", key] += 1
            if key not in self.lost or lost.share > self.lost[key][1].share:
                self.lost[key] = visit, lost

    def born(self, reached: Mapping[Any, Sequence[str]]) -> list[TracedNonfinite]:
        """Returns where inf and NaN were made or given, given the outputs that those `reached`."""
        return [
            TracedNonfinite(**fields, reaches=tuple(reached.get(key, ())))
            for key, fields in self._fields("birth", self.births)
        ]

    def underflows(self) -> list[TracedUnderflow]:
        """Returns where most nonzero values were lost, in the order of execution."""
        return [TracedUnderflow(**fields) for _, fields in self._fields("lost", self.lost)]

    def place(self, visit: Visit, share: float) -> Place:
        """Returns a visited equation, which lost a share of its numbers, as a place of a report."""
        return Place(**self._place("", key_of(visit.eqn, visit.around), visit, 0, share))

    def _fields(
        self, kind: str, found: Mapping[EquationKey, tuple[Visit, Birth | Lost]]
    ) -> Iterator[tuple[EquationKey, dict[str, Any]]]:
        for key, (visit, what) in found.items():
            numbers = what._asdict()
            output = numbers.pop("output")
            yield key, self._place(kind, key, visit, output, what.share) | numbers

    def _place(
        self, kind: str, key: EquationKey, visit: Visit, output: int, share: float
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
            **_told(line),
            "called_from": tuple(map(str, callers)),
            "layer": layer(eqn, visit.around),
            "iteration": visit.iteration,
            "times": self.times[kind, key],
            "visits": self.visits[key],
            "share": share,
        }


def _told(line: Line | None) -> dict[str, Any]:
    line = line or Line("", 0, "")
    where = str(line) if line.file else ""
    return {"where": where, "file": line.file, "line": line.number, "source": line.text}


class Run(NamedTuple):
    """One pass."""

    values: dict[str, Value]  # the loss, the gradients and what else is returned, by their names
    findings: Findings  # what was seen on the way
    arguments: dict[str, Any]  # the floating-point arguments, by their names
    rounded: Sequence[RoundedAt]  # the numbers that a narrow format rounded to 0 or inf, and where
    loss_scale: float

    @property
    def grads(self) -> dict[str, np.ndarray]:
        """The gradients, by their names."""
        values = self.values.items()
        return {name: np.asarray(v.array) for name, v in values if name.startswith("grads")}

    def report(self) -> TraceReport:
        """Returns all that was seen, as Python values."""
        reached = collections.defaultdict(list)
        for name, value in self.values.items():
            for origin in value.origins:
                reached[origin].append(name)
        births = self.findings.born(reached)
        made = [birth for birth in births if birth.cause != "given"]
        # A given inf or NaN is of interest if a NaN was made of infinities, or if no place that
        # made one explains the outputs.
        explained = any(birth.reaches and birth.cause != "infinities" for birth in made)
        given = [birth for birth in births if birth.cause == "given" and birth.reaches]
        return TraceReport(
            loss=float(np.mean(np.asarray(self.values["loss"].array), dtype=np.float64)),
            loss_scale=self.loss_scale,
            equations=self.findings.visits.total(),
            nonfinite=_without_repeats(made if explained else made + given),
            underflows=_without_repeats(self.findings.underflows()),
            nonfinite_arguments=_nonfinite_names(self.arguments),
            nonfinite_outputs=_nonfinite_names({k: v.array for k, v in self.values.items()}),
            not_compared=tuple(sorted(self.findings.not_compared)),
            not_entered=tuple(sorted(self.findings.not_entered)),
            constants=_traced_constants(self.rounded),
        )


def _traced_constants(rounded: Sequence[RoundedAt]) -> tuple[TracedConstant, ...]:
    found: dict[Any, TracedConstant] = {}
    for eqn, around, number in rounded:
        line, became = lines(eqn, around)[0], np.asarray(number.literal.val)
        numbers = number.exact, float(became), str(became.dtype)
        constant = TracedConstant(*numbers, eqn.primitive.name, **_told(line))
        found.setdefault((line.file, line.number, constant.value, constant.dtype), constant)
    return tuple(found.values())


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

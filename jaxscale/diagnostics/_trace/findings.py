"""Findings of a pass: where inf and NaN were made, and where small values were lost."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._jax import JaxprEqn
from .damage import (
    Birth,
    Lost,
    describe_nonfinite,
    find_birth,
    find_lost,
    has_nonfinite,
    nonfinite_mask,
)
from .evaluate import IncomparableError
from .interpreter import Origins, Value, Visit, unite_origins
from .needs import EFFECT, FORWARD, Around, EquationKey, hides_equations, key_of
from .places import NO_LINE, find_layer, find_line, lines
from .program import Rounded
from .report import Place, TracedConstant, TracedNonfinite, TracedUnderflow, TraceReport

# A place is reported if it loses a larger share of the nonzero values.
_LOST_SHARE = 0.5


class OverflowSeen(Exception):
    """Raised to end a pass at the first overflow that depends on the loss scale."""


class _SeenBirth(NamedTuple):
    visit: Visit
    birth: Birth


class _SeenLost(NamedTuple):
    visit: Visit
    lost: Lost


class Findings:
    """What was seen at each equation, by its key.

    `look` is called with each visit. Findings that are brief leave out what is made of numbers that
    are inf or NaN already. Hasty ones look for an overflow only, and raise `OverflowSeen` at it.
    """

    def __init__(
        self,
        look: Callable[[Visit], Any] | None,
        is_brief: bool,
        is_hasty: bool = False,
    ) -> None:
        self._look = look
        self._is_brief = is_brief
        self._is_hasty = is_hasty
        # as they are run
        self.visits: collections.Counter[EquationKey] = collections.Counter()
        self.equations: dict[EquationKey, tuple[JaxprEqn, Around]] = {}
        # What made the inputs of each equation, `()` for an argument or a number. In a loop: when
        # it was visited last, so that what is carried comes from the iteration before.
        self.makers: dict[EquationKey, tuple[EquationKey, ...]] = {}
        self.births: dict[EquationKey, _SeenBirth] = {}  # the first at each equation
        self.not_compared: set[str] = set()
        self.not_entered: set[str] = set()
        self._losses: dict[EquationKey, _SeenLost] = {}  # the worst at each equation
        # On how many visits something was made or lost.
        self._num_births: collections.Counter[EquationKey] = collections.Counter()
        self._num_losses: collections.Counter[EquationKey] = collections.Counter()

    def watch(self, visit: Visit) -> list[Origins]:
        """Notes what happened at an equation, and returns where the bad numbers come from.

        These are the inf and NaN of each output.
        """
        key = key_of(visit.eqn, visit.around)
        self._note_visit(key, visit)
        if self._look:
            self._look(visit)
        if visit.need == EFFECT:  # only printed: it reaches no output
            return [frozenset()] * len(visit.outputs)
        if not self._is_hasty:
            self._note_lost(key, visit)

        masks = list(map(nonfinite_mask, visit.outputs))
        if not any(map(np.any, masks)):
            return [frozenset()] * len(masks)
        origins = unite_origins(visit.inputs)
        birth = self._find_birth(visit, origins, masks)
        if birth is not None:
            self._note_birth(key, visit, birth)
            origins |= {key}

        origins_of_outputs: list[Origins] = []
        for mask in masks:
            if mask.any():
                origins_of_outputs.append(origins)
            else:
                origins_of_outputs.append(frozenset())
        return origins_of_outputs

    def _note_visit(self, key: EquationKey, visit: Visit) -> None:
        if key not in self.visits and hides_equations(visit.eqn):
            self.not_entered.add(visit.eqn.primitive.name)
        self.visits[key] += 1
        self.equations[key] = (visit.eqn, visit.around)
        self.makers[key] = tuple(value.maker for value in visit.inputs)

    def _note_lost(self, key: EquationKey, visit: Visit) -> None:
        try:
            lost = find_lost(visit.eqn, visit.arrays, visit.outputs, least=_LOST_SHARE)
        except IncomparableError:
            self.not_compared.add(visit.eqn.primitive.name)
            return
        if lost is None:
            return
        self._num_losses[key] += 1
        worst = self._losses.get(key)
        if worst is None or lost.share > worst.lost.share:
            self._losses[key] = _SeenLost(visit, lost)

    def _find_birth(
        self, visit: Visit, origins: Origins, masks: Sequence[np.ndarray]
    ) -> Birth | None:
        """Returns the inf or NaN that an equation made, or is given first, if any.

        The masks say where its outputs hold one.
        """
        causes = {self.births[origin].birth.cause for origin in origins}
        is_explained = bool(causes - {"given"})
        if not (is_explained and self._is_brief):
            birth = find_birth(
                visit.eqn, visit.arrays, visit.outputs, is_explained=is_explained
            )
            if birth is not None:
                return birth
        if origins:
            return None
        return describe_nonfinite(masks, "given")

    def _note_birth(self, key: EquationKey, visit: Visit, birth: Birth) -> None:
        self._num_births[key] += 1
        is_given = birth.cause == "given"
        earlier = self.births.get(key)
        if earlier is None:
            self.births[key] = _SeenBirth(visit, birth)
        elif earlier.birth.cause == "given" and not is_given:
            del self.births[key]  # so that it moves to the end: order of execution
            self.births[key] = _SeenBirth(visit, birth)
        if self._is_hasty and visit.scaled and not is_given:
            raise OverflowSeen

    def list_nonfinite(
        self, reached: Mapping[EquationKey, Sequence[str]]
    ) -> list[TracedNonfinite]:
        """Returns where inf and NaN were made or given, with the outputs that each has reached."""
        places = []
        for key, (visit, birth) in self.births.items():
            fields = self._describe(visit, birth, self._num_births[key])
            reaches = tuple(reached.get(key, ()))
            places.append(TracedNonfinite(**fields, reaches=reaches))
        return places

    def list_underflows(self) -> list[TracedUnderflow]:
        """Returns where most nonzero values were lost, in the order of execution."""
        places = []
        for key, (visit, lost) in self._losses.items():
            fields = self._describe(visit, lost, self._num_losses[key])
            places.append(TracedUnderflow(**fields))
        return places

    def _describe(self, visit: Visit, what: Birth | Lost, times: int) -> dict[str, Any]:
        """Returns the fields of a place where something happened that many times."""
        place = self.place(visit, what.share, what.output, times)
        fields = vars(place) | what._asdict()
        del fields["output"]
        return fields

    def place(
        self, visit: Visit, share: float, output: int = 0, times: int = 0
    ) -> Place:
        """Returns a visited equation, which lost a share of its numbers, as a place of a report."""
        eqn = visit.eqn
        line, *callers = lines(eqn, visit.around) or [NO_LINE]
        array = visit.outputs[output]
        direction = "backward"
        if visit.need & FORWARD:
            direction = "forward"
        return Place(
            primitive=eqn.primitive.name,
            dtype=str(array.dtype),
            shape=tuple(map(int, array.shape)),
            inputs=tuple(atom.aval.str_short() for atom in eqn.invars),
            direction=direction,
            scaled=visit.scaled,
            **line.fields(),
            called_from=tuple(map(str, callers)),
            layer=find_layer(eqn, visit.around),
            iteration=visit.iteration,
            times=times,
            visits=self.visits[key_of(eqn, visit.around)],
            share=share,
        )


class Run(NamedTuple):
    """One pass.

    Attributes:
      values: the loss, the auxiliary output and the gradients, by their names.
      findings: what was seen on the way.
      arguments: the floating-point arguments, by their names.
      rounded: the numbers of the source that a narrow format rounded to 0 or inf.
      loss_scale: the loss scale of the pass.
    """

    values: dict[str, Value]
    findings: Findings
    arguments: dict[str, jax.typing.ArrayLike]
    rounded: Sequence[Rounded]
    loss_scale: float

    @property
    def outputs(self) -> dict[str, np.ndarray]:
        """The arrays of `values`, on the host."""
        return {name: np.asarray(value.array) for name, value in self.values.items()}

    @property
    def grads(self) -> dict[str, np.ndarray]:
        """The gradients, by their names."""
        return pick_grads(self.outputs)

    def report(self) -> TraceReport:
        """Returns all that was seen, as Python values."""
        outputs = self.outputs
        return TraceReport(
            loss=float(np.mean(outputs["loss"], dtype=np.float64)),
            loss_scale=self.loss_scale,
            equations=self.findings.visits.total(),
            nonfinite=_merge_repeats(self._list_nonfinite()),
            underflows=_merge_repeats(self.findings.list_underflows()),
            nonfinite_arguments=_name_nonfinite(self.arguments),
            nonfinite_outputs=_name_nonfinite(outputs),
            not_compared=tuple(sorted(self.findings.not_compared)),
            not_entered=tuple(sorted(self.findings.not_entered)),
            constants=_list_constants(self.rounded),
        )

    def _list_nonfinite(self) -> list[TracedNonfinite]:
        """Returns where inf and NaN were made, and then where they were given if that matters."""
        reached: dict[EquationKey, list[str]] = {}
        for name, value in self.values.items():
            for origin in value.origins:
                reached.setdefault(origin, []).append(name)
        makers = []
        first_uses = []  # of an inf or NaN that was given
        is_explained = False
        for place in self.findings.list_nonfinite(reached):
            if place.cause == "given":
                if place.reaches:
                    first_uses.append(place)
                continue
            makers.append(place)
            if place.reaches and place.cause != "infinities":
                is_explained = True
        # A given inf or NaN is of interest if a NaN was made of infinities, or if no place that
        # made one explains the outputs.
        if is_explained:
            return makers
        return makers + first_uses


def pick_grads(outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the gradients among outputs, on the host."""
    grads = {}
    for name, output in outputs.items():
        if name.startswith("grads"):
            grads[name] = np.asarray(output)
    return grads


def _list_constants(rounded: Sequence[Rounded]) -> tuple[TracedConstant, ...]:
    """Returns the numbers that were rounded, each once for a line and a dtype."""
    constants: dict[Any, TracedConstant] = {}
    for number in rounded:
        line = find_line(number.eqn, number.around)
        literal = np.asarray(number.literal.val)
        constant = TracedConstant(
            value=number.exact,
            became=float(literal),
            dtype=str(literal.dtype),
            primitive=number.eqn.primitive.name,
            **line.fields(),
        )
        key = (line.file, line.number, constant.value, constant.dtype)
        constants.setdefault(key, constant)
    return tuple(constants.values())


def _merge_repeats(places: Sequence[Any]) -> tuple[Any, ...]:
    """Returns places without the repeats that `remat` runs in the backward pass."""
    merged: list[Any] = []
    indices: dict[Any, int] = {}  # of the first of several alike
    for place in places:
        key = (
            place.primitive,
            place.dtype,
            place.shape,
            place.file,
            place.line,
            place.share,
        )
        index = indices.setdefault(key, len(merged))
        if index == len(merged):
            merged.append(place)
            continue
        first = merged[index]
        if place.scaled or first.direction == place.direction:
            merged.append(place)
        elif isinstance(place, TracedNonfinite):
            reaches = tuple(dict.fromkeys(first.reaches + place.reaches))
            merged[index] = dataclasses.replace(first, reaches=reaches)
    return tuple(merged)


def _name_nonfinite(leaves: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the leaves that hold inf or NaN."""
    return tuple(name for name, leaf in leaves.items() if has_nonfinite(leaf))

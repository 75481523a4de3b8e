"""A jaxpr as a list of steps, in which calls are opened and neighbours are compiled together.

Compiling each equation by itself takes 30 ms, far longer than to run it. A barrier after each keeps
XLA from rewriting two into one: each number is the one that the equation by itself would give.
Segments are cut before each matrix product, so that equal layers are cut alike, and share their
programs. Loops, conditions, effects and refs are steps of their own.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..._jax import ClosedJaxpr, JaxprEqn, Literal, is_ref
from .damage import CONTRACTIONS
from .evaluate import compute
from .needs import Analysis, Needs, open_equation, unite
from .places import Constants
from .program import LocalStep, Number, Program, Rounded, as_array, program_key

_MOST_STEPS = 32  # of a segment without a product
# of a segment's results, which are all kept until they have been looked at
_MOST_BYTES = 2**28

# The interpreter opens some of these. The others have effects, or fail only once they are compiled.
_ALONE = {"cond", "while", "scan", "shard_map", "pmap", "xla_pmap", "pallas_call"}

# The slot that a value is kept in, a number, or `None` for a value that nothing needs.
Source = int | Number | None


class RoundedAt(NamedTuple):
    """A number that was rounded to 0 or inf, and the equation that reads it."""

    eqn: JaxprEqn
    around: tuple[JaxprEqn, ...]  # the calls that hold it, outermost first
    number: Rounded


class Step(NamedTuple):
    """An equation that is not a call."""

    eqn: JaxprEqn
    around: tuple[JaxprEqn, ...]  # the calls that hold it, outermost first
    needs: Needs  # what each of its results is needed for
    reads: tuple[Source, ...]  # its inputs
    writes: tuple[int, ...]  # the slots of its outputs

    @property
    def read_slots(self) -> list[int]:
        """The slots among its inputs."""
        return _slots_of(self.reads)


class Segment(NamedTuple):
    """Steps that run as one program."""

    steps: tuple[Step, ...]
    program: Program
    reads: tuple[int, ...]  # the slots of the program's inputs


class ConstSlot(NamedTuple):
    """A constant of a jaxpr, and the slot for it."""

    slot: int
    var: Any
    value: Any


class Plan(NamedTuple):
    """What to run for a jaxpr.

    Attributes:
      closed: the jaxpr.
      consts: its constants.
      inputs: the slots of its inputs.
      parts: what to run, in this order.
      outputs: where its outputs are in the end.
      forgotten: for each part, the slots that nothing reads after it.
    """

    closed: ClosedJaxpr
    consts: tuple[ConstSlot, ...]
    inputs: tuple[int, ...]
    parts: tuple[Segment | Step, ...]
    outputs: tuple[Source, ...]
    forgotten: tuple[tuple[int, ...], ...]

    @property
    def steps(self) -> list[Step]:
        """All steps, in the order of execution."""
        steps = []
        for part in self.parts:
            if isinstance(part, Segment):
                steps += part.steps
            else:
                steps.append(part)
        return steps

    @property
    def has_refs(self) -> bool:
        """Whether a step or a constant is a ref, or takes one."""
        variables = [const.var for const in self.consts]
        for step in self.steps:
            variables += [*step.eqn.invars, *step.eqn.outvars]
        return any(map(is_ref, variables))

    def compute(
        self,
        inputs: Sequence[Any],
        consts: Sequence[Any],
        is_wide: Callable[[tuple[int, ...]], bool],
    ) -> list[Any]:
        """Returns the outputs of a program without refs, in a function that is compiled.

        `is_wide` gets the keys of equations, which are as those of the interpreter.
        """
        values = dict(zip(self.inputs, inputs, strict=True))
        for const, value in zip(self.consts, consts, strict=True):
            values[const.slot] = value
        for step in self.steps:
            is_in_float32 = is_wide(tuple(map(id, (*step.around, step.eqn))))
            args = []
            for atom, source in zip(step.eqn.invars, step.reads, strict=True):
                args.append(_read(source, atom, values, is_in_float32))
            outputs = compute(step.eqn, args, is_in_float32)
            values.update(zip(step.writes, outputs, strict=True))
        outputs = []
        for atom, source in zip(self.closed.jaxpr.outvars, self.outputs, strict=True):
            outputs.append(_read(source, atom, values, False))
        return outputs


def _read(source: Source, atom: Any, values: Mapping[int, Any], is_wide: bool) -> Any:
    """Returns the value of an input or output of an equation."""
    if isinstance(source, int):
        return values[source]
    if source is None:  # nothing needs it
        return jax.lax.full(atom.aval.shape, 0, atom.aval.dtype)
    return as_array(source, is_wide)


class Planner:
    """Makes plans, and remembers them and the programs of their segments."""

    def __init__(self, constants: Constants) -> None:
        self.analysis = Analysis()
        self.rounded: list[RoundedAt] = []  # the numbers that became 0 or inf
        self._constants = constants
        self._plans: dict[tuple[int, Needs], Plan] = {}
        self._programs: dict[Any, Program] = {}

    def plan(self, closed: ClosedJaxpr, needs: Needs) -> Plan:
        """Returns what to run for a jaxpr whose results are needed for `needs`."""
        # the plan holds `closed`, so that the number stays its own
        key = (id(closed), needs)
        if key not in self._plans:
            self._plans[key] = self._make_plan(closed, needs)
        return self._plans[key]

    def _make_plan(self, closed: ClosedJaxpr, needs: Needs) -> Plan:
        flat = _FlatProgram(self)
        inputs = flat.new_slots(closed.jaxpr.invars)
        outputs = flat.add(closed, inputs, needs, around=())
        parts = _cut(flat.steps)
        last_parts = _find_last_parts(parts)
        # What goes in or comes out is kept until the end.
        for slot in (*inputs, *_slots_of(outputs)):
            last_parts[slot] = len(parts)

        finished_parts: list[Segment | Step] = []
        forgotten = []
        for index, steps in enumerate(parts):
            read_later = set()
            read_last = []
            for slot, last in last_parts.items():
                if last > index:
                    read_later.add(slot)
                elif last == index:
                    read_last.append(slot)
            if _may_share(steps[0].eqn):
                finished_parts.append(self._make_segment(steps, read_later))
            else:
                finished_parts.append(steps[0])
            forgotten.append(tuple(read_last))
        return Plan(
            closed=closed,
            consts=tuple(flat.consts),
            inputs=inputs,
            parts=tuple(finished_parts),
            outputs=outputs,
            forgotten=tuple(forgotten),
        )

    def _make_segment(self, steps: tuple[Step, ...], later: set[int]) -> Segment:
        """Returns steps as a segment; `later` has the slots that are read after it."""
        written: list[int] = []
        inputs: list[int] = []  # what its steps read that none of them wrote
        for step in steps:
            for slot in step.read_slots:
                if slot not in written and slot not in inputs:
                    inputs.append(slot)
            written += step.writes

        # The program knows a value by its index among these.
        indices = {slot: index for index, slot in enumerate((*inputs, *written))}
        local_steps = [_make_local(step, indices) for step in steps]
        kept = frozenset(indices[slot] for slot in written if slot in later)
        key = program_key(local_steps, kept)
        if key not in self._programs:
            self._programs[key] = Program(local_steps, kept)
        return Segment(steps=steps, program=self._programs[key], reads=tuple(inputs))

    def find_exact(
        self, eqn: JaxprEqn, around: tuple[JaxprEqn, ...], source: Source
    ) -> Source:
        """Returns an input of an equation, with the number of the source if it was rounded."""
        if not isinstance(source, Literal):
            return source
        exact = self._constants.exact(eqn, around, source)
        if exact is None:
            return source
        number = Rounded(source, exact)
        self.rounded.append(RoundedAt(eqn, around, number))
        return number


class _FlatProgram:
    """The equations of a jaxpr and of all that it calls, as steps.

    A call's equations join those of its caller, so that one segment may hold both.
    """

    def __init__(self, planner: Planner) -> None:
        self.steps: list[Step] = []
        self.consts: list[ConstSlot] = []
        self._planner = planner
        self._numbers = itertools.count()

    def new_slots(self, variables: Sequence[Any]) -> tuple[int, ...]:
        """Returns a slot for each variable."""
        return tuple(itertools.islice(self._numbers, len(variables)))

    def add(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[Source],
        needs: Needs,
        around: tuple[JaxprEqn, ...],
    ) -> tuple[Source, ...]:
        """Adds the equations of a jaxpr that are needed, and returns where its outputs are."""
        jaxpr = closed.jaxpr
        const_slots = self.new_slots(jaxpr.constvars)
        for slot, var, value in zip(
            const_slots, jaxpr.constvars, closed.consts, strict=True
        ):
            self.consts.append(ConstSlot(slot, var, value))
        variables = (*jaxpr.constvars, *jaxpr.invars)
        slots = (*const_slots, *inputs)
        sources: dict[Any, Source] = dict(zip(variables, slots, strict=True))

        equation_needs = self._planner.analysis.analyse(jaxpr, needs).equations
        for eqn, eqn_needs in zip(jaxpr.eqns, equation_needs, strict=True):
            if not unite(eqn, eqn_needs):
                continue
            reads = [_find_source(atom, sources) for atom in eqn.invars]
            called = open_equation(eqn)
            if isinstance(called, ClosedJaxpr):
                outputs = self.add(called, reads, eqn_needs, (*around, eqn))
            else:
                outputs = self._add_step(eqn, reads, eqn_needs, around)
            sources.update(zip(eqn.outvars, outputs, strict=True))
        return tuple(_find_source(atom, sources) for atom in jaxpr.outvars)

    def _add_step(
        self,
        eqn: JaxprEqn,
        reads: Sequence[Source],
        needs: Needs,
        around: tuple[JaxprEqn, ...],
    ) -> tuple[int, ...]:
        exact_reads = [
            self._planner.find_exact(eqn, around, source) for source in reads
        ]
        writes = self.new_slots(eqn.outvars)
        self.steps.append(
            Step(
                eqn=eqn,
                around=around,
                needs=needs,
                reads=tuple(exact_reads),
                writes=writes,
            )
        )
        return writes


def _find_source(atom: Any, sources: Mapping[Any, Source]) -> Source:
    if isinstance(atom, Literal):
        return atom
    return sources.get(atom)


def _make_local(step: Step, indices: Mapping[int, int]) -> LocalStep:
    """Returns a step of a program, which knows each slot by its index in the program."""
    reads = []
    for source in step.reads:
        if isinstance(source, int):
            reads.append(indices[source])
        else:
            reads.append(source)
    return LocalStep(step.eqn, tuple(reads))


def _slots_of(sources: Sequence[Source]) -> list[int]:
    return [source for source in sources if isinstance(source, int)]


def _may_share(eqn: JaxprEqn) -> bool:
    """Returns whether an equation may be compiled together with others."""
    name = eqn.primitive.name
    if name in _ALONE or "callback" in name or eqn.effects:
        return False
    return not any(map(is_ref, (*eqn.invars, *eqn.outvars)))


def _cut(steps: Sequence[Step]) -> list[tuple[Step, ...]]:
    """Cuts a list of steps into parts: segments, and steps of their own."""
    parts: list[list[Step]] = []
    size = 0  # of the results of the last part, in bytes
    for step in steps:
        step_size = _count_bytes(step.eqn)
        size += step_size
        if parts and size < _MOST_BYTES and _may_join(step, parts[-1]):
            parts[-1].append(step)
        else:
            parts.append([step])
            size = step_size
    return list(map(tuple, parts))


def _may_join(step: Step, part: Sequence[Step]) -> bool:
    if len(part) >= _MOST_STEPS or step.eqn.primitive.name in CONTRACTIONS:
        return False
    return _may_share(step.eqn) and _may_share(part[0].eqn)


def _count_bytes(eqn: JaxprEqn) -> int:
    """Returns the size of the results of an equation, as far as it is known."""
    total = 0
    for var in eqn.outvars:
        aval: Any = var.aval
        size = getattr(aval, "size", None)
        if isinstance(size, int):
            total += size * getattr(aval.dtype, "itemsize", 8)
    return total


def _find_last_parts(parts: Sequence[Sequence[Step]]) -> dict[int, int]:
    """Returns the index of the last part that needs a slot, because it writes or reads it."""
    last_parts = {}
    for index, part in enumerate(parts):
        for step in part:
            for slot in (*step.writes, *step.read_slots):
                last_parts[slot] = index
    return last_parts

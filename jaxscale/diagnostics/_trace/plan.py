"""A jaxpr as a list of steps, in which calls are opened and neighbours are compiled together.

Compiling each equation by itself takes 30 ms, far longer than to run it. A barrier after each keeps
XLA from rewriting two into one: each number is the one that the equation by itself would give.
Segments are cut before each matrix product, so that equal layers are cut alike, and share their
programs. Loops, conditions, effects and refs are steps of their own.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ... import _jax
from ..._jax import ClosedJaxpr, JaxprEqn, Literal, Op, is_ref, primitives_that
from .damage import is_product
from .evaluate import compute
from .needs import (
    HOLDERS,
    Analysis,
    Around,
    EquationKey,
    Needs,
    key_of,
    read_holder,
    unite,
)
from .places import Constants
from .program import (
    Program,
    Rounded,
    Source,
    Step,
    as_array,
    program_key,
    slots_of,
    zeros_of,
)

_MOST_STEPS = 32  # of a segment without a product
# of a segment's results, which are all kept until they have been looked at
_MOST_BYTES = 2**28

# What holds equations and is not a call: the interpreter opens some of it. A kernel fails only once
# it is compiled.
_ALONE = (HOLDERS - _jax.CALLS) | primitives_that(Op.KERNEL)


class Segment(NamedTuple):
    """Steps that run as one program."""

    steps: Sequence[Step]
    program: Program
    reads: Sequence[int]  # the slots of the program's inputs


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
      steps: its equations, in the order of execution.
      parts: the same as it is run: in segments, and steps of their own.
      outputs: where its outputs are in the end.
      forgotten: for each part, the slots that nothing reads after it.
    """

    closed: ClosedJaxpr
    consts: Sequence[ConstSlot]
    inputs: Sequence[int]
    steps: Sequence[Step]
    parts: Sequence[Segment | Step]
    outputs: Sequence[Source]
    forgotten: Sequence[set[int]]

    @property
    def has_refs(self) -> bool:
        """Whether a step or a constant is a ref, or takes one."""
        variables = [const.var for const in self.consts]
        for step in self.steps:
            variables += [*step.eqn.invars, *step.eqn.outvars]
        return any(map(is_ref, variables))

    def compute(
        self, values: dict[int, Any], is_wide: Callable[[EquationKey], bool]
    ) -> list[Any]:
        """Returns the outputs of a program without refs, in a function that is compiled.

        `values` are its inputs and constants, by their slots.
        """
        for step in self.steps:
            is_in_float32 = is_wide(key_of(step.eqn, step.around))
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
        return zeros_of(atom)
    return as_array(source, is_wide)


class Planner:
    """Makes plans, and remembers them and the programs of their segments."""

    def __init__(self, constants: Constants) -> None:
        self.analysis = Analysis()
        self.rounded: list[Rounded] = []  # the numbers that became 0 or inf
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
        # What goes in or comes out is kept until the end.
        used_later = {*inputs, *slots_of(outputs)}
        parts: list[Segment | Step] = []
        forgotten = []
        for steps in reversed(_cut(flat.steps)):
            used: set[int] = set()
            for step in steps:
                used.update(step.writes, step.read_slots)
            if _may_share(steps[0].eqn):
                parts.append(self._make_segment(steps, used_later))
            else:
                parts.append(steps[0])
            forgotten.append(used - used_later)
            used_later |= used
        parts.reverse()
        forgotten.reverse()
        return Plan(
            closed=closed,
            consts=flat.consts,
            inputs=inputs,
            steps=flat.steps,
            parts=parts,
            outputs=outputs,
            forgotten=forgotten,
        )

    def _make_segment(self, steps: Sequence[Step], later: Set[int]) -> Segment:
        """Returns steps as a segment; `later` has the slots that are used after it."""
        written: list[int] = []
        inputs: list[int] = []  # what its steps read that none of them wrote
        for step in steps:
            for slot in step.read_slots:
                if slot not in written and slot not in inputs:
                    inputs.append(slot)
            written += step.writes
        kept = frozenset(written).intersection(later)
        key = program_key(steps, inputs, kept)
        if key not in self._programs:
            self._programs[key] = Program(steps, inputs, kept)
        return Segment(steps, self._programs[key], inputs)

    def find_exact(self, eqn: JaxprEqn, around: Around, source: Source) -> Source:
        """Returns an input of an equation, with the number of the source if it was rounded."""
        if not isinstance(source, Literal):
            return source
        exact = self._constants.exact(eqn, around, source)
        if exact is None:
            return source
        number = Rounded(source, exact, eqn, around)
        self.rounded.append(number)
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
        around: Around,
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
            called = read_holder(eqn)
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
        around: Around,
    ) -> tuple[int, ...]:
        find_exact = functools.partial(self._planner.find_exact, eqn, around)
        step = Step(
            eqn=eqn,
            around=around,
            needs=needs,
            reads=tuple(map(find_exact, reads)),
            writes=self.new_slots(eqn.outvars),
        )
        self.steps.append(step)
        return step.writes


def _find_source(atom: Any, sources: Mapping[Any, Source]) -> Source:
    if isinstance(atom, Literal):
        return atom
    return sources.get(atom)


def _may_share(eqn: JaxprEqn) -> bool:
    """Returns whether an equation may be compiled together with others."""
    name = eqn.primitive.name
    if name in _ALONE or "callback" in name or eqn.effects:
        return False
    return not any(map(is_ref, (*eqn.invars, *eqn.outvars)))


def _cut(steps: Sequence[Step]) -> list[list[Step]]:
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
    return parts


def _may_join(step: Step, part: Sequence[Step]) -> bool:
    if len(part) >= _MOST_STEPS or is_product(step.eqn):
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

"""A jaxpr as a list of steps, in which calls are opened and neighbours are compiled together.

Compiling each equation by itself takes 30 ms, far longer than to run it. A barrier after each keeps
XLA from rewriting two into one: each number is the one that the equation by itself would give.
Segments are cut before each matrix product, so that equal layers are cut alike, and share their
programs. Loops, conditions, effects and refs are steps of their own.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from ..._jax import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, context, context_key, is_ref
from .jaxpr import Analysis, Needs, opened, union
from .numbers import CONTRACTIONS, IncomparableError, evaluate, evaluate_in_float32
from .places import Constants

_MOST_STEPS = 32  # of a segment without a product
_MOST_BYTES = 2**28  # of the results of a segment, which are all kept until it was looked at

_SHAKE = 2.0**-22  # a few times what float32 rounds by

# The interpreter opens these, or they do more than to compute, or fail only once they are compiled.
_ALONE = {"cond", "while", "scan", "shard_map", "pmap", "xla_pmap", "pallas_call"}


class Rounded(NamedTuple):
    """A number of the source that a narrow format rounded to 0 or inf."""

    literal: Literal  # what became of it
    exact: float


# An equation, what holds it, and a number among its inputs.
RoundedAt = tuple[JaxprEqn, tuple[JaxprEqn, ...], Rounded]

# The slot that a value is kept in, a number, or `None` for a value that nothing needs.
Read = int | Literal | Rounded | None


class Step(NamedTuple):
    """An equation that is not a call."""

    eqn: JaxprEqn
    around: tuple[JaxprEqn, ...]  # the calls that hold it, outermost first
    needs: Needs  # what each of its results is needed for
    reads: tuple[Read, ...]  # the slots of its inputs
    writes: tuple[int, ...]  # the slots of its outputs


class Segment(NamedTuple):
    """Steps that run as one program."""

    steps: tuple[Step, ...]
    program: "Program"
    reads: tuple[int, ...]  # the slots of its inputs


class Plan(NamedTuple):
    """What to run for a jaxpr."""

    closed: ClosedJaxpr
    consts: tuple[tuple[int, Any, Any], ...]  # the slots of its constants, with their variables
    inputs: tuple[int, ...]  # the slots of its inputs
    parts: tuple[Segment | Step, ...]  # what to run
    outputs: tuple[Read, ...]  # the slots of its outputs
    forgotten: tuple[tuple[int, ...], ...]  # the slots that nothing reads after each part


class Planner:
    """Makes plans, and remembers them and the programs of their segments."""

    def __init__(self, constants: Constants) -> None:
        self.analysis = Analysis()
        self.rounded: list[RoundedAt] = []  # the numbers that became 0 or inf, and where
        self._constants = constants
        self._plans: dict[tuple[int, Needs], Plan] = {}
        self._programs: dict[Any, Program] = {}

    def plan(self, closed: ClosedJaxpr, needs: Needs) -> Plan:
        """Returns what to run for a jaxpr whose results are needed for `needs`."""
        key = id(closed), needs  # the plan holds `closed`, so that the number stays its own
        if key not in self._plans:
            self._plans[key] = self._make_plan(closed, needs)
        return self._plans[key]

    def _make_plan(self, closed: ClosedJaxpr, needs: Needs) -> Plan:
        steps: list[Step] = []
        consts: list[tuple[int, Any, Any]] = []
        numbers = itertools.count()

        def new_slots(variables: Sequence[Any]) -> tuple[int, ...]:
            return tuple(itertools.islice(numbers, len(variables)))

        # A call's equations join those of its caller, so that one segment may hold both.
        def flatten(
            closed: ClosedJaxpr, inputs: Sequence[Read], needs: Needs, around: tuple[JaxprEqn, ...]
        ) -> tuple[Read, ...]:
            jaxpr: Jaxpr = closed.jaxpr
            own = new_slots(jaxpr.constvars)
            consts.extend(zip(own, jaxpr.constvars, closed.consts, strict=True))
            variables = (*jaxpr.constvars, *jaxpr.invars)
            slots: dict[Any, Read] = dict(zip(variables, (*own, *inputs), strict=True))

            def read(atom: Any) -> Read:
                return atom if isinstance(atom, Literal) else slots.get(atom)

            all_needs, _ = self.analysis.analyse(jaxpr, needs)
            for eqn, eqn_needs in zip(jaxpr.eqns, all_needs, strict=True):
                if not union(eqn, eqn_needs):
                    continue
                reads, held = tuple(map(read, eqn.invars)), opened(eqn)
                if isinstance(held, ClosedJaxpr):
                    outputs = flatten(held, reads, eqn_needs, (*around, eqn))
                else:
                    reads = tuple(self._exact(eqn, around, each) for each in reads)
                    outputs = new_slots(eqn.outvars)
                    steps.append(Step(eqn, around, eqn_needs, reads, outputs))
                slots.update(zip(eqn.outvars, outputs, strict=True))
            return tuple(map(read, jaxpr.outvars))

        inputs = new_slots(closed.jaxpr.invars)
        outputs = flatten(closed, inputs, needs, ())
        parts = _cut(steps)
        # The part that needs a slot last: at first the one that writes it, and then what reads it.
        last: dict[int, int] = {}
        for index, part in enumerate(parts):
            for step in part:
                slots = (*step.writes, *step.reads)
                last |= {slot: index for slot in slots if isinstance(slot, int)}
        last |= {slot: len(parts) for slot in (*inputs, *outputs) if isinstance(slot, int)}
        forgotten = [[] for _ in range(len(parts) + 1)]  # after the last part, nothing is
        for slot, index in last.items():
            forgotten[index].append(slot)
        made = tuple(
            self._segment(part, {slot for slot in last if last[slot] > index})
            if _may_share(part[0].eqn)
            else part[0]
            for index, part in enumerate(parts)
        )
        return Plan(closed, tuple(consts), inputs, made, outputs, tuple(map(tuple, forgotten[:-1])))

    def _exact(self, eqn: JaxprEqn, around: tuple[JaxprEqn, ...], read: Read) -> Read:
        """Returns an input of an equation, with the number of the source if it was rounded."""
        number = self._constants.exact(eqn, around, read) if isinstance(read, Literal) else None
        if not isinstance(read, Literal) or number is None:
            return read
        self.rounded.append((eqn, around, Rounded(read, number)))
        return self.rounded[-1][-1]

    def _segment(self, steps: tuple[Step, ...], later: set[int]) -> Segment:
        """Returns steps as a segment, given the values that are read after it."""
        made = [slot for step in steps for slot in step.writes]
        read = (slot for step in steps for slot in step.reads if isinstance(slot, int))
        outside = tuple(dict.fromkeys(slot for slot in read if slot not in made))  # each once
        local = {slot: i for i, slot in enumerate((*outside, *made))}
        inner = tuple(
            (step.eqn, tuple(local[r] if isinstance(r, int) else r for r in step.reads))
            for step in steps
        )
        kept = frozenset(local[slot] for slot in made if slot in later)
        program = self._programs.setdefault(_key(inner, kept), Program(inner, kept))
        return Segment(steps, program, outside)


def _may_share(eqn: JaxprEqn) -> bool:
    is_alone = eqn.primitive.name in _ALONE or "callback" in eqn.primitive.name
    return not (is_alone or eqn.effects or any(map(is_ref, (*eqn.invars, *eqn.outvars))))


def _cut(steps: Sequence[Step]) -> list[tuple[Step, ...]]:
    parts: list[list[Step]] = []
    size = 0
    for step in steps:
        size += (more := _bytes(step.eqn))
        joins = parts and _may_share(step.eqn) and _may_share(parts[-1][0].eqn)
        joins = joins and step.eqn.primitive.name not in CONTRACTIONS
        if joins and len(parts[-1]) < _MOST_STEPS and size < _MOST_BYTES:
            parts[-1].append(step)
        else:
            parts.append([step])
            size = more
    return [tuple(part) for part in parts]


def _bytes(eqn: JaxprEqn) -> int:
    avals: list[Any] = [var.aval for var in eqn.outvars]
    arrays = [aval for aval in avals if isinstance(getattr(aval, "size", None), int)]
    return sum(aval.size * getattr(aval.dtype, "itemsize", 8) for aval in arrays)


def _key(inner: Sequence[Any], kept: frozenset[int]) -> Any:
    """Returns what two segments have in common if one program serves both."""
    equations: list[Any] = []
    for eqn, reads in inner:
        params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
        numbers = tuple(read if isinstance(read, int) else _bits(read) for read in reads)
        avals = tuple(atom.aval for atom in eqn.invars)
        equations.append((eqn.primitive, params, numbers, avals, context_key(eqn)))
    key = tuple(equations), kept
    try:
        hash(key)
    except TypeError:  # a parameter may be a list: then the segment has a program of its own
        return object()
    return key


def _bits(number: Literal | Rounded) -> Any:
    if isinstance(number, Rounded):
        return number.exact, _bits(number.literal)
    value = np.asarray(number.val)
    return str(value.dtype), value.tobytes()


class Program:
    """Equations that are compiled together, in each way in which some of them are in float32."""

    def __init__(
        self, inner: Sequence[tuple[JaxprEqn, tuple[Any, ...]]], kept: frozenset[int]
    ) -> None:
        # Each equation, with the numbers of its inputs among those of the program and the outputs
        # before it; and the numbers of those that are read after the program.
        self._inner, self._kept = inner, kept
        self._compiled: dict[tuple[bool, ...], Callable[..., Any]] = {}

    def run(self, inputs: Sequence[Any], wide: tuple[bool, ...], is_shaken: bool) -> list[Any]:
        """Returns the outputs of all equations, given which are computed in float32.

        If all are, those that nothing reads are `None`. If they are shaken, each is multiplied by
        a number near 1: what changes much by that is nothing but the rounding of float32.
        """
        if wide not in self._compiled:
            self._compiled[wide] = compile_fast(lambda *args: self._outputs(wide, *args))
        # An argument, so that one program does both.
        return self._compiled[wide](inputs, np.float32(_SHAKE if is_shaken else 0))

    def _outputs(self, wide: tuple[bool, ...], inputs: Sequence[Any], shake: Any) -> list[Any]:
        values = list(inputs)
        signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), len(self._inner))
        for (eqn, reads), is_wide, sign in zip(self._inner, wide, signs, strict=True):
            # Numbers behind a barrier, or NumPy would compute with them while this is traced.
            numbers = (
                r if isinstance(r, int) else jnp.asarray(as_array(r, is_wide)) for r in reads
            )
            given = [values[n] if isinstance(n, int) else optimization_barrier(n) for n in numbers]
            made = compute(eqn, given, is_wide)
            if all(wide):  # nobody looks at each number, so XLA may fuse the equations
                factor = 1 + sign * shake
                values += [x * factor if x.dtype == np.float32 else x for x in made]
            else:
                values += optimization_barrier(made)
        unread = set(range(len(values))) - self._kept if all(wide) else ()
        return [None if i in unread else values[i] for i in range(len(inputs), len(values))]


def as_array(read: Literal | Rounded, is_wide: bool) -> Any:
    """Returns a number as an array, the exact one if it is used in float32."""
    if isinstance(read, Rounded):
        return np.float32(read.exact) if is_wide else as_array(read.literal, False)
    aval: Any = read.aval
    return np.asarray(read.val, aval.dtype)


def compute(eqn: JaxprEqn, inputs: Sequence[Any], is_wide: bool) -> list[Any]:
    """Returns the outputs of an equation, in float32 if that is asked for and possible."""
    with context(eqn):
        if is_wide:
            try:
                return list(evaluate_in_float32(eqn, inputs))
            except IncomparableError:  # such as a kernel for one dtype
                pass
        return list(evaluate(eqn, inputs))


def compile_fast(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a function, which runs a few times at most, compiled fast; `options` are XLA's."""
    # Not optimised, a CPU contracts no products and sums, as in operations that run by themselves.
    if jax.default_backend() == "cpu":
        options["xla_backend_optimization_level"] = 0
    return jax.jit(fun, compiler_options=options)

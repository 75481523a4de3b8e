"""A jaxpr run step by step, including the equations in its loops and conditions."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import ClosedJaxpr, JaxprEqn, Literal, Scan, While, context, is_ref
from .jaxpr import Needs, opened, results, union
from .plan import Planner, Read, Rounded, Segment, Step, as_array, compute


class Value(NamedTuple):
    """A value, whether it depends on the loss scale, and where its inf and NaN come from."""

    array: Any
    scaled: bool = False
    origins: frozenset[Any] = frozenset()
    maker: "EquationKey" = ()  # the equation that made it, or `()`


class Cell:
    """What a ref holds at the moment. All equations that take the ref share one cell."""

    def __init__(self, value: Value) -> None:
        self.value = value


class Inside(NamedTuple):
    """What a jaxpr runs inside of."""

    around: tuple[JaxprEqn, ...]  # the equations that hold it, outermost first
    iteration: tuple[int, ...]  # the index of each loop among them; of a scan, that of the slice


NOTHING = Inside((), ())


class Visit(NamedTuple):
    """One evaluation of an equation that holds no others."""

    eqn: JaxprEqn
    inputs: Sequence[Value]  # its input values. For a ref, the value that it held.
    outputs: Sequence[Any]  # its output arrays, followed by what its refs hold now
    around: tuple[JaxprEqn, ...]  # as in `Inside`
    iteration: tuple[int, ...]
    need: int  # what it is needed for, as bits


# An equation and those that hold it, by their numbers in memory. Keys of several runs may be
# compared while their `TracedBackward` lives, as it holds these equations.
EquationKey = tuple[int, ...]

IsWide = Callable[[EquationKey], bool]  # whether an equation runs in float32
Watch = Callable[[Visit], Sequence[frozenset[Any]]]  # where the inf and NaN of outputs come from

_NUMBERS = (Literal, Rounded)  # inputs that are no values
_UNUSED = Value(None)  # stands for a value that nothing needs: what computes it is not run


def key_of(eqn: JaxprEqn, around: tuple[JaxprEqn, ...]) -> EquationKey:
    """Returns what tells an equation from all others, and from itself in another call."""
    return tuple(map(id, (*around, eqn)))


class Interpreter:
    """Runs jaxprs, and shows each equation that holds no others to `watch`.

    Interpreters that share a planner share compiled programs. Segments of which all equations are
    computed in float32 are not shown. If these are shaken, each of their results is changed by as
    much as float32 rounds.
    """

    def __init__(self, planner: Planner, watch: Watch, is_wide: IsWide, is_shaken: bool) -> None:
        self._planner, self._watch, self._is_wide = planner, watch, is_wide
        self._is_shaken = is_shaken
        self._cells: dict[int, Cell] = {}  # of refs from outside: these are not changed

    def run(
        self, closed: ClosedJaxpr, inputs: Sequence[Any], needs: Needs, inside: Inside = NOTHING
    ) -> list[Value]:
        """Returns the outputs of a jaxpr, whose results are needed for `needs`, as bits."""
        plan = self._planner.plan(closed, needs)
        values: dict[int, Any] = dict(zip(plan.inputs, inputs, strict=True))
        for slot, var, const in plan.consts:
            if is_ref(var):
                values[slot] = self._cells.setdefault(id(const), Cell(Value(const[...])))
            else:
                values[slot] = Value(const)

        def read(slot: Read) -> Any:
            if isinstance(slot, int):
                return values[slot]
            return _UNUSED if slot is None else Value(as_array(slot, False))

        for part, forgotten in zip(plan.parts, plan.forgotten, strict=True):
            if isinstance(part, Segment):
                self._segment(part, values, read, inside)
            else:
                given = list(map(read, part.reads))
                with context(part.eqn):  # for what a loop holds
                    outputs = self._step(part, given, inside)
                values.update(zip(part.writes, outputs, strict=True))
            for slot in forgotten:
                values.pop(slot, None)
        return list(map(read, plan.outputs))

    def _segment(
        self, segment: Segment, values: dict[int, Any], read: Callable[[Read], Any], inside: Inside
    ) -> None:
        inputs, around = [values[slot].array for slot in segment.reads], inside.around
        wide = tuple(self._is_wide(key_of(s.eqn, (*around, *s.around))) for s in segment.steps)
        outputs = iter(segment.program.run(inputs, wide, self._is_shaken))
        for step in segment.steps:
            arrays = list(itertools.islice(outputs, len(step.writes)))
            if all(wide):
                made = list(map(Value, arrays))
            else:
                made = self._show(step, list(map(read, step.reads)), arrays, inside)
            values.update(zip(step.writes, made, strict=True))

    def _step(self, step: Step, inputs: list[Any], inside: Inside) -> Sequence[Value | Cell]:
        eqn, needs, around = step.eqn, step.needs, (*inside.around, *step.around)
        within = Inside((*around, eqn), inside.iteration)
        match opened(eqn):
            case Scan() as loop:
                return self._scan(inputs, loop, needs, within)
            case While() as loop:
                return self._while(inputs, loop, union(eqn, needs), within)
            case list() as branches:
                index, *inputs = inputs
                branch = branches[min(max(int(index.array), 0), len(branches) - 1)]
                return self.run(branch, inputs, needs, within)
        given = [each.value if isinstance(each, Cell) else each for each in inputs]
        is_wide, pairs = self._is_wide(key_of(eqn, around)), zip(step.reads, given, strict=True)
        arrays = [as_array(r, is_wide) if isinstance(r, _NUMBERS) else v.array for r, v in pairs]
        made = self._show(step, given, compute(eqn, arrays, is_wide), inside)
        cells = [each for each in inputs if isinstance(each, Cell)]
        for cell, value in zip(cells, made[len(eqn.outvars) :], strict=True):
            cell.value = value
        outputs = zip(eqn.outvars, made, strict=False)
        return [Cell(value) if is_ref(var) else value for var, value in outputs]

    def _show(
        self, step: Step, given: list[Value], arrays: Sequence[Any], inside: Inside
    ) -> list[Value]:
        around, need = (*inside.around, *step.around), union(step.eqn, step.needs)
        origins = self._watch(Visit(step.eqn, given, arrays, around, inside.iteration, need))
        scaled, maker = any(value.scaled for value in given), key_of(step.eqn, around)
        pairs = zip(arrays, origins, strict=True)
        return [Value(array, scaled, of, maker) for array, of in pairs]

    def _while(self, inputs: list[Any], loop: While, need: int, inside: Inside) -> list[Value]:
        tested, done = loop.test_consts, loop.body_consts
        carry, index = inputs[tested + done :], 0

        def call(closed: ClosedJaxpr, consts: list[Any]) -> list[Value]:
            needs = (need,) * len(results(closed.jaxpr))
            within = inside._replace(iteration=(*inside.iteration, index))
            return self.run(closed, [*consts, *carry], needs, within)

        while call(loop.test, inputs[:tested])[0].array:
            carry = call(loop.body, inputs[tested : tested + done])
            index += 1
        return carry

    def _scan(self, inputs: list[Any], loop: Scan, needs: Needs, inside: Inside) -> list[Value]:
        length, consts, size = loop.length, loop.consts, loop.carries
        needs = self._planner.analysis.scanned(loop, needs)
        carry, scanned = inputs[consts : consts + size], inputs[consts + size :]
        stacked: list[Any] = [None] * length
        for i in reversed(range(length)) if loop.reverse else range(length):
            slices = [_slice(each, i) for each in scanned]
            given = [*inputs[:consts], *carry, *slices]
            within = inside._replace(iteration=(*inside.iteration, i))
            outputs = self.run(loop.body, given, needs, within)
            carry, stacked[i] = outputs[:size], outputs[size:]
            for each, part in zip(scanned, slices, strict=True):
                if isinstance(each, Cell):
                    each.value = _with_slice(each.value, i, part.value)
        if not length:
            avals: list[Any] = [var.aval for var in inside.around[-1].outvars[size:]]
            return [*carry, *(Value(jax.lax.full(aval.shape, 0, aval.dtype)) for aval in avals)]
        return [*carry, *map(_stack, zip(*stacked, strict=True))]


def _is_extended(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _slice(value: Any, index: int) -> Any:
    if isinstance(value, Cell):
        return Cell(_slice(value.value, index))
    if value is _UNUSED:
        return value
    # NumPy slices what it can: JAX would compile a program for each shape.
    array = value.array if _is_extended(value.array) else np.asarray(value.array)
    return value._replace(array=jnp.asarray(array[index]))


def _with_slice(value: Value, index: int, part: Value) -> Value:
    return Value(
        jnp.asarray(value.array).at[index].set(part.array),
        value.scaled or part.scaled,
        value.origins | part.origins,
    )


def _stack(values: Sequence[Value]) -> Value:
    if values[0] is _UNUSED:
        return _UNUSED
    arrays = [value.array for value in values]
    return Value(
        jnp.stack(arrays) if _is_extended(arrays[0]) else jnp.asarray(np.stack(arrays)),
        any(value.scaled for value in values),
        frozenset().union(*(value.origins for value in values)),
        values[0].maker,
    )

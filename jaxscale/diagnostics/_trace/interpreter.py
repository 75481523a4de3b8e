"""A jaxpr run step by step, including the equations in its loops and conditions."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Op,
    Scan,
    While,
    context,
    is_ref,
    primitives_that,
)
from .damage import has_nonfinite
from .evaluate import compute
from .needs import (
    Around,
    EquationKey,
    Needs,
    key_of,
    read_holder,
    results,
    split,
    unite,
)
from .plan import Planner, Segment
from .program import Rounded, Source, Step, as_array, zeros_of

_RETURN_INPUTS = primitives_that(Op.RETURNS_INPUTS)

# The equations at which an inf or a NaN was made, or first used.
Origins = frozenset[EquationKey]


class Value(NamedTuple):
    """A value, whether it depends on the loss scale, and where its inf and NaN come from."""

    array: Any
    scaled: bool = False
    origins: Origins = frozenset()
    maker: EquationKey = ()  # the equation that made it, or `()`


class Cell:
    """What a ref holds at the moment. All equations that take the ref share one cell."""

    def __init__(self, value: Value) -> None:
        self.value = value


def _look_into(entry: Value | Cell) -> Value:
    """Returns a value, or the value that a cell holds now."""
    if isinstance(entry, Cell):
        return entry.value
    return entry


class Location(NamedTuple):
    """What a jaxpr runs inside of.

    Attributes:
      around: the equations that hold it, outermost first.
      iteration: the index of each loop among them: for a scan, the index of the slice.
    """

    around: Around
    iteration: tuple[int, ...]

    def in_iteration(self, index: int) -> "Location":
        """Returns this location in an iteration of the innermost loop."""
        return self._replace(iteration=(*self.iteration, index))

    def around_step(self, step: Step) -> Around:
        """Returns the equations that hold a step of a plan that runs here."""
        return (*self.around, *step.around)


TOP = Location((), ())  # of the whole program


class Visit(NamedTuple):
    """One evaluation of an equation that holds no others."""

    eqn: JaxprEqn
    inputs: Sequence[Value]  # its input values. For a ref, the value that it held.
    outputs: Sequence[Any]  # its output arrays, followed by what its refs hold now
    around: Around  # as in `Location`
    iteration: tuple[int, ...]
    need: int  # what it is needed for, as bits

    @property
    def arrays(self) -> list[Any]:
        """The arrays of its inputs."""
        return [value.array for value in self.inputs]

    @property
    def scaled(self) -> bool:
        """Whether it depends on the loss scale."""
        return any(value.scaled for value in self.inputs)


IsWide = Callable[[EquationKey], bool]  # whether an equation runs in float32
# where the inf and NaN of the outputs come from
Watch = Callable[[Visit], Sequence[Origins]]

# stands for a value that nothing needs: what computes it is not run
_UNUSED = Value(None)

# The values that are kept while a plan runs. A ref is kept as its cell.
_Slots = dict[int, Any]


class Interpreter:
    """Runs jaxprs, and shows each equation that holds no others to `watch`.

    Interpreters that share a planner share compiled programs. Segments of which all equations are
    computed in float32 are not shown. If these are shaken, each of their results is changed by as
    much as float32 rounds.
    """

    def __init__(
        self, planner: Planner, watch: Watch, is_wide: IsWide, is_shaken: bool
    ) -> None:
        self._planner = planner
        self._watch = watch
        self._is_wide = is_wide
        self._is_shaken = is_shaken
        self._cells: dict[int, Cell] = {}  # of refs from outside: these are not changed

    def interpret(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[Any],
        needs: Needs,
        location: Location = TOP,
    ) -> list[Any]:
        """Returns the outputs of a jaxpr, whose results are needed for `needs`, as bits."""
        plan = self._planner.plan(closed, needs)
        slots: _Slots = dict(zip(plan.inputs, inputs, strict=True))
        for slot, var, const in plan.consts:
            slots[slot] = self._open_const(var, const)
        for part, forgotten in zip(plan.parts, plan.forgotten, strict=True):
            if isinstance(part, Segment):
                self._run_segment(part, slots, location)
            else:
                entries = _read_all(part.reads, slots)
                with context(part.eqn):  # for what a loop holds
                    outputs = self._run_step(part, entries, location)
                slots.update(zip(part.writes, outputs, strict=True))
            for slot in forgotten:
                slots.pop(slot, None)
        return _read_all(plan.outputs, slots)

    def _open_const(self, var: Any, const: Any) -> Value | Cell:
        if is_ref(var):
            return self._cells.setdefault(id(const), Cell(Value(const[...])))
        return Value(const)

    def _run_segment(self, segment: Segment, slots: _Slots, location: Location) -> None:
        """Runs the program of a segment, and shows its equations one after the other."""
        entries = _read_all(segment.reads, slots)
        inputs = [value.array for value in entries]
        wide = tuple(self._is_step_wide(step, location) for step in segment.steps)
        outputs = segment.program.evaluate(inputs, wide, self._is_shaken)
        for step, arrays in zip(segment.steps, outputs, strict=True):
            if all(wide):
                values = _pass_on_origins(entries, arrays)
            else:
                step_inputs = _read_all(step.reads, slots)
                values = self._show(step, step_inputs, arrays, location)
            slots.update(zip(step.writes, values, strict=True))

    def _is_step_wide(self, step: Step, location: Location) -> bool:
        return self._is_wide(key_of(step.eqn, location.around_step(step)))

    def _run_step(
        self, step: Step, entries: list[Any], location: Location
    ) -> Sequence[Value | Cell]:
        """Runs an equation that is in no segment: it may be a loop or a `cond`."""
        around = (*location.around_step(step), step.eqn)
        inside = location._replace(around=around)
        match read_holder(step.eqn):
            case Scan() as loop:
                return self._run_scan(loop, entries, step.needs, inside)
            case While() as loop:
                return self._run_while(
                    loop, entries, unite(step.eqn, step.needs), inside
                )
            case list() as branches:
                number, *operands = entries
                index = max(int(number.array), 0)
                branch = branches[min(index, len(branches) - 1)]
                return self.interpret(branch, operands, step.needs, inside)
        return self._run_alone(step, entries, location)

    def _run_alone(
        self, step: Step, entries: list[Any], location: Location
    ) -> Sequence[Value | Cell]:
        """Runs an equation that holds no others by itself, and updates the refs that it takes."""
        eqn = step.eqn
        cells = [entry for entry in entries if isinstance(entry, Cell)]
        inputs = list(map(_look_into, entries))
        is_wide = self._is_step_wide(step, location)
        arrays = []
        for source, value in zip(step.reads, inputs, strict=True):
            array = value.array
            if isinstance(source, Rounded) and is_wide:
                array = np.float32(source.exact)
            arrays.append(array)
        values = self._show(step, inputs, compute(eqn, arrays, is_wide), location)

        num_outputs = len(eqn.outvars)
        for cell, value in zip(cells, values[num_outputs:], strict=True):
            cell.value = value
        outputs: list[Value | Cell] = []
        for var, value in zip(eqn.outvars, values[:num_outputs], strict=True):
            if is_ref(var):
                outputs.append(Cell(value))
            else:
                outputs.append(value)
        return outputs

    def _show(
        self, step: Step, inputs: list[Value], arrays: Sequence[Any], location: Location
    ) -> list[Value]:
        """Shows an equation to `watch`, and returns its results as values."""
        visit = Visit(
            eqn=step.eqn,
            inputs=inputs,
            outputs=arrays,
            around=location.around_step(step),
            iteration=location.iteration,
            need=unite(step.eqn, step.needs),
        )
        maker = key_of(visit.eqn, visit.around)
        are_scaled = [visit.scaled] * len(arrays)
        # Each output is one input. `jax.checkpoint` in its new form puts a barrier around what it
        # computes again and its cotangents.
        if step.eqn.primitive.name in _RETURN_INPUTS:
            are_scaled = [value.scaled for value in inputs]
        values = []
        for array, is_scaled, origins in zip(
            arrays, are_scaled, self._watch(visit), strict=True
        ):
            values.append(Value(array, is_scaled, origins, maker))
        return values

    def _run_while(
        self, loop: While, entries: list[Any], need: int, inside: Location
    ) -> list[Value]:
        test_consts, body_consts, carries = split(
            entries, loop.test_consts, loop.body_consts
        )
        test_needs = (need,) * len(results(loop.test.jaxpr))
        body_needs = (need,) * len(results(loop.body.jaxpr))
        for index in itertools.count():
            location = inside.in_iteration(index)
            test_inputs = [*test_consts, *carries]
            (is_on,) = self.interpret(loop.test, test_inputs, test_needs, location)
            if not is_on.array:
                break
            body_inputs = [*body_consts, *carries]
            carries = self.interpret(loop.body, body_inputs, body_needs, location)
        return list(carries)

    def _run_scan(
        self, loop: Scan, entries: list[Any], needs: Needs, inside: Location
    ) -> list[Value]:
        body_needs = self._planner.analysis.find_body_needs(loop, needs)
        consts, carries, scanned = split(entries, loop.consts, loop.carries)
        indices = list(range(loop.length))
        if loop.reverse:
            indices.reverse()
        rows = []  # what each iteration adds to the stacked outputs
        for index in indices:
            slices = [_slice(entry, index) for entry in scanned]
            inputs = [*consts, *carries, *slices]
            outputs = self.interpret(
                loop.body, inputs, body_needs, inside.in_iteration(index)
            )
            carries, row = split(outputs, loop.carries)
            rows.append(row)
            _write_slices(scanned, slices, index)
        if not rows:
            variables = inside.around[-1].outvars[loop.carries :]
            return [*carries, *map(_make_zeros, variables)]
        if loop.reverse:
            rows.reverse()
        return [*carries, *map(_stack, zip(*rows, strict=True))]


def _read_all(sources: Sequence[Source], slots: _Slots) -> list[Any]:
    return [_read(source, slots) for source in sources]


def _read(source: Source, slots: _Slots) -> Any:
    """Returns the value or the cell in a slot, or a number as a value."""
    if source is None:
        return _UNUSED
    if isinstance(source, int):
        return slots[source]
    return Value(as_array(source, False))


def unite_origins(values: Sequence[Value]) -> Origins:
    """Returns where the inf and NaN of several values come from."""
    return frozenset().union(*(value.origins for value in values))


def _pass_on_origins(inputs: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    """Returns results that are not shown, with the origins of inf and NaN in the inputs."""
    origins = unite_origins(inputs)
    values = []
    for array in arrays:
        is_bad = bool(origins) and array is not None and has_nonfinite(array)
        values.append(Value(array, origins=origins if is_bad else frozenset()))
    return values


def _is_extended(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _slice(entry: Any, index: int) -> Any:
    """Returns a slice of a value, or a new cell with a slice of what a ref holds."""
    if isinstance(entry, Cell):
        return Cell(_slice(entry.value, index))
    if entry is _UNUSED:
        return entry
    array = entry.array
    if not _is_extended(array):
        array = np.asarray(array)  # JAX would compile a program for each shape
    return entry._replace(array=jnp.asarray(array[index]))


def _write_slices(entries: Sequence[Any], slices: Sequence[Any], index: int) -> None:
    """Writes what the refs of an iteration hold back into the refs that they are slices of."""
    for entry, part in zip(entries, slices, strict=True):
        if not isinstance(entry, Cell):
            continue
        whole = entry.value
        array = jnp.asarray(whole.array)
        entry.value = Value(
            array=array.at[index].set(part.value.array),
            scaled=whole.scaled or part.value.scaled,
            origins=whole.origins | part.value.origins,
        )


def _stack(values: Sequence[Value]) -> Value:
    if values[0] is _UNUSED:
        return _UNUSED
    return Value(
        array=_stack_arrays([value.array for value in values]),
        scaled=any(value.scaled for value in values),
        origins=unite_origins(values),
        maker=values[0].maker,
    )


def _stack_arrays(arrays: Sequence[Any]) -> jax.Array:
    if _is_extended(arrays[0]):
        return jnp.stack(arrays)
    return jnp.asarray(np.stack(arrays))


def _make_zeros(var: Any) -> Value:
    return Value(zeros_of(var))

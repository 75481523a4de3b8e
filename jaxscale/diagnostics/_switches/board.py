"""A backward pass as one compiled program with a switch at each line of the model.

Every half-precision value is carried in float32. An equation whose result is half precision is
computed in float32, and its result is rounded where the switch of its place is on. So one program
evaluates any set of lines in half precision, at any loss scale: none of them is the truth, all of
them is the model. At lines to blame each kind of operation has a switch, and each limit of the
format. Refs are carried as the arrays that they hold.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _jax
from ..._jax import (
    Form,
    Held,
    Jaxpr,
    JaxprEqn,
    Literal,
    Op,
    context,
    is_half,
    is_ref,
    primitives_that,
)
from .backward import OF_GRADIENT, Backward, compile_fast
from .evaluate import (
    IncomparableError,
    dtype_of,
    dtype_of_atom,
    evaluate,
    widen,
    zeros_of,
)
from .needs import Around, EquationKey, Needs, key_of, results, split
from .operations import Operations, Place
from .places import Line

# What is only moved was rounded before.
_MOVES = primitives_that(Op.MOVE)
_END_REFS = primitives_that(Op.ENDS_REF)
# These add up in the format of their result. Rounding afterwards does not show what that loses.
_ADD_UP = {
    "scatter-add",
    "cumsum",
    "cumprod",
    "reduce_sum",
    "reduce_prod",
    "reduce_window_sum",
}
_SHAKE = 2.0**-22  # a few times what float32 rounds by
_WHOLE = 2.0**24  # float32 holds all whole numbers up to here
_GIVEN = primitives_that(Op.PASSES_ON) - primitives_that(Op.CASTS)  # not computed
_LARGEST_MASK = 1e4  # a number that stands for infinity, and that every format holds


class Limits(NamedTuple):
    """What holds at the places that have all of it as switches. Each is `bool[]`.

    Attributes:
      digits: numbers have as many digits as the format.
      smallest: numbers below those of the format are flushed.
      largest: numbers beyond those of the format are inf.
      bounded: numbers are bounded at 1e4.
      cleaned: inf and NaN are 0, where the switch of the place is on.
    """

    digits: Any = True
    smallest: Any = True
    largest: Any = True
    bounded: Any = False
    cleaned: Any = False


class Numbers(NamedTuple):
    """The numbers at a place, and what they are in float32, made of the same operands.

    Attributes:
      largest: the largest finite magnitude in float32.
      largest_input: the largest operand.
      least_input: the least one.
      total: how many there are.
      bad: how many are inf or NaN.
      bad_in_float32: how many are so in float32.
      nonzero: how many are not 0 in float32.
      flushed: how many of those are 0.
      below_one: how many are below 1 in magnitude in float32.
      saturated: how many of those are 1 or -1.
      given: how many operands are inf or NaN.
    """

    largest: float = 0.0
    largest_input: float = -math.inf
    least_input: float = math.inf
    total: int = 0
    bad: int = 0
    bad_in_float32: int = 0
    nonzero: int = 0
    flushed: int = 0
    below_one: int = 0
    saturated: int = 0
    given: int = 0


class _Note(NamedTuple):
    """What is noted at a place: numbers whose largest counts, and numbers that add up."""

    largest: Any
    sums: Any

    def add(self, other: "_Note") -> "_Note":
        largest = lax.max(self.largest, other.largest)
        return _Note(largest, lax.add(self.sums, other.sums))


_NUM_LARGEST = 3
_NUM_SUMS = len(Numbers._fields) - _NUM_LARGEST


class Outcome(NamedTuple):
    """What one evaluation gives, on the host.

    Attributes:
      outputs: the loss, the auxiliary output and the gradients, by their names.
      births: the places that make inf or NaN of finite numbers, in the order in which they run, if
        the program looks for them.
      numbers: what was measured, by the places.
    """

    outputs: dict[str, np.ndarray]
    births: tuple[Place, ...]
    numbers: dict[Place, Numbers]

    @property
    def loss(self) -> float:
        return float(np.mean(self.outputs["loss"], dtype=np.float64))

    @property
    def grads(self) -> dict[str, np.ndarray]:
        """The gradients, by the names of their leaves."""
        grads = {}
        for name, output in self.outputs.items():
            if name.startswith(OF_GRADIENT):
                grads[name.removeprefix(OF_GRADIENT)] = output
        return grads

    @property
    def has_finite_grads(self) -> bool:
        return are_finite(self.grads)

    @property
    def is_finite(self) -> bool:
        return not self.nonfinite

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """The names of the outputs that hold inf or NaN."""
        names = self.outputs.items()
        return tuple(name for name, leaf in names if not np.isfinite(leaf).all())


def are_finite(leaves: Mapping[str, np.ndarray]) -> bool:
    return all(np.isfinite(leaf).all() for leaf in leaves.values())


class Variant(NamedTuple):
    """What a program can do besides rounding, at the price of a compilation.

    Attributes:
      limited: the places at which each limit of the format has a switch of its own.
      measured: the places whose numbers are measured.
      notes_births: whether it notes where inf and NaN are made.
      dtype: another format in the place of half precision, if there is one.
      unrounded: the equations whose results are never rounded.
      is_shaken: whether numbers change as little as float32 rounds, in the place of what half
        precision rounds.
      native: the lines that compute in the format that they are written in, as the compiled model.
    """

    limited: frozenset[Place] = frozenset()
    measured: frozenset[Place] = frozenset()
    notes_births: bool = False
    dtype: str = ""
    unrounded: frozenset[EquationKey | Place] = frozenset()
    is_shaken: bool = False
    native: frozenset[Line] = frozenset()


ALL_LIMITS = Limits()
NO_LIMITS = Limits(digits=False, smallest=False, largest=False)
PLAIN = Variant()


class Switchboard:
    """The loss and its gradients as a function of the loss scale and of switches.

    Attributes:
      operations: what the program does.
      places: the places that have a switch, in the order in which they last run.
      lines: the lines among them at which something is rounded, in the order in which they
        last run: there a loss scale overflows first.
    """

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        self.operations = Operations(backward)
        self.places = self.operations.places
        self.rounding = [p for p in self.places if p in self.operations.dtypes]
        last: dict[Line, None] = {}
        for place in self.rounding:
            last.pop(place.line, None)
            last[place.line] = None
        self.lines = list(last)
        self._programs: dict[Variant, Callable[..., Any]] = {}

    def places_of(self, lines: Collection[Line]) -> list[Place]:
        return [place for place in self.rounding if place.line in lines]

    def evaluate(
        self,
        loss_scale: float,
        on: Collection[Place],
        limits: Limits = ALL_LIMITS,
        variant: Variant = PLAIN,
    ) -> Outcome:
        """Evaluates with these places in half precision, and all others in float32."""
        if variant not in self._programs:
            self._programs[variant] = self._compile(variant)
        chosen = {_switch_of(place, variant) for place in on}
        switches = np.array([s in chosen for s in self._list_switches(variant)], bool)
        closed = self._backward.closed
        consts = [
            const[...] if is_ref(var) else const
            for const, var in zip(closed.consts, closed.jaxpr.constvars, strict=True)
        ]
        with jax.debug_nans(False), jax.debug_infs(False):
            outputs, notes = jax.device_get(
                self._programs[variant](
                    consts, np.float32(loss_scale), switches, np.array(limits)
                )
            )
        named = dict(zip(self._backward.names, outputs, strict=True))
        births = []
        numbers = {}
        for place, note in zip(_list_noted(self.places, variant), notes, strict=True):
            if place in variant.measured:
                numbers[place] = Numbers(*note.largest, *note.sums)._replace(
                    least_input=-note.largest[2]
                )
            elif note.sums.any():
                births.append(place)
        return Outcome(named, tuple(births), numbers)

    def _list_switches(self, variant: Variant) -> list[Place | Line]:
        return list(dict.fromkeys(_switch_of(place, variant) for place in self.places))

    def _compile(self, variant: Variant) -> Callable[..., Any]:
        backward = self._backward

        def compute(consts: Any, loss_scale: Any, switches: Any, limits: Any) -> Any:
            on = {}
            for i, switch in enumerate(self._list_switches(variant)):
                on[switch] = lax.index_in_dim(switches, i, keepdims=False)
            run = _Run(self.operations, on, Limits(*limits), variant)
            inputs = [*consts, loss_scale]
            outputs = run.run(backward.closed.jaxpr, inputs, backward.needs, ())
            return outputs, run.list_notes()

        return compile_fast(compute, xla_allow_excess_precision=False)


def _switch_of(place: Place, variant: Variant) -> Place | Line:
    """Returns what has a switch of its own: a place whose limits have, and else a whole line."""
    if place in variant.limited:
        return place
    return place.line


def _list_noted(places: Collection[Place], variant: Variant) -> list[Place]:
    """Returns the places at which a program notes something."""
    if variant.notes_births:
        return list(places)
    return [place for place in places if place in variant.measured]


class _Run:
    """One way through the program, while it is traced."""

    def __init__(
        self,
        operations: Operations,
        on: dict[Place | Line, Any],
        limits: Limits,
        variant: Variant,
    ) -> None:
        self._operations = operations
        self._on = on
        self._limits = limits
        self._variant = variant
        self._noted = _list_noted(operations.places, variant)
        self._notes: dict[Place, _Note] = {}
        self._signs = np.random.default_rng(0)

    def list_notes(self) -> list[_Note]:
        """Returns what was noted at each place where something may be."""
        return [self._notes.get(place, self._blank(place)) for place in self._noted]

    def _blank(self, place: Place) -> _Note:
        if place in self._variant.measured:
            largest = np.full(_NUM_LARGEST, -np.inf, np.float32)
            return _Note(jnp.asarray(largest), jnp.zeros(_NUM_SUMS))
        return _Note(jnp.zeros(0), jnp.zeros(1))

    def run(
        self, jaxpr: Jaxpr, inputs: Sequence[Any], needs: Needs, around: Around
    ) -> list[Any]:
        """Returns the results of a program, with half precision carried in float32."""
        variables = [*jaxpr.constvars, *jaxpr.invars]
        env = dict(zip(variables, map(widen, inputs), strict=True))
        for eqn, eqn_needs in self._operations.needed(jaxpr, needs):
            outputs = self._evaluate(eqn, eqn_needs, env, around)
            env.update(zip(results(eqn), outputs, strict=True))
        return [_read_result(atom, env) for atom in results(jaxpr)]

    def _evaluate(
        self, eqn: JaxprEqn, needs: Needs, env: dict[Any, Any], around: Around
    ) -> list[Any]:
        place = self._operations.place_of(eqn, needs, around)
        rounding = _Rounding(self, place, key_of(eqn, around))
        inputs = [
            self._read(eqn, position, env, rounding, around)
            for position in range(len(eqn.invars))
        ]
        opened = self._operations.open(eqn, needs)
        if opened:
            return self._enter(eqn, opened, inputs, around)
        with context(eqn):
            outputs = self._compute(eqn, inputs, rounding)
        if place in self._variant.limited:
            outputs = [rounding.clean(x) for x in outputs]
        if self._variant.notes_births:
            made = _makes_bad(inputs, outputs)
            count = jnp.asarray(made, jnp.float32)[None]
            self.note(place, _Note(jnp.zeros(0), count))
        return outputs

    def note(self, place: Place, note: _Note) -> None:
        if place in self._notes:
            note = note.add(self._notes[place])
        self._notes[place] = note

    def _read(
        self,
        eqn: JaxprEqn,
        position: int,
        env: dict[Any, Any],
        rounding: "_Rounding",
        around: Around,
    ) -> Any:
        atom = eqn.invars[position]
        if not isinstance(atom, Literal):
            if atom not in env:  # nothing needs it
                return widen(zeros_of(atom))
            return env[atom]
        if not is_half(dtype_of_atom(atom)):
            return atom.val
        exact = self._operations.exact(eqn, around, position)
        if exact is None:
            return widen(np.asarray(atom.val, dtype_of_atom(atom)))
        # JAX rounded the number before it traced the equation.
        return rounding.round(jnp.float32(exact), dtype_of_atom(atom))

    def _compute(
        self, eqn: JaxprEqn, inputs: Sequence[Any], rounding: "_Rounding"
    ) -> list[Any]:
        """Returns the results of an equation that holds no others, rounded where it is on."""
        # A ref is carried as what it holds.
        if any(map(is_ref, eqn.outvars)) or eqn.primitive.name in _END_REFS:
            return [inputs[0]] * len(results(eqn))
        has_half = _has_half(results(eqn))
        if rounding.place.line in self._variant.native:
            return list(map(widen, evaluate(eqn, inputs)))
        if not has_half and not _has_half(eqn.invars):
            outputs = evaluate(eqn, inputs)
            rounding.measure(inputs, outputs, outputs)
            return outputs
        try:
            exact = evaluate(eqn, inputs, np.float32)
        except IncomparableError:  # such as a kernel for one dtype
            return list(map(widen, evaluate(eqn, inputs)))
        if eqn.primitive.name in _MOVES:
            return exact
        outputs = exact
        if eqn.primitive.name in _ADD_UP and has_half:
            outputs = self._choose_sums(eqn, inputs, exact, rounding)
        rounded = []
        for var, x in zip(results(eqn), outputs, strict=True):
            if is_half(dtype_of_atom(var)):
                x = rounding.round(x, dtype_of_atom(var))
            rounded.append(x)
        rounding.measure(inputs, exact, rounded)
        return rounded

    def _choose_sums(
        self,
        eqn: JaxprEqn,
        inputs: Sequence[Any],
        exact: Sequence[Any],
        rounding: "_Rounding",
    ) -> list[Any]:
        """Returns sums that were added up in the format of their result, where it is on."""
        summed = evaluate(eqn, inputs, self._variant.dtype or None)
        return [
            rounding.choose(widen(narrow), wide)
            for narrow, wide in zip(summed, exact, strict=True)
        ]

    # Programs within equations.

    def _enter(
        self,
        eqn: JaxprEqn,
        opened: Sequence[tuple[Held, Needs]],
        inputs: Sequence[Any],
        around: Around,
    ) -> list[Any]:
        around = (*around, eqn)

        def run(number: int, *args: Any) -> list[Any]:
            held, inner = opened[number]
            program = held.program
            return self.run(program.jaxpr, [*program.consts, *args], inner, around)

        match _jax.form_of(eqn):
            case Form.SCAN:
                return self._scan(eqn, inputs, functools.partial(run, 0))
            case Form.WHILE:
                return self._while(eqn, inputs, run)
            case Form.BRANCHES:
                branches = [functools.partial(run, i) for i in range(len(opened))]
                return self._switch(branches, inputs)
            case Form.SHARD_MAP:
                return self._map(eqn, inputs, functools.partial(run, 0))
        return run(0, *inputs)

    def _apart(
        self, run: Callable[..., Any], *args: Any
    ) -> tuple[list[Any], list[_Note]]:
        """Runs what is traced by itself, and returns what was noted as well."""
        outside = self._notes
        self._notes = {}
        outputs = run(*args)
        notes = self.list_notes()
        self._notes = outside
        return outputs, notes

    def _note_all(self, notes: Sequence[_Note]) -> None:
        for place, note in zip(self._noted, notes, strict=True):
            self.note(place, _Note(*note))

    def _scan(
        self, eqn: JaxprEqn, inputs: Sequence[Any], body: Callable[..., list[Any]]
    ) -> list[Any]:
        loop = _jax.scan(eqn)
        variables = loop.body.jaxpr.invars
        is_held = [is_ref(var) for var in variables]
        consts, carries, slices = split(list(inputs), loop.consts, loop.carries)
        held_consts = is_held[: loop.consts]
        refs = [x for x, held in zip(consts, held_consts, strict=True) if held]

        def step(state: Any, sliced: Any) -> Any:
            carries, refs, notes = state
            now = iter(refs)
            taken = [
                next(now) if held else x
                for x, held in zip(consts, held_consts, strict=True)
            ]
            outputs, more = self._apart(body, *taken, *carries, *sliced)
            plain, written = outputs[: len(eqn.outvars)], outputs[len(eqn.outvars) :]
            refs, of_slices = written[: len(refs)], written[len(refs) :]
            state = plain[: loop.carries], refs, _add_all(notes, more)
            return state, (plain[loop.carries :], of_slices)

        state = list(map(jnp.asarray, carries)), refs, self._no_notes()
        (carried, refs, notes), (stacked, of_slices) = lax.scan(
            step, state, list(slices), length=loop.length, reverse=loop.reverse
        )
        self._note_all(notes)
        return [*carried, *stacked, *refs, *of_slices]

    def _no_notes(self) -> list[_Note]:
        return list(map(self._blank, self._noted))

    def _while(
        self, eqn: JaxprEqn, inputs: Sequence[Any], run: Callable[..., list[Any]]
    ) -> list[Any]:
        loop = _jax.while_loop(eqn)
        names = [name for name in eqn.params if name in ("cond_jaxpr", "body_jaxpr")]
        test_number = names.index("cond_jaxpr")
        tested, consts, carries = split(
            list(inputs), loop.test_consts, loop.body_consts
        )

        def test(state: Any) -> Any:
            outputs, _ = self._apart(run, test_number, *tested, *state[0])
            return outputs[0]

        def body(state: Any) -> Any:
            carries, notes = state
            outputs, more = self._apart(run, 1 - test_number, *consts, *carries)
            return outputs[: len(carries)], _add_all(notes, more)

        state = list(map(jnp.asarray, carries)), self._no_notes()
        carried, notes = lax.while_loop(test, body, state)
        self._note_all(notes)
        return list(carried)

    def _switch(
        self, branches: Sequence[Callable[..., list[Any]]], inputs: Sequence[Any]
    ) -> list[Any]:
        index, *operands = inputs
        apart = [functools.partial(self._apart, branch) for branch in branches]
        outputs, notes = lax.switch(index, apart, *operands)
        self._note_all(notes)
        return list(outputs)

    def _map(
        self, eqn: JaxprEqn, inputs: Sequence[Any], run: Callable[..., list[Any]]
    ) -> list[Any]:
        mapped = _jax.mapped(eqn)
        names = list(self._on)
        switches = jnp.stack(list(self._on.values()))
        outside = self._on, self._limits

        def body(switches: Any, limits: Any, *args: Any) -> tuple[Any, ...]:
            self._on = {name: switches[i] for i, name in enumerate(names)}
            self._limits = Limits(*limits)
            outputs, _ = self._apart(run, *args)
            self._on, self._limits = outside
            return tuple(outputs)

        specs = (jax.sharding.PartitionSpec(),) * 2 + tuple(mapped.options["in_specs"])
        limits = jnp.stack(list(map(jnp.asarray, self._limits)))
        try:
            return list(mapped.map(body, in_specs=specs)(switches, limits, *inputs))
        finally:
            self._on, self._limits = outside

    # For `_Rounding`.

    def shake(self, x: Any, place: Place) -> Any:
        """Returns numbers changed by little, each by itself, unless they were only passed on."""
        if place.primitive in _GIVEN:
            return x
        # A sign for each element: one for all would cancel in a quotient, as in a softmax.
        signs = np.float32(_SHAKE)
        for axis, size in enumerate(np.shape(x)):
            along = self._signs.choice(np.array([-1, 1], np.float32), size)
            signs = signs * lax.broadcast_in_dim(along, np.shape(x), [axis])
        # float32 does not round whole numbers, such as positions.
        is_exact = (lax.abs(x) < _WHOLE) & (lax.floor(x) == x)
        shaken = lax.select(is_exact, x, x * (1 + signs))
        # XLA would take long to fuse so many operations into one.
        return lax.optimization_barrier(shaken)

    def is_on(self, place: Place) -> Any:
        return self._on[_switch_of(place, self._variant)]

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def variant(self) -> Variant:
        return self._variant


class _Rounding:
    """How the results of one equation are rounded."""

    def __init__(self, run: _Run, place: Place, key: EquationKey) -> None:
        variant = run.variant
        self._run = run
        self.place = place
        self._dtype = variant.dtype
        self._is_limited = place in variant.limited
        self._is_measured = place in variant.measured
        self._is_exact = bool({key, place} & variant.unrounded)
        self._is_shaken = variant.is_shaken

    def round(self, x: Any, dtype: Any) -> Any:
        """Returns float32 as it is in another format, where that is on."""
        if self._is_exact:
            return x
        if self._is_shaken:
            return self._run.shake(x, self.place)
        dtype = np.dtype(self._dtype or dtype)
        if self._is_limited:
            return _select(self._run.is_on(self.place), self._limit(x, dtype), x)
        return _select(self._run.is_on(self.place), _round_trip(x, dtype), x)

    def choose(self, narrow: Any, wide: Any) -> Any:
        """Returns what was computed in the format itself, where that is on."""
        if self._is_exact or self._is_shaken:
            return wide
        is_on = self._run.is_on(self.place)
        if self._is_limited:
            limits = self._run.limits
            is_on = is_on & limits.digits & (limits.largest | jnp.isfinite(narrow))
        return _select(is_on, narrow, wide)

    def _limit(self, x: Any, dtype: Any) -> Any:
        """Returns float32 within those limits of a format that are on."""
        info = jnp.finfo(dtype)
        limits = self._run.limits
        bound = np.float32(_LARGEST_MASK)
        x = _select(limits.bounded, lax.clamp(-bound, x, bound), x)
        rounded = _round_trip(x, dtype)
        digits = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
        limited = _select(limits.digits, digits, x)
        is_tiny = lax.lt(lax.abs(x), np.float32(info.tiny))
        tiny = lax.select(is_tiny, rounded, limited)
        limited = _select(limits.smallest, tiny, limited)
        is_huge = lax.bitwise_not(lax.is_finite(rounded))  # NaN in some formats
        return _select(limits.largest, lax.select(is_huge, rounded, limited), limited)

    def clean(self, x: Any) -> Any:
        """Returns an array with 0 for inf and NaN, where that is on."""
        if not jnp.issubdtype(dtype_of(x), jnp.floating):
            return x
        is_on = lax.bitwise_and(self._run.is_on(self.place), self._run.limits.cleaned)
        return _select(is_on, jnp.where(jnp.isfinite(x), x, 0), x)

    def measure(
        self, inputs: Sequence[Any], exact: Sequence[Any], rounded: Sequence[Any]
    ) -> None:
        """Notes what became of the numbers."""
        if not self._is_measured:
            return
        operands = list(filter(_is_floating, map(jnp.asarray, inputs)))
        for narrow, wide in zip(rounded, exact, strict=True):
            if _is_floating(wide) and wide.size:
                self._run.note(self.place, _count(operands, wide, narrow))


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(dtype_of(x), jnp.floating))


def _count(operands: Sequence[Any], wide: Any, narrow: Any) -> _Note:
    magnitude = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0)
    largest_input = -jnp.inf
    least_input = jnp.inf
    num_given = 0
    for operand in operands:
        if not operand.size:
            continue
        is_finite = jnp.isfinite(operand)
        highest = jnp.max(jnp.where(is_finite, operand, -jnp.inf))
        lowest = jnp.min(jnp.where(is_finite, operand, jnp.inf))
        largest_input = jnp.maximum(largest_input, highest.astype(jnp.float32))
        least_input = jnp.minimum(least_input, lowest.astype(jnp.float32))
        num_given += jnp.sum(~is_finite)
    is_below_one = (magnitude < 1) & (magnitude > 0)
    counts = [
        wide.size,
        jnp.sum(~jnp.isfinite(narrow)),
        jnp.sum(~jnp.isfinite(wide)),
        jnp.sum(magnitude > 0),
        jnp.sum((narrow == 0) & (magnitude > 0)),
        jnp.sum(is_below_one),
        jnp.sum(is_below_one & (jnp.abs(narrow) == 1)),
        num_given,
    ]
    largest = [jnp.max(magnitude), largest_input, -least_input]
    return _Note(
        jnp.stack([jnp.asarray(x, jnp.float32) for x in largest]),
        jnp.stack([jnp.asarray(x, jnp.float32) for x in counts]),
    )


def _round_trip(x: Any, dtype: Any) -> Any:
    return lax.convert_element_type(lax.convert_element_type(x, dtype), jnp.float32)


def _add_all(notes: Sequence[_Note], more: Sequence[_Note]) -> list[_Note]:
    return [one.add(other) for one, other in zip(notes, more, strict=True)]


def _read_result(atom: Any, env: dict[Any, Any]) -> Any:
    if isinstance(atom, Literal):
        return widen(np.asarray(atom.val, dtype_of_atom(atom)))
    if atom not in env:
        return widen(zeros_of(atom))
    return env[atom]


def _has_half(atoms: Sequence[Any]) -> bool:
    return any(is_half(dtype_of_atom(atom)) for atom in atoms)


def _select(on: Any, chosen: Any, other: Any) -> Any:
    if not jnp.issubdtype(dtype_of(other), jnp.floating):
        return other
    return lax.select_n(on, jnp.asarray(other), jnp.asarray(chosen))


def _makes_bad(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Returns whether inf or NaN is made of finite numbers, or NaN of infinities, as `bool[]`."""
    # Of `lax`: each function of `jax.numpy` would be a call of its own, and be traced as such.
    had_bad, had_nan = _find_bad(inputs)
    has_bad, has_nan = _find_bad(outputs)
    makes_bad = lax.bitwise_and(has_bad, lax.bitwise_not(had_bad))
    makes_nan = lax.bitwise_and(has_nan, lax.bitwise_not(had_nan))
    return lax.bitwise_or(makes_bad, makes_nan)


def _find_bad(values: Sequence[Any]) -> tuple[Any, Any]:
    """Returns whether there is inf or NaN, and whether there is NaN."""
    is_bad = np.zeros((), bool)
    is_nan = np.zeros((), bool)
    for value in values:
        if not hasattr(value, "dtype") or not np.size(value) or not _is_floating(value):
            continue
        value = jnp.asarray(value)
        largest = lax.reduce_max(lax.abs(value), range(value.ndim))
        is_finite = lax.lt(largest, np.asarray(np.inf, value.dtype))
        is_bad = lax.bitwise_or(is_bad, lax.bitwise_not(is_finite))
        is_nan = lax.bitwise_or(is_nan, lax.ne(largest, largest))
    return is_bad, is_nan

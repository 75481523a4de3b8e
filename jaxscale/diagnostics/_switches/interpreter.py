"""One way through a program: its equations in turn, with half precision carried in float32.

Refs are carried as the arrays that they hold.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import _jaxprs
from ..._jaxprs import (
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
from .evaluate import IncomparableError, dtype_of_atom, evaluate, widen, zeros_of
from .needs import Around, Needs, key_of, results, split
from .notes import NUM_LARGEST, NUM_SUMS, Note, add_all, makes_bad
from .operations import Operations, Place
from .places import Line
from .rounding import Rounding
from .switches import Limits, Variant, list_noted, switch_of

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


class Run:
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
        self._noted = list_noted(operations.places, variant)
        self._notes: dict[Place, Note] = {}
        self._signs = np.random.default_rng(0)

    def list_notes(self) -> list[Note]:
        """Returns what was noted at each place where something may be."""
        return [self._notes.get(place, self._blank(place)) for place in self._noted]

    def _blank(self, place: Place) -> Note:
        if place in self._variant.measured:
            largest = np.full(NUM_LARGEST, -np.inf, np.float32)
            return Note(jnp.asarray(largest), jnp.zeros(NUM_SUMS))
        return Note(jnp.zeros(0), jnp.zeros(1))

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
        rounding = Rounding(self, place, key_of(eqn, around))
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
            made = makes_bad(inputs, outputs)
            count = jnp.asarray(made, jnp.float32)[None]
            self.note(place, Note(jnp.zeros(0), count))
        return outputs

    def note(self, place: Place, note: Note) -> None:
        if place in self._notes:
            note = note.add(self._notes[place])
        self._notes[place] = note

    def _read(
        self,
        eqn: JaxprEqn,
        position: int,
        env: dict[Any, Any],
        rounding: Rounding,
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
        self, eqn: JaxprEqn, inputs: Sequence[Any], rounding: Rounding
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
        rounding: Rounding,
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

        match _jaxprs.form_of(eqn):
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
    ) -> tuple[list[Any], list[Note]]:
        """Runs what is traced by itself, and returns what was noted as well."""
        outside = self._notes
        self._notes = {}
        outputs = run(*args)
        notes = self.list_notes()
        self._notes = outside
        return outputs, notes

    def _note_all(self, notes: Sequence[Note]) -> None:
        for place, note in zip(self._noted, notes, strict=True):
            self.note(place, Note(*note))

    def _scan(
        self, eqn: JaxprEqn, inputs: Sequence[Any], body: Callable[..., list[Any]]
    ) -> list[Any]:
        loop = _jaxprs.scan(eqn)
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
            state = plain[: loop.carries], refs, add_all(notes, more)
            return state, (plain[loop.carries :], of_slices)

        state = list(map(jnp.asarray, carries)), refs, self._no_notes()
        (carried, refs, notes), (stacked, of_slices) = lax.scan(
            step, state, list(slices), length=loop.length, reverse=loop.reverse
        )
        self._note_all(notes)
        return [*carried, *stacked, *refs, *of_slices]

    def _no_notes(self) -> list[Note]:
        return list(map(self._blank, self._noted))

    def _while(
        self, eqn: JaxprEqn, inputs: Sequence[Any], run: Callable[..., list[Any]]
    ) -> list[Any]:
        loop = _jaxprs.while_loop(eqn)
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
            return outputs[: len(carries)], add_all(notes, more)

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
        mapped = _jaxprs.mapped(eqn)
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

    # For `Rounding`.

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
        return self._on[switch_of(place, self._variant)]

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def variant(self) -> Variant:
        return self._variant


def _read_result(atom: Any, env: dict[Any, Any]) -> Any:
    if isinstance(atom, Literal):
        return widen(np.asarray(atom.val, dtype_of_atom(atom)))
    if atom not in env:
        return widen(zeros_of(atom))
    return env[atom]


def _has_half(atoms: Sequence[Any]) -> bool:
    return any(is_half(dtype_of_atom(atom)) for atom in atoms)

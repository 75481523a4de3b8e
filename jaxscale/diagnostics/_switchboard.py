"""A backward pass as one compiled program with a switch at each line of the model.

Every half-precision value is carried in float32. An equation whose result is half precision is
computed in float32, and its result is rounded where the switch of its line is on. So one program
evaluates any set of lines in half precision, at any loss scale: none of them is the truth, all of
them is the model. Refs are carried as the arrays that they hold.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _jax
from .._jax import (
    ClosedJaxpr,
    Form,
    Held,
    Jaxpr,
    JaxprEqn,
    Literal,
    Op,
    context,
    is_half,
    is_ref,
    open_equation,
    primitives_that,
)
from ._trace.evaluate import (
    IncomparableError,
    dtype_of,
    evaluate,
    evaluate_in_float32,
)
from ._trace.needs import (
    BACKWARD,
    FORWARD,
    Analysis,
    Around,
    Needs,
    results,
    split,
    unite,
)
from ._trace.places import Constants, Line, find_line
from ._trace.program import compile_fast, zeros_of

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


class Place(NamedTuple):
    """A line of the model in one of the passes: what a switch belongs to."""

    line: Line
    is_backward: bool


class Limits(NamedTuple):
    """Which limits of the format hold where a switch is on. Each is `bool[]`."""

    digits: Any = True
    smallest: Any = True
    largest: Any = True


class Outcome(NamedTuple):
    """What one evaluation gives, on the host.

    Attributes:
      loss: the loss.
      grads: the gradients, by their names.
      births: the places that make inf or NaN of finite numbers, in the order in which they run, if
        the program looks for them.
    """

    loss: float
    grads: dict[str, np.ndarray]
    births: tuple[Place, ...]

    @property
    def has_finite_grads(self) -> bool:
        return all(np.isfinite(leaf).all() for leaf in self.grads.values())

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and self.has_finite_grads


class Variant(NamedTuple):
    """What a program can do besides rounding, at the price of a longer compilation.

    Attributes:
      limited: the lines at which each limit of the format has a switch of its own.
      notes_births: whether it notes where inf and NaN are made.
      dtype: another format in the place of half precision, if there is one.
    """

    limited: frozenset[Line] = frozenset()
    notes_births: bool = False
    dtype: str = ""


ALL_LIMITS = Limits()
PLAIN = Variant()


class Switchboard:
    """The loss and its gradients as a function of the loss scale and of switches.

    Attributes:
      places: the places that have a switch, in the order in which they last run.
      lines: the lines among them at which something is rounded.
    """

    def __init__(
        self, closed: ClosedJaxpr, names: Sequence[str], constants: Constants
    ) -> None:
        self._closed = closed
        self._names = names
        self._needs = tuple(map(_find_need, names))
        self.opener = _Opener(constants)
        self.opener.look_at(closed.jaxpr, self._needs, ())
        self.places = list(self.opener.places)
        self.lines = list(
            dict.fromkeys(p.line for p in self.places if p in self.opener.rounding)
        )
        self._programs: dict[Variant, Callable[..., Any]] = {}

    def evaluate(
        self,
        loss_scale: float,
        lines: Sequence[Line] | set[Line],
        limits: Limits = ALL_LIMITS,
        variant: Variant = PLAIN,
        is_shaken: bool = False,
    ) -> Outcome:
        """Evaluates with these lines in half precision, and all others in float32."""
        if variant not in self._programs:
            self._programs[variant] = self._compile(variant)
        chosen = set(lines)
        switches = np.array([place.line in chosen for place in self.places])
        consts = self._closed.consts
        if is_shaken:
            consts = _shake(consts)
        with jax.debug_nans(False), jax.debug_infs(False):
            outputs, births = jax.device_get(
                self._programs[variant](
                    consts, np.float32(loss_scale), switches, np.array(limits)
                )
            )
        values = dict(zip(self._names, outputs, strict=True))
        grads = {}
        for name, value in values.items():
            if name.startswith("grads"):
                grads[name] = np.asarray(value)
        born = [self.places[i] for i in np.flatnonzero(births)]
        return Outcome(float(np.mean(values["loss"])), grads, tuple(born))

    def _compile(self, variant: Variant) -> Callable[..., Any]:
        def compute(consts: Any, loss_scale: Any, switches: Any, limits: Any) -> Any:
            on = {}
            for i, place in enumerate(self.places):
                on[place] = lax.index_in_dim(switches, i, keepdims=False)
            run = _Run(self.opener, on, Limits(*limits), variant)
            outputs = run.run(
                self._closed.jaxpr, [*consts, loss_scale], self._needs, ()
            )
            return outputs, run.births_of(self.places)

        return compile_fast(compute, xla_allow_excess_precision=False)


def _find_need(name: str) -> int:
    if name.startswith("grads"):
        return BACKWARD
    return FORWARD


def _shake(consts: Sequence[Any]) -> list[Any]:
    """Returns arrays with float32 changed by as much as float32 rounds."""
    generator = np.random.default_rng(0)
    shaken = []
    for const in consts:
        if dtype_of(const) == np.float32:
            signs = generator.choice(np.array([-1, 1], np.float32), np.shape(const))
            const = const * (1 + signs * np.float32(_SHAKE))
        shaken.append(const)
    return shaken


class _Opener:
    """Finds the places of a program, and says what its equations hold and are needed for."""

    def __init__(self, constants: Constants) -> None:
        self._analysis = Analysis()
        self._constants = constants
        self._lines: dict[Any, Line] = {}
        self.places: dict[Place, None] = {}  # in the order in which they last run
        self.rounding: set[Place] = set()

    def needed(self, jaxpr: Jaxpr, needs: Needs) -> list[tuple[JaxprEqn, Needs]]:
        """Returns the equations that the results need, and what theirs are needed for."""
        usage = self._analysis.analyse(jaxpr, needs)
        equations = []
        for eqn, eqn_needs in zip(jaxpr.eqns, usage.equations, strict=True):
            if unite(eqn, eqn_needs):
                equations.append((eqn, eqn_needs))
        return equations

    def open(self, eqn: JaxprEqn, needs: Needs) -> list[tuple[Held, Needs]]:
        """Returns the programs of an equation, and what their results are needed for."""
        form = _jax.form_of(eqn)
        if form is Form.SCAN:
            (held,) = open_equation(eqn)
            inner = self._analysis.find_body_needs(_jax.scan(eqn), needs)
            return [(held, inner)]
        opened = []
        for held in open_equation(eqn):
            inner = needs
            if form in (Form.WHILE, Form.SHARD_MAP, Form.PMAP):
                inner = (unite(eqn, needs),) * len(results(held.program.jaxpr))
            opened.append((held, inner))
        return opened

    def look_at(self, jaxpr: Jaxpr, needs: Needs, around: Around) -> None:
        for eqn, eqn_needs in self.needed(jaxpr, needs):
            opened = self.open(eqn, eqn_needs)
            for held, inner in opened:
                self.look_at(held.program.jaxpr, inner, (*around, eqn))
            place = self.place_of(eqn, eqn_needs, around)
            self.places.pop(place, None)
            self.places[place] = None
            if not opened and _has_half(eqn):
                self.rounding.add(place)

    def place_of(self, eqn: JaxprEqn, needs: Needs, around: Around) -> Place:
        tracebacks = tuple(_jax.traceback_of(e) for e in (eqn, *around))
        if tracebacks not in self._lines:
            self._lines[tracebacks] = find_line(eqn, around)
        is_backward = not unite(eqn, needs) & FORWARD
        return Place(self._lines[tracebacks], is_backward)

    def exact(self, eqn: JaxprEqn, around: Around, literal: Literal) -> float | None:
        return self._constants.exact(eqn, around, literal)


class _Run:
    """One way through the program, while it is traced."""

    def __init__(
        self, opener: _Opener, on: dict[Place, Any], limits: Limits, variant: Variant
    ) -> None:
        self._opener = opener
        self._on = on
        self._limits = limits
        self._variant = variant
        self._births: dict[Place, Any] = {}

    def births_of(self, places: Sequence[Place]) -> Any:
        never = jnp.zeros((), bool)
        return [self._births.get(place, never) for place in places]

    def run(
        self, jaxpr: Jaxpr, inputs: Sequence[Any], needs: Needs, around: Around
    ) -> list[Any]:
        """Returns the results of a program, with half precision carried in float32."""
        variables = [*jaxpr.constvars, *jaxpr.invars]
        env = dict(zip(variables, map(_widen, inputs), strict=True))
        for eqn, eqn_needs in self._opener.needed(jaxpr, needs):
            outputs = self._evaluate(eqn, eqn_needs, env, around)
            env.update(zip(results(eqn), outputs, strict=True))
        return [_read_result(atom, env) for atom in results(jaxpr)]

    def _evaluate(
        self, eqn: JaxprEqn, needs: Needs, env: dict[Any, Any], around: Around
    ) -> list[Any]:
        place = self._opener.place_of(eqn, needs, around)
        inputs = [self._read(eqn, atom, env, place, around) for atom in eqn.invars]
        opened = self._opener.open(eqn, needs)
        if opened:
            return self._enter(eqn, opened, inputs, around)
        with context(eqn):
            outputs = self._compute(eqn, inputs, place)
        if self._variant.notes_births:  # a `gather` makes NaN of an index out of range
            is_born = lax.bitwise_not(_has_bad(inputs))
            self._note(place, lax.bitwise_and(_has_bad(outputs), is_born))
        return outputs

    def _note(self, place: Place, is_born: Any) -> None:
        if place in self._births:
            is_born = lax.bitwise_or(is_born, self._births[place])
        self._births[place] = is_born

    def _read(
        self,
        eqn: JaxprEqn,
        atom: Any,
        env: dict[Any, Any],
        place: Place,
        around: Around,
    ) -> Any:
        if not isinstance(atom, Literal):
            if atom not in env:  # nothing needs it
                return _widen(zeros_of(atom))
            return env[atom]
        if not is_half(_dtype(atom)):
            return atom.val
        exact = self._opener.exact(eqn, around, atom)
        if exact is None:
            return _widen(np.asarray(atom.val, _dtype(atom)))
        # JAX rounded the number before it traced the equation.
        return self._round(jnp.float32(exact), _dtype(atom), place)

    def _compute(self, eqn: JaxprEqn, inputs: Sequence[Any], place: Place) -> list[Any]:
        """Returns the results of an equation that holds no others, rounded where it is on."""
        # A ref is carried as what it holds.
        if any(map(is_ref, eqn.outvars)) or eqn.primitive.name in _END_REFS:
            return [inputs[0]] * len(results(eqn))
        if not _has_half(eqn) and not any(is_half(_dtype(v)) for v in eqn.invars):
            return evaluate(eqn, inputs)
        name = eqn.primitive.name
        try:
            outputs = evaluate_in_float32(eqn, inputs)
        except IncomparableError:  # such as a kernel for one dtype
            return list(map(_widen, evaluate(eqn, inputs)))
        if name in _MOVES:
            return outputs
        if name in _ADD_UP and _has_half(eqn):
            outputs = self._choose_sums(eqn, inputs, outputs, place)
        rounded = []
        for var, x in zip(results(eqn), outputs, strict=True):
            if is_half(_dtype(var)):
                x = self._round(x, _dtype(var), place)
            rounded.append(x)
        return rounded

    def _choose_sums(
        self, eqn: JaxprEqn, inputs: Sequence[Any], exact: Sequence[Any], place: Place
    ) -> list[Any]:
        """Returns sums that were added up in the format of their result, where it is on."""
        summed = map(_widen, evaluate(eqn, inputs))
        chosen = []
        for narrow, wide in zip(summed, exact, strict=True):
            is_on = self._on[place]
            if place.line in self._variant.limited:
                is_kept = self._limits.largest | jnp.isfinite(narrow)
                is_on = is_on & self._limits.digits & is_kept
            chosen.append(_select(is_on, narrow, wide))
        return chosen

    def _round(self, x: Any, dtype: Any, place: Place) -> Any:
        dtype = np.dtype(self._variant.dtype or dtype)
        if place.line in self._variant.limited:
            return _select(self._on[place], self._limit(x, dtype), x)
        rounded = lax.convert_element_type(
            lax.convert_element_type(x, dtype), jnp.float32
        )
        return _select(self._on[place], rounded, x)

    def _limit(self, x: Any, dtype: Any) -> Any:
        """Returns float32 within those limits of a format that are on."""
        info = jnp.finfo(dtype)
        limits = self._limits
        rounded = lax.convert_element_type(
            lax.convert_element_type(x, dtype), jnp.float32
        )
        digits = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
        limited = _select(limits.digits, digits, x)
        is_tiny = lax.lt(lax.abs(x), np.float32(info.tiny))
        tiny = lax.select(is_tiny, rounded, limited)
        limited = _select(limits.smallest, tiny, limited)
        huge = lax.select(
            lax.eq(lax.abs(rounded), np.float32(np.inf)), rounded, limited
        )
        return _select(limits.largest, huge, limited)

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
                outputs = self._switch(branches, inputs)
                return outputs
            case Form.SHARD_MAP | Form.PMAP:
                return self._map(eqn, inputs, functools.partial(run, 0))
        return run(0, *inputs)

    def _apart(
        self, run: Callable[..., Any], *args: Any
    ) -> tuple[list[Any], list[Any]]:
        """Runs what is traced by itself, and returns its births as well: `bool[places]`."""
        outside = self._births
        self._births = {}
        outputs = run(*args)
        births = self.births_of(list(self._on)) if self._variant.notes_births else []
        self._births = outside
        return outputs, births

    def _note_all(self, births: Sequence[Any]) -> None:
        if self._variant.notes_births:
            for place, is_born in zip(self._on, births, strict=True):
                self._note(place, is_born)

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
            carries, refs, births = state
            now = iter(refs)
            taken = [
                next(now) if held else x
                for x, held in zip(consts, held_consts, strict=True)
            ]
            outputs, more = self._apart(body, *taken, *carries, *sliced)
            plain, written = outputs[: len(eqn.outvars)], outputs[len(eqn.outvars) :]
            births = [one | other for one, other in zip(births, more, strict=True)]
            refs, of_slices = written[: len(refs)], written[len(refs) :]
            state = plain[: loop.carries], refs, births
            return state, (plain[loop.carries :], of_slices)

        state = list(map(jnp.asarray, carries)), refs, self._no_births()
        (carried, refs, births), (stacked, of_slices) = lax.scan(
            step, state, list(slices), length=loop.length, reverse=loop.reverse
        )
        self._note_all(births)
        return [*carried, *stacked, *refs, *of_slices]

    def _no_births(self) -> list[Any]:
        if not self._variant.notes_births:
            return []
        return [jnp.zeros((), bool)] * len(self._on)

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
            carries, births = state
            outputs, more = self._apart(run, 1 - test_number, *consts, *carries)
            births = [one | other for one, other in zip(births, more, strict=True)]
            return outputs[: len(carries)], births

        state = list(map(jnp.asarray, carries)), self._no_births()
        carried, births = lax.while_loop(test, body, state)
        self._note_all(births)
        return list(carried)

    def _switch(
        self, branches: Sequence[Callable[..., list[Any]]], inputs: Sequence[Any]
    ) -> list[Any]:
        index, *operands = inputs
        apart = [functools.partial(self._apart, branch) for branch in branches]
        outputs, births = lax.switch(index, apart, *operands)
        self._note_all(births)
        return list(outputs)

    def _map(
        self, eqn: JaxprEqn, inputs: Sequence[Any], run: Callable[..., list[Any]]
    ) -> list[Any]:
        mapped = _jax.mapped(eqn)
        places = list(self._on)
        switches = jnp.stack(list(self._on.values()))
        outside = self._on, self._limits

        def body(switches: Any, limits: Any, *args: Any) -> tuple[Any, ...]:
            self._on = {place: switches[i] for i, place in enumerate(places)}
            self._limits = Limits(*limits)
            outputs, _ = self._apart(run, *args)
            self._on, self._limits = outside
            return tuple(outputs)

        specs = (jax.sharding.PartitionSpec(),) * 2 + tuple(
            mapped.options[mapped.inputs]
        )
        limits = jnp.stack(list(map(jnp.asarray, self._limits)))
        try:
            return list(mapped.map(body, in_specs=specs)(switches, limits, *inputs))
        finally:
            self._on, self._limits = outside


def _read_result(atom: Any, env: dict[Any, Any]) -> Any:
    if isinstance(atom, Literal):
        return _widen(np.asarray(atom.val, _dtype(atom)))
    if atom not in env:
        return _widen(zeros_of(atom))
    return env[atom]


def _has_half(eqn: JaxprEqn) -> bool:
    return any(is_half(_dtype(var)) for var in results(eqn))


def _select(on: Any, chosen: Any, other: Any) -> Any:
    if not jnp.issubdtype(dtype_of(other), jnp.floating):
        return other
    if jnp.ndim(on):
        return jnp.where(on, chosen, other)
    return lax.select_n(on, jnp.asarray(other), jnp.asarray(chosen))


def _has_bad(values: Sequence[Any]) -> Any:
    """Returns whether there is inf or NaN, as `bool[]`."""
    # Of `lax`: each function of `jax.numpy` would be a call of its own, and be traced as such.
    is_bad = np.zeros((), bool)
    for value in values:
        if not isinstance(value, jax.Array) or not value.size:
            continue
        if jnp.issubdtype(value.dtype, jnp.floating):
            largest = lax.reduce_max(lax.abs(value), range(value.ndim))
            is_finite = lax.lt(largest, np.asarray(np.inf, value.dtype))
            is_bad = lax.bitwise_or(is_bad, lax.bitwise_not(is_finite))
    return is_bad


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", None)


def _widen(value: Any) -> Any:
    if is_half(getattr(value, "dtype", None)):
        return lax.convert_element_type(value, jnp.float32)
    return value

"""One way through a program: its equations in turn, with half precision carried in float32."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._jax import jaxprs
from ..._jax.jaxprs import (
    Form,
    Held,
    Jaxpr,
    JaxprEqn,
    Literal,
    Op,
    context,
    is_half,
    primitives_that,
)
from .equations import Around, EquationKey, key_of, split
from .evaluate import IncomparableError, dtype_of_atom, evaluate, widen, zeros_of
from .notes import count_numbers, is_floating, makes_bad
from .operations import Operation, Operations, Place
from .places import Line
from .rounding import Rounding
from .switches import Limits, Variant

# What is only moved was rounded before.
_MOVES = primitives_that(Op.MOVE)
_ACCUMULATE = primitives_that(Op.ACCUMULATES)


class Run:
    """One way through the program, while it is traced.

    When the program runs, `note` is called with a place and with what is noted there: the fields of
    its `Numbers`, or whether it makes inf or NaN.
    """

    def __init__(
        self,
        operations: Operations,
        on: Mapping[Place | Line, Any],
        limits: Limits,
        variant: Variant,
        note: Callable[[Place, Any], None],
    ) -> None:
        self._operations = operations
        self._on = on
        self._limits = limits
        self._variant = variant
        self._note = note

    def run(
        self, jaxpr: Jaxpr, inputs: Sequence[Any], around: Around = ()
    ) -> list[Any]:
        """Returns the outputs of a program, whose constants come first."""
        variables = [*jaxpr.constvars, *jaxpr.invars]
        env = dict(zip(variables, map(widen, inputs), strict=True))
        for eqn in jaxpr.eqns:
            key = key_of(eqn, around)
            if key in self._operations.needed:
                outputs = self._evaluate(eqn, key, env, around)
                env.update(zip(eqn.outvars, outputs, strict=True))
        return [_read(atom, env) for atom in jaxpr.outvars]

    def _evaluate(
        self, eqn: JaxprEqn, key: EquationKey, env: Mapping[Any, Any], around: Around
    ) -> list[Any]:
        if self._operations.opened[key]:
            inputs = [_read(atom, env) for atom in eqn.invars]
            return self._enter(eqn, key, inputs, around)
        operation = self._operations.by_key[key]
        place = operation.place
        rounding = self._rounding_of(key, place)
        inputs = []
        for atom, exact in zip(eqn.invars, operation.exact, strict=True):
            value = _read(atom, env)
            if exact is not None and is_half(dtype_of_atom(atom)):
                # JAX rounded the number before it traced the equation.
                value = rounding.round(jnp.float32(exact), dtype_of_atom(atom))
            inputs.append(value)
        with context(eqn):
            outputs = self._compute(operation, inputs, rounding)
        outputs = [rounding.clean(x) for x in outputs]
        if self._variant.notes_births and any(map(is_floating, outputs)):
            # What only moves numbers, too: for an index out of range it may fill in NaN.
            self._tell(place, makes_bad(inputs, outputs))
        return outputs

    def _rounding_of(self, key: EquationKey, place: Place) -> Rounding:
        is_on = self._on[self._variant.switch_of(place)]
        if not self._variant.unrounded.isdisjoint((key, place)):
            is_on = np.zeros((), bool)
        limits = None
        if place in self._variant.limited:
            limits = self._limits
        return Rounding(is_on, limits, self._variant.dtype)

    def _tell(self, place: Place, noted: Any) -> None:
        # A callback, as nothing else comes out of loops and branches by itself.
        jax.debug.callback(functools.partial(self._note, place), noted)

    def _compute(
        self, operation: Operation, inputs: Sequence[Any], rounding: Rounding
    ) -> list[Any]:
        """Returns the outputs of an operation, rounded where it is on."""
        eqn, place = operation.eqn, operation.place
        if place.line in self._variant.native:
            return list(map(widen, evaluate(eqn, inputs)))
        try:
            exact = evaluate(eqn, inputs, np.float32)
        except IncomparableError:  # such as a kernel for one dtype
            return list(map(widen, evaluate(eqn, inputs)))
        if eqn.primitive.name in _MOVES:
            return exact
        outputs = exact
        if eqn.primitive.name in _ACCUMULATE and place in self._operations.dtypes:
            narrow = evaluate(eqn, inputs, self._variant.dtype or None)
            outputs = map(rounding.choose, map(widen, narrow), exact)
        rounded = []
        for var, x in zip(eqn.outvars, outputs, strict=True):
            if is_half(dtype_of_atom(var)):
                x = rounding.round(x, dtype_of_atom(var))
            rounded.append(x)
        if place in self._variant.limited:
            for wide, narrow in zip(exact, rounded, strict=True):
                if is_floating(wide):
                    self._tell(place, count_numbers(inputs, wide, narrow))
        return rounded

    def _enter(
        self, eqn: JaxprEqn, key: EquationKey, inputs: Sequence[Any], around: Around
    ) -> list[Any]:
        """Returns the outputs of an equation that holds programs."""

        def run(held: Held, *args: Any) -> tuple[Any, ...]:
            program = held.program
            args = (*program.consts, *args)
            return tuple(self.run(program.jaxpr, args, (*around, eqn)))

        held = self._operations.opened[key]
        runs = [functools.partial(run, each) for each in held]
        match jaxprs.form_of(eqn):
            case Form.SCAN:
                outputs = _scan(eqn, runs[0], inputs)
            case Form.WHILE:
                # The test has no outputs of its own.
                test, body = reversed(runs) if held[0].outputs else runs
                outputs = _loop(eqn, test, body, inputs)
            case Form.BRANCHES:
                outputs = lax.switch(inputs[0], runs, *inputs[1:])
            case Form.SHARD_MAP:
                outputs = jaxprs.mapped(eqn).map(*runs)(*inputs)
            case _:
                outputs = run(*held, *inputs)
        return list(outputs)


def _scan(
    eqn: JaxprEqn, body: Callable[..., Any], inputs: Sequence[Any]
) -> Sequence[Any]:
    loop = jaxprs.scan(eqn)
    consts, carries, slices = split(inputs, loop.consts, loop.carries)

    def step(carried: Any, sliced: Any) -> Any:
        outputs = body(*consts, *carried, *sliced)
        return outputs[: loop.carries], outputs[loop.carries :]

    carried, stacked = lax.scan(
        step, tuple(map(jnp.asarray, carries)), tuple(slices),
        length=loop.length, reverse=loop.reverse,
    )  # fmt: skip
    return [*carried, *stacked]


def _loop(
    eqn: JaxprEqn,
    test: Callable[..., Any],
    body: Callable[..., Any],
    inputs: Sequence[Any],
) -> Sequence[Any]:
    loop = jaxprs.while_loop(eqn)
    tested, consts, carries = split(inputs, loop.test_consts, loop.body_consts)
    return lax.while_loop(
        lambda carried: test(*tested, *carried)[0],
        lambda carried: body(*consts, *carried),
        tuple(map(jnp.asarray, carries)),
    )


def _read(atom: Any, env: Mapping[Any, Any]) -> Any:
    """Returns the number of a literal or the value of a variable; 0 for what nothing needs."""
    if isinstance(atom, Literal):
        if is_half(dtype_of_atom(atom)):
            return widen(np.asarray(atom.val, dtype_of_atom(atom)))
        return atom.val
    if atom not in env:
        return widen(zeros_of(atom))
    return env[atom]

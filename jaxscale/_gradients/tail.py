"""A traced program in two parts: the half-precision part, and what follows it in float32.

The *head* is every equation that a half-precision value comes from, and those that take one. The
*tail* is the rest. Its backward pass needs no scale, and the cotangents that leave it for the head
say which scale that needs.

Control flow and functions with derivative rules belong to one part as a whole. Calls that mean
nothing but their program, such as `jit` and `jax.checkpoint`, and `shard_map` are divided in two.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _jax
from .._autocast.readers import equations, reads_half, variables
from .._jax import ClosedJaxpr, JaxprEqn, Literal, UnknownFormError, bind, context, source


@dataclasses.dataclass(frozen=True, eq=False)
class _Crossing:
    """A value that goes from the head of a call to its tail: a variable outside of the call."""

    aval: Any


class _Step(NamedTuple):
    """An equation, or the head or the tail of one that is divided."""

    eqn: JaxprEqn
    invars: Sequence[Any]
    outvars: Sequence[Any]
    holds_half: bool
    of: "Split | None" = None  # the parts of a divided call
    part: "Part | None" = None  # and which of them this is


class Part:
    """Some steps of a program, as a function of lists of arrays.

    Its `inputs` are the variables that it reads and does not compute. Its `outputs` may be
    literals, if the program returns these.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[_Step],
        inputs: Iterable[Any],
        outputs: Sequence[Any],
        constants: dict[Any, Any],
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.steps, self._constants = steps, constants
        read = set(variables(outputs)).union(*(variables(step.invars) for step in steps))
        self.inputs = [var for var in inputs if var in read]
        self.outputs = outputs

    def __call__(self, *args: Any) -> list[Any]:
        env = self._constants | dict(zip(self.inputs, args, strict=True))
        for step in self.steps:
            values = _evaluate(step, [_read(env, atom) for atom in step.invars])
            env.update(zip(step.outvars, values, strict=True))
        return [_read(env, atom) for atom in self.outputs]

    def without_casts(self, by: Iterable[Any]) -> tuple["Part", dict[Any, Any]]:
        """Returns the part without the casts of some inputs to half precision.

        What each is cast to becomes an input: returned, too, with what it is a cast of.
        """
        wide = {var for var in by if not is_half(var.aval)}
        sources: dict[Any, Any] = {
            step.outvars[0]: step.invars[0]
            for step in self.steps
            if step.eqn.primitive.name == "convert_element_type"
            and is_half(step.outvars[0].aval)
            and not wide.isdisjoint(variables(step.invars))
        }
        steps = [step for step in self.steps if sources.keys().isdisjoint(step.outvars)]
        inputs = [*self.inputs, *sources]
        return Part(self.__name__, steps, inputs, self.outputs, self._constants), sources

    def derived(self, by: Iterable[Any]) -> set[Any]:
        """Returns the variables that may have a derivative by some of the inputs, and these."""
        found = set(by)
        for step in self.steps:
            is_stopped = step.eqn.primitive.name == "stop_gradient"
            if not is_stopped and not found.isdisjoint(variables(step.invars)):
                found.update(var for var in step.outvars if is_inexact(var.aval))
        return found


class Split(NamedTuple):
    """A program in two parts."""

    inputs: list[Any]  # the variables of its inputs
    head: Part  # returns what the tail reads of it
    tail: Part  # returns what the program does


def split(program: ClosedJaxpr, under_autocast: bool) -> Split:
    """Returns a program in its two parts.

    Matrix products in float32 count as half precision if an `autocast` may yet make them that:
    if the program was traced for one, or if nothing else in it is in half precision.
    """
    every = itertools.chain(*map(equations, program.jaxpr.eqns))
    casts = under_autocast or not any(map(_is_typed_half, every))
    return _split(
        program,
        lambda eqn: any(_is_typed_half(e) or (casts and reads_half(e)) for e in equations(eqn)),
    )


def is_half(aval: Any) -> bool:
    """Returns whether arrays of a type are floating-point numbers of 16 bits or fewer."""
    return is_inexact(aval) and jnp.finfo(aval.dtype).bits < 32


def is_inexact(aval: Any) -> bool:
    """Returns whether an array, or arrays of a type, are floating-point or complex numbers."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _split(program: ClosedJaxpr, holds_half: Callable[[JaxprEqn], bool]) -> Split:
    jaxpr = program.jaxpr
    needed: set[Any] = set()
    head, tail = [], []
    for step in reversed([step for eqn in jaxpr.eqns for step in _steps(eqn, holds_half)]):
        if step.holds_half or not needed.isdisjoint(step.outvars):
            head.append(step)
            needed.update(variables(step.invars))
        else:
            tail.append(step)
    made = [var for step in reversed(head) for var in step.outvars]
    constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
    after = Part("tail", tail[::-1], [*made, *jaxpr.invars], jaxpr.outvars, constants)
    crossing = [var for var in after.inputs if var in set(made)]
    before = Part("head", head[::-1], jaxpr.invars, crossing, constants)
    return Split(list(jaxpr.invars), before, after)


def _steps(eqn: JaxprEqn, holds_half: Callable[[JaxprEqn], bool]) -> list[_Step]:
    """Returns an equation as one step, or as two if it is a call that has a head and a tail."""
    whole = _Step(eqn, eqn.invars, eqn.outvars, holds_half(eqn))
    is_mapped = eqn.primitive.name == "shard_map"
    if not whole.holds_half or not (is_mapped or _jax.is_divisible(eqn)):
        return [whole]
    try:
        inner = _jax.mapped(eqn).program if is_mapped else _jax.callee(eqn)
    except UnknownFormError:
        return [whole]
    parts = _split(inner, holds_half)
    if not parts.tail.steps:
        return [whole]
    # New variables, as a program may be called twice.
    outside: dict[Any, Any] = dict(zip(parts.inputs, eqn.invars, strict=True))
    outside |= {var: _Crossing(var.aval) for var in parts.head.outputs}
    crossing = [outside[var] for var in parts.head.outputs]
    before, after = ([outside[var] for var in part.inputs] for part in (parts.head, parts.tail))
    return [
        _Step(eqn, before, crossing, True, parts, parts.head),
        _Step(eqn, after, eqn.outvars, False, parts, parts.tail),
    ]


def _evaluate(step: _Step, values: list[Any]) -> list[Any]:
    with context(step.eqn), source(step.eqn, _jax.current_scopes()):
        if step.of is None or step.part is None:
            return bind(step.eqn, values)
        if step.eqn.primitive.name == "shard_map":
            return _call_mapped(step.eqn, step.of, step.part, values)
        return _jax.call_part(step.eqn, step.part, values)


def _call_mapped(eqn: JaxprEqn, parts: Split, part: Part, values: list[Any]) -> list[Any]:
    """Returns the outputs of the head or the tail of a `shard_map`.

    What goes from one to the other gets an axis in front, along which devices that may differ hold
    a piece each.
    """
    each, crossing = _jax.mapped(eqn), set(parts.head.outputs)
    specs = dict(zip(parts.inputs, each.options["in_specs"], strict=True))
    for var in crossing:
        is_checked, axes = each.options["check_vma"], each.options["axis_names"]
        along = _jax.varying(var.aval) if is_checked else axes
        specs[var] = PartitionSpec(tuple(sorted(along, key=repr)) or None)

    def call(*args: Any) -> tuple[Any, ...]:
        pairs = zip(args, part.inputs, strict=True)
        outputs = part(*(x[0] if var in crossing else x for x, var in pairs))
        if part is parts.head:
            return tuple(jnp.expand_dims(output, 0) for output in outputs)
        return tuple(outputs)

    options = {"in_specs": tuple(specs[var] for var in part.inputs)}
    if part is parts.head:
        options["out_specs"] = tuple(specs[var] for var in part.outputs)
    return list(each.map(call, **options)(*values))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _is_typed_half(eqn: JaxprEqn) -> bool:
    return any(is_half(atom.aval) for atom in (*eqn.invars, *eqn.outvars))

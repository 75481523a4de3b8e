"""The parts of a jaxpr that is divided: steps, which run as a function of arrays."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._jax import jaxprs
from .._jax.jaxprs import (
    Atom,
    ClosedJaxpr,
    Form,
    JaxprEqn,
    Literal,
    Op,
    bind,
    called_program,
    context,
    form_of,
    primitives_that,
    source,
    variables,
)

_DIVIDED = jaxprs.DIVISIBLE | {Form.SHARD_MAP}
_STOPS = primitives_that(Op.STOPS_TANGENTS)
_CASTS = primitives_that(Op.CASTS)


@dataclasses.dataclass(frozen=True, eq=False)
class Crossing:
    """A value that goes from the head of a call to its tail: a variable outside of the call."""

    aval: Any


class Step(NamedTuple):
    """An equation, or the head or the tail of one that is divided."""

    eqn: JaxprEqn
    invars: Sequence[Any]
    outvars: Sequence[Any]
    holds_half: bool
    of: "Split | None" = None  # the parts of a divided call
    part: "Part | None" = None  # and which of them this is


class Part:
    """Some steps of a jaxpr, as a function of lists of arrays.

    Its `inputs` are the variables that it reads and does not compute. Its `outputs` may be
    literals, if the jaxpr returns these.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[Step],
        inputs: Iterable[Any],
        outputs: Sequence[Any],
        constants: dict[Any, Any],
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.steps = steps
        self.outputs = outputs
        self._constants = constants
        used = set(variables(outputs))
        for step in steps:
            used.update(variables(step.invars))
        self.inputs = [var for var in inputs if var in used]

    def __call__(self, *args: jax.Array) -> list[Any]:
        env = self._constants | dict(zip(self.inputs, args, strict=True))
        for step in self.steps:
            inputs = [_look_up(env, atom) for atom in step.invars]
            env.update(zip(step.outvars, _evaluate(step, inputs), strict=True))
        return [_look_up(env, atom) for atom in self.outputs]

    def without_casts(self, by: Iterable[Any]) -> tuple["Part", dict[Any, Any]]:
        """Returns the part without the casts of some inputs to half precision.

        The result of each cast becomes an input. The second result says of which input it is the
        cast.
        """
        wide = {var for var in by if not jaxprs.holds_half(var.aval)}
        sources: dict[Any, Any] = {}
        others = []
        for step in self.steps:
            if _is_cast_to_half(step) and not wide.isdisjoint(variables(step.invars)):
                sources[step.outvars[0]] = step.invars[0]
            else:
                others.append(step)
        inputs = [*self.inputs, *sources]
        part = Part(self.__name__, others, inputs, self.outputs, self._constants)
        return part, sources

    def find_derived(self, by: Iterable[Any]) -> set[Any]:
        """Returns the variables that may have a derivative by some of the inputs, and these."""
        derived = set(by)
        for step in self.steps:
            if step.eqn.primitive.name in _STOPS:
                continue
            if derived.isdisjoint(variables(step.invars)):
                continue
            for var in (*step.outvars, *refs_of(step)):
                if jaxprs.holds_inexact(var.aval):
                    derived.add(var)
        return derived


class Split(NamedTuple):
    """A jaxpr in two parts."""

    inputs: list[Any]  # the variables of its inputs
    head: Part  # returns the values in `crossing`, and then the outputs in `from_head`
    tail: Part  # returns the other outputs
    crossing: list[Any]  # the variables that the head computes and the tail reads
    from_head: list[int]  # the places of the outputs that the head returns itself


def refs_of(eqn: JaxprEqn | Step) -> Iterator[Any]:
    """Yields the refs that an equation reads or writes: mutable arrays."""
    return filter(jaxprs.is_ref, (*eqn.invars, *eqn.outvars))


def find_divisible(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the jaxpr of an equation that may be divided in two, such as a call.

    One that takes a ref belongs to one part as a whole.
    """
    if form_of(eqn) not in _DIVIDED or any(refs_of(eqn)):
        return None
    if not (is_mapped(eqn) or jaxprs.is_divisible(eqn)):
        return None
    return called_program(eqn, _DIVIDED)


def is_mapped(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a `shard_map`."""
    return form_of(eqn) is Form.SHARD_MAP


def _evaluate(step: Step, values: list[Any]) -> list[Any]:
    """Returns the outputs of a step."""
    with context(step.eqn), source(step.eqn, jaxprs.current_scopes()):
        if step.of is None or step.part is None:
            return bind(step.eqn, values)
        if is_mapped(step.eqn):
            return _call_mapped(step.eqn, step.of, step.part, values)
        return jaxprs.call_part(step.eqn, step.part, values)


def _call_mapped(
    eqn: JaxprEqn, parts: Split, part: Part, values: list[Any]
) -> list[Any]:
    """Returns the outputs of the head or the tail of a `shard_map`.

    What goes from one to the other gets a new first axis. Each device that may hold a value of its
    own puts it in one place along that axis.
    """
    mapping = jaxprs.mapped(eqn)
    is_head = part is parts.head
    crossing = set(parts.crossing)
    specs = dict(zip(parts.inputs, mapping.options["in_specs"], strict=True))
    for var in crossing:
        axes = mapping.options["axis_names"]
        if mapping.options["check_vma"]:
            axes = jaxprs.varying(var.aval)
        specs[var] = PartitionSpec(tuple(sorted(axes, key=repr)) or None)

    def call_part(*args: jax.Array) -> tuple[Any, ...]:
        inputs = []
        for arg, var in zip(args, part.inputs, strict=True):
            if var in crossing:
                arg = arg[0]
            inputs.append(arg)
        outputs = part(*inputs)
        if is_head:
            outputs = [jnp.expand_dims(output, 0) for output in outputs]
        return tuple(outputs)

    options = {"in_specs": tuple(specs[var] for var in part.inputs)}
    if is_head:
        options["out_specs"] = tuple(specs[var] for var in part.outputs)
    mapped_part = mapping.map(call_part, **options)
    return list(mapped_part(*values))


def _look_up(env: dict[Any, Any], atom: Atom) -> Any:
    """Returns the value of a variable or a literal."""
    if isinstance(atom, Literal):
        return atom.val
    return env[atom]


def _is_cast_to_half(step: Step) -> bool:
    is_cast = step.eqn.primitive.name in _CASTS
    return is_cast and jaxprs.holds_half(step.outvars[0].aval)

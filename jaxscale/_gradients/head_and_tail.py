"""A traced program in two parts: the half-precision part, and what follows it in float32.

The *head* is every equation that a half-precision value comes from, and those that take one, if a
cotangent comes back to that value. The *tail* is the rest. Its backward pass needs no scale, and
the cotangents that leave it for the head say which scale that needs.

Control flow and functions with derivative rules belong to one part as a whole. Calls that mean
nothing but their program, such as `jit` and `jax.checkpoint`, and `shard_map` are divided in two.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _jax
from .._autocast.callers import Owner, owner_of
from .._autocast.casts import has_products, reads_half
from .._autocast.readers import has_gradient
from .._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    UnknownFormError,
    bind,
    context,
    programs,
    source,
    variables,
)


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

        What each is cast to becomes an input. The second result says of what it is a cast.
        """
        wide = {var for var in by if not _jax.holds_half(var.aval)}
        sources: dict[Any, Any] = {
            step.outvars[0]: step.invars[0]
            for step in self.steps
            if step.eqn.primitive.name == "convert_element_type"
            and _jax.holds_half(step.outvars[0].aval)
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
                written = (*step.outvars, *_refs(step))
                found.update(var for var in written if _jax.holds_inexact(var.aval))
        return found


class Split(NamedTuple):
    """A program in two parts."""

    inputs: list[Any]  # the variables of its inputs
    head: Part  # returns what the tail reads of it, and then the outputs in `from_head`
    tail: Part  # returns the other outputs
    crossing: list[Any]  # the variables that go from the head to the tail
    from_head: list[int]  # which outputs of the program the head returns itself


def split(program: ClosedJaxpr, under_autocast: bool) -> Split:
    """Returns a program in its two parts, of which the tail returns all outputs.

    Matrix products in float32 count as half precision if an `autocast` may yet make them that:
    if the program was traced for one, or if nothing else in it is in half precision.
    """
    holds_typed_half = _Search(_is_typed_half)
    casts = under_autocast or not any(map(holds_typed_half, program.jaxpr.eqns))
    finder = _HalfFinder(holds_typed_half, casts)
    finder.search(program, [True] * len(program.jaxpr.outvars), Owner.MODEL)
    splitter = _Splitter(finder.holds_half)
    return splitter.make_parts(program, *splitter.divide(program, ()), from_head=[])


class _Search:
    """Whether an equation, or one in the programs that it holds, has a property.

    A program that several equations hold is searched once.
    """

    def __init__(self, has: Callable[[JaxprEqn], bool]) -> None:
        self._has = has
        self._known: dict[Any, bool] = {}

    def __call__(self, eqn: JaxprEqn) -> bool:
        return self._has(eqn) or self.within(eqn)

    def within(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation in the programs that this one holds has the property."""
        return any(map(self._in_program, programs(eqn)))

    def _in_program(self, program: Any) -> bool:
        jaxpr = _jax.closed(program).jaxpr
        if jaxpr not in self._known:
            self._known[jaxpr] = any(map(self, jaxpr.eqns))
        return self._known[jaxpr]


class _HalfFinder:
    """Finds the equations with half-precision values that a cotangent comes back to.

    A value in half precision that is only kept, for what is computed again, has no cotangent that
    could flush. With `casts`, products in float32 count as half precision.

    An equation of a program that is called many times counts if it does in one of these calls.
    """

    def __init__(self, holds_typed_half: _Search, casts: bool) -> None:
        self._holds_typed_half = holds_typed_half
        self._casts = casts
        self._found: set[int] = set()  # identities of equations
        self._known: dict[Any, list[bool]] = {}

    def holds_half(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation of a program that was searched was found."""
        return id(eqn) in self._found

    def search(
        self, program: ClosedJaxpr, pulled_outputs: Sequence[bool], owner: Owner
    ) -> list[bool]:
        """Searches a program, and those that its divisible calls hold.

        Args:
          program: a program.
          pulled_outputs: for each of its outputs, whether a cotangent comes back to it.
          owner: whose products these are, as in `owner_of`.

        Returns:
          For each input of the program, whether a cotangent comes back to it.
        """
        key = program.jaxpr, tuple(pulled_outputs), owner
        if key not in self._known:
            pulled = self._find_pulled(program, pulled_outputs, owner)
            for eqn in program.jaxpr.eqns:
                if self._is_half(eqn, pulled, owner):
                    self._found.add(id(eqn))
            self._known[key] = [var in pulled for var in program.jaxpr.invars]
        return self._known[key]

    def _find_pulled(
        self, program: ClosedJaxpr, pulled_outputs: Sequence[bool], owner: Owner
    ) -> set[Any]:
        """Returns the variables that a cotangent comes back to, and searches the calls."""
        pulled = set(variables(itertools.compress(program.jaxpr.outvars, pulled_outputs)))
        for eqn in reversed(program.jaxpr.eqns):
            inner = _divided(eqn)
            if inner is not None:
                of_call = [var in pulled for var in eqn.outvars]
                back = self.search(inner, of_call, owner_of(eqn, owner))
            elif not pulled.isdisjoint(_refs(eqn)):
                back = [True] * len(eqn.invars)  # what it writes is read later
            elif pulled.isdisjoint(eqn.outvars) or not has_gradient(eqn):
                continue
            elif _jax.is_stand_in(eqn):
                back = [False, True]
            else:
                back = [True] * len(eqn.invars)
            pulled.update(variables(itertools.compress(eqn.invars, back)))
        return pulled

    def _is_half(self, eqn: JaxprEqn, pulled: set[Any], owner: Owner) -> bool:
        inner = _divided(eqn)
        atoms = {*eqn.outvars}
        if inner is None:
            atoms.update(variables(eqn.invars))
        if any(_jax.holds_half(atom.aval) for atom in atoms & pulled):
            return True
        if inner is not None:
            return any(map(self.holds_half, inner.jaxpr.eqns))
        if self._holds_typed_half.within(eqn):
            return True
        return self._casts and (reads_half(eqn, owner) or has_products(eqn, owner))


class _Splitter:
    """Splits a program, and those that its calls hold.

    A program that is called many times is split once for each set of outputs that the head needs,
    so that its parts are functions that are called many times.
    """

    def __init__(self, holds_half: Callable[[JaxprEqn], bool]) -> None:
        self._holds_half = holds_half
        self._known: dict[Any, Split | None] = {}

    def divide(
        self, program: ClosedJaxpr, needed: Iterable[Any]
    ) -> tuple[list[_Step], list[_Step]]:
        """Returns the steps of the head and of the tail.

        The head computes all that is in half precision, what that is computed from, and what is
        `needed` besides. All that reads or writes one ref belongs to one part: the head runs before
        the tail, and must not read what that writes.
        """
        of_head = set(variables(needed))
        while True:
            head, tail = self._divide(program, of_head)
            refs = {ref for step in head for ref in _refs(step)}
            if refs <= of_head:
                return head, tail
            of_head |= refs

    def _divide(self, program: ClosedJaxpr, of_head: set[Any]) -> tuple[list[_Step], list[_Step]]:
        """Returns the steps of the head and of the tail, given variables of the head."""
        in_head = set(of_head)
        head: list[_Step] = []
        tail: list[_Step] = []
        for eqn in reversed(program.jaxpr.eqns):
            for step in reversed(self._steps(eqn, in_head)):
                made = (*step.outvars, *_refs(step))
                if step.holds_half or not in_head.isdisjoint(made):
                    head.append(step)
                    in_head.update(variables(step.invars))
                else:
                    tail.append(step)
        return head[::-1], tail[::-1]

    def make_parts(
        self,
        program: ClosedJaxpr,
        head: Sequence[_Step],
        tail: Sequence[_Step],
        from_head: list[int],
    ) -> Split:
        """Returns steps as two parts, of which the head returns some of the outputs itself."""
        jaxpr = program.jaxpr
        made = [var for step in head for var in step.outvars]
        constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
        others = [atom for i, atom in enumerate(jaxpr.outvars) if i not in from_head]
        after = Part("tail", tail, [*made, *jaxpr.invars], others, constants)
        crossing = [var for var in after.inputs if var in set(made)]
        outputs = [*crossing, *(jaxpr.outvars[i] for i in from_head)]
        before = Part("head", head, jaxpr.invars, outputs, constants)
        return Split(list(jaxpr.invars), before, after, crossing, from_head)

    def _steps(self, eqn: JaxprEqn, in_head: set[Any]) -> list[_Step]:
        """Returns an equation as one step, or as two if it is a call with a head and a tail."""
        whole = _Step(eqn, eqn.invars, eqn.outvars, self._holds_half(eqn))
        inner = _divided(eqn)
        if not whole.holds_half or inner is None:
            return [whole]
        is_mapped = eqn.primitive.name == "shard_map"
        # What a device returns has another shape than what a `shard_map` does, so that its tail
        # returns all of it, and belongs to the head as a whole if that reads any.
        needed = [not is_mapped and var in in_head for var in eqn.outvars]
        parts = self._split_call(inner, needed, is_mapped)
        if parts is None:
            return [whole]
        # New variables, as a program may be called twice.
        outside: dict[Any, Any] = dict(zip(parts.inputs, eqn.invars, strict=True))
        outside |= {var: _Crossing(var.aval) for var in parts.crossing}
        crossing = [outside[var] for var in parts.crossing]
        returned = [eqn.outvars[i] for i in parts.from_head]
        others = [var for i, var in enumerate(eqn.outvars) if i not in parts.from_head]
        head = _Step(
            eqn,
            invars=[outside[var] for var in parts.head.inputs],
            outvars=[*crossing, *returned],
            holds_half=True,
            of=parts,
            part=parts.head,
        )
        tail = _Step(
            eqn,
            invars=[outside[var] for var in parts.tail.inputs],
            outvars=others,
            holds_half=False,
            of=parts,
            part=parts.tail,
        )
        return [head, tail]

    def _split_call(
        self, program: ClosedJaxpr, needed: Sequence[bool], is_mapped: bool
    ) -> Split | None:
        """Returns a program that is called in its parts, `None` if all of it is the head's."""
        jaxpr = program.jaxpr
        key = jaxpr, tuple(map(id, program.consts)), tuple(needed), is_mapped
        if key not in self._known:
            head, tail = self.divide(program, itertools.compress(jaxpr.outvars, needed))
            made = {var for step in head for var in step.outvars}
            from_head = [
                i
                for i, (atom, is_needed) in enumerate(zip(jaxpr.outvars, needed, strict=True))
                if is_needed or (not is_mapped and not isinstance(atom, Literal) and atom in made)
            ]
            parts = self.make_parts(program, head, tail, from_head) if tail else None
            self._known[key] = parts
        return self._known[key]


def _refs(eqn: JaxprEqn | _Step) -> Iterator[Any]:
    """Yields the refs that an equation reads or writes: mutable arrays."""
    return filter(_jax.is_ref, (*eqn.invars, *eqn.outvars))


def _divided(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the program of an equation that may be divided in two, such as a call.

    One that takes a ref belongs to one part as a whole.
    """
    is_mapped = eqn.primitive.name == "shard_map"
    if not is_mapped and not _jax.is_divisible(eqn):
        return None
    if any(_refs(eqn)):
        return None
    try:
        return _jax.mapped(eqn).program if is_mapped else _jax.callee(eqn)
    except UnknownFormError:
        return None


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
    mapping = _jax.mapped(eqn)
    is_head = part is parts.head
    crossing = set(parts.crossing)
    specs = dict(zip(parts.inputs, mapping.options["in_specs"], strict=True))
    for var in crossing:
        along = mapping.options["axis_names"]
        if mapping.options["check_vma"]:
            along = _jax.varying(var.aval)
        specs[var] = PartitionSpec(tuple(sorted(along, key=repr)) or None)

    def call_part(*args: Any) -> tuple[Any, ...]:
        inputs = []
        for arg, var in zip(args, part.inputs, strict=True):
            inputs.append(arg[0] if var in crossing else arg)
        outputs = part(*inputs)
        if is_head:
            return tuple(jnp.expand_dims(output, 0) for output in outputs)
        return tuple(outputs)

    options = {"in_specs": tuple(specs[var] for var in part.inputs)}
    if is_head:
        options["out_specs"] = tuple(specs[var] for var in part.outputs)
    mapped_part = mapping.map(call_part, **options)
    return list(mapped_part(*values))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _is_typed_half(eqn: JaxprEqn) -> bool:
    return any(_jax.holds_half(atom.aval) for atom in (*eqn.invars, *eqn.outvars))

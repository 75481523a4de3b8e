"""A traced program in two parts: the half-precision part, and what follows it in float32.

The *head* is every equation that a half-precision value comes from, and those that take one, if a
cotangent comes back to that value. The *tail* is the rest. Its backward pass needs no scale, and
the cotangents that leave it for the head say which scale that needs.

Control flow and functions with derivative rules belong to one part as a whole. Calls that mean
nothing but their program, such as `jit` and `jax.checkpoint`, and `shard_map` are divided in two.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._autocast.callers import Owner
from .._jax import ClosedJaxpr, JaxprEqn, Literal, variables
from .half_finder import EquationSearch, HalfFinder, is_typed_half
from .parts import Crossing, Part, Split, Step, find_divisible, refs_of


def split(program: ClosedJaxpr, under_autocast: bool) -> Split:
    """Returns a program in its two parts, of which the tail returns all outputs.

    Matrix products in float32 count as half precision if an `autocast` may yet make them that:
    if the program was traced for one, or if nothing else in it is in half precision.
    """
    holds_typed_half = EquationSearch(is_typed_half)
    casts = under_autocast or not any(map(holds_typed_half, program.jaxpr.eqns))
    finder = HalfFinder(holds_typed_half, casts)
    finder.search(program, [True] * len(program.jaxpr.outvars), Owner.MODEL)
    splitter = _Splitter(finder.holds_half)
    head, tail = splitter.divide(program, needed=())
    return splitter.make_parts(program, head, tail, from_head=[])


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
    ) -> tuple[list[Step], list[Step]]:
        """Returns the steps of the head and of the tail.

        The head computes all that is in half precision, what that is computed from, and what is
        `needed` besides. All that reads or writes one ref belongs to one part: the head runs before
        the tail, and must not read what that writes.
        """
        of_head = set(variables(needed))
        while True:
            head, tail = self._assign_steps(program, of_head)
            refs = {ref for step in head for ref in refs_of(step)}
            if refs <= of_head:
                return head, tail
            of_head |= refs

    def _assign_steps(
        self, program: ClosedJaxpr, of_head: set[Any]
    ) -> tuple[list[Step], list[Step]]:
        """Returns the steps of the head and of the tail, given variables of the head."""
        in_head = set(of_head)
        head: list[Step] = []
        tail: list[Step] = []
        for eqn in reversed(program.jaxpr.eqns):
            for step in reversed(self._divide_equation(eqn, in_head)):
                written = (*step.outvars, *refs_of(step))
                if step.holds_half or not in_head.isdisjoint(written):
                    head.append(step)
                    in_head.update(variables(step.invars))
                else:
                    tail.append(step)
        return head[::-1], tail[::-1]

    def make_parts(
        self,
        program: ClosedJaxpr,
        head: Sequence[Step],
        tail: Sequence[Step],
        from_head: list[int],
    ) -> Split:
        """Returns steps as two parts, of which the head returns some of the outputs itself."""
        jaxpr = program.jaxpr
        constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
        of_head = [var for step in head for var in step.outvars]
        from_tail = [atom for i, atom in enumerate(jaxpr.outvars) if i not in from_head]
        tail_part = Part("tail", tail, [*of_head, *jaxpr.invars], from_tail, constants)
        computed = set(of_head)
        crossing = [var for var in tail_part.inputs if var in computed]
        head_outputs = [*crossing, *(jaxpr.outvars[i] for i in from_head)]
        head_part = Part("head", head, jaxpr.invars, head_outputs, constants)
        return Split(list(jaxpr.invars), head_part, tail_part, crossing, from_head)

    def _divide_equation(self, eqn: JaxprEqn, in_head: set[Any]) -> list[Step]:
        """Returns an equation as one step, or as two if it is a call with a head and a tail."""
        whole = Step(eqn, eqn.invars, eqn.outvars, self._holds_half(eqn))
        inner = find_divisible(eqn)
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
        outside |= {var: Crossing(var.aval) for var in parts.crossing}
        crossing = [outside[var] for var in parts.crossing]
        returned = [eqn.outvars[i] for i in parts.from_head]
        others = [var for i, var in enumerate(eqn.outvars) if i not in parts.from_head]
        head = Step(
            eqn,
            invars=[outside[var] for var in parts.head.inputs],
            outvars=[*crossing, *returned],
            holds_half=True,
            of=parts,
            part=parts.head,
        )
        tail = Step(
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
            computed = {var for step in head for var in step.outvars}
            from_head = []
            for i, (atom, is_needed) in enumerate(
                zip(jaxpr.outvars, needed, strict=True)
            ):
                is_of_head = not isinstance(atom, Literal) and atom in computed
                if is_needed or (is_of_head and not is_mapped):
                    from_head.append(i)
            self._known[key] = None
            if tail:
                self._known[key] = self.make_parts(program, head, tail, from_head)
        return self._known[key]

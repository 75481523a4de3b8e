"""A traced jaxpr in two parts: the half-precision part, and what follows it in float32.

The *head* is every equation that a half-precision value comes from, and every one that takes such a
value if a cotangent comes back to it. The *tail* is the rest. Its backward pass needs no scale, and
the cotangents that leave it for the head say which scale the head needs.

A step in float32 whose result both parts use is in both. So a cotangent passes its derivative,
which may be small where the cotangent is large, before it goes to the head and is scaled.

Control flow and functions with derivative rules belong to one part as a whole. `shard_map`, and
calls that only run their jaxpr, such as `jit` and `jax.checkpoint`, are divided in two.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._autocast.product_owner import outermost
from .._jax import jaxprs
from .._jax.jaxprs import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Search,
    programs,
    variables,
)
from .half_finder import HalfFinder
from .jaxpr_parts import Crossing, Part, Split, Step, find_divisible, is_mapped, refs_of


def split(program: ClosedJaxpr, with_products: bool) -> Split:
    """Returns a jaxpr in its two parts, of which the tail returns all outputs.

    `with_products` says whether matrix products in float32 count as half precision.
    """
    jaxpr = program.jaxpr
    finder = HalfFinder(with_products)
    pulled_outputs = [True] * len(jaxpr.outvars)
    finder.search(program, pulled_outputs, outermost(program))
    splitter = _Splitter(finder.holds_half)
    head, tail = splitter.divide(program, needed=())
    return splitter.make_parts(program, head, tail, from_head=[])


class _Splitter:
    """Splits a jaxpr, and those that its calls hold.

    A jaxpr that is called many times is split once for each set of outputs that the head needs.
    So each part stays one function that is called many times.
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
                return head, [*_list_shared(head, tail), *tail]
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
        of_tail = set(_list_computed(tail))
        of_head = [var for var in _list_computed(head) if var not in of_tail]
        returned, others = _divide_outputs(jaxpr.outvars, from_head)
        tail_part = Part("tail", tail, [*of_head, *jaxpr.invars], others, constants)
        computed = set(of_head)
        crossing = [var for var in tail_part.inputs if var in computed]
        head_outputs = [*crossing, *returned]
        head_part = Part("head", head, jaxpr.invars, head_outputs, constants)
        return Split(
            inputs=list(jaxpr.invars),
            head=head_part,
            tail=tail_part,
            crossing=crossing,
            from_head=from_head,
        )

    def _divide_equation(self, eqn: JaxprEqn, in_head: set[Any]) -> list[Step]:
        """Returns an equation as one step, or as two if it is a call with a head and a tail."""
        whole = Step(eqn, eqn.invars, eqn.outvars, self._holds_half(eqn))
        inner = find_divisible(eqn)
        if not whole.holds_half or inner is None:
            return [whole]
        # What a device returns has another shape than what a `shard_map` does, so that its tail
        # returns all of it, and belongs to the head as a whole if that reads any.
        mapped = is_mapped(eqn)
        needed = [not mapped and var in in_head for var in eqn.outvars]
        parts = self._split_call(inner, needed, mapped)
        if parts is None:
            return [whole]
        # What each variable of the jaxpr is outside of the call.
        outside: dict[Any, Any] = dict(zip(parts.inputs, eqn.invars, strict=True))
        crossing = []
        for var in parts.crossing:
            # A new one, as a jaxpr may be called twice.
            outside[var] = Crossing(var.aval)
            crossing.append(outside[var])
        returned, others = _divide_outputs(eqn.outvars, parts.from_head)
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
        self, program: ClosedJaxpr, needed: Sequence[bool], mapped: bool
    ) -> Split | None:
        """Returns the parts of a jaxpr that is called, `None` if all of it is the head's."""
        jaxpr = program.jaxpr
        key = jaxpr, tuple(map(id, program.consts)), tuple(needed), mapped
        if key in self._known:
            return self._known[key]
        parts = None
        head, tail = self.divide(program, itertools.compress(jaxpr.outvars, needed))
        if tail:
            computed = set(_list_computed(head))
            from_head = []
            for i, atom in enumerate(jaxpr.outvars):
                is_of_head = not isinstance(atom, Literal) and atom in computed
                if needed[i] or (is_of_head and not mapped):
                    from_head.append(i)
            parts = self.make_parts(program, head, tail, from_head)
        self._known[key] = parts
        return parts


def _list_shared(head: Sequence[Step], tail: Sequence[Step]) -> list[Step]:
    """Returns the steps of the head that the tail does again, as it uses their results.

    These are in float32, and not as expensive as a loop may be. The compiler merges what both parts
    do in the forward pass.
    """
    used: set[Any] = set()
    for step in tail:
        used.update(variables(step.invars))
    shared = []
    for step in reversed(head):
        if used.isdisjoint(step.outvars) or step.holds_half or _holds_loop(step.eqn):
            continue
        has_effects = step.eqn.effects or any(refs_of(step))
        if not has_effects and all(map(_is_inexact, step.outvars)):
            shared.append(step)
            used.update(variables(step.invars))
    return shared[::-1]


def ends_in_loop(steps: Iterable[Step], outputs: Iterable[Any]) -> bool:
    """Returns whether some outputs of steps come out of what is never divided, such as a loop."""
    ends = set(variables(outputs))
    return any(not ends.isdisjoint(step.outvars) and _is_loop(step) for step in steps)


def _is_loop(step: Step) -> bool:
    """Returns whether a step is a loop, or a call whose outputs come out of one."""
    if step.part is not None:
        return ends_in_loop(step.part.steps, step.part.outputs)
    called = find_divisible(step.eqn)
    if called is None:
        return _may_loop(step.eqn)
    whole = [Step(eqn, eqn.invars, eqn.outvars, True) for eqn in called.jaxpr.eqns]
    return ends_in_loop(whole, called.jaxpr.outvars)


def _may_loop(eqn: JaxprEqn) -> bool:
    """Returns whether an equation holds a jaxpr, and is not just a call of it."""
    return any(programs(eqn)) and not jaxprs.is_divisible(eqn)


_holds_loop = Search(_may_loop)


def _is_inexact(var: Atom) -> bool:
    return jaxprs.holds_inexact(var.aval)


def _list_computed(steps: Sequence[Step]) -> list[Any]:
    """Returns the variables that some steps compute."""
    return [var for step in steps for var in step.outvars]


def _divide_outputs(
    outputs: Sequence[Any], from_head: list[int]
) -> tuple[list[Any], list[Any]]:
    """Returns the outputs that the head returns itself, and the others."""
    of_head = [outputs[i] for i in from_head]
    others = [output for i, output in enumerate(outputs) if i not in from_head]
    return of_head, others

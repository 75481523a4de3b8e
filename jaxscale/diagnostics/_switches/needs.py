"""Needs: what each equation of a program is needed for.

Nothing here looks at values. The jaxpr of `value_and_grad` has the equations of both passes in one
list, and some that no output needs. Those that the loss needs are the forward pass. Those that only
the gradients need are the backward pass: it includes what `remat` computes again, and the
derivatives that JAX computes ahead of time.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import _jaxprs
from ..._autocast.table import OPAQUE
from ..._jaxprs import (
    Form,
    Held,
    Jaxpr,
    JaxprEqn,
    Literal,
    UnknownFormError,
    is_ref,
    open_equation,
)

# What an equation is needed for, as bits. An equation with none of them is dead code.
FORWARD = 1
BACKWARD = 2

# The equations that hold another one, outermost first.
Around = tuple[JaxprEqn, ...]

# An equation and those that hold it, by their numbers in memory, as long as these live.
EquationKey = tuple[int, ...]

# The needs of several values or results, in their order.
Needs = tuple[int, ...]


def key_of(eqn: JaxprEqn, around: Around) -> EquationKey:
    """Returns what tells an equation from all others, and from itself in another call."""
    return tuple(map(id, (*around, eqn)))


def hides_equations(eqn: JaxprEqn) -> bool:
    """Returns whether there is more than one operation, or may be, in an equation that runs as one.

    The function of a `scatter` or a reduction is one operation.
    """
    if _jaxprs.operation(eqn) in _jaxprs.FORMS.keys() | OPAQUE:
        return True
    programs = list(_jaxprs.programs(eqn))
    if not programs:
        return _jaxprs.reaches_program(eqn)
    return any(len(program.eqns) > 1 for program in programs)


def results(of: Jaxpr | JaxprEqn) -> list[Any]:
    """Returns the outputs of a jaxpr or an equation, and the refs that it may write to."""
    return [*of.outvars, *filter(is_ref, of.invars)]


def split(values: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """Returns the first of some values in groups of these sizes, and then a group of the others."""
    groups = []
    for size in sizes:
        groups.append(values[:size])
        values = values[size:]
    return [*groups, values]


def unite(needs: Needs) -> int:
    """Returns what an equation as a whole is needed for, given the needs of its results."""
    whole = 0
    for need in needs:
        whole |= need
    return whole


class Usage(NamedTuple):
    """What the values in a jaxpr are needed for."""

    equations: list[Needs]  # for each equation, those of its results
    inputs: Needs


class Analysis:
    """Finds out what the equations of jaxprs are needed for, and remembers it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Jaxpr, Needs], Usage] = {}

    def analyse(self, jaxpr: Jaxpr, needs: Needs) -> Usage:
        """Returns what the values in a jaxpr are needed for, given the needs of its results."""
        key = (jaxpr, needs)
        if key not in self._known:
            self._known[key] = self._find_usage(jaxpr, needs)
        return self._known[key]

    def open(self, eqn: JaxprEqn, needs: Needs) -> list[tuple[Held, Needs]]:
        """Returns the programs of an equation, and what their results are needed for."""
        try:
            programs = open_equation(eqn)
        except UnknownFormError:
            return []
        return [(held, self._find_inner_needs(eqn, held, needs)) for held in programs]

    def _find_inner_needs(self, eqn: JaxprEqn, held: Held, needs: Needs) -> Needs:
        jaxpr = held.program.jaxpr
        if _jaxprs.form_of(eqn) is Form.WHILE:
            # What is carried decides how often it runs, so all of it is needed alike.
            return (unite(needs),) * len(results(jaxpr))
        refs = [i for i, var in enumerate(jaxpr.invars) if is_ref(var)]
        outside = [eqn.outvars[number] for number in held.outputs]
        outside += [eqn.invars[held.inputs[i]] for i in refs]
        need_of = dict(zip(results(eqn), needs, strict=True))
        inner = [need_of[atom] for atom in outside]
        fed_back = [*held.fed_back, *enumerate(refs, len(jaxpr.outvars))]
        while True:
            # A carry or a ref is also needed for what the next turn computes from it.
            inputs = self.analyse(jaxpr, tuple(inner)).inputs
            wider = list(inner)
            for output, number in fed_back:
                wider[output] |= inputs[number]
            if wider == inner:
                return tuple(inner)
            inner = wider

    def _find_usage(self, jaxpr: Jaxpr, needs: Needs) -> Usage:
        needs_by_var: dict[Any, int] = collections.defaultdict(int)

        def add(atoms: Sequence[Any], needs: Needs) -> None:
            for atom, need in zip(atoms, needs, strict=True):
                if not isinstance(atom, Literal):
                    needs_by_var[atom] |= need

        add(results(jaxpr), needs)
        equations = []
        for eqn in reversed(jaxpr.eqns):
            # A value written to a ref is needed for all that later reads of the ref are.
            eqn_needs = tuple(needs_by_var[var] for var in results(eqn))
            equations.append(eqn_needs)
            add(eqn.invars, self._find_input_needs(eqn, eqn_needs))
        equations.reverse()
        return Usage(equations, inputs=tuple(needs_by_var[var] for var in jaxpr.invars))

    def _find_input_needs(self, eqn: JaxprEqn, needs: Needs) -> Needs:
        """Returns what the inputs of an equation are needed for."""
        # Those that no program takes, such as the index of a branch, are needed for all of it.
        inputs = [unite(needs)] * len(eqn.invars)
        opened = self.open(eqn, needs)
        for number in {n for held, _ in opened for n in held.inputs}:
            inputs[number] = 0
        for held, inner in opened:
            inside = self.analyse(held.program.jaxpr, inner).inputs
            for number, need in zip(held.inputs, inside, strict=True):
                inputs[number] |= need
        return tuple(inputs)

"""Needs: the equations that hold others, and what each equation is needed for.

Nothing here looks at values. The jaxpr of `value_and_grad` has the equations of both passes in one
list, and some that no output needs. Those that the loss needs are the forward pass. Those that only
the gradients need are the backward pass: it includes what `remat` computes again, and the
derivatives that JAX computes ahead of time.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ... import _jax
from ..._autocast.table import OPAQUE
from ..._jax import (
    ClosedJaxpr,
    Form,
    Jaxpr,
    JaxprEqn,
    Literal,
    Scan,
    UnknownFormError,
    While,
    is_ref,
)

# What an equation is needed for, as bits. An equation with none of them is dead code.
FORWARD = 1
BACKWARD = 2
EFFECT = 4

# The equations that hold another one, outermost first.
Around = tuple[JaxprEqn, ...]

# An equation and those that hold it, by their numbers in memory. Keys of several runs may be
# compared while their `TracedBackward` lives, as it holds these equations.
EquationKey = tuple[int, ...]

# The needs of several values or results, in their order.
Needs = tuple[int, ...]

_READERS: dict[Form, Callable[[JaxprEqn], Any]] = {
    **dict.fromkeys(_jax.CALL_FORMS, _jax.callee),
    Form.SCAN: _jax.scan,
    Form.WHILE: _jax.while_loop,
    Form.BRANCHES: _jax.branches,
}

# An equation of these runs as one if its parameters are not known, or if it is that of devices.
HOLDERS = _jax.FORMS.keys()


def key_of(eqn: JaxprEqn, around: Around) -> EquationKey:
    """Returns what tells an equation from all others, and from itself in another call."""
    return tuple(map(id, (*around, eqn)))


def read_holder(
    eqn: JaxprEqn,
) -> ClosedJaxpr | Scan | While | list[ClosedJaxpr] | None:
    """Returns the jaxpr that an equation calls, its loop, or its branches; `None` for others."""
    reader = _READERS.get(_jax.form_of(eqn))
    if reader is None:
        return None
    try:
        return reader(eqn)
    except UnknownFormError:
        return None


def hides_equations(eqn: JaxprEqn) -> bool:
    """Returns whether there is more than one operation, or may be, in an equation that runs as one.

    The function of a `scatter` or a reduction is one operation.
    """
    if _jax.operation(eqn) in HOLDERS | OPAQUE:
        return True
    programs = list(_jax.programs(eqn))
    if not programs:
        return _jax.reaches_program(eqn)
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


def unite(eqn: JaxprEqn, needs: Needs) -> int:
    """Returns what an equation as a whole is needed for, given the needs of its results."""
    whole = 0
    if eqn.effects:
        whole = EFFECT
    for need in needs:
        whole |= need
    return whole


def _unite_each(first: Needs, second: Needs) -> Needs:
    """Returns what each of several values is needed for, given two sets of needs of theirs."""
    return tuple(one | other for one, other in zip(first, second, strict=True))


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

    def find_body_needs(self, loop: Scan, needs: Needs) -> Needs:
        """Returns what the results of a `scan`'s body are needed for, given those of the `scan`."""
        jaxpr = loop.body.jaxpr
        while True:
            # A carry or a ref is also needed for what the next iteration computes from it.
            inputs = self.analyse(jaxpr, needs).inputs
            _, carries, _ = split(inputs, loop.consts, loop.carries)
            stacked = (0,) * (len(jaxpr.outvars) - loop.carries)
            refs = [
                need
                for var, need in zip(jaxpr.invars, inputs, strict=True)
                if is_ref(var)
            ]
            wider = _unite_each(needs, (*carries, *stacked, *refs))
            if wider == needs:
                return needs
            needs = wider

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
        whole = unite(eqn, needs)
        match read_holder(eqn):
            case ClosedJaxpr() as called:
                return self.analyse(called.jaxpr, needs).inputs
            case Scan() as loop:
                body_needs = self.find_body_needs(loop, needs)
                inputs = self.analyse(loop.body.jaxpr, body_needs).inputs
                consts, _, slices = split(inputs, loop.consts, loop.carries)
                return (*consts, *body_needs[: loop.carries], *slices)
            case list() as branches:
                operands = (0,) * (len(eqn.invars) - 1)
                for branch in branches:
                    usage = self.analyse(branch.jaxpr, needs)
                    operands = _unite_each(operands, usage.inputs)
                return whole, *operands  # the first input is the index of the branch
        # The carry of a `while` decides how often it runs, so all inputs are needed alike.
        return (whole,) * len(eqn.invars)

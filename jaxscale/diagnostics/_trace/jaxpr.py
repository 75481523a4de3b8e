"""Which equations hold other equations, and what each equation is needed for.

Nothing here looks at values. The jaxpr of `value_and_grad` has the equations of both passes in one
list, and some that no output needs. Those that the loss needs are the forward pass. Those that only
the gradients need are the backward pass: it includes what `remat` computes again, and the
derivatives that JAX computes ahead of time.
"""

import collections
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

from ... import _jax
from ..._autocast.table import OPAQUE
from ..._jax import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Scan, UnknownFormError, While, is_ref

# What an equation is needed for, as bits. An equation with none of them is dead code.
FORWARD, BACKWARD, EFFECT = 1, 2, 4

# The needs of several values or results, in their order.
Needs = tuple[int, ...]

_READERS = {
    **dict.fromkeys(_jax.CALLS, _jax.callee),
    **{"scan": _jax.scan, "while": _jax.while_loop, "cond": _jax.branches},
}

# An equation of these runs as one if its parameters are not known, or if it is that of devices.
HOLDERS = _READERS.keys() | {"shard_map", "pmap", "xla_pmap"}


def opened(eqn: JaxprEqn) -> ClosedJaxpr | Scan | While | list[ClosedJaxpr] | None:
    """Returns the jaxpr that an equation calls, its loop, or its branches; `None` for others."""
    read: Any = _READERS.get(_jax.operation(eqn))
    try:
        return read(eqn) if read else None
    except UnknownFormError:
        return None


def hides_equations(eqn: JaxprEqn) -> bool:
    """Returns whether there is more than one operation, or may be, in an equation that runs as one.

    The function of a `scatter` or a reduction is one operation.
    """
    if _jax.operation(eqn) in HOLDERS | OPAQUE:
        return True
    held = list(_jax.programs(eqn))
    return any(len(each.eqns) > 1 for each in held) if held else _jax.reaches_program(eqn)


def results(of: Jaxpr | JaxprEqn) -> list[Any]:
    """Returns the outputs of a jaxpr or an equation, and the refs that it may write to."""
    return [*of.outvars, *filter(is_ref, of.invars)]


class Analysis:
    """What the equations of jaxprs are needed for. It remembers jaxprs it has analysed."""

    def __init__(self) -> None:
        self._known: dict[tuple[Jaxpr, Needs], tuple[list[Needs], Needs]] = {}

    def scanned(self, loop: Scan, needs: Needs) -> Needs:
        """Returns what the results of the body of a `scan` are needed for."""
        jaxpr, consts, size = loop.body.jaxpr, loop.consts, loop.carries
        while True:
            # A carry or a ref is also needed for what the next iteration computes from it.
            inputs = self.analyse(jaxpr, needs)[1]
            carry, stacked = inputs[consts : consts + size], (0,) * (len(jaxpr.outvars) - size)
            refs = itertools.compress(inputs, map(is_ref, jaxpr.invars))
            wider = tuple(map(operator.or_, needs, (*carry, *stacked, *refs)))
            if wider == needs:
                return needs
            needs = wider

    def analyse(self, jaxpr: Jaxpr, needs: Needs) -> tuple[list[Needs], Needs]:
        """Returns the needs of the results of each equation and of the inputs of a jaxpr."""
        key = (jaxpr, needs)
        if key not in self._known:
            found: dict[Any, int] = collections.defaultdict(int)
            outputs = []

            def need_for(atoms: Sequence[Any], needs: Needs) -> None:
                for atom, need in zip(atoms, needs, strict=True):
                    if not isinstance(atom, Literal):
                        found[atom] |= need

            need_for(results(jaxpr), needs)
            for eqn in reversed(jaxpr.eqns):
                # A value written to a ref is needed for all that later reads of the ref are.
                outputs.append(tuple(found[var] for var in results(eqn)))
                need_for(eqn.invars, self._of_inputs(eqn, outputs[-1]))
            self._known[key] = outputs[::-1], tuple(found[var] for var in jaxpr.invars)
        return self._known[key]

    def _of_inputs(self, eqn: JaxprEqn, needs: Needs) -> Needs:
        every = union(eqn, needs)
        match opened(eqn):
            case ClosedJaxpr() as called:
                return self.analyse(called.jaxpr, needs)[1]
            case Scan() as loop:
                consts, size = loop.consts, loop.carries
                needs = self.scanned(loop, needs)
                inputs = self.analyse(loop.body.jaxpr, needs)[1]
                return (*inputs[:consts], *needs[:size], *inputs[consts + size :])
            case list() as branches:
                of_branches = [self.analyse(branch.jaxpr, needs)[1] for branch in branches]
                pairs = zip(*of_branches, strict=True)
                return every, *(functools.reduce(operator.or_, of) for of in pairs)
        # The carry of a `while` decides how often it runs, so all inputs are needed alike.
        return (every,) * len(eqn.invars)


def union(eqn: JaxprEqn, needs: Needs) -> int:
    """Returns what an equation as a whole is needed for, given the needs of its results."""
    return functools.reduce(operator.or_, needs, EFFECT if eqn.effects else 0)

"""Counts of the numbers that each half-precision gradient is a sum of, from a traced program.

A parameter in half precision that is read many times, as an embedding is by each token or a weight
in each turn of a loop, gets its gradient as a sum in half precision. Such a sum stops growing. How
long it is depends on the batch, so on a small batch no number shows what is lost on a large one.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._jaxprs import (
    ClosedJaxpr,
    Form,
    Jaxpr,
    JaxprEqn,
    Literal,
    Op,
    UnknownFormError,
    does,
    find_pulled_inputs,
    form_of,
    holds_half,
    open_equation,
    scan,
    slice_sizes,
)
from ..diagnostics._switches.places import find_line


class SumOfGradient(NamedTuple):
    """A gradient that is summed in half precision.

    Attributes:
      leaf: the parameter.
      dtype: its dtype, and that of the sum.
      numbers: of how many numbers the sum is, at most.
      where: the file and line of the equation that adds most of them, or `""`.
    """

    leaf: str
    dtype: str
    numbers: int
    where: str


class _Count(NamedTuple):
    numbers: int
    where: str = ""


def count_summands(
    program: ClosedJaxpr, leaves: Sequence[str]
) -> tuple[SumOfGradient, ...]:
    """Returns of how many numbers the gradients of the first inputs of a program are sums.

    `leaves` has the names of these inputs. Those that are not in half precision are left out.
    """
    counts = _count_inputs(program.jaxpr, [_Count(1)] * len(program.jaxpr.outvars))
    sums = []
    for leaf, var, count in zip(leaves, program.jaxpr.invars, counts, strict=False):
        if holds_half(var.aval):
            dtype = str(getattr(var.aval, "dtype", ""))
            sums.append(SumOfGradient(leaf, dtype, count.numbers, count.where))
    return tuple(sums)


def _count_inputs(jaxpr: Jaxpr, of_outputs: Sequence[_Count]) -> list[_Count]:
    """Returns for each input of how many numbers its cotangent is a sum, given that of outputs."""
    found: dict[Any, list[_Count]] = {}
    for atom, count in zip(jaxpr.outvars, of_outputs, strict=True):
        if not isinstance(atom, Literal):
            found.setdefault(atom, []).append(count)
    for eqn in reversed(jaxpr.eqns):
        outputs = [_add(found.get(var, [])) for var in eqn.outvars]
        for atom, count in zip(eqn.invars, _count_through(eqn, outputs), strict=True):
            if not isinstance(atom, Literal) and holds_half(atom.aval):
                found.setdefault(atom, []).append(count)
            elif not isinstance(atom, Literal) and count.numbers:
                # a sum in float32 is rounded once
                found[atom] = [_Count(1)]
    return [_add(found.get(var, [])) for var in jaxpr.invars]


def _add(counts: Sequence[_Count]) -> _Count:
    """Returns how many numbers there are, and the line that most of them are from."""
    if not counts:
        return _Count(0)
    most = max(counts, key=lambda count: count.numbers)
    return _Count(sum(count.numbers for count in counts), most.where)


def _count_through(eqn: JaxprEqn, outputs: Sequence[_Count]) -> list[_Count]:
    """Returns how many numbers an equation sends back to each of its inputs."""
    try:
        held = open_equation(eqn)
    except UnknownFormError:
        held = []
    if held and form_of(eqn) is not Form.CUSTOM_VJP:
        return _count_in_programs(eqn, held, outputs)
    sent = _Count(0)
    op = does(eqn.primitive.name)
    if any(output.numbers for output in outputs) and Op.NO_GRADIENT not in op:
        sent = _Count(1, find_line(eqn, ()).where)
        # What only passes on a sum that was made in half precision has the same summands.
        of_half = [
            output
            for output, var in zip(outputs, eqn.outvars, strict=True)
            if holds_half(var.aval)
        ]
        if Op.ELEMENTWISE in op or Op.MOVE in op:
            sent = max(of_half, key=lambda count: count.numbers, default=sent)
            sent = sent._replace(where=sent.where or find_line(eqn, ()).where)
    sent_to = [sent if pulled else _Count(0) for pulled in find_pulled_inputs(eqn)]
    # Only slices that overlap are added in half precision. Other sums are reductions, which
    # hardware computes in float32.
    share = _count_slices(eqn)
    if Op.SUMS_BACKWARD in op and share > 1:
        sent_to[0] = _Count(sent.numbers * share, find_line(eqn, ()).where)
    return sent_to


def _count_slices(eqn: JaxprEqn) -> int:
    """Returns how many of the slices that an equation reads may be one and the same."""
    sizes = slice_sizes(eqn)
    if not sizes:
        return 1
    aval: Any = eqn.outvars[0].aval
    return math.prod(aval.shape) // max(math.prod(sizes), 1)


def _count_in_programs(
    eqn: JaxprEqn, held: Sequence[Any], outputs: Sequence[_Count]
) -> list[_Count]:
    """Returns how many numbers the programs in an equation send back to each of its inputs."""
    counts = [_Count(0)] * len(eqn.invars)
    consts = 0
    length = 1
    if form_of(eqn) is Form.SCAN:
        loop = scan(eqn)
        consts, length = loop.consts, loop.length
    for program, inputs, numbers, fed_back in held:
        of_outputs = [outputs[number] for number in numbers]
        of_outputs += [_Count(1)] * (len(program.jaxpr.outvars) - len(of_outputs))
        # What a turn carries to the next is read there.
        for number, _ in fed_back:
            of_outputs[number] = max(of_outputs[number], _Count(1))
        inside = _count_inputs(program.jaxpr, of_outputs)
        for i, (number, count) in enumerate(zip(inputs, inside, strict=True)):
            # a program that JAX has cached does not know the line that calls it
            where = count.where or find_line(eqn, ()).where
            turns = length if i < consts else 1
            count = _Count(count.numbers * turns, where)
            counts[number] = max(counts[number], count)
    return counts

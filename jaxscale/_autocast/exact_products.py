"""Products whose numbers must be exact: counts, places and indices.

A flat index of 4001 is 4000 in float16, and a count of 70,000 is inf. Such numbers are told by
where they come from, or by where they go:

- They come from integers alone: from indices, masks and constants of the text, and not from a float
  that the jaxpr is given, nor from random bits.
- Or nothing but integers is made of them, as by a cast, a comparison or an `argmax`. What another
  product reads does not count, so a model is in half precision also where only its prediction is
  asked for, all but the last product.

What `jax.checkpoint` computes again for a derivative is often only compared, as for that of a ReLU.
So such a product is exact if it was exact in the forward pass, which it is from the same line as.
"""

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from .._jax import jaxprs
from .._jax.jaxprs import (
    Atom,
    ClosedJaxpr,
    Flags,
    Held,
    Jaxpr,
    JaxprEqn,
    Literal,
    Op,
    closed,
    does,
    form_of,
    holds_inexact,
    once_for_each_program,
    variables,
)
from . import table

# What these return does not follow from the numbers that they read.
_UNRELATED = Op.READS_BITS | Op.RUNS_ELSEWHERE | Op.KERNEL | Op.ALGORITHM | Op.ON_REFS


class Use(enum.IntEnum):
    """The use of a value: of several uses, the largest counts."""

    NOTHING = 0
    INTEGERS = 1
    NUMBERS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Exact:
    """The products of a jaxpr that must be exact, and the facts from around that they follow from.

    Attributes:
      inputs: for each of its first inputs, whether it comes from integers alone.
      outputs: the uses of its first outputs.
      products: the identities of the products that must be exact.
      inside: what must be exact in the jaxprs of its equations, by the identity of the equation
        and the jaxpr. Those without such a product are left out.
      lines: the lines of all of them, each with the calls that lead to it.
    """

    inputs: Flags = ()
    outputs: tuple[Use, ...] = ()
    products: frozenset[int] = frozenset()
    inside: dict[tuple[int, Jaxpr], "Exact"] = dataclasses.field(default_factory=dict)
    lines: frozenset[Any] = frozenset()

    def inside_of(self, eqn: JaxprEqn, program: Jaxpr | ClosedJaxpr) -> "Exact":
        """Returns the exact products of a jaxpr that an equation holds."""
        return self.inside.get((id(eqn), closed(program).jaxpr), NOTHING_EXACT)


NOTHING_EXACT = Exact()


def find_exact(
    program: Jaxpr | ClosedJaxpr,
    inputs: Flags = (),
    outputs: tuple[Use, ...] = (),
    lines: frozenset[Any] = frozenset(),
) -> Exact:
    """Finds the exact products of a jaxpr: always the same object for the same arguments.

    `inputs` and `outputs` are as in `Exact`. Of other inputs and outputs nothing is known. `lines`
    are those of exact products in a forward pass that is not part of the jaxpr.
    """
    exact = _find_exact(program, inputs, outputs, lines)
    if exact.lines <= lines:
        return exact
    return _find_exact(program, inputs, outputs, lines | exact.lines)


@once_for_each_program
def _find_exact(
    program: Jaxpr,
    inputs: Flags,
    outputs: tuple[Use, ...],
    lines: frozenset[Any],
    is_again: bool = False,
) -> Exact:
    """Finds the exact products of a jaxpr, of which all or some are computed again."""
    counts = _find_counts(program, inputs)
    uses = _find_uses(program, outputs)
    products = set()
    inside = {}
    found: set[Any] = set()
    for eqn in program.eqns:
        again = is_again or jaxprs.is_computed_again(eqn)
        if eqn.primitive.name in table.PRODUCTS:
            (var,) = eqn.outvars
            line = jaxprs.traceback_of(eqn)
            is_index = uses.get(var) is Use.INTEGERS and (not again or line in lines)
            if var in counts or is_index:
                products.add(id(eqn))
                found.add(line)
        opened = _open(eqn)
        if not opened:
            continue
        counted = _count_in_turns(opened, [_is_count(v, counts) for v in eqn.invars])
        after = [uses.get(var, Use.NOTHING) for var in eqn.outvars]
        before = _use_in_turns(opened, eqn, after)
        for held in opened:
            inner_inputs = tuple(counted[number] for number in held.inputs)
            inner_outputs = _output_uses(held, after, before)
            exact = _find_exact(held.program, inner_inputs, inner_outputs, lines, again)
            if exact is not NOTHING_EXACT:
                inside[id(eqn), held.program.jaxpr] = exact
                found.update(exact.lines)
    if not products and not inside:
        return NOTHING_EXACT
    return Exact(inputs, outputs, frozenset(products), inside, frozenset(found))


def _open(eqn: JaxprEqn) -> Sequence[Held]:
    """Returns the jaxprs that an equation holds, if they can be read."""
    try:
        return jaxprs.open_equation(eqn)
    except jaxprs.UnknownFormError:
        return []


# Where numbers come from: from the inputs of a jaxpr to its outputs.


@once_for_each_program
def _find_counts(program: Jaxpr, inputs: Flags) -> set[Any]:
    """Returns the variables of floats that come from integers alone."""
    counts = set(itertools.compress(program.invars, inputs))
    for eqn in program.eqns:
        are_counts = [_is_count(atom, counts) for atom in eqn.invars]
        of_outputs = _count_after(eqn, are_counts)
        counts.update(itertools.compress(eqn.outvars, of_outputs))
    return counts


def _is_count(atom: Atom, counts: set[Any]) -> bool:
    if isinstance(atom, Literal):
        return True
    return not holds_inexact(atom.aval) or atom in counts


def _count_after(eqn: JaxprEqn, are_counts: Sequence[bool]) -> list[bool]:
    """Returns a flag for each output of an equation: it comes from integers alone."""
    if form_of(eqn) in table.WITH_RULES:
        # Its derivative may make a number of what is a boolean, as those of a sign do.
        return [all(are_counts)] * len(eqn.outvars)
    opened = _open(eqn)
    if opened:
        counted = _count_in_turns(opened, are_counts)
        outputs = [True] * len(eqn.outvars)
        for held in opened:
            inner = _count_outputs(held, counted)
            for number, is_count in zip(held.outputs, inner, strict=False):
                outputs[number] = outputs[number] and is_count
        return outputs
    done = does(eqn.primitive.name)
    is_related = bool(done) and not done & _UNRELATED
    return [is_related and all(are_counts)] * len(eqn.outvars)


def _count_in_turns(opened: Sequence[Held], are_counts: Sequence[bool]) -> list[bool]:
    """Returns a flag for each input of an equation: it comes from integers alone in each turn."""
    counted = list(are_counts)
    previous = None
    while counted != previous:
        previous = list(counted)
        for held in opened:
            outputs = _count_outputs(held, counted)
            for output, number in held.fed_back:
                carried = held.inputs[number]
                counted[carried] = counted[carried] and outputs[output]
    return counted


def _count_outputs(held: Held, counted: Sequence[bool]) -> list[bool]:
    inputs = tuple(counted[number] for number in held.inputs)
    counts = _find_counts(held.program, inputs)
    return [_is_count(atom, counts) for atom in held.program.jaxpr.outvars]


# Where numbers go: from the outputs of a jaxpr to its inputs.


@once_for_each_program
def _find_uses(program: Jaxpr, outputs: tuple[Use, ...]) -> dict[Any, Use]:
    """Returns the use of each variable that has one."""
    uses: dict[Any, Use] = {}

    def note(atoms: Sequence[Any], uses_of_atoms: Iterator[Use]) -> None:
        for atom, use in zip(atoms, uses_of_atoms, strict=False):
            for var in variables([atom]):
                if not holds_inexact(var.aval):
                    use = min(use, Use.INTEGERS)
                uses[var] = max(use, uses.get(var, Use.NOTHING))

    note(program.outvars, itertools.chain(outputs, itertools.repeat(Use.NUMBERS)))
    for eqn in reversed(program.eqns):
        after = [uses.get(var, Use.NOTHING) for var in eqn.outvars]
        note(eqn.invars, iter(_use_before(eqn, after)))
    return uses


def _use_before(eqn: JaxprEqn, after: Sequence[Use]) -> list[Use]:
    """Returns the use of each input of an equation, given those of its outputs."""
    use = max(after, default=Use.NOTHING)
    if any(map(jaxprs.is_ref, eqn.invars)):
        use = Use.NUMBERS  # what it writes is read later
    elif form_of(eqn) not in table.WITH_RULES and _open(eqn):
        return _use_in_turns(_open(eqn), eqn, after)
    elif eqn.primitive.name in table.PRODUCTS and use:
        use = Use.NUMBERS
    return [use] * len(eqn.invars)


def _use_in_turns(
    opened: Sequence[Held], eqn: JaxprEqn, after: Sequence[Use]
) -> list[Use]:
    """Returns the use of each input of an equation in all turns of its loop, if it is one."""
    # Such as the index of a branch, which no jaxpr takes.
    before = [max(after, default=Use.NOTHING)] * len(eqn.invars)
    for held in opened:
        for number in held.inputs:
            before[number] = Use.NOTHING
    previous = None
    while before != previous:
        previous = list(before)
        for held in opened:
            uses = _find_uses(held.program, _output_uses(held, after, before))
            for var, number in zip(held.program.jaxpr.invars, held.inputs, strict=True):
                before[number] = max(before[number], uses.get(var, Use.NOTHING))
    return before


def _output_uses(
    held: Held, after: Sequence[Use], before: Sequence[Use]
) -> tuple[Use, ...]:
    """Returns the uses of the outputs of a program: after the equation, and in the next turn."""
    if not held.outputs:
        return (Use.INTEGERS,)  # the test of a loop
    outputs = [after[number] for number in held.outputs]
    for output, number in held.fed_back:
        outputs[output] = max(outputs[output], before[held.inputs[number]])
    return tuple(outputs)

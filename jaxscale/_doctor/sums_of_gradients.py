"""Counts of the numbers that each half-precision gradient is a sum of.

A parameter in half precision that is read many times, as an embedding is by each token or a weight
in each turn of a loop, gets its gradient as a sum in half precision. Such a sum stops growing. How
long it is depends on the batch, so on a small batch no number shows what is lost on a large one.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import optax

from .._jax.jaxprs import (
    Form,
    Literal,
    Op,
    does,
    form_of,
    holds_half,
    is_half,
    programs,
    scan,
)
from .._trees.gradient_leaves import leaf_name, list_gradients
from .._trees.leaves import dtype_of
from ..diagnostics._switches.backward import OF_GRADIENT
from ..diagnostics._switches.equations import EquationKey
from ..diagnostics._switches.operations import Keys, Operation, Operations


class SumOfGradient(NamedTuple):
    """A gradient that is summed in half precision.

    Attributes:
      leaf: the parameter.
      dtype: its dtype, and that of the sum.
      numbers: of how many numbers the sum is, at most.
      where: the file and line of the operation that adds most of them, or `""`.
    """

    leaf: str
    dtype: str
    numbers: int
    where: str


class _Count(NamedTuple):
    numbers: int = 0
    where: str = ""


def count_summands(
    operations: Operations, params: optax.Params
) -> tuple[SumOfGradient, ...]:
    """Returns of how many numbers the gradients of half-precision parameters are sums."""
    counts: dict[EquationKey, _Count] = {}
    for key, operation in operations.by_key.items():
        if operation.place.is_backward:
            counts[key] = _count(key, operation, counts)
    sums = []
    for path, leaf in list_gradients(params):
        if is_half(dtype_of(leaf)):
            name = leaf_name(path)
            count = _find_most(counts, operations.makers[OF_GRADIENT + name])
            sums.append(SumOfGradient(name, str(dtype_of(leaf)), *count))
    return tuple(sums)


def _find_most(counts: Mapping[EquationKey, _Count], makers: Keys) -> _Count:
    # What is computed later, in a turn of a loop, is not known yet.
    return max((counts[key] for key in makers if key in counts), default=_Count())


def _count(
    key: EquationKey, operation: Operation, counts: Mapping[EquationKey, _Count]
) -> _Count:
    """Returns of how many numbers of the backward pass a result is a sum in half precision."""
    eqn = operation.eqn
    op = does(eqn.primitive.name)
    if all(isinstance(atom, Literal) for atom in eqn.invars):
        return _Count()  # the zeros that a sum begins with
    of_inputs = [_find_most(counts, makers) for makers in operation.makers]
    most = max(of_inputs, default=_Count())
    if not (Op.ELEMENTWISE in op or Op.MOVE in op):
        most = _Count()
    most = max(most, _Count(1))
    # A sum in float32 is rounded once. So are reductions, which hardware computes in float32.
    if not holds_half(eqn.outvars[0].aval):
        return most
    numbers = 0
    if _adds_slices(operation):
        target, _, slices = of_inputs
        indices: Any = eqn.invars[1].aval
        num_slices = math.prod(indices.shape[:-1])
        numbers = target.numbers + max(slices.numbers, 1) * num_slices
    # An addition of the model is arithmetic. Passed on by JAX, its gradient is not a sum.
    elif Op.ADDS in op and Op.ELEMENTWISE in op and Op.ARITHMETIC not in op:
        numbers = sum(count.numbers for count in of_inputs)
        if any(key in makers for makers in operation.makers):
            numbers *= _count_turns(operation)
    if numbers <= most.numbers:
        return most
    return _Count(numbers, operation.place.line.where)


def _adds_slices(operation: Operation) -> bool:
    """Returns whether an operation adds slices, which may overlap, to the places of indices."""
    if len(operation.makers) != 3:
        return False
    inner = [eqn for program in programs(operation.eqn) for eqn in program.eqns]
    return any(Op.ADDS in does(eqn.primitive.name) for eqn in inner)


def _count_turns(operation: Operation) -> int:
    """Returns how often the loop around an operation runs, if that is known."""
    for eqn in reversed(operation.around):
        if form_of(eqn) is Form.SCAN:
            return scan(eqn).length
    return 1

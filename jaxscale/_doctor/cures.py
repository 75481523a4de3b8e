"""Cures that are better than a cast to float32: what was found, what is tried, and what to write.

`CURES` is the table. A cure is told only if the model was right with it: through the switches, or
in a program in which some operations are not rounded, which is what the cure comes to.
"""

import math
import re
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import numpy as np

from .._jaxprs import Literal, Op, primitives_that
from ..diagnostics._switches.needs import EquationKey
from ..diagnostics._switches.operations import Operation, Operations
from ..diagnostics._switches.places import Line
from ..diagnostics._switches.search import CLOSE, Birth, Blame, ErrorOf, Search
from ..diagnostics._switches.switches import Limits, Variant

_KEEP_AWAY = (
    "Here the function or its derivative has no finite value, as a root, a logarithm or a division "
    "has none at 0. Keep the operand away from such a point: "
)
CURES = {
    # Numbers that become 0, 1 or inf before their logarithm or their quotient is taken.
    "softmax": "These are probabilities, and then their logarithm is taken. Write "
    "`jax.nn.log_softmax(logits)` instead of `log(softmax(logits))`: {dtype} holds the logarithm "
    "of a small probability, but not the probability.",
    "sigmoid": "These are probabilities, and then their logarithm is taken. Write "
    "`jax.nn.log_sigmoid(logits)` instead of `log(sigmoid(logits))`, and "
    "`jax.nn.log_sigmoid(-logits)` for the logarithm of 1 minus them.",
    "product": "This is a product of many numbers. Add up their logarithms instead: {dtype} "
    "holds that sum, but not the product.",
    "exponential": "These are exponentials, and then their logarithm is taken. Compute with "
    "the exponents instead: the logarithm of `exp(x)` is `x`.",
    "logarithm of a sum": "This is the logarithm of a sum of exponentials. Write "
    "`jax.nn.logsumexp(x)` instead: it subtracts the maximum first.",
    "exponential of a row": "Subtract the maximum of each row before the exponential, as "
    "`jax.nn.softmax` and `jax.nn.logsumexp` do: then no exponential is above 1.",
    # What a narrow format cannot hold.
    "mask": "For a mask, use -1e4 instead of -1e9 or `finfo.min`.",
    # What is not finite in float32 either.
    "masked row": "In a row that is masked as a whole, softmax is NaN. Mask with a number that "
    "{dtype} holds, such as -1e4, and leave such rows out of the loss.",
    "negative operand": "The operand is negative, {least}, as a difference of two large numbers "
    "may become. An epsilon does not help: compute the difference another way, a variance as "
    "`((x - x.mean())**2).mean()`.",
    "inner where": "The loss is finite, as a `jnp.where` takes none of these numbers. "
    "Its derivative is 0 times that of this operation, which is NaN. Put another `jnp.where` "
    "inside, around the operand: `jnp.where(ok, f(jnp.where(ok, x, 1.0)), y)` instead of "
    "`jnp.where(ok, f(x), y)`.",
    "index": "An index is out of range, where JAX fills in NaN. Check the labels, tokens or "
    "positions.",
    "exponential of a large number": "Even float32 cannot hold this exponential: clip the "
    "exponent, or subtract the maximum first, as `jax.nn.softmax` does.",
    "operand of any size": f"{_KEEP_AWAY}clip it, add 1e-3 to it in float32, or replace it with "
    "`jnp.where`.",
    # Most probabilities are far below 1e-3.
    "logarithm of a probability": f"{_KEEP_AWAY}clip it, or replace it with `jnp.where` first. "
    "Compute the logarithm of a probability from the logits, with `jax.nn.log_softmax` or "
    "`jax.nn.log_sigmoid`.",
    "operand from 0 to 1": f"{_KEEP_AWAY}clip it, or replace it with `jnp.where` first.",
}

_MASK = r"mask|-\s*1e\d|finfo"
_OF_NEGATIVE_OPERANDS = ("log", "sqrt", "rsqrt", "log1p", "pow")
_INDEXED = ("gather", "dynamic_slice", "scatter")

_EXPONENTIALS = primitives_that(Op.EXPONENTIAL)
_LOGARITHMS = primitives_that(Op.LOGARITHM)
_SIGMOIDS = primitives_that(Op.SIGMOID)
_DIVIDES = primitives_that(Op.DIVIDES)
_MULTIPLIES = primitives_that(Op.MULTIPLIES)
_ADDS = primitives_that(Op.ADDS)
_SUBTRACTS = primitives_that(Op.SUBTRACTS) - {"neg"}
_PRODUCTS_OF_TWO = primitives_that(Op.MULTIPLIES | Op.ELEMENTWISE)
_SUMS = primitives_that(Op.ADDS | Op.REDUCTION)
_MOVES = primitives_that(Op.PASSES_ON) | primitives_that(Op.MOVE) | {"neg"}
_EXTREMES = primitives_that(Op.PASSES_ON | Op.REDUCTION)
_LINEAR = _MOVES | _ADDS | _SUBTRACTS
_SELECTS = primitives_that(Op.SELECTS)
_ELEMENTS = primitives_that(Op.ELEMENTWISE) | _MOVES
# What may lie between an exponential and the logarithm of what is made of it.
_BETWEEN = (
    _LINEAR | _MULTIPLIES | _DIVIDES | _SUMS | primitives_that(Op.PRODUCT)
) - primitives_that(Op.LIMITS)
_MANY = 64  # a sum of this many numbers, each with its full weight, is worth a word
_MANY_FACTORS = 4  # products in a row: more than a formula has


class Sum(NamedTuple):
    """A sum over many numbers that is the loss, or a part of it."""

    where: str  # file and line, or `""`
    size: int  # how many numbers are added up
    weight: float  # the loss is this times the sum: of a mean, one over the size
    path: tuple[EquationKey, ...]  # the operations from the loss to the sum


def find_cure(search: Search, blame: Blame, error_of: ErrorOf, is_mask: bool) -> str:
    """Returns the name of what helps at a line, if something is better than a cast, or `""`.

    A mask is a cure only if `is_mask` allows it.
    """
    places = search.board.places
    operations = search.board.operations
    if (
        is_mask
        and blame.limit == "overflow"
        and re.search(_MASK, blame.place.line.text)
    ):
        at_line = frozenset(p for p in places if p.line == blame.place.line)
        variant = Variant(limited=at_line)
        if error_of(places, Limits(bounded=True), variant) <= CLOSE:
            return "mask"
    for name, keys, lines in _list_regions(operations, blame):
        # Their derivatives come from the result instead.
        backward = [p for p in places if p.is_backward and p.line in lines]
        variant = Variant(unrounded=frozenset([*keys, *backward]))
        if error_of(places, variant=variant) <= CLOSE:
            return name
    return ""


def find_cure_in_float32(search: Search, birth: Birth) -> str:
    """Returns the name of what to do about an operation that is not finite in float32 either."""
    place = birth.place
    numbers = birth.numbers
    name = place.primitive
    if _is_left_out(search, birth):
        return "inner where"
    if numbers.given and not place.is_backward:
        return "masked row"
    if name in _INDEXED:
        return "index"
    if name in _EXPONENTIALS:
        return "exponential of a large number"
    if name in _OF_NEGATIVE_OPERANDS and numbers.least_input < 0:
        return "negative operand"
    if numbers.least_input < 0 or numbers.largest_input > 1:
        return "operand of any size"
    if name == "log" or "log" in place.line.text:
        return "logarithm of a probability"
    return "operand from 0 to 1"


def _is_left_out(search: Search, birth: Birth) -> bool:
    """Returns whether the loss is finite, and a `where` takes what the line makes, or not."""
    if not math.isfinite(search.exact.loss):
        return False
    operations = search.board.operations
    for operation in operations.by_key.values():
        if operation.place.primitive not in _SELECTS or operation.place.is_backward:
            continue
        for makers in operation.makers[1:]:
            for key in _walk_back(operations, makers, _ELEMENTS):
                if operations.by_key[key].place.line == birth.place.line:
                    return True
    return False


# Numbers whose logarithm or quotient is taken.


def _list_regions(
    operations: Operations, blame: Blame
) -> Iterator[tuple[str, Set[EquationKey], Set[Line]]]:
    """Yields cures, the operations that they leave unrounded, and the lines of these.

    These are the operations from an exponential, or from a product, to the logarithm or the
    quotient of what is made of it, of which one is to blame.
    """
    found: dict[str, tuple[set[EquationKey], set[Line]]] = {}
    for operation in operations.by_key.values():
        if operation.place.is_backward:
            continue
        name, region = _name_region(operations, operation)
        lines = {operations.by_key[key].place.line for key in region}
        if name and lines & {*blame.lines, blame.place.line}:
            keys, all_lines = found.setdefault(name, (set(), set()))
            keys |= region
            all_lines |= {*lines, operation.place.line}
    for name, (keys, lines) in found.items():
        yield name, keys, lines


def _name_region(
    operations: Operations, end: Operation
) -> tuple[str, set[EquationKey]]:
    """Returns the cure that an operation may need, and what lies before it."""
    primitive = end.eqn.primitive.name
    if primitive not in _LOGARITHMS | _DIVIDES:
        return "", set()
    region = set(_walk_back(operations, frozenset().union(*end.makers), _BETWEEN))
    names = {operations.by_key[key].eqn.primitive.name for key in region}
    has_sum = bool(names & (_SUMS | primitives_that(Op.PRODUCT)))
    has_exponential = bool(names & _EXPONENTIALS)
    if primitive in _DIVIDES:
        divided_by = _walk_back(operations, end.makers[1], _BETWEEN)
        exponentials = [
            operations.by_key[key]
            for key in divided_by
            if operations.by_key[key].eqn.primitive.name in _EXPONENTIALS
        ]
        is_shifted = any(_is_shifted(operations, each) for each in exponentials)
        if has_sum and exponentials and not is_shifted:
            return "exponential of a row", region
        return "", set()
    if _count_products(operations, region) >= _MANY_FACTORS:
        return "product", region
    is_quotient = any(
        operations.by_key[key].makers[1]
        for key in region
        if operations.by_key[key].eqn.primitive.name in _DIVIDES
    )
    if names & _SIGMOIDS or (has_exponential and is_quotient and not has_sum):
        return "sigmoid", region
    if names & _SUBTRACTS:
        return "", set()
    if has_exponential and is_quotient:
        return "softmax", region
    if not has_exponential or names - _BETWEEN - _EXPONENTIALS:
        return "", set()
    return "logarithm of a sum" if has_sum else "exponential", region


def _is_shifted(operations: Operations, exponential: Operation) -> bool:
    """Returns whether a maximum was subtracted from an exponent."""
    before = _walk_back(operations, exponential.makers[0], _MOVES)
    for key in before:
        difference = operations.by_key[key]
        if difference.eqn.primitive.name in _SUBTRACTS:
            subtracted = _walk_back(operations, difference.makers[1], _MOVES)
            names = {operations.by_key[k].eqn.primitive.name for k in subtracted}
            return bool(names & _EXTREMES)
    return False


def _count_products(operations: Operations, region: Set[EquationKey]) -> int:
    """Returns how many factors a product has at least, as far as that shows."""
    count = 0
    for key in region:
        operation = operations.by_key[key]
        name = operation.eqn.primitive.name
        is_carried = any(key in makers for makers in operation.makers)
        if name in _MULTIPLIES - _PRODUCTS_OF_TWO or (
            name in _PRODUCTS_OF_TWO and is_carried
        ):
            return _MANY_FACTORS
        count += name in _PRODUCTS_OF_TWO and all(operation.makers)
    return count


def _walk_back(
    operations: Operations, keys: frozenset[EquationKey], through: Set[str]
) -> list[EquationKey]:
    """Returns operations, their makers, and the makers of those that are in `through`."""
    waiting = list(keys)
    visited: dict[EquationKey, None] = {}
    while waiting:
        key = waiting.pop()
        if key in visited:
            continue
        visited[key] = None
        operation = operations.by_key[key]
        if operation.eqn.primitive.name in through:
            for makers in operation.makers:
                waiting += makers
    return list(visited)


# The sums that the loss is made of.


def find_mean(search: Search) -> Sum | None:
    """Returns the largest sum in the loss whose mean gives finite and right gradients."""
    board = search.board
    sums = [
        total
        for total in list_sums(board.operations)
        if total.weight * total.size >= _MANY
    ]
    for total in sorted(sums, key=lambda total: -total.size):
        if abs(search.exact.loss) / total.size > float(np.finfo(np.float16).max):
            continue
        variant = Variant(unrounded=frozenset(total.path))
        # The gradients of a mean are those of the sum at a loss scale smaller by its size. What is
        # flushed without a loss scale may be right with one.
        for loss_scale in (1 / total.size, 1.0):
            outcome = board.evaluate(loss_scale, board.places, variant=variant)
            at_mean = board.evaluate(1 / total.size, board.places, variant=variant)
            if not outcome.has_finite_grads or not at_mean.has_finite_grads:
                continue
            if max(search.errors(outcome.grads).values(), default=0.0) <= CLOSE:
                return total
    return None


def list_sums(operations: Operations) -> Iterator[Sum]:
    """Yields the sums that the loss is made of, if it is linear in them."""
    waiting: list[tuple[EquationKey, float, tuple[EquationKey, ...]]]
    waiting = [(key, 1.0, ()) for key in operations.loss]
    while waiting:
        key, weight, after = waiting.pop()
        if key in after:
            continue
        path = (*after, key)
        operation = operations.by_key[key]
        eqn = operation.eqn
        if eqn.primitive.name in _SUMS:
            size = _size(eqn.invars[0]) // max(_size(eqn.outvars[0]), 1)
            yield Sum(operation.place.line.where, size, weight, path)
        for maker, its_weight in _find_terms(operation, weight):
            waiting.append((maker, its_weight, path))


def _find_terms(
    operation: Operation, weight: float
) -> Iterator[tuple[EquationKey, float]]:
    """Yields what made the numbers that an operation is linear in, and how often each counts."""
    name = operation.eqn.primitive.name
    if name in _LINEAR:
        for makers in operation.makers:
            for maker in makers:
                yield maker, weight
    if name not in _DIVIDES | _PRODUCTS_OF_TWO:
        return
    first, second = map(_read_number, operation.eqn.invars)
    by_first, by_second = operation.makers
    if second and name in _DIVIDES:
        weight /= second
    elif second:
        weight *= second
    elif first and name in _PRODUCTS_OF_TWO:
        by_first, weight = by_second, weight * first
    else:
        return
    for maker in by_first:
        yield maker, weight


def _size(atom: Any) -> int:
    return atom.aval.size


def _read_number(atom: Any) -> float:
    """Returns an input that is a number of the program; 0 for any other, as for 0 itself."""
    if not isinstance(atom, Literal) or np.shape(atom.val):
        return 0.0
    return float(atom.val)

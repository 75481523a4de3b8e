"""Cures that are better than a cast to float32: what was found, what is tried, and what to write.

`CURES` is the table. A cure is told only if the model was right with it: through the switches, or
in a program in which some operations are not rounded, which is what the cure comes to.
"""

import math
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np

from .._jax.jaxprs import Literal, Op, does, primitives_that
from ..diagnostics._switches.equations import EquationKey
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

_ADDS = primitives_that(Op.ADDS)
_DIVIDES = primitives_that(Op.DIVIDES)
_EXPONENTIALS = primitives_that(Op.EXPONENTIAL)
_LOGARITHMS = primitives_that(Op.LOGARITHM)
_SUBTRACTS = primitives_that(Op.SUBTRACTS) - {"neg"}
_PRODUCTS_OF_TWO = primitives_that(Op.MULTIPLIES | Op.ELEMENTWISE)
_SUMS = primitives_that(Op.ADDS | Op.REDUCTION)
_MOVES = primitives_that(Op.PASSES_ON) | primitives_that(Op.MOVE) | {"neg"}
_LINEAR = _MOVES | _ADDS | _SUBTRACTS
_EXTREMES = primitives_that(Op.PASSES_ON | Op.REDUCTION)
_SELECTS = primitives_that(Op.SELECTS)
_ELEMENTS = primitives_that(Op.ELEMENTWISE) | _MOVES
# What may lie between an exponential and the logarithm of what is made of it.
_BETWEEN = (
    _LINEAR
    | primitives_that(Op.MULTIPLIES)
    | _DIVIDES
    | _SUMS
    | primitives_that(Op.PRODUCT)
) - primitives_that(Op.LIMITS)
_MANY = 64  # a sum of this many numbers, each with its full weight, is worth a word
_FLOAT16_RANGE = 2.0**16
_MANY_FACTORS = 4  # products in a row: more than a formula has

# What lies before a logarithm or a quotient may have these traits, by what is there.
_TRAITS = {
    "exponential": _EXPONENTIALS,
    "sigmoid": primitives_that(Op.SIGMOID),
    "sum": _SUMS | primitives_that(Op.PRODUCT),
    "difference": _SUBTRACTS,
}
# By what ends it, and by the traits that it has and does not have: the cure. The first row counts.
_ROWS = [
    (_DIVIDES, "exponential sum below", "shifted", "exponential of a row"),
    (_LOGARITHMS, "product", "", "product"),
    (_LOGARITHMS, "sigmoid", "", "sigmoid"),
    (_LOGARITHMS, "exponential quotient", "sum", "sigmoid"),
    (_LOGARITHMS, "exponential quotient", "difference", "softmax"),
    (_LOGARITHMS, "exponential sum", "difference other", "logarithm of a sum"),
    (_LOGARITHMS, "exponential", "difference other", "exponential"),
]


class Sum(NamedTuple):
    """A sum over many numbers that is the loss, or a part of it."""

    where: str  # file and line, or `""`
    size: int  # how many numbers are added up
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
        chosen = frozenset().union(*operation.makers[1:])
        made_of = _walk_back(operations, chosen, _ELEMENTS)
        if birth.place.line in {part.place.line for part in made_of.values()}:
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
    for end in operations.by_key.values():
        primitive = end.place.primitive
        if end.place.is_backward or primitive not in _LOGARITHMS | _DIVIDES:
            continue
        region = _walk_back(operations, frozenset().union(*end.makers), _BETWEEN)
        name = _name_cure(primitive, _find_traits(operations, end, region))
        lines = {operation.place.line for operation in region.values()}
        if name and lines & {*blame.lines, blame.place.line}:
            keys, all_lines = found.setdefault(name, (set(), set()))
            keys.update(region)
            all_lines |= {*lines, end.place.line}
    for name, (keys, lines) in found.items():
        yield name, keys, lines


def _name_cure(primitive: str, traits: Set[str]) -> str:
    """Returns what a logarithm or a quotient needs, by what lies before it."""
    for ends, has, has_not, name in _ROWS:
        is_like = traits >= {*has.split()} and not traits & {*has_not.split()}
        if primitive in ends and is_like:
            return name
    return ""


def _find_traits(
    operations: Operations, end: Operation, region: Mapping[EquationKey, Operation]
) -> set[str]:
    """Returns what lies before a logarithm or a quotient, in the words of `_ROWS`."""
    names = _names(region)
    traits = {trait for trait, known in _TRAITS.items() if names & known}
    if names - _BETWEEN - _EXPONENTIALS:
        traits.add("other")
    if _count_products(region) >= _MANY_FACTORS:
        traits.add("product")
    for quotient in region.values():
        if quotient.place.primitive in _DIVIDES and quotient.makers[1]:
            traits.add("quotient")
    for operation in _walk_back(operations, end.makers[-1], _BETWEEN).values():
        if operation.place.primitive in _EXPONENTIALS:
            traits.add("below")
            if _is_shifted(operations, operation):
                traits.add("shifted")
    return traits


def _names(region: Mapping[EquationKey, Operation]) -> set[str]:
    return {operation.place.primitive for operation in region.values()}


def _is_shifted(operations: Operations, exponential: Operation) -> bool:
    """Returns whether a maximum was subtracted from an exponent."""
    for difference in _walk_back(operations, exponential.makers[0], _MOVES).values():
        if difference.place.primitive in _SUBTRACTS:
            subtracted = _walk_back(operations, difference.makers[1], _MOVES)
            return bool(_names(subtracted) & _EXTREMES)
    return False


def _count_products(region: Mapping[EquationKey, Operation]) -> int:
    """Returns how many factors a product has at least, as far as that shows."""
    count = 0
    for key, operation in region.items():
        op = does(operation.place.primitive)
        if Op.MULTIPLIES not in op:
            continue
        is_carried = any(key in makers for makers in operation.makers)
        if is_carried or Op.ELEMENTWISE not in op:  # in a loop, or of a whole axis
            return _MANY_FACTORS
        count += all(operation.makers)
    return count


def _walk_back(
    operations: Operations, keys: frozenset[EquationKey], through: Set[str]
) -> dict[EquationKey, Operation]:
    """Returns operations, their makers, and the makers of those that are in `through`."""
    waiting = list(keys)
    visited: dict[EquationKey, Operation] = {}
    while waiting:
        key = waiting.pop()
        if key in visited:
            continue
        operation = operations.by_key[key]
        visited[key] = operation
        if operation.place.primitive in through:
            for makers in operation.makers:
                waiting += makers
    return visited


# The sums that the loss is made of.


def find_mean(search: Search) -> Sum | None:
    """Returns the largest sum in the loss whose mean gives finite and right gradients."""
    sums = _list_sums(search.board.operations)
    for total in sorted(sums, key=lambda total: -total.size):
        if abs(search.exact.loss) / total.size >= _FLOAT16_RANGE:
            continue
        # The gradients of a mean are those of the sum at a loss scale smaller by its size. What is
        # flushed without a loss scale may be right with one.
        error_of = search.error_at(1 / total.size, factors=[1.0, total.size])
        variant = Variant(unrounded=frozenset(total.path))
        if error_of(search.board.places, variant=variant) <= CLOSE:
            return total
    return None


def _list_sums(operations: Operations) -> Iterator[Sum]:
    """Yields the sums of many numbers that the loss is made of, if it is linear in them."""
    # Operations, what the loss is times the numbers there, and the operations after them.
    waiting: list[tuple[EquationKey, float, tuple[EquationKey, ...]]]
    waiting = [(key, 1.0, ()) for key in operations.makers["loss"]]
    while waiting:
        key, weight, after = waiting.pop()
        if key in after:
            continue
        path = (*after, key)
        operation = operations.by_key[key]
        if operation.place.primitive in _SUMS:
            summands: Any = operation.eqn.invars[0].aval
            sums: Any = operation.eqn.outvars[0].aval
            size = summands.size // max(sums.size, 1)
            if weight * size >= _MANY:
                yield Sum(operation.place.line.where, size, path)
        for makers, factor in _find_terms(operation):
            waiting += [(maker, weight * factor, path) for maker in makers]


def _find_terms(operation: Operation) -> list[tuple[Set[EquationKey], float]]:
    """Returns what made the numbers that an operation is linear in, and how often each counts."""
    name = operation.place.primitive
    if name in _LINEAR:
        return [(makers, 1.0) for makers in operation.makers]
    if name in _DIVIDES | _PRODUCTS_OF_TWO:
        first, second = map(_read_number, operation.eqn.invars)
        by_first, by_second = operation.makers
        if second:
            return [(by_first, 1 / second if name in _DIVIDES else second)]
        if first and name in _PRODUCTS_OF_TWO:
            return [(by_second, first)]
    return []


def _read_number(atom: Any) -> float:
    """Returns an input that is a number of the program; 0 for any other, as for 0 itself."""
    if not isinstance(atom, Literal) or np.shape(atom.val):
        return 0.0
    return float(atom.val)

"""Origins of a number: a softmax, a product of many numbers, a sum that is the loss.

Some faults have a cure that is better than a cast: the logarithm of a softmax is `log_softmax`.
Which one fits shows in the operations around the faulty one, so that it does not matter whether
the model calls a function of JAX or writes it out.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._jax import JaxprEqn, Literal, Op, primitives_that
from ..diagnostics._trace.findings import Findings, Run
from ..diagnostics._trace.interpreter import EquationKey
from ..diagnostics._trace.needs import FORWARD
from ..diagnostics._trace.places import find_line

# What a number may have been made by, as `Culprit.made_by` names it.
SOFTMAX = "softmax"
SIGMOID = "sigmoid"
PRODUCT = "product"
EXPONENTIAL = "exponential"
LOG_OF_SUM = "logarithm of a sum of exponentials"

# They return some of the numbers that they take.
_MOVES = primitives_that(Op.PASSES_ON)
_LIMITS = primitives_that(Op.LIMITS)
_ADDS = primitives_that(Op.ADDS)
_SUMS = primitives_that(Op.ADDS | Op.REDUCTION)
_DIVIDES = primitives_that(Op.DIVIDES)
_MULTIPLIES = primitives_that(Op.MULTIPLIES)
_PRODUCTS_OF_TWO = primitives_that(Op.MULTIPLIES | Op.ELEMENTWISE)
_MATRIX_PRODUCTS = primitives_that(Op.PRODUCT)
_EXPONENTIALS = primitives_that(Op.EXPONENTIAL)
_LOGARITHMS = primitives_that(Op.LOGARITHM)
_SELECTS = primitives_that(Op.SELECTS)
_ELEMENTWISE = primitives_that(Op.ELEMENTWISE) - _SELECTS
_SIGMOIDS = primitives_that(Op.SIGMOID)
_LINEAR = _MOVES | _ADDS | primitives_that(Op.SUBTRACTS)
# A sum may have an epsilon added to it.
_MOVES_AND_ADD = _MOVES | (_ADDS - _SUMS)

_MANY = 64  # a sum of this many numbers, each with its full weight, is worth a word
_MANY_FACTORS = 4  # products in a row: more than a formula has
_MOST_MOVES = 12  # operations in which that many are looked for


class Sum(NamedTuple):
    """A sum over many numbers that is the loss, or a part of it."""

    where: str  # file and line, or `""`
    size: int  # how many numbers are added up
    weight: float  # the loss is this times the sum: of a mean, one over the size

    @property
    def is_large(self) -> bool:
        """Whether it makes the loss far larger than a mean would."""
        return self.size >= _MANY and self.size * abs(self.weight) >= _MANY


class Operations:
    """The operations of a pass, and which of them made the numbers of which."""

    def __init__(self, findings: Findings) -> None:
        self._equations = findings.equations
        self._makers = findings.makers
        self._births = findings.births

    # What the numbers of one operation were made by.

    def find_origin(self, key: EquationKey) -> str:
        """Returns what made the numbers of an operation, as one of the names above, or `""`."""
        for source in self._walk_back(key, _MOVES):
            name = self._name(source)
            if name in _EXPONENTIALS:
                return self._find_use(source)
            if name in _SIGMOIDS:
                return SIGMOID
            if name in _MULTIPLIES and self._has_factors(source):
                return PRODUCT
            if name in _DIVIDES and (quotient := self._find_quotient(source)):
                return quotient
        return ""

    def _find_use(self, exponential: EquationKey) -> str:
        """Returns what an exponential is a part of: a softmax, a `logsumexp` or neither."""
        use = EXPONENTIAL
        for total in self._walk_on(exponential, _MOVES):
            if self._name(total) not in _SUMS | _MATRIX_PRODUCTS:
                continue
            for reader in self._walk_on(total, _MOVES_AND_ADD):
                name = self._name(reader)
                if name in _DIVIDES and self._is_divided_by(reader, total):
                    return SOFTMAX
                if name in _LOGARITHMS:
                    use = LOG_OF_SUM
        return use

    def _is_divided_by(self, quotient: EquationKey, total: EquationKey) -> bool:
        """Returns whether exponentials, maybe times values, are divided by their sum.

        The derivative of a logarithm also divides by that sum, but divides no exponentials.
        """
        dividend, divisor = self._makers[quotient]
        is_divisor = total in self._walk_back(divisor, _MOVES_AND_ADD)
        through = _MOVES | _PRODUCTS_OF_TWO | _MATRIX_PRODUCTS
        return is_divisor and self._comes_from(dividend, _EXPONENTIALS, through)

    def _find_quotient(self, quotient: EquationKey) -> str:
        """Returns whether a quotient is a softmax, a sigmoid or neither.

        A softmax divides exponentials by a sum. A sigmoid is 1 / (1 + exp(x)), or
        exp(x) / (1 + exp(x)).
        """
        dividend, divisor = self._makers[quotient]
        if self._comes_from(divisor, _SUMS, _MOVES_AND_ADD):
            if self._comes_from(dividend, _EXPONENTIALS, _MOVES):
                return SOFTMAX
        elif self._comes_from(divisor, _EXPONENTIALS, _MOVES_AND_ADD):
            return SIGMOID
        return ""

    def _has_factors(
        self,
        key: EquationKey,
        num_factors: int = _MANY_FACTORS,
        num_moves: int = _MOST_MOVES,
    ) -> bool:
        """Returns whether a product is of many factors, or of what a loop carries.

        Of the last `num_moves` operations up to here, `num_factors` are then products. In a loop, a
        product that is carried follows itself.
        """
        if key not in self._equations or not num_moves:
            return False
        name = self._name(key)
        if name in _MULTIPLIES - _PRODUCTS_OF_TWO:
            return True
        if name in _PRODUCTS_OF_TWO:
            inputs = self._equation(key).invars
            if not any(isinstance(atom, Literal) for atom in inputs):
                num_factors -= 1
        elif name not in _MOVES - _LIMITS:
            return False
        if not num_factors:
            return True
        makers = self._makers[key]
        return any(
            self._has_factors(maker, num_factors, num_moves - 1) for maker in makers
        )

    # Exponentials and logarithms.

    def find_unshifted(self) -> tuple[str, ...]:
        """Returns the lines of exponentials that overflow, of a softmax or a `logsumexp`."""
        unshifted = []
        for key in self._births:
            if self._name(key) in _EXPONENTIALS and self._find_use(key) != EXPONENTIAL:
                unshifted.append(find_line(*self._equations[key]).where)
        return tuple(filter(None, unshifted))

    def find_untaken(self) -> tuple[str, ...]:
        """Returns the lines that make inf or NaN of which a selection takes none.

        In the forward pass a selection reads them. In the backward pass they are multiplied by a
        cotangent that comes out of one.
        """
        untaken = []
        for key in self._births:
            if self._is_untaken(key):
                untaken.append(find_line(*self._equations[key]).where)
        return tuple(filter(None, untaken))

    def _is_untaken(self, key: EquationKey) -> bool:
        visit, _ = self._births[key]
        if visit.need & FORWARD:
            readers = self._walk_on(key, _ELEMENTWISE)
            return any(self._name(reader) in _SELECTS for reader in readers)
        for reader in self._walk_on(key, _ELEMENTWISE - _PRODUCTS_OF_TWO):
            if self._name(reader) not in _PRODUCTS_OF_TWO:
                continue
            for maker in self._makers[reader]:
                if self._comes_from(maker, _SELECTS, _MOVES | _PRODUCTS_OF_TWO):
                    return True
        return False

    def is_read_by_logarithm(self, key: EquationKey) -> bool:
        through = _LINEAR | _MULTIPLIES | _DIVIDES
        readers = self._walk_on(key, through)
        return any(self._name(reader) in _LOGARITHMS for reader in readers)

    # The sums that the loss is made of.

    def find_loss_sums(self, run: Run) -> Iterator[Sum]:
        """Yields the sums that the loss is made of, if it is linear in them."""
        for path, weight in self._find_sums(run.values["loss"].maker, 1.0, ()):
            yield self._describe_sum(path[-1], weight)

    def find_large_sums(self, run: Run) -> Iterator[Sum]:
        """Yields those that are large, and whose mean would be finite.

        All inf and NaN of the loss are then of the sum or a multiple of it.
        """
        loss = run.values["loss"]
        for path, weight in self._find_sums(loss.maker, 1.0, ()):
            total = self._describe_sum(path[-1], weight)
            is_of_sum = loss.origins <= set(path)
            if total.is_large and is_of_sum and self._are_below(loss.origins, total):
                yield total

    def _find_sums(
        self, key: EquationKey, weight: float, after: tuple[EquationKey, ...]
    ) -> Iterator[tuple[tuple[EquationKey, ...], float]]:
        """Yields the sums in the numbers of an operation, which count `weight` times.

        Each comes as the operations from the loss to the sum, and how many times it counts.
        """
        if key not in self._equations or key in after:
            return
        path = (*after, key)
        if self._name(key) in _SUMS:
            yield path, weight
        for maker, its_weight in self._find_terms(key, weight):
            yield from self._find_sums(maker, its_weight, path)

    def _are_below(self, keys: Iterable[EquationKey], total: Sum) -> bool:
        """Returns whether the inf of some operations is finite if divided by the size of a sum."""
        for key in keys:
            visit, birth = self._births[key]
            largest = float(jnp.finfo(visit.outputs[birth.output].dtype).max)
            if not birth.float32_result <= largest * total.size:
                return False
        return True

    def _find_terms(
        self, key: EquationKey, weight: float
    ) -> Iterator[tuple[EquationKey, float]]:
        """Yields what made the numbers that an operation is linear in, and how often each counts.

        The numbers of the operation count `weight` times.
        """
        makers = self._makers[key]
        name = self._name(key)
        if name in _LINEAR:
            for maker in makers:
                yield maker, weight
        if name not in _DIVIDES | _PRODUCTS_OF_TWO:
            return
        first, second = map(_read_number, self._equation(key).invars)
        if second and name in _DIVIDES:
            yield makers[0], weight / second
        elif second:
            yield makers[0], weight * second
        elif first and name in _PRODUCTS_OF_TWO:
            yield makers[1], weight * first

    def _describe_sum(self, key: EquationKey, weight: float) -> Sum:
        eqn, around = self._equations[key]
        num_sums = max(_count_numbers(eqn.outvars[0]), 1)
        size = _count_numbers(eqn.invars[0]) // num_sums
        return Sum(find_line(eqn, around).where, size, weight)

    # Walks from one operation to others.

    def _walk_back(self, key: EquationKey, through: Set[str]) -> Iterator[EquationKey]:
        """Yields an operation, its makers, and the makers of those that are in `through`."""
        return self._walk([key], self._makers, through)

    def _walk_on(self, key: EquationKey, through: Set[str]) -> Iterator[EquationKey]:
        """Yields the readers of what an operation makes, and of what those in `through` make."""
        readers = self._walk(self._readers.get(key, ()), self._readers, through)
        return filter(key.__ne__, readers)

    def _walk(
        self,
        starts: Sequence[EquationKey],
        neighbours: Mapping[EquationKey, Sequence[EquationKey]],
        through: Set[str],
    ) -> Iterator[EquationKey]:
        """Yields operations, the nearest first, and goes on from those that are in `through`."""
        waiting = list(starts)
        visited = set()
        while waiting:
            key = waiting.pop(0)
            if key in visited or key not in self._equations:
                continue
            visited.add(key)
            yield key
            if self._name(key) in through:
                waiting += neighbours.get(key, ())

    @functools.cached_property
    def _readers(self) -> dict[EquationKey, list[EquationKey]]:
        """What reads the numbers of each operation."""
        readers: dict[EquationKey, list[EquationKey]] = {}
        for reader, makers in self._makers.items():
            for maker in makers:
                readers.setdefault(maker, []).append(reader)
        return readers

    def _comes_from(self, key: EquationKey, names: Set[str], through: Set[str]) -> bool:
        sources = self._walk_back(key, through)
        return any(self._name(source) in names for source in sources)

    def _name(self, key: EquationKey) -> str:
        return self._equation(key).primitive.name

    def _equation(self, key: EquationKey) -> JaxprEqn:
        eqn, _ = self._equations[key]
        return eqn


def _count_numbers(atom: Any) -> int:
    return atom.aval.size


def _read_number(atom: Any) -> float:
    """Returns an input that is a number of the program; 0 for any other, as for 0 itself."""
    if not isinstance(atom, Literal) or np.shape(atom.val):
        return 0.0
    return float(atom.val)

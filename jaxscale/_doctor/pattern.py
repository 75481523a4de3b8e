"""What a number was computed from: a softmax, a product of many numbers, a sum that is the loss.

Some faults have a cure that is better than a cast: the logarithm of a softmax is `log_softmax`.
Which one fits is read from the operations around the faulty one, so that it does not matter whether
the model calls a function of JAX or writes it out.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .._jax import Literal
from ..diagnostics._trace.findings import Findings, Run
from ..diagnostics._trace.interpreter import EquationKey
from ..diagnostics._trace.places import Line, lines

# What a number may have been made by, as `Culprit.made_by` names it.
SOFTMAX, SIGMOID, PRODUCT = "softmax", "sigmoid", "product"
EXPONENTIAL, LOG_OF_SUM = "exponential", "logarithm of a sum of exponentials"

_SAME_NUMBERS = {
    *("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze", "rev"),
    *("expand_dims", "slice", "dynamic_slice", "gather", "copy", "copy_p", "stop_gradient"),
    *("concatenate", "split", "select_n", "max", "min", "clamp", "reduce_precision", "pad"),
    *("optimization_barrier", "sharding_constraint", "name", "abs", "reduce_max", "reduce_min"),
}
_SCALED = {"add", "sub", "neg", "mul", "div", "add_any"}
_EXPONENTIALS = {"exp", "exp2"}
_MANY_FACTORS = 4  # products in a row: more than a formula has
_MOST_MOVES = 12  # operations in which that many are looked for


class Sum(NamedTuple):
    """A sum over many numbers that is the loss, or a part of it."""

    where: str  # file and line, or `""`
    file: str
    line: int
    size: int  # how many numbers are added up
    weight: float  # the loss is this times the sum: of a mean, one over the size


class Operations:
    """The operations of a pass, and which of them made the numbers of which."""

    def __init__(self, findings: Findings) -> None:
        self._equations, self._makers = findings.equations, findings.makers
        self._overflowed = list(findings.births)

    def find_origin(self, key: EquationKey) -> str:
        """Returns what made the numbers of an operation, as one of the names above, or `""`."""
        for source in self._sources(key, _SAME_NUMBERS):
            name = self._name(source)
            if name in ("reduce_prod", "cumprod") or self._is_long_product(source):
                return PRODUCT
            if name == "logistic" or (name == "div" and self._is_sigmoid(source)):
                return SIGMOID
            if name == "div" and self._is_softmax(source):
                return SOFTMAX
            if name in _EXPONENTIALS:
                return self._find_use(source)
        return ""

    def _find_use(self, exponential: EquationKey) -> str:
        """Returns what an exponential is a part of: a softmax, a `logsumexp` or neither."""
        use = EXPONENTIAL
        for total in self._find_totals(exponential):
            for reader in self._readers(total, _SAME_NUMBERS | {"add"}):
                if self._name(reader) == "div" and self._is_divided_by(reader, total):
                    return SOFTMAX
                if self._name(reader) == "log":
                    use = LOG_OF_SUM
        return use

    def _is_divided_by(self, quotient: EquationKey, total: EquationKey) -> bool:
        """Returns whether exponentials, maybe times values, are divided by their sum.

        The derivative of a logarithm divides by it, too, but divides no exponentials.
        """
        above, below = self._makers[quotient]
        is_below = total in self._sources(below, _SAME_NUMBERS | {"add"})
        through = _SAME_NUMBERS | {"mul", "dot_general"}
        return is_below and self._comes_from(above, _EXPONENTIALS, through)

    def _find_totals(self, exponential: EquationKey) -> list[EquationKey]:
        """Returns the sums that an exponential goes into."""
        readers = self._readers(exponential, _SAME_NUMBERS)
        return [reader for reader in readers if self._name(reader) in ("reduce_sum", "dot_general")]

    def find_unshifted(self) -> tuple[str, ...]:
        """Returns the lines of exponentials that overflow, of a softmax or a `logsumexp`."""
        keys = [key for key in self._overflowed if self._name(key) in _EXPONENTIALS]
        found = [lines(*self._equations[k])[:1] for k in keys if self._find_use(k) != EXPONENTIAL]
        return tuple(str(line) for each in found for line in each)

    def is_read_by_logarithm(self, key: EquationKey) -> bool:
        through = _SAME_NUMBERS | _SCALED | {"reduce_prod", "cumprod", "reduce_sum"}
        return self._has_reader(key, {"log", "log1p"}, through)

    def find_loss_sums(self, run: Run) -> Iterator[Sum]:
        """Returns the sums that the loss is made of, if it is linear in them."""
        yield from self._loss_sums(run.values["loss"].maker, 1.0, frozenset())

    def _loss_sums(
        self, key: EquationKey, weight: float, seen: frozenset[EquationKey]
    ) -> Iterator[Sum]:
        if key not in self._equations or key in seen:
            return
        eqn, around = self._equations[key]
        name, makers = eqn.primitive.name, self._makers[key]
        follow = functools.partial(self._loss_sums, seen=seen | {key})
        if name == "reduce_sum":
            source: Any = eqn.invars[0].aval
            result: Any = eqn.outvars[0].aval
            size = source.size // max(result.size, 1)
            line = next(iter(lines(eqn, around)), Line("", 0, ""))
            yield Sum(str(line) if line.file else "", line.file, line.number, size, weight)
            yield from follow(makers[0], weight)
        elif name in _SAME_NUMBERS or name in ("add", "add_any", "sub", "neg"):
            for maker in makers:
                yield from follow(maker, weight)
        elif name == "div" and _is_number(eqn.invars[1]):
            yield from follow(makers[0], weight / _read_number(eqn.invars[1]))
        elif name == "mul" and _is_number(eqn.invars[1]):
            yield from follow(makers[0], weight * _read_number(eqn.invars[1]))
        elif name == "mul" and _is_number(eqn.invars[0]):
            yield from follow(makers[1], weight * _read_number(eqn.invars[0]))

    def _name(self, key: EquationKey) -> str:
        return self._equations[key][0].primitive.name

    def _sources(self, key: EquationKey, through: set[str]) -> Iterator[EquationKey]:
        """Returns an operation and those before it, as long as they are among `through`."""
        waiting, seen = [key], set()
        while waiting:
            key = waiting.pop(0)
            if key in seen or key not in self._equations:
                continue
            seen.add(key)
            yield key
            if self._name(key) in through:
                waiting += self._makers[key]

    def _readers(self, key: EquationKey, through: set[str]) -> Iterator[EquationKey]:
        """Returns the operations that read what one makes, and what those among `through` make."""
        waiting, seen = [key], {key}
        while waiting:
            made = waiting.pop(0)
            for reader in self._read_by.get(made, ()):
                if reader not in seen:
                    seen.add(reader)
                    yield reader
                    if self._name(reader) in through:
                        waiting.append(reader)

    @functools.cached_property
    def _read_by(self) -> dict[EquationKey, list[EquationKey]]:
        found: dict[EquationKey, list[EquationKey]] = {}
        for reader, makers in self._makers.items():
            for maker in makers:
                found.setdefault(maker, []).append(reader)
        return found

    def _has_reader(self, key: EquationKey, names: set[str], through: set[str]) -> bool:
        return any(self._name(reader) in names for reader in self._readers(key, through))

    def _is_softmax(self, key: EquationKey) -> bool:
        """Returns whether a quotient is that of a softmax."""
        above, below = self._makers[key]
        is_exponential = self._comes_from(above, _EXPONENTIALS, _SAME_NUMBERS)
        return is_exponential and self._comes_from(below, {"reduce_sum"}, _SAME_NUMBERS | {"add"})

    def _is_sigmoid(self, key: EquationKey) -> bool:
        """Returns whether a quotient is 1 / (1 + exp(x)), or exp(x) / (1 + exp(x))."""
        below = self._makers[key][1]
        return self._comes_from(below, _EXPONENTIALS, _SAME_NUMBERS | {"add"}) and not (
            self._comes_from(below, {"reduce_sum"}, _SAME_NUMBERS | {"add"})
        )

    def _comes_from(self, key: EquationKey, names: set[str], through: set[str]) -> bool:
        return any(self._name(source) in names for source in self._sources(key, through))

    def _is_long_product(self, key: EquationKey) -> bool:
        """Returns whether a product is of many factors, or of what a loop carries."""
        if self._name(key) != "mul":
            return False
        return self._has_factors(key, _MANY_FACTORS, _MOST_MOVES)

    def _has_factors(self, key: EquationKey, factors: int, moves: int) -> bool:
        """Returns whether so many products follow each other up to here, with few moves between.

        In a loop the product that is carried follows itself.
        """
        if key not in self._equations or not moves:
            return False
        name, makers = self._name(key), self._makers[key]
        if name == "mul":
            factors -= not any(isinstance(atom, Literal) for atom in self._equations[key][0].invars)
        elif name not in _SAME_NUMBERS - {"max", "min", "clamp"}:
            return False
        return not factors or any(self._has_factors(each, factors, moves - 1) for each in makers)


def _is_number(atom: Any) -> bool:
    """Returns whether an input is a number other than 0 that stands in the program."""
    return isinstance(atom, Literal) and not np.shape(atom.val) and bool(atom.val)


def _read_number(atom: Any) -> float:
    return float(atom.val)

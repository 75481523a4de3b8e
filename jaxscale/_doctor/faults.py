"""The gradients against those in float32: what is wrong with them, at which lines, what helps."""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from ..diagnostics._switches.board import Outcome, are_finite
from ..diagnostics._switches.notes import Numbers
from ..diagnostics._switches.operations import Place
from ..diagnostics._switches.search import CLOSE, STABLE, Blame, ErrorOf, Search
from ..diagnostics._switches.switches import ALL_LIMITS, PLAIN, Limits, Variant
from . import cures
from .gradients import Comparison, compare_gradients


class Fault(NamedTuple):
    """A place where numbers are lost, and the cures that were tried there.

    Attributes:
      kind: `"nonfinite"` if the loss or the gradients are inf or NaN as written, and not in
        float32, `"wrong"` if they are finite and far from those in float32, `"compiled"` if that
        is so in the compiled program alone, and `"in float32"` if they are not finite in float32
        either.
      where: file and line, or `""` for no line of the model.
      operation: what does it there, as JAX calls it, or `""` if it is one of several.
      direction: `"forward"` or `"backward"`.
      layer: the scopes that it is in, as modules of Flax set them, or `""`.
      dtype: the format of its results.
      limit: which limit of that format is to blame, as `Blame.limit` names it.
      lines: the lines that were tried in float32, the most harmful first.
      works: whether the gradients are then finite and right.
      error: the largest error of a leaf of the gradients then; inf if they are not finite, and
        `None` if they are finite and none can be compared.
      cure: a name in `CURES` of what was tried and helps, or `""`.
      bfloat16: whether the gradients are right with bfloat16 in the place of float16.
      numbers: the numbers there.
    """

    kind: str
    where: str
    operation: str
    direction: str
    layer: str
    dtype: str
    limit: str = ""
    lines: tuple[str, ...] = ()
    works: bool = False
    error: float | None = None
    cure: str = ""
    bfloat16: bool = False
    numbers: Numbers = Numbers()


class Check(NamedTuple):
    """The gradients against those in float32. Nothing is known if the arguments are not finite.

    Attributes:
      is_finite_in_float32: whether the loss and the gradients are finite in float32, `None` if not
        known.
      float32: what the gradients lost, if they are finite as written and in float32.
      wrong: the names of the gradients that are far from those in float32.
      unstable: the names of those that cannot be compared: rounding in float32 alone changes them
        by much.
      right_loss: the loss in float32, if that as written is far from it, and both are finite.
      mean: how many numbers the loss is a sum of, if their mean was tried, and helps.
      mean_at: the file and line of that sum, or `""`.
      fault: where the gradients go wrong, if a line is to blame.
      grads: the gradients in float32, by their names, if they are finite.
      error: how far all gradients that can be compared are off together, as `Comparison.error`;
        `None` if not known.
    """

    is_finite_in_float32: bool | None = None
    float32: Comparison | None = None
    wrong: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    right_loss: float | None = None
    mean: int = 0
    mean_at: str = ""
    fault: Fault | None = None
    grads: Mapping[str, np.ndarray] = {}
    error: float | None = None

    @property
    def compares_nothing(self) -> bool:
        """There is a gradient in float32, but none that can be compared with it."""
        nonzero = {name for name, grad in self.grads.items() if grad.any()}
        return bool(nonzero) and nonzero <= set(self.unstable)


class Checker:
    """Compares the gradients of a switchboard, and those of the compiled program, with float32.

    `best` is the largest loss scale that fits, or `None`.
    """

    def __init__(self, search: Search, best: float | None) -> None:
        self._search = search
        self._best = best

    def check(
        self, loss_scale: float, compiled: Mapping[str, np.ndarray], is_mask: bool
    ) -> Check:
        """Finds out what is wrong at a loss scale, where, and what helps.

        `compiled` has the gradients of the compiled program.
        """
        search = self._search
        scale = max(loss_scale, self._best or 0.0)
        if not search.exact.is_finite:
            fault = None
            if not search.as_written(loss_scale).is_finite:
                fault = self._find_in_float32()
            return Check(is_finite_in_float32=False, fault=fault)
        check = self._compare(search.as_written(scale))
        written = search.as_written(loss_scale)
        if not written.is_finite:
            at_best = search.as_written(self._best) if self._best else written
            if at_best.is_finite:
                return check._replace(fault=self.find_overflow(loss_scale))
            fault = self._explain("nonfinite", self._best or 1.0, is_mask)
            return self._find_mean(check._replace(fault=fault))
        if check.wrong:
            check = check._replace(fault=self._explain("wrong", scale, is_mask))
        else:
            check = self._check_compiled(check, compiled, scale)
        if self._best is not None and self._best < 1:
            check = self._find_mean(check)
        return check

    def _compare(self, written: Outcome) -> Check:
        search = self._search
        exact = search.exact
        grads = exact.grads
        check = Check(is_finite_in_float32=True, grads=grads)
        if not written.has_finite_grads:
            unstable = [n for n, change in search.noise.items() if change > STABLE]
            return check._replace(unstable=tuple(unstable))
        comparison = compare_gradients(written.grads, grads)
        certain = search.errors(written.grads)
        off = [leaf.path for leaf in comparison.leaves if leaf.error > CLOSE]
        unstable = tuple(path for path in off if path not in certain)
        compared = {n: leaf for n, leaf in grads.items() if n not in unstable}
        error = None
        if compared:
            error = compare_gradients(written.grads, compared).error
        return check._replace(
            float32=comparison,
            wrong=tuple(path for path in off if path in certain),
            unstable=unstable,
            right_loss=self._find_right_loss(written.loss),
            error=error,
        )

    def _find_right_loss(self, loss: float) -> float | None:
        """Returns the loss in float32 if a loss is far from it, else `None`."""
        exact = self._search.exact.loss
        error = abs(loss - exact)
        if not math.isfinite(loss) or error <= CLOSE * abs(exact):
            return None
        change = max(abs(shaken.loss - exact) for shaken in self._search.shaken)
        if change > STABLE * min(error, abs(exact)):
            return None
        return exact

    def _check_compiled(
        self, check: Check, compiled: Mapping[str, np.ndarray], scale: float
    ) -> Check:
        """Adds what only the compiled program gets wrong: XLA puts operations together there."""
        search = self._search
        if are_finite(compiled):
            wrong = {n for n, e in search.errors(compiled).items() if e > CLOSE}
            if not wrong:
                return check
            comparison = compare_gradients(compiled, check.grads)
            paths = [leaf.path for leaf in comparison.leaves if leaf.path in wrong]
            check = check._replace(wrong=tuple(paths), float32=comparison)

        def error_of(
            on: Collection[Place], limits: Limits = ALL_LIMITS, variant: Variant = PLAIN
        ) -> float:
            del limits, variant
            lines = frozenset(place.line for place in on)
            outcome = search.board.evaluate(scale, [], variant=Variant(native=lines))
            if not outcome.is_finite:
                return math.inf
            return max(search.errors(outcome.grads).values(), default=0.0)

        if error_of(search.board.places) <= CLOSE:
            return check
        lines = search.find_lines(error_of)
        others = [p for p in search.board.places if p.line not in lines]
        error = error_of(others)
        place = search.board.places_of(lines[:1])[0]
        fault = self._describe("compiled", place)._replace(
            lines=tuple(line.where for line in lines),
            works=error <= CLOSE,
            error=error,
        )
        return check._replace(fault=fault)

    def _describe(self, kind: str, place: Place) -> Fault:
        return Fault(
            kind,
            place.line.where,
            place.primitive,
            place.direction,
            place.layer,
            self._search.board.operations.dtypes.get(place, "float32"),
        )

    def _find_in_float32(self) -> Fault | None:
        """Returns where inf and NaN are made in float32."""
        birth = self._search.find_birth()
        if birth is None:
            return None
        cure = ""
        if birth.is_tried:
            cure = cures.find_cure_in_float32(self._search, birth)
        fault = self._describe("in float32", birth.place)
        return fault._replace(cure=cure, numbers=birth.numbers)

    def find_overflow(self, loss_scale: float) -> Fault | None:
        """Returns where a loss scale overflows that is larger than the largest that fits."""
        error_of = self._search.overflows_at(loss_scale)
        blame = self._search.blame(error_of, loss_scale, most=1)
        if blame is None:
            return None
        fault = self._describe("nonfinite", blame.place)
        return fault._replace(limit=blame.limit)

    def find_ceiling(self, loss_scale: float) -> Fault | None:
        """Returns the line at which a loss scale overflows that is larger than the largest.

        Its operation and layer are named if there is one: to tell them apart, the program would
        have to be compiled again.
        """
        search = self._search
        lines = search.find_lines(search.overflows_at(loss_scale), most=1)
        if not lines:
            return None
        places = search.board.places_of(lines)
        places = [place for place in places if place.is_backward] or places
        fault = self._describe("nonfinite", places[0])
        if len({place.primitive for place in places}) > 1:
            fault = fault._replace(operation="")
        if len({place.layer for place in places}) > 1:
            fault = fault._replace(layer="")
        return fault._replace(limit="overflow")

    def _explain(self, kind: str, scale: float, is_mask: bool) -> Fault | None:
        search = self._search
        blame = None
        error_of = search.error_at(scale)
        if self._best is not None:
            # At the scale itself first: a line that only allows a higher one is not at fault.
            error_of = search.error_at(scale, factors=[1.0, 2.0**-8])
            blame = search.blame(error_of, scale)
        if blame is None or blame.error > CLOSE:
            error_of = search.error_at(scale)
            blame = search.blame(error_of, scale) or blame
        if blame is None:
            return None
        works = blame.error <= CLOSE
        error: float | None = blame.error
        if works and search.compares_nothing:
            error = None
        place = self._find_first(kind, blame, scale)
        numbers = search.measure(place, scale)
        fault = self._describe(kind, place)
        return fault._replace(
            limit=blame.limit,
            lines=tuple(line.where for line in blame.lines),
            works=works,
            error=error,
            cure=cures.find_cure(search, blame, error_of, is_mask),
            bfloat16=works and self._is_right_in_bfloat16(fault, blame, error_of),
            numbers=numbers,
        )

    def _find_first(self, kind: str, blame: Blame, scale: float) -> Place:
        """Returns where a fault begins: every result is rounded by a little, to 1 as well.

        Then what makes inf or NaN of it comes first.
        """
        operations = self._search.board.operations
        is_constant = any(
            constant.line == blame.place.line
            for constant in operations.constants.values()
        )
        # A bound that is an argument, as that of `jnp.clip`, is converted by itself.
        is_constant |= all(
            operation.is_scalar
            for operation in operations.by_key.values()
            if operation.place == blame.place
        )
        if kind != "nonfinite" or blame.limit != "rounding" or is_constant:
            return blame.place
        return self._search.find_first_birth(scale) or blame.place

    def _is_right_in_bfloat16(
        self, fault: Fault, blame: Blame, error_of: ErrorOf
    ) -> bool:
        if fault.dtype != "float16" or blame.limit == "rounding":
            return False
        variant = Variant(dtype="bfloat16")
        return error_of(self._search.board.places, variant=variant) <= CLOSE

    def _find_mean(self, check: Check) -> Check:
        """Adds the largest sum whose mean in its place gives finite and right gradients."""
        total = cures.find_mean(self._search)
        if total is None:
            return check
        return check._replace(mean=total.size, mean_at=total.where)

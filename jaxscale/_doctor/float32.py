"""The gradients against those in float32: what is wrong with them, where, and what helps."""

import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import jax
import numpy as np
import optax

from .._trees.gradient_leaves import leaf_name
from ..diagnostics._trace.backward import Run, TracedBackward
from ..diagnostics._trace.report import Place, TraceReport
from .announcer import Announce
from .gradients import CLOSE, Comparison, are_finite, compare_gradients
from .origins import Sum
from .remedy import Culprit, FaultSearch, Remedy

# What changes by a larger share, or by a larger part of its error, when float32 is shaken by as
# much as it rounds, is nothing but the rounding of float32, as the gradient of a bias before a
# normalization is. It says nothing about narrower formats, and cannot be compared.
STABLE = 0.3


class Float32Check(NamedTuple):
    """The gradients against those in float32. Nothing is known if the arguments are not finite.

    Attributes:
      grads: the gradients in float32, by their names, if they are finite. What cannot be computed
        in float32, such as a kernel for one dtype, is as written.
      is_finite: whether the loss and the gradients are finite in float32, `None` if not known.
      comparison: what the gradients lost, if they are finite as written and in float32.
      wrong_leaves: the names of the gradients that are far from those in float32.
      unstable_leaves: the names of those that are as far from them, or not finite, and cannot be
        compared: rounding in float32 alone changes them by more than the share `STABLE`.
      error: how far all others are off together, as `Comparison.error`; `None` if not known.
      culprit: where they go wrong, if one equation is to blame.
      remedy: the lines that were tried in float32, in vain or not.
      right_loss: the loss in float32, if that as written is far from it, and both are finite.
      compiled_remedy: the lines that were tried in float32 in the compiled program, if only its
        gradients are wrong or not finite, and that help.
      mean: a sum that is the loss and too large, if its mean was tried, and is not.
    """

    grads: Mapping[str, np.ndarray] = {}
    is_finite: bool | None = None
    comparison: Comparison | None = None
    wrong_leaves: tuple[str, ...] = ()
    unstable_leaves: tuple[str, ...] = ()
    error: float | None = None
    culprit: Culprit | None = None
    remedy: Remedy | None = None
    right_loss: float | None = None
    compiled_remedy: Remedy | None = None
    mean: Sum | None = None

    @property
    def compares_nothing(self) -> bool:
        """Whether there is a gradient in float32, but none that can be compared with it."""
        nonzero = {name for name, grad in self.grads.items() if grad.any()}
        return bool(nonzero) and nonzero <= set(self.unstable_leaves)


def check_against_float32(
    backward: TracedBackward,
    run: Run,
    fused: Mapping[str, np.ndarray],
    params: optax.Params,
    best: float,
    loss_sums: Sequence[Sum],
    announce: Announce,
) -> Float32Check:
    """Finds out what is wrong with the gradients of `run`, where, and what helps.

    `fused` has the gradients of the same pass compiled as one program. `best` is the largest loss
    scale that fits, or that of the run if none is known. `loss_sums` are the sums that are the
    loss.
    """
    report = run.report()
    if report.nonfinite_arguments:
        return Float32Check()
    announce("comparing with float32", backward.how_far)
    reference = _Reference(backward, run.loss_scale, params)
    if not reference.is_finite:
        return Float32Check(is_finite=False)
    check = _find_fault(backward, run, fused, reference, best, announce)
    if report.nonfinite_outputs or best < 1:
        return check._replace(mean=_find_mean(backward, reference, loss_sums))
    return check


def _find_mean(
    backward: TracedBackward, reference: "_Reference", loss_sums: Sequence[Sum]
) -> Sum | None:
    """Returns the largest sum whose mean in its place gives finite and right gradients."""
    for total in sorted(loss_sums, key=lambda total: -total.size):
        if not (total.is_large and total.has_finite_mean):
            continue
        # The gradients of a mean are those of the sum at a loss scale smaller by its size. What is
        # flushed without a loss scale may be right with one.
        grads = backward.run(1 / total.size, is_brief=True).grads
        scaled_grads = backward.run(1.0, is_brief=True).grads
        is_right = reference.is_right(grads) or reference.is_right(scaled_grads)
        if are_finite(grads) and is_right:
            return total
    return None


def _find_fault(
    backward: TracedBackward,
    run: Run,
    fused: Mapping[str, np.ndarray],
    reference: "_Reference",
    best: float,
    announce: Announce,
) -> Float32Check:
    """Compares the gradients of `run`, and looks for the line at fault if they are wrong."""
    report = run.report()
    if report.nonfinite_outputs:
        unstable_leaves = reference.find_unstable_leaves()
        check = Float32Check(
            reference.grads, is_finite=True, unstable_leaves=unstable_leaves
        )
        suspects = reference.grads.keys() - set(unstable_leaves)
        search = _LineSearch(backward, run, reference, suspects, announce)
        return search.explain_nonfinite(check, report, best)

    right_loss = reference.find_right_loss(run)
    check = reference.judge(reference.rename(run.grads))
    check = check._replace(right_loss=right_loss)
    if check.wrong_leaves:
        suspects = set(check.wrong_leaves)
        search = _LineSearch(backward, run, reference, suspects, announce)
        return search.explain_wrong(check)
    # XLA may put two operations together, and lose what each by itself would keep.
    if are_finite(fused):
        check_of_fused = reference.judge(fused)
        if not check_of_fused.wrong_leaves:
            return check
        check = check_of_fused._replace(right_loss=right_loss)
    suspects = reference.grads.keys() - set(check.unstable_leaves)
    search = _LineSearch(backward, run, reference, suspects, announce)
    return search.explain_compiled(check)


class _Reference:
    """The gradients in float32, and how far others are from them."""

    def __init__(
        self, backward: TracedBackward, loss_scale: float, params: optax.Params
    ) -> None:
        self._run_in_float32 = functools.partial(
            backward.run, loss_scale, lambda key: True
        )
        self._names: dict[str, str] = {}  # by the names in a trace
        for path, _ in jax.tree_util.tree_leaves_with_path(params):
            self._names[f"grads{jax.tree_util.keystr(path)}"] = leaf_name(path)
        run = self._run_in_float32()
        self.is_finite = are_finite(run.outputs)
        self.grads = self.rename(run.grads)
        self._loss = _find_loss(run)

    def rename(self, grads: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns gradients of a trace by the names of their leaves."""
        return {self._names[name]: grad for name, grad in grads.items()}

    def compare(self, grads: Mapping[str, np.ndarray]) -> Comparison:
        """Compares gradients by their names in a trace."""
        return compare_gradients(self.rename(grads), self.grads)

    @functools.cached_property
    def _shaken(self) -> Run:
        return self._run_in_float32(is_shaken=True)

    @functools.cached_property
    def _changes(self) -> dict[str, float]:
        """By how much each leaf changes when float32 is shaken."""
        shaken = self.compare(self._shaken.grads)
        return {leaf.path: leaf.error for leaf in shaken.leaves}

    def find_right_loss(self, run: Run) -> float | None:
        """Returns the loss in float32 if that of a pass is far from it, else `None`."""
        error = abs(_find_loss(run) - self._loss)
        if error <= CLOSE * abs(self._loss):
            return None
        change = abs(_find_loss(self._shaken) - self._loss)
        if change > STABLE * min(error, abs(self._loss)):
            return None
        return self._loss

    def find_unstable_leaves(self) -> tuple[str, ...]:
        """Returns the leaves that rounding in float32 alone changes by much."""
        return tuple(path for path in self.grads if self._changes[path] > STABLE)

    def is_right(self, grads: Mapping[str, np.ndarray]) -> bool:
        """Returns whether gradients, by their names in a trace, are finite and none is wrong."""
        return are_finite(grads) and not self.judge(self.rename(grads)).wrong_leaves

    def judge(self, grads: Mapping[str, np.ndarray]) -> Float32Check:
        """Returns which of the finite gradients are far from those in float32."""
        comparison = compare_gradients(grads, self.grads)
        wrong_leaves = []
        unstable_leaves = []
        for leaf in comparison.leaves:
            if leaf.error <= CLOSE:
                continue
            if self._changes[leaf.path] <= STABLE * min(leaf.error, 1.0):
                wrong_leaves.append(leaf.path)
            else:
                unstable_leaves.append(leaf.path)
        compared = {
            name: leaf
            for name, leaf in self.grads.items()
            if name not in unstable_leaves
        }
        error = None
        if compared:
            error = compare_gradients(grads, compared).error
        return Float32Check(
            grads=self.grads,
            is_finite=True,
            comparison=comparison,
            wrong_leaves=tuple(wrong_leaves),
            unstable_leaves=tuple(unstable_leaves),
            error=error,
        )


def _explains_nonfinite(source: Culprit, report: TraceReport) -> bool:
    """Returns whether a source made a 0, or a number of the source was rounded there.

    Every result is rounded by a little, to 1 as well. Then the line that makes inf comes first.
    """
    if source.kind == "underflow":
        return True
    # A bound that is an argument, as that of `jnp.clip`, is converted by itself.
    if source.kind == "saturation" and not source.place.shape:
        return True
    return any(constant.where == source.place.where for constant in report.constants)


def _find_loss(run: Run) -> float:
    return float(np.mean(run.outputs["loss"], dtype=np.float64))


class _LineSearch:
    """The search for the line at fault. `suspects` are the leaves whose error counts."""

    def __init__(
        self,
        backward: TracedBackward,
        run: Run,
        reference: _Reference,
        suspects: Set[str],
        announce: Announce,
    ) -> None:
        self._backward = backward
        self._run = run
        self._reference = reference
        self._suspects = suspects
        self._announce = announce
        announce("looking for the line at fault", backward.how_far)
        self._search = FaultSearch(backward, run, self._error_of, run.loss_scale)

    def explain_wrong(self, check: Float32Check) -> Float32Check:
        """Adds where finite gradients go wrong, and what helps."""
        culprit = self._search.find_culprit()
        return check._replace(culprit=culprit, remedy=self._try_culprit(culprit))

    def explain_nonfinite(
        self, check: Float32Check, report: TraceReport, best: float
    ) -> Float32Check:
        """Adds what keeps the outputs finite, and the culprit if numbers go wrong before."""
        first = report.first_nonfinite
        if first is None:
            return check
        # a lower loss scale helps first
        if first.scaled and best < self._run.loss_scale:
            return check
        if first.cause == "value":
            # In float32 this operation makes none: what came to it was lost before.
            source = self._search.find_source()
            if source is not None and _explains_nonfinite(source, report):
                return check._replace(culprit=source, remedy=self._try_culprit(source))
        remedy = self._try_in_float32(first)
        if remedy is not None and remedy.works:
            return check._replace(remedy=remedy)
        # The first line may be right, and what came to it rounded.
        culprit = self._search.find_culprit()
        remedy_before = self._try_culprit(culprit)
        if remedy_before is not None and remedy_before.works:
            return check._replace(culprit=culprit, remedy=remedy_before)
        return check._replace(remedy=remedy)

    def explain_compiled(self, check: Float32Check) -> Float32Check:
        """Adds what helps if the gradients only go wrong in the compiled program."""
        self._announce("trying lines in float32, compiled", self._backward.how_far)
        return check._replace(compiled_remedy=self._search.find_compiled_remedy())

    def _try_culprit(self, culprit: Culprit | None) -> Remedy | None:
        if culprit is None:
            return None
        return self._try_in_float32(culprit.place)

    def _try_in_float32(self, place: Place) -> Remedy | None:
        if not place.file:
            return None
        self._announce(f"trying {place.where} in float32", self._backward.how_far)
        remedy = self._search.find_remedy(place)
        if not self._suspects:
            # Finite is all that can be said of them.
            remedy = remedy._replace(error=None)
        return remedy

    def _error_of(self, grads: Mapping[str, np.ndarray]) -> float:
        if not are_finite(grads):
            return math.inf
        largest = 0.0
        for leaf in self._reference.compare(grads).leaves:
            if leaf.path in self._suspects:
                largest = max(largest, leaf.error)
        return largest

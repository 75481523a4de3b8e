"""The gradients against those in float32: what is wrong with them, where, and what helps."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .._trees.tree import leaf_name
from ..diagnostics._trace.backward import Backward, Run
from ..diagnostics._trace.report import Place, TraceReport
from .compare import CLOSE, Comparison, compare_gradients
from .progress import Progress
from .remedy import Culprit, Remedy, Trials

# What changes by a larger share, or by a larger part of its error, when float32 is shaken by as
# much as it rounds, is nothing but the rounding of float32, as the gradient of a bias before a
# normalization is. It says nothing about narrower formats.
_STABLE = 0.3


class Against(NamedTuple):
    """What came of the comparison. All but `right` is explained in `Exam`.

    Attributes:
      right: the gradients in float32; none if they, or the arguments, are not finite.
      is_finite: `is_finite_in_float32` there.
      comparison: `float32` there.
      wrong: as there.
      culprit: as there.
      remedy: as there.
    """

    right: Mapping[str, np.ndarray] = {}
    is_finite: bool | None = None
    comparison: Comparison | None = None
    wrong: tuple[str, ...] = ()
    culprit: Culprit | None = None
    remedy: Remedy | None = None


class _Reference:
    """The gradients in float32, and how far others are from them."""

    def __init__(self, backward: Backward, loss_scale: float, params: Any) -> None:
        self._backward, self._loss_scale = backward, loss_scale
        pairs = jax.tree_util.tree_leaves_with_path(params)
        self._names = {f"grads{jax.tree_util.keystr(path)}": leaf_name(path) for path, _ in pairs}
        run = self._run()
        outputs = [np.asarray(value.array) for value in run.values.values()]
        self.is_finite = all(np.isfinite(output).all() for output in outputs)
        self.right = self._named(run.grads)

    def _run(self, **kwargs: Any) -> Run:
        return self._backward.run(self._loss_scale, lambda place: True, **kwargs)

    def _named(self, grads: Mapping[str, Any]) -> dict[str, Any]:
        return {self._names[name]: grad for name, grad in grads.items()}

    def compare(self, grads: Mapping[str, Any]) -> Comparison:
        """Returns what the gradients of a trace lost."""
        return compare_gradients(self._named(grads), self.right)

    @functools.cached_property
    def change(self) -> dict[str, float]:
        """By how much each leaf changes when float32 is shaken."""
        shaken = self.compare(self._run(is_shaken=True).grads)
        return {leaf.path: leaf.error for leaf in shaken.leaves}

    def far(self, comparison: Comparison) -> tuple[str, ...]:
        """Returns the leaves that are wrong, worst first."""
        return tuple(
            leaf.path
            for leaf in comparison.leaves
            if leaf.error > CLOSE and self.change[leaf.path] <= _STABLE * min(leaf.error, 1.0)
        )


def against_float32(
    backward: Backward,
    run: Run,
    whole: Mapping[str, np.ndarray],
    params: Any,
    *,
    is_too_high: bool,
    progress: Progress,
) -> Against:
    """Returns what is wrong with the gradients, where, and what helps.

    Args:
      backward: the backward pass.
      run: a pass of it, as it is written.
      whole: the gradients of the same pass compiled as one program, by their names.
      params: the parameters.
      is_too_high: whether a lower loss scale would fit.
      progress: is told what is done next.
    """
    report = run.report()
    if report.nonfinite_arguments:
        return Against()
    progress("comparing with float32", backward.how_far)
    reference = _Reference(backward, run.loss_scale, params)
    if not reference.is_finite:
        return Against(is_finite=False)
    found = Against(reference.right, True)
    if report.nonfinite_outputs:
        wrong = {path for path in reference.right if reference.change[path] <= _STABLE}
    else:
        comparison = reference.compare(run.grads)
        found = found._replace(comparison=comparison, wrong=reference.far(comparison))
        if not found.wrong:
            return _of_whole(found, reference, whole)
        wrong = set(found.wrong)

    def error_of(grads: Mapping[str, Any]) -> float:
        if not all(np.isfinite(grad).all() for grad in grads.values()):
            return math.inf
        leaves = reference.compare(grads).leaves
        return max((leaf.error for leaf in leaves if leaf.path in wrong), default=0.0)

    progress("looking for the line at fault", backward.how_far)
    trials = Trials(backward, run.loss_scale, run, error_of, CLOSE)
    if not report.nonfinite_outputs:
        culprit = trials.find_culprit()
        return found._replace(culprit=culprit, remedy=_tried(trials, culprit, progress))
    return _of_nonfinite(found, report, trials, is_too_high, progress)


def _of_whole(found: Against, reference: _Reference, whole: Mapping[str, np.ndarray]) -> Against:
    # XLA may put two operations together, and lose what each by itself would keep.
    if all(np.isfinite(leaf).all() for leaf in whole.values()):
        comparison = compare_gradients(whole, reference.right)
        if wrong := reference.far(comparison):
            return found._replace(comparison=comparison, wrong=wrong)
    return found


def _of_nonfinite(
    found: Against,
    report: TraceReport,
    trials: Trials,
    is_too_high: bool,
    progress: Progress,
) -> Against:
    place = report.first_nonfinite
    if place is None or (place.scaled and is_too_high):
        return found  # a lower loss scale helps first
    remedy = _try(trials, place, progress)
    if remedy is None or not remedy.works:
        # The line may be right, and what came to it rounded.
        culprit = trials.find_culprit()
        before = _tried(trials, culprit, progress)
        if before is not None and before.works:
            return found._replace(culprit=culprit, remedy=before)
    return found._replace(remedy=remedy)


def _tried(trials: Trials, culprit: Culprit | None, progress: Progress) -> Remedy | None:
    return _try(trials, culprit.place, progress) if culprit else None


def _try(trials: Trials, place: Place, progress: Progress) -> Remedy | None:
    if not place.file:
        return None
    progress(f"trying {place.where} in float32", trials.how_far)
    return trials.find_remedy((place.file, place.line))

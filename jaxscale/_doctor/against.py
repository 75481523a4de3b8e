"""The gradients against those in float32: what is wrong with them, where, and what helps."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .._trees.tree import leaf_name
from ..diagnostics._trace.backward import Run, TracedBackward
from ..diagnostics._trace.report import Place
from .gradients import CLOSE, Comparison, are_finite, compare_gradients
from .progress import Progress
from .remedy import Culprit, Remedy, Trials

# What changes by a larger share, or by a larger part of its error, when float32 is shaken by as
# much as it rounds, is nothing but the rounding of float32, as the gradient of a bias before a
# normalization is. It says nothing about narrower formats.
_STABLE = 0.3


class Against(NamedTuple):
    """The gradients against those in float32. Nothing is known if the arguments are not finite."""

    # The gradients in float32, by their names, if they are finite. What cannot be computed in
    # float32, as a kernel for one dtype, is as written.
    grads: Mapping[str, np.ndarray] = {}
    is_finite: bool | None = None  # whether loss and gradients are finite in float32
    comparison: Comparison | None = None  # what is lost, if both gradients are finite
    wrong: tuple[str, ...] = ()  # the leaves of the gradients that are far from those in float32
    culprit: Culprit | None = None  # where they go wrong, if it is one equation
    remedy: Remedy | None = None  # the lines that make them right in float32, or were tried in vain


class _Reference:
    """The gradients in float32, and how far others are from them."""

    def __init__(self, backward: TracedBackward, loss_scale: float, params: Any) -> None:
        self._run = functools.partial(backward.run, loss_scale, lambda key: True)
        pairs = jax.tree_util.tree_leaves_with_path(params)
        self._names = {f"grads{jax.tree_util.keystr(path)}": leaf_name(path) for path, _ in pairs}
        run = self._run()
        self.is_finite = are_finite({k: np.asarray(v.array) for k, v in run.values.items()})
        self.grads = self._rename(run.grads)

    def _rename(self, grads: Mapping[str, Any]) -> dict[str, Any]:
        return {self._names[name]: grad for name, grad in grads.items()}

    def compare(self, grads: Mapping[str, Any]) -> Comparison:
        return compare_gradients(self._rename(grads), self.grads)

    @functools.cached_property
    def change(self) -> dict[str, float]:
        """By how much each leaf changes when float32 is shaken."""
        shaken = self.compare(self._run(is_shaken=True).grads)
        return {leaf.path: leaf.error for leaf in shaken.leaves}

    def find_wrong(self, comparison: Comparison) -> tuple[str, ...]:
        return tuple(
            leaf.path
            for leaf in comparison.leaves
            if leaf.error > CLOSE and self.change[leaf.path] <= _STABLE * min(leaf.error, 1.0)
        )


def compare_with_float32(
    backward: TracedBackward,
    run: Run,
    whole: Mapping[str, np.ndarray],
    params: Any,
    best: float,
    progress: Progress,
) -> Against:
    """Returns what is wrong with the gradients of `run`, where, and what helps.

    `whole` has the gradients of the same pass compiled as one program. `best` is the largest loss
    scale that fits, or that of the run if none is known.
    """
    report = run.report()
    if report.nonfinite_arguments:
        return Against()
    progress("comparing with float32", backward.how_far)
    reference = _Reference(backward, run.loss_scale, params)
    if not reference.is_finite:
        return Against(is_finite=False)
    found = Against(reference.grads, True)
    if report.nonfinite_outputs:
        wrong = {path for path in reference.grads if reference.change[path] <= _STABLE}
    else:
        comparison = reference.compare(run.grads)
        found = found._replace(comparison=comparison, wrong=reference.find_wrong(comparison))
        if not found.wrong and are_finite(whole):
            # XLA may put two operations together, and lose what each by itself would keep.
            comparison = compare_gradients(whole, reference.grads)
            if fused := reference.find_wrong(comparison):
                return found._replace(comparison=comparison, wrong=fused)
        if not found.wrong:
            return found
        wrong = set(found.wrong)

    def error_of(grads: Mapping[str, Any]) -> float:
        if not are_finite(grads):
            return math.inf
        leaves = reference.compare(grads).leaves
        return max((leaf.error for leaf in leaves if leaf.path in wrong), default=0.0)

    def try_in_float32(place: Place | None) -> Remedy | None:
        if place is None or not place.file:
            return None
        progress(f"trying {place.where} in float32", backward.how_far)
        return trials.find_remedy(place)

    progress("looking for the line at fault", backward.how_far)
    trials = Trials(backward, run, error_of, run.loss_scale)
    remedy = None
    if report.nonfinite_outputs:
        first = report.first_nonfinite
        if first is None or (first.scaled and best < run.loss_scale):
            return found  # a lower loss scale helps first
        # In float32 this operation makes none: what came to it was lost before.
        flush = trials.find_flush() if first.cause == "value" else None
        if flush is not None:
            return found._replace(culprit=flush, remedy=try_in_float32(flush.place))
        remedy = try_in_float32(first)
        if remedy is not None and remedy.works:
            return found._replace(remedy=remedy)
    # Where the outputs are not finite, the first line may be right, and what came to it rounded.
    culprit = trials.find_culprit()
    before = try_in_float32(culprit.place if culprit else None)
    if report.nonfinite_outputs and not (before and before.works):
        return found._replace(remedy=remedy)
    return found._replace(culprit=culprit, remedy=before)

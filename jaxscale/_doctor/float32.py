"""The gradients against those in float32: what is wrong with them, where, and what helps."""

import functools
import math
from collections.abc import Mapping, Set
from typing import NamedTuple

import jax
import numpy as np
import optax

from .._trees.gradient_leaves import leaf_name
from ..diagnostics._trace.backward import Run, TracedBackward
from ..diagnostics._trace.report import Place, TracedNonfinite, TraceReport
from .announcer import Announce
from .gradients import CLOSE, Comparison, are_finite, compare_gradients
from .origins import Operations, Sum
from .remedy import Culprit, LineSearch, Remedy

# What changes by a larger share, or by a larger part of its error, when float32 is shaken by as
# much as it rounds, is nothing but the rounding of float32, as the gradient of a bias before a
# normalization is. It says nothing about narrower formats, and cannot be compared.
STABLE = 0.3


class Float32Check(NamedTuple):
    """The gradients against those in float32. Nothing is known if the arguments are not finite.

    Attributes:
      is_finite_in_float32: whether the loss and the gradients are finite in float32, `None` if not
        known.
      float32: what the gradients lost, if they are finite as written and in float32.
      wrong: the names of the gradients that are far from those in float32.
      unstable: the names of those that are as far from them, or not finite, and cannot be compared:
        rounding in float32 alone changes them by more than the share `STABLE`.
      right_loss: the loss in float32, if that as written is far from it, and both are finite.
      mean: a sum that is the loss and too large, if its mean was tried, and is not.
      culprit: where they go wrong, if one equation is to blame.
      remedy: the lines that were tried in float32, in vain or not.
      compiled_remedy: the lines that were tried in float32 in the compiled program, if only its
        gradients are wrong or not finite, and that help.
      grads: the gradients in float32, by their names, if they are finite. What cannot be computed
        in float32, such as a kernel for one dtype, is as written.
      error: how far all gradients that can be compared are off together, as `Comparison.error`;
        `None` if not known.
    """

    is_finite_in_float32: bool | None = None
    float32: Comparison | None = None
    wrong: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    right_loss: float | None = None
    mean: Sum | None = None
    culprit: Culprit | None = None
    remedy: Remedy | None = None
    compiled_remedy: Remedy | None = None
    grads: Mapping[str, np.ndarray] = {}
    error: float | None = None

    @property
    def compares_nothing(self) -> bool:
        """Whether there is a gradient in float32, but none that can be compared with it."""
        nonzero = {name for name, grad in self.grads.items() if grad.any()}
        return bool(nonzero) and nonzero <= set(self.unstable)


def check_against_float32(
    backward: TracedBackward,
    run: Run,
    fused: Mapping[str, np.ndarray],
    params: optax.Params,
    best: float,
    announce: Announce,
) -> Float32Check:
    """Finds out what is wrong with the gradients of `run`, where, and what helps.

    `fused` has the gradients of the same pass compiled as one program. `best` is the largest loss
    scale that fits, or that of the run if none is known.
    """
    report = run.report()
    if report.nonfinite_arguments:
        return Float32Check()
    announce("comparing with float32", backward.how_far)
    reference = _Reference(backward, run.loss_scale, params)
    if not reference.is_finite:
        return Float32Check(is_finite_in_float32=False)
    search = _FaultSearch(backward, run, reference, announce)
    if report.nonfinite_outputs:
        check = search.explain_nonfinite(report, best)
    else:
        check = search.explain_finite(fused)
    if report.nonfinite_outputs or best < 1:
        return check._replace(mean=_find_mean(backward, run, reference))
    return check


def _find_mean(
    backward: TracedBackward, run: Run, reference: "_Reference"
) -> Sum | None:
    """Returns the largest sum whose mean in its place gives finite and right gradients."""
    sums = Operations(run.findings).find_large_sums(run)
    for total in sorted(sums, key=lambda total: -total.size):
        # The gradients of a mean are those of the sum at a loss scale smaller by its size. What is
        # flushed without a loss scale may be right with one.
        grads = backward.run(1 / total.size, is_brief=True).grads
        scaled_grads = backward.run(1.0, is_brief=True).grads
        is_right = reference.is_right(grads) or reference.is_right(scaled_grads)
        if are_finite(grads) and is_right:
            return total
    return None


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
        return are_finite(grads) and not self.judge(self.rename(grads)).wrong

    def judge(self, grads: Mapping[str, np.ndarray]) -> Float32Check:
        """Returns which of the finite gradients are far from those in float32."""
        comparison = compare_gradients(grads, self.grads)
        wrong = []
        unstable = []
        for leaf in comparison.leaves:
            if leaf.error <= CLOSE:
                continue
            if self._changes[leaf.path] <= STABLE * min(leaf.error, 1.0):
                wrong.append(leaf.path)
            else:
                unstable.append(leaf.path)
        compared = {
            name: leaf for name, leaf in self.grads.items() if name not in unstable
        }
        error = None
        if compared:
            error = compare_gradients(grads, compared).error
        return Float32Check(
            grads=self.grads,
            is_finite_in_float32=True,
            float32=comparison,
            wrong=tuple(wrong),
            unstable=tuple(unstable),
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


class _FaultSearch:
    """The search for the line at fault in a pass, and for what helps."""

    def __init__(
        self,
        backward: TracedBackward,
        run: Run,
        reference: _Reference,
        announce: Announce,
    ) -> None:
        self._backward = backward
        self._run = run
        self._reference = reference
        self._announce = announce

    def explain_nonfinite(self, report: TraceReport, best: float) -> Float32Check:
        """Returns what keeps the outputs finite, and the culprit if numbers go wrong before."""
        check = Float32Check(
            is_finite_in_float32=True,
            unstable=self._reference.find_unstable_leaves(),
            grads=self._reference.grads,
        )
        suspects = check.grads.keys() - set(check.unstable)
        lines = self._begin(suspects)
        first = report.first_nonfinite
        if first is None:
            return check
        # a lower loss scale helps first
        if first.scaled and best < self._run.loss_scale:
            return check
        culprit, remedy = self._find_cause(lines, first, report)
        if remedy is not None and not suspects:
            # Finite is all that can be said of them.
            remedy = remedy._replace(error=None)
        return check._replace(culprit=culprit, remedy=remedy)

    def _find_cause(
        self, lines: LineSearch, first: TracedNonfinite, report: TraceReport
    ) -> tuple[Culprit | None, Remedy | None]:
        """Returns what goes wrong before inf or NaN is made at `first`, and what helps."""
        if first.cause == "value":
            # In float32 this operation makes none: what came to it was lost before.
            source = lines.find_source()
            if source is not None and _explains_nonfinite(source, report):
                return source, self._try_in_float32(lines, source.place)
        remedy = self._try_in_float32(lines, first)
        if remedy is not None and remedy.works:
            return None, remedy
        # The first line may be right, and what came to it rounded.
        culprit = lines.find_culprit()
        if culprit is not None:
            remedy_before = self._try_in_float32(lines, culprit.place)
            if remedy_before is not None and remedy_before.works:
                return culprit, remedy_before
        return None, remedy

    def explain_finite(self, fused: Mapping[str, np.ndarray]) -> Float32Check:
        """Returns how far finite gradients are off, where they go wrong, and what helps."""
        reference = self._reference
        right_loss = reference.find_right_loss(self._run)
        check = reference.judge(reference.rename(self._run.grads))
        check = check._replace(right_loss=right_loss)
        if check.wrong:
            lines = self._begin(set(check.wrong))
            culprit = lines.find_culprit()
            if culprit is None:
                return check
            remedy = self._try_in_float32(lines, culprit.place)
            return check._replace(culprit=culprit, remedy=remedy)
        # XLA may put two operations together, and lose what each by itself would keep.
        if are_finite(fused):
            check_of_fused = reference.judge(fused)
            if not check_of_fused.wrong:
                return check
            check = check_of_fused._replace(right_loss=right_loss)
        lines = self._begin(check.grads.keys() - set(check.unstable))
        self._announce("trying lines in float32, compiled", self._backward.how_far)
        return check._replace(compiled_remedy=lines.find_compiled_remedy())

    def _begin(self, suspects: Set[str]) -> LineSearch:
        """Begins a search in which the error of these leaves counts."""
        self._announce("looking for the line at fault", self._backward.how_far)

        def error_of(grads: Mapping[str, np.ndarray]) -> float:
            if not are_finite(grads):
                return math.inf
            leaves = self._reference.compare(grads).leaves
            errors = [leaf.error for leaf in leaves if leaf.path in suspects]
            return max(errors, default=0.0)

        return LineSearch(self._backward, self._run, error_of, self._run.loss_scale)

    def _try_in_float32(self, lines: LineSearch, place: Place) -> Remedy | None:
        if not place.where:
            return None
        self._announce(f"trying {place.where} in float32", self._backward.how_far)
        return lines.find_remedy(place.where)

"""The exam: all diagnostics of one loss on its parameters and one batch."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._autocast.api import autocast
from .._jax import (
    ClosedJaxpr,
    Jaxpr,
    Op,
    backward_rule,
    does,
    has_narrow_range,
    holds_half,
    programs,
    walk_program,
)
from .._trees.gradient_leaves import leaf_name
from ..diagnostics._histogram import find_shares_by_leaf, shares
from ..diagnostics._leaves import table
from ..diagnostics._trace.backward import TracedBackward
from ..diagnostics._trace.findings import Run
from ..diagnostics._trace.places import Around, find_line
from ..diagnostics._trace.report import TracedNonfinite, TraceReport
from .announcer import Announce, announce_nothing
from .compiled import BackwardTrial, CompiledBackward
from .exam import Exam
from .float32 import Float32Check, check_against_float32
from .gradients import (
    add_histograms,
    are_finite,
    compare_gradients,
    count_leaves,
)
from .origins import Operations
from .remedy import Relief, find_relief
from .start import find_start
from .sums_of_gradients import count_summands
from .target import Target, TargetError, error_line

# The largest gradient at the largest loss scale is below this if something else limits the scale.
_FULL = 2.0**12
# times the largest loss scale: the one to try with some lines in float32
_HIGHER = 2.0**8


def examine(
    target: Target,
    loss_scale: float | None,
    dtype: str | None = None,
    announce: Announce = announce_nothing,
    *,
    is_quick: bool = False,
) -> Exam:
    """Runs all diagnostics.

    `loss_scale` is `None` for the largest that does not overflow. `jaxscale.autocast` computes the
    loss in `dtype`, if there is one.
    """
    loss_as_written = None
    if dtype is not None:
        loss_as_written = CompiledBackward(target).compute_loss()
        target = target._replace(loss_fn=autocast(target.loss_fn, dtype=dtype))
    compiled = CompiledBackward(target)
    program = _trace_loss(compiled, target.name, dtype)
    dtypes = _find_dtypes(program)

    announce("compiling the backward pass")
    loss = float(compiled.differentiate(1.0).loss)
    calibration = None
    largest_scale = None
    overflows = False
    trial = BackwardTrial()
    if any(map(has_narrow_range, dtypes)) and math.isfinite(loss):
        announce("looking for the largest loss scale that fits", compiled.how_far)
        calibration = compiled.calibrate()
        # a dynamic scale ends near it, wherever it started
        largest_scale = calibration.init_scale
        overflows = calibration.overflows_at is not None
        if not is_quick:
            announce("trying `scale_backward`")
            trial = compiled.try_scale_backward()

    traced_scale = loss_scale or largest_scale or 1.0
    shown_scale = loss_scale or 1.0
    best_scale = largest_scale or traced_scale
    best = compiled.find_gradients(best_scale)
    histograms = count_leaves(best.tree)
    histogram = add_histograms(histograms)
    traced_grads = compiled.find_gradients(traced_scale)
    comparison = None
    if largest_scale is not None and shown_scale < largest_scale:
        shown_grads = compiled.find_gradients(shown_scale)
        comparison = compare_gradients(shown_grads.by_name, best.by_name)
    exam = Exam(
        target=target.name,
        autocast=dtype or "",
        is_quick=is_quick,
        is_auto=loss_scale is None,
        loss=loss,
        loss_as_written=loss_as_written,
        dtypes=tuple(sorted(map(str, dtypes))),
        dtypes_of_parameters=_name_dtypes(target.params),
        sums_of_gradients=count_summands(program, _name_leaves(target.params)),
        backward_rules=_find_backward_rules(program),
        loss_scale=traced_scale,
        shown_scale=shown_scale,
        calibration=calibration,
        start=find_start(largest_scale),
        trial=trial,
        largest=best.largest,
        is_limited=overflows and 0 < best.largest * best_scale < _FULL,
        ceiling=None,
        relief=None,
        comparison=comparison,
        trace=_make_empty_report(loss, traced_scale),
        check=Float32Check(),
        unshifted=(),
        untaken=(),
        half_draws=tuple(dict.fromkeys(_find_half_draws(program, ()))),
        loss_sums=(),
        zero=(),
        leaves=table(count_leaves(traced_grads.tree), loss_scale=traced_scale),
        histogram=histogram,
        shares=shares(histogram, loss_scale=shown_scale),
        layers=find_shares_by_leaf(histograms, round(math.log2(shown_scale))),
    )
    exam = _Tracer(target, compiled, announce).complete(exam)
    zero = _find_zero_leaves(exam.check.grads or best.by_name)
    return exam._replace(zero=zero)


def _name_dtypes(tree: Any) -> tuple[str, ...]:
    return tuple(sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)}))


def _name_leaves(tree: Any) -> list[str]:
    return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _trace_loss(
    compiled: CompiledBackward, name: str, dtype: str | None
) -> ClosedJaxpr:
    try:
        return jax.make_jaxpr(compiled.loss_of)(*compiled.args)
    except Exception as error:
        if dtype is None:
            raise
        # As it is written, the loss was run before.
        raise TargetError(
            f"`jaxscale.autocast` raised on the loss of {name}: {error_line(error)}"
        ) from error


class _Tracer:
    """Runs the backward pass equation by equation, and adds to an exam what that shows.

    `compiled` is the same pass as one program. `announce` is told what is done next.
    """

    def __init__(
        self, target: Target, compiled: CompiledBackward, announce: Announce
    ) -> None:
        self._target = target
        self._compiled = compiled
        self._announce = announce
        args = (target.params, target.batch)
        self._backward = TracedBackward(
            target.loss_fn, args, {}, target.constants, has_aux=target.has_aux
        )

    def complete(self, exam: Exam) -> Exam:
        """Adds all that only a pass equation by equation can show."""
        run = None
        # If all is finite, a quick exam has nothing to see.
        if not (exam.is_quick and self._is_finite(exam)):
            run = self._run_as_written(exam)
            exam = self._describe_run(exam, run)
        if exam.overflows_at is None or exam.trace.nonfinite_outputs:
            return exam
        self._announce("looking for what limits the loss scale", self._backward.how_far)
        if run is None or exam.is_quick:
            ceiling = self._backward.first_overflow(exam.overflows_at)
            return exam._replace(ceiling=ceiling)
        exam = exam._replace(ceiling=self._find_ceiling(exam.overflows_at))
        return exam._replace(relief=self._find_relief(exam, run))

    def _is_finite(self, exam: Exam) -> bool:
        """Returns whether all outputs are known to be finite."""
        grads = self._compiled.find_gradients(exam.loss_scale).by_name
        is_loss_finite = math.isfinite(exam.loss)
        return is_loss_finite and are_finite(grads) and not self._target.has_aux

    def _run_as_written(self, exam: Exam) -> Run:
        self._announce("looking at each operation", self._backward.how_far)
        return self._backward.run(exam.loss_scale, is_brief=True)

    def _describe_run(self, exam: Exam, run: Run) -> Exam:
        operations = Operations(run.findings)
        loss_sums = tuple(operations.find_loss_sums(run))
        exam = exam._replace(
            trace=run.report(),
            unshifted=operations.find_unshifted(),
            untaken=operations.find_untaken(),
            loss_sums=loss_sums,
        )
        if exam.is_quick:
            return exam
        return exam._replace(check=self._check_against_float32(exam, run))

    def _check_against_float32(self, exam: Exam, run: Run) -> Float32Check:
        best = exam.best_scale
        if exam.loss_scale < best and not exam.trace.nonfinite_outputs:
            # A scale that is too low also flushes gradients. At the largest one only the faults
            # of the model are left.
            run = self._backward.run(best, is_brief=True)
        fused = self._compiled.find_gradients(max(exam.loss_scale, best)).by_name
        return check_against_float32(
            backward=self._backward,
            run=run,
            fused=fused,
            params=self._target.params,
            best=best,
            announce=self._announce,
        )

    def _find_ceiling(self, overflows_at: float) -> TracedNonfinite | None:
        """Returns where a loss scale overflows, if that depends on the scale and does harm."""
        run = self._backward.run(overflows_at, is_brief=True)
        first = run.report().first_nonfinite
        if first is None or not first.scaled or not first.reaches:
            return None
        return first

    def _find_relief(self, exam: Exam, run: Run) -> Relief | None:
        """Returns which lines in float32 let a higher loss scale fit, if one would be better."""
        ceiling = exam.ceiling
        would_help = exam.is_limited or exam.best_scale < 1
        if ceiling is None or not ceiling.where or not would_help:
            return None
        self._announce(f"trying {ceiling.where} in float32", self._backward.how_far)
        higher = max(exam.best_scale * _HIGHER, 1.0)
        return find_relief(self._backward, run, ceiling.where, higher)


def _make_empty_report(loss: float, loss_scale: float) -> TraceReport:
    return TraceReport(
        loss=loss,
        loss_scale=loss_scale,
        equations=0,
        nonfinite=(),
        underflows=(),
        nonfinite_arguments=(),
        nonfinite_outputs=(),
        not_compared=(),
        not_entered=(),
        constants=(),
    )


def _find_zero_leaves(grads: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    return tuple(name for name, grad in grads.items() if grad.size and not grad.any())


def _find_dtypes(program: ClosedJaxpr) -> set[Any]:
    """Returns the floating dtypes that a program computes in."""
    variables = [*program.jaxpr.outvars]
    for eqn in walk_program(program):
        variables += eqn.outvars
    dtypes = set()
    for variable in variables:
        dtype = getattr(variable.aval, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            dtypes.add(dtype)
    return dtypes


def _find_half_draws(
    program: Jaxpr | ClosedJaxpr, around: Around
) -> Iterator[tuple[str, str]]:
    """Yields the dtype and the line of each draw of random numbers in half precision.

    JAX makes them of random bits, in one program.
    """
    draws = any(Op.RANDOM in does(eqn.primitive.name) for eqn in program.eqns)
    for eqn in program.eqns:
        if draws and Op.READS_BITS in does(eqn.primitive.name):
            made: Any = eqn.outvars[0].aval
            if holds_half(made):
                yield str(made.dtype), find_line(eqn, around).where
        for inner in programs(eqn):
            yield from _find_half_draws(inner, (*around, eqn))


def _find_backward_rules(program: ClosedJaxpr) -> dict[str, str]:
    """Returns the names of the backward rules, by the line that calls their functions."""
    rules = {}
    for eqn in walk_program(program):
        rule = backward_rule(eqn)
        if rule:
            where = find_line(eqn, ()).where
            if where:
                rules[where] = rule
    return rules

"""The exam: all diagnostics of one loss on its parameters and one batch."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._autocast.api import autocast
from .._jax import ClosedJaxpr, JaxprEqn, backward_rule, closed, programs
from ..diagnostics._calibrate import Calibration
from ..diagnostics._histogram import Histogram, Shares, shares
from ..diagnostics._leaves import LeafTable, table
from ..diagnostics._suggest import Suggestion, suggest_scale
from ..diagnostics._trace.backward import TracedBackward
from ..diagnostics._trace.findings import Run
from ..diagnostics._trace.places import lines
from ..diagnostics._trace.report import TracedNonfinite, TraceReport
from ..diagnostics._underflow import Underflow, underflow
from .against import Against, compare_with_float32
from .compiled import BackwardTrial, CompiledBackward
from .gradients import Comparison, are_finite, by_name, compare_gradients, count_numbers
from .pattern import Operations, Sum
from .progress import Progress
from .remedy import Relief, find_relief
from .target import Target, TargetError, error_line

# The largest gradient at the largest loss scale is below this if something else limits the scale.
_FULL = 2.0**12
_HIGHER = 2.0**8  # times the largest loss scale: the one to try with some lines in float32
_MOST_LAYERS = 40  # in the map of layers


class Exam(NamedTuple):
    """What was measured. All of it is on the host, except for the histogram."""

    target: str  # what was examined, as named on the command line
    autocast: str  # the format in which `jaxscale.autocast` computed the loss, or `""`
    is_quick: bool  # whether nothing was compared with float32, and nothing finite was traced
    is_auto: bool  # whether no scale was given, so that `loss_scale` is the largest that fits
    loss: float
    loss_as_written: float | None  # without `jaxscale.autocast`; `None` if that was not used
    dtypes: tuple[str, ...]  # the formats in which the loss is computed
    backward_rules: dict[str, str]  # their names, by the line that calls their functions
    loss_scale: float  # the scale of the trace and the table of leaves
    shown_scale: float  # the scale at which formats are judged: the one given, or 1
    # The largest scale that does not overflow. `None` if none of the model's dtypes needs one, or
    # the loss itself is not finite.
    calibration: Calibration | None
    backward_trial: BackwardTrial | None  # of `jaxscale.scale_backward`, after a calibration
    largest: float  # the largest magnitude among the gradients at the largest scale
    is_limited: bool  # whether a number on the way, far larger than the gradients, limits it
    trace: TraceReport  # where numbers get lost at the loss scale
    against: Against  # the gradients against those in float32
    ceiling: TracedNonfinite | None  # where the least loss scale that does not fit overflows
    # What lets a higher scale fit, sought if the scale `is_limited` or the largest is below 1.
    # `None` otherwise, or if nothing was found.
    relief: Relief | None
    unshifted: tuple[str, ...]  # lines with an exponential of a row without its maximum, too large
    loss_sums: tuple[Sum, ...]  # the sums that the loss is made of
    # The gradients at the shown scale against those at the largest, if it is lower.
    comparison: Comparison | None
    zero: tuple[str, ...]  # leaves whose gradient is 0 everywhere, in float32 if that is known
    leaves: LeafTable  # the gradients, leaf by leaf
    histogram: Histogram  # the gradients at the largest scale, where the fewest are flushed
    shares: dict[str, Shares]  # what each format keeps of these at the shown scale
    layers: Underflow  # the same for each layer
    suggestion: Suggestion  # the scale at which float16 would store these gradients best

    @property
    def is_right(self) -> bool:
        """Whether the gradients were compared with float32, and none is wrong."""
        return self.against.comparison is not None and not self.against.wrong

    @property
    def is_all_zero(self) -> bool:
        """Whether all gradients are 0 at the largest scale, at which the histogram is taken."""
        return self.suggestion.needed is None and not self.leaves.nonfinite_rows

    @property
    def is_of_autocast(self) -> bool:
        """Whether half precision is due to autocast, and not written by hand."""
        return bool(self.autocast) and math.isfinite(self.loss_as_written or 0.0)

    @property
    def fits(self) -> float | None:
        return self.calibration.init_scale if self.calibration else None


class _Scales(NamedTuple):
    """The loss scales that matter, and what was tried to find them."""

    calibration: Calibration | None
    backward_trial: BackwardTrial | None
    used: float  # the scale of the trace
    shown: float  # the scale at which formats are judged
    best: float  # the largest that fits, where the fewest gradients are flushed on the way


class _Traced(NamedTuple):
    """What one pass, equation by equation, showed, and what was tried after it."""

    report: TraceReport
    against: Against = Against()
    ceiling: TracedNonfinite | None = None
    relief: Relief | None = None
    unshifted: tuple[str, ...] = ()
    loss_sums: tuple[Sum, ...] = ()


def examine(
    target: Target,
    loss_scale: float | None,
    dtype: str | None = None,
    progress: Progress = lambda *_: None,
    *,
    is_quick: bool = False,
) -> Exam:
    """Returns the results of all diagnostics.

    `loss_scale` is `None` for the largest that does not overflow. `jaxscale.autocast` computes the
    loss in `dtype`, if there is one.
    """
    loss_as_written = None
    if dtype:
        written = CompiledBackward(target)
        loss_as_written = float(jax.jit(written.loss_of)(*written.args))
        target = target._replace(loss_fn=autocast(target.loss_fn, dtype=dtype))
    compiled = CompiledBackward(target)
    program = _trace_loss(compiled, target.name, dtype)
    dtypes = _find_dtypes(program)
    progress("compiling the backward pass")
    loss, _ = compiled.run(1.0)
    can_scale = bool(np.isfinite(loss)) and is_half(dtypes)
    scales = _find_scales(compiled, loss_scale, can_scale, is_quick, progress)

    grads = {scale: compiled.run(scale)[1] for scale in scales[2:]}
    named = {scale: by_name(tree) for scale, tree in grads.items()}
    largest = max(float(np.abs(leaf).max(initial=0)) for leaf in named[scales.best].values())
    calibration = scales.calibration
    is_ended = calibration is not None and calibration.overflows_at is not None
    is_limited = is_ended and 0 < largest * scales.best < _FULL
    traced = _trace(target, loss, scales, named, is_limited, is_quick, progress)

    _, histograms = count_numbers(grads[scales.best], scales.used)
    histogram: Any = sum(jax.tree.leaves(histograms, is_leaf=lambda x: isinstance(x, Histogram)))
    comparison = None
    fits = calibration.init_scale if calibration is not None else None
    if fits is not None and scales.shown < fits:
        comparison = compare_gradients(named[scales.shown], named[scales.best])
    exact = traced.against.grads or named[scales.best]
    return Exam(
        target=target.name,
        autocast=dtype or "",
        is_quick=is_quick,
        is_auto=loss_scale is None,
        loss=loss,
        loss_as_written=loss_as_written,
        dtypes=dtypes,
        backward_rules=_find_backward_rules(program),
        loss_scale=scales.used,
        shown_scale=scales.shown,
        calibration=calibration,
        backward_trial=scales.backward_trial,
        largest=largest,
        is_limited=is_limited,
        trace=traced.report,
        against=traced.against,
        ceiling=traced.ceiling,
        relief=traced.relief,
        unshifted=traced.unshifted,
        loss_sums=traced.loss_sums,
        comparison=comparison,
        zero=tuple(name for name, grad in exact.items() if grad.size and not grad.any()),
        leaves=table(count_numbers(grads[scales.used], scales.used)[0]),
        histogram=histogram,
        shares=shares(histogram, loss_scale=scales.shown),
        layers=_find_layers(histograms, scales.shown),
        suggestion=suggest_scale(histogram),
    )


def _trace_loss(compiled: CompiledBackward, name: str, dtype: str | None) -> ClosedJaxpr:
    try:
        return jax.make_jaxpr(compiled.loss_of)(*compiled.args)
    except Exception as error:
        if not dtype:
            raise
        # As it is written, the loss was run before.
        raise TargetError(
            f"`jaxscale.autocast` raised on the loss of {name}: {error_line(error)}"
        ) from error


def _find_scales(
    compiled: CompiledBackward,
    loss_scale: float | None,
    can_scale: bool,
    is_quick: bool,
    progress: Progress,
) -> _Scales:
    calibration, backward_trial, fits = None, None, None
    if can_scale:
        progress("looking for the largest loss scale that fits", compiled.how_far)
        calibration = compiled.calibrate()
        fits = calibration.init_scale  # a dynamic scale ends near it, wherever it started
        if not is_quick:
            progress("trying `scale_backward`")
            backward_trial = compiled.try_scale_backward()
    used = loss_scale or fits or 1.0
    return _Scales(
        calibration, backward_trial, used=used, shown=loss_scale or 1.0, best=fits or used
    )


def _trace(
    target: Target,
    loss: float,
    scales: _Scales,
    named: Mapping[float, Mapping[str, np.ndarray]],
    is_limited: bool,
    is_quick: bool,
    progress: Progress,
) -> _Traced:
    """Returns what the pass shows equation by equation. `named` has the gradients at each scale."""
    backward = TracedBackward(
        target.loss_fn, (target.params, target.batch), {}, target.constants, has_aux=target.has_aux
    )
    overflows_at = scales.calibration.overflows_at if scales.calibration else None
    is_finite = math.isfinite(loss) and are_finite(named[scales.used])
    if is_quick and is_finite and not target.has_aux:  # nothing is to be seen
        report = TraceReport(
            loss=loss,
            loss_scale=scales.used,
            equations=0,
            nonfinite=(),
            underflows=(),
            nonfinite_arguments=(),
            nonfinite_outputs=(),
            not_compared=(),
            not_entered=(),
            constants=(),
        )
        if overflows_at is None:
            return _Traced(report)
        progress("looking for what limits the loss scale", backward.how_far)
        return _Traced(report, ceiling=backward.first_overflow(overflows_at))

    progress("looking at each operation", backward.how_far)
    run = backward.run(scales.used, is_brief=True)
    operations = Operations(run.findings)
    traced = _Traced(
        report=run.report(),
        unshifted=operations.find_unshifted(),
        loss_sums=tuple(operations.find_loss_sums(run)),
    )
    if not is_quick:
        against = _compare(backward, run, traced.report, scales, named, target.params, progress)
        traced = traced._replace(against=against)
    if overflows_at is None or traced.report.nonfinite_outputs:
        return traced
    progress("looking for what limits the loss scale", backward.how_far)
    if is_quick:
        return traced._replace(ceiling=backward.first_overflow(overflows_at))
    return _find_limit(backward, run, traced, scales, overflows_at, is_limited, progress)


def _compare(
    backward: TracedBackward,
    run: Run,
    report: TraceReport,
    scales: _Scales,
    named: Mapping[float, Mapping[str, np.ndarray]],
    params: Any,
    progress: Progress,
) -> Against:
    right = run
    if scales.used < scales.best and not report.nonfinite_outputs:
        # What a scale that is too low flushes is told apart from what the model gets wrong.
        right = backward.run(scales.best, is_brief=True)
    whole = named[max(scales.used, scales.best)]
    return compare_with_float32(backward, right, whole, params, scales.best, progress)


def _find_limit(
    backward: TracedBackward,
    run: Run,
    traced: _Traced,
    scales: _Scales,
    overflows_at: float,
    is_limited: bool,
    progress: Progress,
) -> _Traced:
    """Returns the same with what limits the loss scale, and what would let a higher one fit."""
    first = backward.run(overflows_at, is_brief=True).report().first_nonfinite
    if first is None or not (first.scaled and first.reaches):
        return traced
    traced = traced._replace(ceiling=first)
    if first.file and (is_limited or scales.best < 1):
        progress(f"trying {first.where} in float32", backward.how_far)
        higher = max(scales.best * _HIGHER, 1.0)
        return traced._replace(relief=find_relief(backward, run, first, higher))
    return traced


def is_half(dtypes: tuple[str, ...]) -> bool:
    """Returns whether any has a smaller range than float32, which gradients may leave."""
    return any(jnp.finfo(dtype).nexp < 8 for dtype in dtypes)


def _find_layers(histograms: Any, loss_scale: float) -> Underflow:
    """Returns what formats lose of each leaf, or of the deepest layers that fit in a picture."""
    found = underflow(histograms, loss_scale=loss_scale)
    deepest = max(name.count("/") for name in found.layers)
    for depth in range(deepest, 0, -1):
        if len(found.layers) <= _MOST_LAYERS:
            break
        found = underflow(histograms, loss_scale=loss_scale, depth=depth)
    return found


def _find_dtypes(program: ClosedJaxpr) -> tuple[str, ...]:
    made = (var for eqn in _walk_equations(program) for var in eqn.outvars)
    dtypes = {getattr(var.aval, "dtype", None) for var in (*made, *program.jaxpr.outvars)}
    return tuple(sorted(str(d) for d in dtypes if d and jnp.issubdtype(d, jnp.floating)))


def _find_backward_rules(program: ClosedJaxpr) -> dict[str, str]:
    named = ((lines(eqn, ())[:1], backward_rule(eqn)) for eqn in _walk_equations(program))
    return {str(line): name for found, name in named if name for line in found}


def _walk_equations(program: ClosedJaxpr) -> Iterator[JaxprEqn]:
    for eqn in program.jaxpr.eqns:
        yield eqn
        for inner in programs(eqn):
            yield from _walk_equations(closed(inner))

"""The backward pass looked at equation by equation: what is wrong, and what limits the loss scale.

A quick look makes as few of these passes as it can: none at the scale that fits if all is finite
there, and at the one that overflows only up to the overflow.
"""

from typing import Any, NamedTuple

import numpy as np

from ..diagnostics._trace.backward import Run, TracedBackward
from ..diagnostics._trace.report import TracedNonfinite, TraceReport
from .against import Against, compare_with_float32
from .progress import Progress
from .remedy import Relief, find_relief

_HIGHER = 2.0**8  # times the largest loss scale: the one to try with some lines in float32


class Looked(NamedTuple):
    """What was seen."""

    trace: TraceReport  # where numbers get lost at the loss scale of the exam
    against: Against = Against()  # the gradients against those in float32
    ceiling: TracedNonfinite | None = None  # where the least loss scale that does not fit overflows
    # The lines that in float32 let a higher loss scale fit, if some were found.
    relief: Relief | None = None


class Scales(NamedTuple):
    """The loss scales that a backward pass is looked at with."""

    used: float  # that of the exam
    fits: float | None = None  # the largest that does not overflow, if there is one
    overflows: float | None = None  # the least that overflows, if that is known


def look_quickly(
    backward: TracedBackward, scales: Scales, loss: float, needs_trace: bool, progress: Progress
) -> Looked:
    """Looks for what limits the loss scale, and before, where `needs_trace`, at all equations."""
    looked = Looked(TraceReport(loss, scales.used, 0, *((),) * 7))
    if needs_trace:
        looked = Looked(_run(backward, scales.used, progress).report())
    if scales.overflows is None or looked.trace.nonfinite_outputs:
        return looked
    progress("looking for what limits the loss scale", backward.how_far)
    return looked._replace(ceiling=backward.first_overflow(scales.overflows))


def look_closely(
    backward: TracedBackward,
    scales: Scales,
    whole: dict[str, np.ndarray],
    params: Any,
    needs_relief: bool,
    progress: Progress,
) -> Looked:
    """Looks at everything, and compares it with float32.

    `whole` has the gradients of the pass compiled as one program. If it `needs_relief`, it is tried
    which lines in float32 let a higher loss scale fit.
    """
    run = right = _run(backward, scales.used, progress)
    report, fits = run.report(), scales.fits
    if fits and scales.used < fits and not report.nonfinite_outputs:
        # What a scale that is too low flushes is told apart from what the model gets wrong.
        right = backward.run(fits, is_brief=True)
    is_too_high = fits is not None and fits < scales.used
    against = compare_with_float32(backward, right, whole, params, is_too_high, progress)
    looked = Looked(report, against)
    if scales.overflows is None or report.nonfinite_outputs:
        return looked
    progress("looking for what limits the loss scale", backward.how_far)
    limit = backward.run(scales.overflows, is_brief=True).report().first_nonfinite
    if limit is None or not (limit.scaled and limit.reaches):
        return looked
    looked = looked._replace(ceiling=limit)
    if not (needs_relief and limit.file and fits):
        return looked
    progress(f"trying {limit.where} in float32", backward.how_far)
    higher = max(fits * _HIGHER, 1.0)
    return looked._replace(relief=find_relief(backward, run, (limit.file, limit.line), higher))


def _run(backward: TracedBackward, loss_scale: float, progress: Progress) -> Run:
    progress("looking at each operation", backward.how_far)
    return backward.run(loss_scale, is_brief=True)

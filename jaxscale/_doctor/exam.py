"""The exam: all diagnostics of one loss on its parameters and one batch."""

import math
from collections.abc import Iterator
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
from ..diagnostics._trace.places import lines
from ..diagnostics._trace.report import TracedNonfinite, TraceReport
from ..diagnostics._underflow import Underflow, underflow
from .against import Against, compare_with_float32
from .compiled import CompiledBackward
from .gradients import Comparison, are_finite, by_name, compare_gradients, count_numbers
from .progress import Progress
from .remedy import Relief, find_relief
from .target import Target

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
    repeats: tuple[int, bool] | None  # what `count_repeats` returns, after a calibration
    largest: float  # the largest magnitude among the gradients at the largest scale
    is_limited: bool  # whether a number on the way, far larger than the gradients, limits it
    trace: TraceReport  # where numbers get lost at the loss scale
    against: Against  # the gradients against those in float32
    ceiling: TracedNonfinite | None  # where the least loss scale that does not fit overflows
    # What lets a higher scale fit, sought if the scale `is_limited` or the largest is below 1.
    # `None` otherwise, or if nothing was found.
    relief: Relief | None
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
    program = jax.make_jaxpr(compiled.loss_of)(*compiled.args)
    dtypes = _find_dtypes(program)
    progress("compiling the backward pass")
    loss, calibration, repeats = compiled.run(1.0)[0], None, None
    if np.isfinite(loss) and is_half(dtypes):
        progress("looking for the largest loss scale that fits", compiled.how_far)
        calibration = compiled.calibrate()
        if not is_quick:
            progress("trying `scale_backward`")
            repeats = compiled.count_repeats()
    # The largest that does not overflow: a dynamic scale ends near it, wherever it started.
    fits, overflows = calibration[:2] if calibration else (None, None)
    used, shown = loss_scale or fits or 1.0, loss_scale or 1.0
    # The gradients are most exact at the largest scale, where the fewest are flushed on the way.
    best = fits or used
    grads = {scale: compiled.run(scale)[1] for scale in {used, shown, best}}
    named = {scale: by_name(tree) for scale, tree in grads.items()}
    largest = max(float(np.abs(leaf).max(initial=0)) for leaf in named[best].values())
    is_limited = bool(fits and overflows) and 0 < largest * best < _FULL

    backward = TracedBackward(
        target.loss_fn, (target.params, target.batch), {}, target.constants, has_aux=target.has_aux
    )
    run = None  # if nothing is to be seen
    if not is_quick or target.has_aux or not (np.isfinite(loss) and are_finite(named[used])):
        progress("looking at each operation", backward.how_far)
        run = backward.run(used, is_brief=True)
    trace = run.report() if run else TraceReport(loss, used, 0, *((),) * 7)
    against, ceiling, relief = Against(), None, None
    if run and not is_quick:
        right = run
        if used < best and not trace.nonfinite_outputs:
            # What a scale that is too low flushes is told apart from what the model gets wrong.
            right = backward.run(best, is_brief=True)
        whole = named[max(used, best)]
        against = compare_with_float32(backward, right, whole, target.params, best, progress)
    if overflows is not None and not trace.nonfinite_outputs:
        progress("looking for what limits the loss scale", backward.how_far)
        if is_quick:
            ceiling = backward.first_overflow(overflows)
        else:
            first = backward.run(overflows, is_brief=True).report().first_nonfinite
            ceiling = first if first and first.scaled and first.reaches else None
    if run and not is_quick and fits and ceiling and ceiling.file and (is_limited or fits < 1):
        progress(f"trying {ceiling.where} in float32", backward.how_far)
        higher = max(fits * _HIGHER, 1.0)
        relief = find_relief(backward, run, ceiling, higher)

    _, histograms = count_numbers(grads[best], used)
    histogram: Any = sum(jax.tree.leaves(histograms, is_leaf=lambda x: isinstance(x, Histogram)))
    is_lower = fits is not None and shown < fits
    exact = against.grads or named[best]
    return Exam(
        target=target.name,
        autocast=dtype or "",
        is_quick=is_quick,
        is_auto=loss_scale is None,
        loss=loss,
        loss_as_written=loss_as_written,
        dtypes=dtypes,
        backward_rules=_find_backward_rules(program),
        loss_scale=used,
        shown_scale=shown,
        calibration=calibration,
        repeats=repeats,
        largest=largest,
        is_limited=is_limited,
        trace=trace,
        against=against,
        ceiling=ceiling,
        relief=relief,
        comparison=compare_gradients(named[shown], named[best]) if is_lower else None,
        zero=tuple(name for name, grad in exact.items() if grad.size and not grad.any()),
        leaves=table(count_numbers(grads[used], used)[0]),
        histogram=histogram,
        shares=shares(histogram, loss_scale=shown),
        layers=_find_layers(histograms, shown),
        suggestion=suggest_scale(histogram),
    )


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

"""The exam: all diagnostics of one loss on its parameters and one batch.

`examine` finds the largest loss scale that fits, near which a dynamic scale would train, looks at
each equation there (`look`), and counts the gradients. `findings` decides what is a problem.
"""

import functools
import operator
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
from .against import Against
from .compare import Comparison, compare_gradients
from .compiled import CompiledBackward, are_finite, by_name
from .counts import count_numbers
from .look import Scales, look_closely, look_quickly
from .progress import Progress, silent
from .remedy import Relief
from .target import Target

# The largest gradient at the largest loss scale is below this if something else limits the scale.
_FULL = 2.0**12
_MOST_LAYERS = 40  # in the map of layers


class Exam(NamedTuple):
    """What was measured. All of it is on the host, except for the histogram."""

    target: str  # what was examined, as named on the command line
    autocast: str  # the format in which `jaxscale.autocast` computed the loss, or `""`
    # Whether nothing was compared with float32 or tried in it, and nothing was traced that is
    # finite.
    is_quick: bool
    # Whether no scale was given, so that `loss_scale` is the largest that does not overflow.
    is_auto: bool
    loss: float
    # The loss without `jaxscale.autocast`, or `None` if that was not used.
    loss_as_written: float | None
    dtypes: tuple[str, ...]  # the formats in which the loss is computed
    # The functions that `jax.custom_vjp` was given as backward rules, by the line that calls
    # them, as `path/to/file.py:3`.
    backward_rules: dict[str, str]
    loss_scale: float  # the scale of the trace and the table of leaves
    shown_scale: float  # the scale at which formats are judged: the one given, or 1
    # The largest scale that does not overflow. `None` if none of the model's dtypes needs one, or
    # the loss itself is not finite.
    calibration: Calibration | None
    # How often `scale_backward` repeats the backward pass, and whether it is finite then. `None` if
    # there is no calibration, or if it refuses this loss.
    repeats: tuple[int, bool] | None
    largest: float  # the largest magnitude among the gradients at the largest scale
    # Whether a number on the way that is far larger than the gradients limits the scale.
    is_limited: bool
    trace: TraceReport  # where numbers get lost
    against: Against  # the gradients against those in float32
    ceiling: TracedNonfinite | None  # where the least loss scale that does not fit overflows
    # The lines that in float32 let a higher loss scale fit, if the scale `is_limited` or the
    # largest is below 1, and some were found.
    relief: Relief | None
    # The gradients at the shown scale against those at the largest. `None` if the shown scale is
    # not lower.
    comparison: Comparison | None
    # The leaves whose gradient is exactly 0 everywhere, in float32 if that was computed.
    zero: tuple[str, ...]
    leaves: LeafTable  # the gradients, leaf by leaf
    histogram: Histogram  # the gradients at the largest scale, where the fewest are flushed
    shares: dict[str, Shares]  # what each format keeps of these at the shown scale
    layers: Underflow  # the same for each layer
    suggestion: Suggestion  # the scale at which float16 would store these gradients best

    @property
    def is_half(self) -> bool:
        """Whether anything is computed in a format with a smaller range than float32."""
        return _is_half(self.dtypes)

    @property
    def is_right(self) -> bool:
        """Whether the gradients were compared with float32, and none is wrong."""
        return self.against.comparison is not None and not self.against.wrong

    @property
    def fits(self) -> float | None:
        """The largest loss scale that does not overflow, if there is one."""
        return self.calibration.init_scale if self.calibration else None


def examine(
    target: Target,
    loss_scale: float | None,
    dtype: str | None = None,
    progress: Progress = silent,
    *,
    is_quick: bool = False,
) -> Exam:
    """Returns the results of all diagnostics.

    Args:
      target: the loss, its parameters and a batch.
      loss_scale: the scale to examine at, or `None` for the largest that does not overflow.
      dtype: the format in which `jaxscale.autocast` computes the loss, or `None` for the loss as
        it is written.
      progress: is told what is done next.
      is_quick: whether to leave out what takes long.
    """
    loss_as_written = None
    if dtype:
        loss_as_written = CompiledBackward(target).loss()
        target = target._replace(loss_fn=autocast(target.loss_fn, dtype=dtype))
    compiled = CompiledBackward(target)
    program = compiled.program()
    dtypes = _find_dtypes(program)
    progress("compiling the backward pass")
    loss, calibration = compiled.run(1.0)[0], None
    if np.isfinite(loss) and _is_half(dtypes):
        progress("looking for the largest loss scale that fits", compiled.how_far)
        calibration = compiled.calibrate()
    repeats = None
    if calibration and not is_quick:
        progress("trying `scale_backward`")
        repeats = compiled.count_repeats()
    # The largest that does not overflow: a dynamic scale ends near it, wherever it started.
    fits, overflows = calibration[:2] if calibration else (None, None)
    scales, shown = Scales(loss_scale or fits or 1.0, fits, overflows), loss_scale or 1.0
    grads = {scale: compiled.run(scale)[1] for scale in {scales.used, shown, fits or scales.used}}
    used = by_name(grads[scales.used])
    # The gradients are most exact at the largest scale, where the fewest are flushed on the way.
    seen = by_name(grads[fits or scales.used])
    largest = max(float(np.abs(leaf).max(initial=0)) for leaf in seen.values())
    is_limited = bool(fits and overflows) and 0 < largest * (fits or 0) < _FULL
    backward = TracedBackward(
        target.loss_fn, (target.params, target.batch), {}, target.constants, has_aux=target.has_aux
    )
    if is_quick:
        needs_trace = target.has_aux or not (np.isfinite(loss) and are_finite(used))
        looked = look_quickly(backward, scales, loss, needs_trace, progress)
    else:
        whole = seen if fits and fits > scales.used else used
        needs_relief = is_limited or bool(fits and fits < 1)
        looked = look_closely(backward, scales, whole, target.params, needs_relief, progress)
    counted = count_numbers(grads[fits or scales.used], scales.used)
    histogram = functools.reduce(
        operator.add,
        jax.tree.leaves(counted.histograms, is_leaf=lambda x: isinstance(x, Histogram)),
    )
    exact = looked.against.grads or seen
    return Exam(
        **looked._asdict(),
        target=target.name,
        autocast=dtype or "",
        is_quick=is_quick,
        is_auto=loss_scale is None,
        loss=loss,
        loss_as_written=loss_as_written,
        dtypes=dtypes,
        backward_rules=_find_backward_rules(program),
        loss_scale=scales.used,
        shown_scale=shown,
        calibration=calibration,
        repeats=repeats,
        largest=largest,
        is_limited=is_limited,
        comparison=(
            compare_gradients(by_name(grads[shown]), seen) if fits and shown < fits else None
        ),
        zero=tuple(name for name, grad in exact.items() if grad.size and not grad.any()),
        leaves=table(count_numbers(grads[scales.used], scales.used).counts),
        histogram=histogram,
        shares=shares(histogram, loss_scale=shown),
        layers=_find_layers(counted.histograms, shown),
        suggestion=suggest_scale(histogram),
    )


def _is_half(dtypes: tuple[str, ...]) -> bool:
    # With fewer than float32's 8 bits of exponent: gradients may leave their range.
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
    """Returns the floating dtypes in which a loss is computed."""
    made = (var for eqn in _walk_equations(program) for var in eqn.outvars)
    dtypes = {getattr(var.aval, "dtype", None) for var in (*made, *program.jaxpr.outvars)}
    return tuple(sorted(str(d) for d in dtypes if d and jnp.issubdtype(d, jnp.floating)))


def _find_backward_rules(program: ClosedJaxpr) -> dict[str, str]:
    named = ((lines(eqn, ())[:1], backward_rule(eqn)) for eqn in _walk_equations(program))
    return {str(line): name for found, name in named if name for line in found}


def _walk_equations(program: ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Returns the equations of a program, and those that they hold."""
    for eqn in program.jaxpr.eqns:
        yield eqn
        for inner in programs(eqn):
            yield from _walk_equations(closed(inner))

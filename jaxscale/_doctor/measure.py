"""The exam: all diagnostics of one loss on its parameters and one batch."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._autocast.api import autocast
from .._jax import ClosedJaxpr, backward_rule, has_narrow_range, walk_program
from ..diagnostics._calibrate import Calibration
from ..diagnostics._histogram import shares
from ..diagnostics._leaves import table
from ..diagnostics._suggest import suggest_scale
from ..diagnostics._trace.backward import TracedBackward
from ..diagnostics._trace.findings import Run
from ..diagnostics._trace.places import lines
from ..diagnostics._trace.report import TracedNonfinite, TraceReport
from ..diagnostics._underflow import Underflow, underflow
from .announcer import Announce, announce_nothing
from .compiled import BackwardTrial, CompiledBackward
from .exam import Exam
from .float32 import Float32Check, check_against_float32
from .gradients import (
    Comparison,
    Gradients,
    are_finite,
    compare_gradients,
    count_numbers,
)
from .origins import Operations, Sum
from .remedy import Relief, find_relief
from .target import Target, TargetError, error_line

# The largest gradient at the largest loss scale is below this if something else limits the scale.
_FULL = 2.0**12
# times the largest loss scale: the one to try with some lines in float32
_HIGHER = 2.0**8
_MOST_LAYERS = 40  # in the map of layers


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
    is_narrow = any(map(has_narrow_range, dtypes))
    can_scale = is_narrow and math.isfinite(loss)
    scales = _find_scales(compiled, loss_scale, can_scale, is_quick, announce)
    gradients = {}
    for scale in {scales.traced, scales.judged, scales.best}:
        grads = compiled.differentiate(scale).grads
        gradients[scale] = Gradients.from_tree(grads)
    best = gradients[scales.best]

    is_limited = (
        scales.overflows_at is not None and 0 < best.largest * scales.best < _FULL
    )
    tracer = _Tracer(
        _make_program(target), scales, gradients, target.params, is_limited, announce
    )
    if is_quick:
        traced = tracer.trace_quickly(loss, has_aux=target.has_aux)
    else:
        traced = tracer.trace_in_full()

    counted = count_numbers(best.tree, scales.traced)
    histogram = counted.whole
    return Exam(
        target=target.name,
        autocast=dtype or "",
        is_quick=is_quick,
        is_auto=loss_scale is None,
        loss=loss,
        loss_as_written=loss_as_written,
        dtypes=tuple(sorted(map(str, dtypes))),
        has_narrow_range=is_narrow,
        backward_rules=_find_backward_rules(program),
        loss_scale=scales.traced,
        judged_scale=scales.judged,
        calibration=scales.calibration,
        backward_trial=scales.backward_trial,
        largest_gradient=best.largest,
        is_limited=is_limited,
        ceiling=traced.ceiling,
        relief=traced.relief,
        scale_comparison=_compare_scales(scales, gradients),
        trace=traced.report,
        float32=traced.float32,
        unshifted=traced.unshifted,
        loss_sums=traced.loss_sums,
        zero_leaves=_find_zero_leaves(traced.float32.grads or best.by_name),
        leaf_table=table(
            count_numbers(gradients[scales.traced].tree, scales.traced).counts
        ),
        histogram=histogram,
        shares=shares(histogram, loss_scale=scales.judged),
        layers=find_layers(counted.histograms, scales.judged),
        suggestion=suggest_scale(histogram),
    )


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


class _Scales(NamedTuple):
    """The loss scales that matter, and what was tried to find them.

    Attributes:
      calibration: the search for the largest scale that fits, if there was one.
      backward_trial: what `scale_backward` does, if it was tried.
      traced: the scale of the trace.
      judged: the scale at which formats are judged.
      best: the largest scale that fits, where the fewest gradients are flushed on the way.
    """

    calibration: Calibration | None
    backward_trial: BackwardTrial | None
    traced: float
    judged: float
    best: float

    @property
    def overflows_at(self) -> float | None:
        """The least loss scale that was seen to overflow, if one was."""
        if self.calibration is None:
            return None
        return self.calibration.overflows_at


def _find_scales(
    compiled: CompiledBackward,
    loss_scale: float | None,
    can_scale: bool,
    is_quick: bool,
    announce: Announce,
) -> _Scales:
    calibration = None
    backward_trial = None
    largest = None  # that fits
    if can_scale:
        announce("looking for the largest loss scale that fits", compiled.how_far)
        calibration = compiled.calibrate()
        # a dynamic scale ends near it, wherever it started
        largest = calibration.init_scale
        if not is_quick:
            announce("trying `scale_backward`")
            backward_trial = compiled.try_scale_backward()
    traced = loss_scale or largest or 1.0
    return _Scales(
        calibration=calibration,
        backward_trial=backward_trial,
        traced=traced,
        judged=loss_scale or 1.0,
        best=largest or traced,
    )


def _make_program(target: Target) -> TracedBackward:
    args = (target.params, target.batch)
    return TracedBackward(
        target.loss_fn, args, {}, target.constants, has_aux=target.has_aux
    )


class _Traced(NamedTuple):
    """What one pass, equation by equation, showed, and what was tried after it."""

    report: TraceReport
    float32: Float32Check = Float32Check()
    ceiling: TracedNonfinite | None = None
    relief: Relief | None = None
    unshifted: tuple[str, ...] = ()
    loss_sums: tuple[Sum, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Tracer:
    """Runs the backward pass equation by equation, and says what that showed.

    Attributes:
      backward: the program that is run.
      scales: the loss scales that matter.
      gradients: those of the same pass compiled as one program, by their loss scales.
      params: the parameters.
      is_limited: whether a number on the way limits the loss scale.
      announce: is told what is done next.
    """

    backward: TracedBackward
    scales: _Scales
    gradients: Mapping[float, Gradients]
    params: optax.Params
    is_limited: bool
    announce: Announce

    def trace_quickly(self, loss: float, *, has_aux: bool) -> _Traced:
        """Looks for inf and NaN, and for what limits the loss scale."""
        grads = self.gradients[self.scales.traced].by_name
        if math.isfinite(loss) and are_finite(grads) and not has_aux:
            # there is nothing to see
            traced = _Traced(_make_empty_report(loss, self.scales.traced))
        else:
            traced = _describe_run(self._run_as_written())
        if self.scales.overflows_at is not None and not traced.report.nonfinite_outputs:
            self.announce(
                "looking for what limits the loss scale", self.backward.how_far
            )
            ceiling = self.backward.first_overflow(self.scales.overflows_at)
            traced = traced._replace(ceiling=ceiling)
        return traced

    def trace_in_full(self) -> _Traced:
        """Also compares with float32, and tries what would let a higher loss scale fit."""
        run = self._run_as_written()
        traced = _describe_run(run)
        traced = traced._replace(float32=self._check_against_float32(run, traced))
        if self.scales.overflows_at is None or traced.report.nonfinite_outputs:
            return traced
        self.announce("looking for what limits the loss scale", self.backward.how_far)
        ceiling = self._find_ceiling(self.scales.overflows_at)
        if ceiling is None:
            return traced
        return traced._replace(ceiling=ceiling, relief=self._find_relief(run, ceiling))

    def _run_as_written(self) -> Run:
        self.announce("looking at each operation", self.backward.how_far)
        return self.backward.run(self.scales.traced, is_brief=True)

    def _check_against_float32(self, run: Run, traced: _Traced) -> Float32Check:
        best = self.scales.best
        if self.scales.traced < best and not traced.report.nonfinite_outputs:
            # A scale that is too low also flushes gradients. At the largest one only the faults
            # of the model are left.
            run = self.backward.run(best, is_brief=True)
        fused = self.gradients[max(self.scales.traced, best)].by_name
        return check_against_float32(
            backward=self.backward,
            run=run,
            fused=fused,
            params=self.params,
            best=best,
            loss_sums=traced.loss_sums,
            announce=self.announce,
        )

    def _find_ceiling(self, overflows_at: float) -> TracedNonfinite | None:
        """Returns where a loss scale overflows, if that depends on the scale and does harm."""
        first = self.backward.run(overflows_at, is_brief=True).report().first_nonfinite
        if first is None or not first.scaled or not first.reaches:
            return None
        return first

    def _find_relief(self, run: Run, ceiling: TracedNonfinite) -> Relief | None:
        """Returns which lines in float32 let a higher loss scale fit, if one would be better."""
        would_help = self.is_limited or self.scales.best < 1
        if not ceiling.file or not would_help:
            return None
        self.announce(f"trying {ceiling.where} in float32", self.backward.how_far)
        higher = max(self.scales.best * _HIGHER, 1.0)
        return find_relief(self.backward, run, ceiling, higher)


def _describe_run(run: Run) -> _Traced:
    operations = Operations(run.findings)
    return _Traced(
        report=run.report(),
        unshifted=operations.find_unshifted(),
        loss_sums=tuple(operations.find_loss_sums(run)),
    )


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


def _compare_scales(
    scales: _Scales, gradients: Mapping[float, Gradients]
) -> Comparison | None:
    """Returns what the judged scale loses that the largest one keeps, if that is higher."""
    if scales.calibration is None or scales.calibration.init_scale is None:
        return None
    if scales.judged >= scales.calibration.init_scale:
        return None
    return compare_gradients(
        gradients[scales.judged].by_name, gradients[scales.best].by_name
    )


def _find_zero_leaves(grads: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    return tuple(name for name, grad in grads.items() if grad.size and not grad.any())


def find_layers(histograms: Any, loss_scale: float) -> Underflow:
    """Returns what formats lose of each leaf, or of the deepest layers that fit in a picture."""
    layers = underflow(histograms, loss_scale=loss_scale)
    deepest = max(name.count("/") for name in layers.layers)
    for depth in range(deepest, 0, -1):
        if len(layers.layers) <= _MOST_LAYERS:
            break
        layers = underflow(histograms, loss_scale=loss_scale, depth=depth)
    return layers


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


def _find_backward_rules(program: ClosedJaxpr) -> dict[str, str]:
    """Returns the names of the backward rules, by the line that calls their functions."""
    rules = {}
    for eqn in walk_program(program):
        rule = backward_rule(eqn)
        if rule:
            for line in lines(eqn, ())[:1]:
                rules[str(line)] = rule
    return rules

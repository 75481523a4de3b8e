"""The exam: all diagnostics of one loss on its parameters and one batch.

`examine` first finds the largest loss scale that fits, near which a dynamic scale would train. It
traces the loss there and at the least scale that overflows, and compares the gradients with those
in float32 (`against`). The results are an `Exam`; `findings` decides what is a problem.

A quick exam makes as few passes equation by equation as it can: none at the scale that fits if all
is finite there, and at the one that overflows only up to the overflow.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._autocast.api import autocast
from .._gradients.value_and_grad import value_and_grad
from .._gradients.verdict import all_finite
from .._jax import ClosedJaxpr, Jaxpr, backward_rule, closed, programs
from .._state.scale import init_state
from ..diagnostics._calibrate import Calibration, Search
from ..diagnostics._formats import is_array
from ..diagnostics._histogram import Histogram, Shares, shares
from ..diagnostics._leaves import LeafTable, table
from ..diagnostics._suggest import Suggestion, suggest_scale
from ..diagnostics._trace.backward import Backward, Run
from ..diagnostics._trace.places import lines
from ..diagnostics._trace.plan import compiled
from ..diagnostics._trace.report import TracedNonfinite, TraceReport
from ..diagnostics._underflow import Underflow, underflow
from .against import Against, against_float32
from .compare import Comparison, by_name, compare_gradients
from .counts import count_numbers
from .progress import Progress, silent
from .remedy import Culprit, Relief, Remedy, find_relief
from .target import Target

# The largest gradient at the largest loss scale is below this if something else limits the scale.
_FULL = 2.0**12
_HIGHER = 2.0**8  # times the largest loss scale: the one to try with some lines in float32
_MOST_LAYERS = 40  # in the map of layers
_LEAST, _LARGEST, _MOST_PASSES = -14, 24, 10  # exponents of the loss scales to try


class Exam(NamedTuple):
    """What was measured. All of it is on the host, except for the histogram.

    Attributes:
      target: what was examined, as named on the command line.
      loss: the loss.
      loss_scale: the scale of the trace and the table of leaves.
      is_auto: whether no scale was given, so that `loss_scale` is the largest that does not
        overflow.
      shown_scale: the scale at which formats are judged: the one given, or 1.
      dtypes: the formats in which the loss is computed.
      calibration: the largest scale that does not overflow. `None` if none of the
        model's dtypes needs one, or the loss itself is not finite.
      comparison: the gradients at the shown scale against those at the largest. `None` if the
        shown scale is not lower.
      float32: the gradients against those computed in float32. `None` if one of the two is not
        finite. What cannot be computed in float32, as a kernel for one dtype, is as written.
      is_finite_in_float32: whether loss and gradients are finite in float32. `None` if the
        arguments are not.
      wrong: the leaves of the gradients that are far from those in float32.
      culprit: where they go wrong, if it is one equation.
      remedy: the lines that in float32 make loss and gradients right, or that were tried in vain.
      ceiling: where the least loss scale that does not fit overflows.
      relief: the lines that in float32 let a higher loss scale fit, if the scale `is_limited` or
        the largest is below 1, and some were found.
      largest: the largest magnitude among the gradients at the largest scale.
      is_limited: whether a number on the way that is far larger than the gradients limits the
        scale.
      backward_rules: the functions that `jax.custom_vjp` was given as backward rules, by the line
        that calls them, as `path/to/file.py:3`.
      zero: the leaves whose gradient is exactly 0 everywhere, in float32 if `float32` is known.
      leaves: the gradients, leaf by leaf.
      histogram: the gradients at the largest scale, where the fewest are flushed.
      shares: what each format keeps of these at the shown scale.
      layers: the same for each layer.
      suggestion: the scale at which float16 would store these gradients best.
      trace: where numbers get lost.
      autocast: the format in which `jaxscale.autocast` computed the loss, or `""`.
      loss_as_written: the loss without `jaxscale.autocast`, or `None` if that was not used.
      is_quick: whether nothing was compared with float32 or tried in it, and nothing was traced
        that is finite.
    """

    target: str
    loss: float
    loss_scale: float
    is_auto: bool
    shown_scale: float
    dtypes: tuple[str, ...]
    calibration: Calibration | None
    comparison: Comparison | None
    float32: Comparison | None
    is_finite_in_float32: bool | None
    wrong: tuple[str, ...]
    culprit: Culprit | None
    remedy: Remedy | None
    ceiling: TracedNonfinite | None
    relief: Relief | None
    largest: float
    is_limited: bool
    backward_rules: dict[str, str]
    zero: tuple[str, ...]
    leaves: LeafTable
    histogram: Histogram
    shares: dict[str, Shares]
    layers: Underflow
    suggestion: Suggestion
    trace: TraceReport
    autocast: str
    loss_as_written: float | None
    is_quick: bool

    @property
    def is_half(self) -> bool:
        """Whether anything is computed in a format with a smaller range than float32."""
        return _is_half(self.dtypes)

    @property
    def fits(self) -> float | None:
        """The largest loss scale that does not overflow, if there is one."""
        return self.calibration.init_scale if self.calibration else None


def _is_half(dtypes: tuple[str, ...]) -> bool:
    # With fewer than float32's 8 bits of exponent: gradients may leave their range.
    return any(jnp.finfo(dtype).nexp < 8 for dtype in dtypes)


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
    params, as_written = target.params, target
    if dtype:
        target = target._replace(loss_fn=autocast(target.loss_fn, dtype=dtype))
    loss_of, arrays = _of_arrays(target)
    loss_as_written = float(jax.jit(_of_arrays(as_written)[0])(params, arrays)) if dtype else None
    program = jax.make_jaxpr(loss_of)(params, arrays)
    dtypes = _dtypes(program)
    progress("compiling the backward pass")
    passes = _Passes(loss_of, params, arrays)
    loss = passes.at(1.0)[0]
    calibration = None
    if np.isfinite(loss) and _is_half(dtypes):
        progress("looking for the largest loss scale that fits", passes.how_far)
        calibration = passes.calibration()
    # The largest that does not overflow: a dynamic scale ends near it, wherever it started.
    fits = calibration.init_scale if calibration else None
    used = loss_scale or fits or 1.0
    shown = loss_scale or 1.0
    grads = {scale: passes.at(scale)[1] for scale in {used, shown, fits or used}}
    # The gradients are most exact at the largest scale, where the fewest are flushed on the way.
    seen = grads[fits or used]
    largest = max(float(np.abs(leaf).max(initial=0)) for leaf in by_name(seen).values())
    backward = Backward(
        target.loss_fn, (params, target.batch), {}, target.constants, has_aux=target.has_aux
    )
    ends = calibration[:2] if calibration else (None, None)
    is_limited = None not in ends and 0 < largest * (fits or 0) < _FULL
    look = _Looks(backward, used, ends, progress)
    if is_quick:
        is_finite = all(np.isfinite(leaf).all() for leaf in (loss, *by_name(grads[used]).values()))
        looked = look.quickly(loss, needs_trace=not is_finite or target.has_aux)
    else:
        whole = by_name(grads[fits if fits and fits > used else used])
        looked = look.closely(whole, params, needs_relief=is_limited or bool(fits and fits < 1))
    found = looked.found
    histograms = count_numbers(seen, used).histograms
    everything = functools.reduce(
        operator.add, jax.tree.leaves(histograms, is_leaf=lambda x: isinstance(x, Histogram))
    )
    return Exam(
        target=target.name,
        loss=loss,
        loss_scale=used,
        is_auto=loss_scale is None,
        shown_scale=shown,
        dtypes=dtypes,
        calibration=calibration,
        comparison=(
            compare_gradients(by_name(grads[shown]), by_name(seen))
            if fits and shown < fits
            else None
        ),
        float32=found.comparison,
        is_finite_in_float32=found.is_finite,
        wrong=found.wrong,
        culprit=found.culprit,
        remedy=found.remedy,
        ceiling=looked.ceiling,
        relief=looked.relief,
        largest=largest,
        is_limited=is_limited,
        backward_rules=_backward_rules(program),
        zero=tuple(p for p, g in (found.right or by_name(seen)).items() if g.size and not g.any()),
        leaves=table(count_numbers(grads[used], used).counts),
        histogram=everything,
        shares=shares(everything, loss_scale=shown),
        layers=_find_layers(histograms, shown),
        suggestion=suggest_scale(everything),
        trace=looked.report,
        autocast=dtype or "",
        loss_as_written=loss_as_written,
        is_quick=is_quick,
    )


class _Looked(NamedTuple):
    """What was seen by looking at each equation. `Exam` explains `ceiling` and `relief`."""

    report: TraceReport
    found: Against = Against()
    ceiling: TracedNonfinite | None = None
    relief: Relief | None = None


class _Looks(NamedTuple):
    """Ways to look at each equation of a backward pass.

    Attributes:
      backward: the pass.
      used: the loss scale to look at.
      ends: the largest loss scale that fits, and the least that overflows, if they are known.
      progress: is told what is done next.
    """

    backward: Backward
    used: float
    ends: tuple[float | None, float | None]
    progress: Progress

    def quickly(self, loss: float, *, needs_trace: bool) -> _Looked:
        """Looks for the ceiling, and before at all equations if something may be wrong there."""
        looked, at = _Looked(TraceReport(loss, self.used, 0, *((),) * 7)), self.ends[1]
        if needs_trace:
            looked = _Looked(self._run("looking at each operation", self.used).report())
        if at is None or looked.report.nonfinite_outputs:
            return looked
        self.progress("looking for what limits the loss scale", self.backward.how_far)
        return looked._replace(ceiling=self.backward.first_overflow(at))

    def closely(self, whole: dict[str, np.ndarray], params: Any, *, needs_relief: bool) -> _Looked:
        """Looks at everything, and compares it with float32."""
        fits, at = self.ends
        run = right = self._run("looking at each operation", self.used)
        report = run.report()
        if fits and self.used < fits and not report.nonfinite_outputs:
            # What a scale that is too low flushes is told apart from what the model gets wrong.
            right = self.backward.run(fits, is_brief=True)
        is_too_high = fits is not None and fits < self.used
        found = against_float32(
            self.backward, right, whole, params, is_too_high=is_too_high, progress=self.progress
        )
        looked = _Looked(report, found)
        if at is None or report.nonfinite_outputs:
            return looked
        limit = self._run("looking for what limits the loss scale", at).report().first_nonfinite
        if limit is None or not (limit.scaled and limit.reaches):
            return looked
        looked = looked._replace(ceiling=limit)
        if not (needs_relief and limit.file and fits):
            return looked
        self.progress(f"trying {limit.where} in float32", self.backward.how_far)
        scale = max(fits * _HIGHER, 1.0)
        return looked._replace(
            relief=find_relief(self.backward, run, (limit.file, limit.line), scale)
        )

    def _run(self, words: str, loss_scale: float) -> Run:
        self.progress(words, self.backward.how_far)
        return self.backward.run(loss_scale, is_brief=True)


class _Passes:
    """Backward passes of one compiled program, at any loss scale."""

    def __init__(self, loss_of: Callable[..., Any], params: Any, arrays: list[Any]) -> None:
        def backward(state: Any, params: Any, arrays: list[Any]) -> tuple[Any, Any, Any]:
            loss, grads = value_and_grad(loss_of, state)(params, arrays)
            return loss, grads, all_finite(grads)

        # As if each operation ran by itself, which is how the trace runs it.
        self._backward = compiled(backward, xla_allow_excess_precision=False)
        self._params, self._arrays = params, arrays
        self._tried = 0

    def how_far(self) -> str:
        """Returns how many loss scales were tried, in words."""
        return f"{self._tried} tried"

    def at(self, loss_scale: float) -> tuple[float, Any]:
        """Returns the loss and the gradients at a loss scale."""
        loss, grads, _ = self._backward(init_state(loss_scale), self._params, self._arrays)
        return float(loss), grads

    def calibration(self) -> Calibration:
        """Returns the largest loss scale that does not overflow."""

        def try_scale(exponent: int, batch: Any) -> tuple[Any, bool]:
            del batch
            self._tried += 1
            loss, _, finite = self._backward(init_state(2.0**exponent), self._params, self._arrays)
            return loss, bool(finite)

        search = Search(try_scale, _LEAST, _LARGEST, _MOST_PASSES)
        search.look_at(None)
        return search.result()


def _of_arrays(target: Target) -> tuple[Callable[[Any, Any], Any], list[Any]]:
    """Returns the loss as a function that can be compiled, and the arrays of the batch."""
    leaves, structure = jax.tree.flatten(target.batch)

    def loss_of(params: Any, arrays: list[Any]) -> Any:
        # Compiled programs take arrays. Everything else in a batch stays as it is.
        given = iter(arrays)
        batch = [next(given) if is_array(leaf) else leaf for leaf in leaves]
        output = target.loss_fn(params, jax.tree.unflatten(structure, batch))
        return output[0] if target.has_aux else output

    return loss_of, [leaf for leaf in leaves if is_array(leaf)]


def _find_layers(histograms: Any, loss_scale: float) -> Underflow:
    """Returns what formats lose of each leaf, or of the deepest layers that fit in a picture."""
    found = underflow(histograms, loss_scale=loss_scale)
    deepest = max(name.count("/") for name in found.layers)
    for depth in range(deepest, 0, -1):
        if len(found.layers) <= _MOST_LAYERS:
            break
        found = underflow(histograms, loss_scale=loss_scale, depth=depth)
    return found


def _dtypes(program: ClosedJaxpr) -> tuple[str, ...]:
    """Returns the floating dtypes in which a loss is computed."""
    inner = (var for jaxpr in _jaxprs(program.jaxpr) for eqn in jaxpr.eqns for var in eqn.outvars)
    dtypes = {getattr(var.aval, "dtype", None) for var in (*inner, *program.jaxpr.outvars)}
    return tuple(sorted(str(d) for d in dtypes if d and jnp.issubdtype(d, jnp.floating)))


def _backward_rules(program: ClosedJaxpr) -> dict[str, str]:
    rules = {}
    for jaxpr in _jaxprs(program.jaxpr):
        for eqn in jaxpr.eqns:
            name = backward_rule(eqn)
            for line in lines(eqn, ())[:1] if name else ():
                rules[str(line)] = name
    return rules


def _jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    yield jaxpr
    for eqn in jaxpr.eqns:
        for program in programs(eqn):
            yield from _jaxprs(closed(program).jaxpr)

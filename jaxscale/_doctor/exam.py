"""The exam: all diagnostics of one loss on its parameters and one batch.

`examine` first finds the largest loss scale that fits, near which a dynamic scale would train.
It takes gradients at that scale, at the one that was asked for, and if need be in float32, runs
every diagnostic, and returns the results as an `Exam`. A `Comparison` says what one set of
gradients lost against another. `findings` decides what is a problem; it asks `may_matter`, which
is here, as it needs nothing but these measurements.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._autocast.api import autocast
from .._state import init_state
from .._tree import leaf_name
from .._value_and_grad import grad
from ..diagnostics._calibrate import Calibration, calibrate
from ..diagnostics._formats import is_ndarray
from ..diagnostics._histogram import Histogram, Shares, histogram, leaf_histograms, shares
from ..diagnostics._leaves import LeafTable, leaf_counts, table
from ..diagnostics._suggest import Suggestion, suggest_scale
from ..diagnostics._trace.interpreter import Interpreter, Value
from ..diagnostics._trace.jaxpr import BACKWARD
from ..diagnostics._trace.numbers import IncomparableError
from ..diagnostics._trace.plan import Planner
from ..diagnostics._trace.report import TracedUnderflow, TraceReport
from ..diagnostics._trace.trace import trace
from ..diagnostics._underflow import Underflow, underflow
from .target import Target

_MOST_LAYERS = 40  # in the map of layers
_FLUSHED = 0.5  # an underflow may matter if at least this share of the nonzero values becomes 0,
_LOST_SUM = 0.01  # and these values had at least this share of the sum of all magnitudes


class Comparison(NamedTuple):
    """What gradients lost, compared with the same gradients with less or nothing lost.

    Attributes:
      flushed: the share of the nonzero numbers that became 0.
      error: the norm of the difference, divided by the norm of what the gradients should be.
      worst: the leaf with the largest share flushed, or `""` if nothing was.
      worst_flushed: the share flushed in that leaf.
    """

    flushed: float
    error: float
    worst: str
    worst_flushed: float


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
      float32: the gradients against those computed in float32. `None` if they are not finite,
        if they cannot be computed in float32, or if neither an underflow that may matter was seen
        nor `jaxscale.autocast` used.
      leaves: the gradients, leaf by leaf.
      histogram: the gradients at the largest scale, where the fewest are flushed.
      shares: what each format keeps of these at the shown scale.
      layers: the same for each layer.
      suggestion: the scale at which float16 would store these gradients best.
      trace: where numbers get lost.
      autocast: the format in which `jaxscale.autocast` computed the loss, or `""`.
      loss_as_written: the loss without `jaxscale.autocast`, or `None` if that was not used.
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
    leaves: LeafTable
    histogram: Histogram
    shares: dict[str, Shares]
    layers: Underflow
    suggestion: Suggestion
    trace: TraceReport
    autocast: str
    loss_as_written: float | None

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


def may_matter(place: TracedUnderflow) -> bool:
    """Returns whether most values became zero, and not only the smallest of them."""
    return place.zeros >= _FLUSHED * place.nonzero and place.lost_sum >= _LOST_SUM


def examine(target: Target, loss_scale: float | None, dtype: str | None = None) -> Exam:
    """Returns the results of all diagnostics.

    Args:
      target: the loss, its parameters and a batch.
      loss_scale: the scale to examine at, or `None` for the largest that does not overflow.
      dtype: the format in which `jaxscale.autocast` computes the loss, or `None` for the loss as
        it is written.
    """
    params, as_written = target.params, target
    if dtype:
        target = target._replace(loss_fn=autocast(target.loss_fn, dtype=dtype))
    loss_of, arrays = _of_arrays(target)
    loss_as_written = float(jax.jit(_of_arrays(as_written)[0])(params, arrays)) if dtype else None
    dtypes = _dtypes(loss_of, params, arrays)
    loss = float(jax.jit(loss_of)(params, arrays))
    calibration = None
    if np.isfinite(loss) and _is_half(dtypes):
        calibration = calibrate(loss_of, params, [arrays])
    # The largest that does not overflow: a dynamic scale ends near it, wherever it started.
    fits = calibration.init_scale if calibration else None
    used = loss_scale or fits or 1.0
    shown = loss_scale or 1.0
    compiled = jax.jit(lambda state, params, arrays: grad(loss_of, state)(params, arrays))
    grads = {
        scale: compiled(init_state(scale), params, arrays) for scale in {used, shown, fits or used}
    }
    # The gradients are most exact at the largest scale, where the fewest are flushed on the way.
    seen = grads[fits or used]
    counted = histogram(seen)
    report = trace(target.loss_fn, init_state(used), has_aux=target.has_aux)(params, target.batch)
    exact = None
    may_differ = dtype is not None or any(map(may_matter, report.underflows))
    if may_differ and not report.nonfinite_outputs:
        exact = _float32_gradients(_of_arrays(as_written)[0], params, arrays)
    return Exam(
        target=target.name,
        loss=loss,
        loss_scale=used,
        is_auto=loss_scale is None,
        shown_scale=shown,
        dtypes=dtypes,
        calibration=calibration,
        comparison=_compared(grads[shown], seen) if fits and shown < fits else None,
        float32=_compared(grads[used], exact) if exact is not None else None,
        leaves=table(leaf_counts(grads[used], loss_scale=used)),
        histogram=counted,
        shares=shares(counted, loss_scale=shown),
        layers=_layers(leaf_histograms(seen), shown),
        suggestion=suggest_scale(counted),
        trace=report,
        autocast=dtype or "",
        loss_as_written=loss_as_written,
    )


def _of_arrays(target: Target) -> tuple[Callable[[Any, Any], Any], list[Any]]:
    """Returns the loss as a function that can be compiled, and the arrays of the batch."""
    leaves, structure = jax.tree.flatten(target.batch)

    def loss_of(params: Any, arrays: list[Any]) -> Any:
        # Compiled programs take arrays. Everything else in a batch stays as it is.
        given = iter(arrays)
        batch = [next(given) if is_ndarray(leaf) else leaf for leaf in leaves]
        output = target.loss_fn(params, jax.tree.unflatten(structure, batch))
        return output[0] if target.has_aux else output

    return loss_of, [leaf for leaf in leaves if is_ndarray(leaf)]


def _compared(grads: Any, exact: Any) -> Comparison:
    """Returns what `grads` lost, compared with `exact`."""
    pairs = {
        leaf_name(path): (np.asarray(grad, np.float64), np.asarray(leaf, np.float64))
        for (path, leaf), grad in zip(
            jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(grads), strict=True
        )
    }
    lost = {name: int(np.sum((a == 0) & (b != 0))) for name, (a, b) in pairs.items()}
    nonzero = {name: int(np.sum(b != 0)) for name, (_, b) in pairs.items()}
    flushed = {name: lost[name] / max(nonzero[name], 1) for name in pairs}
    worst = max(flushed, key=lambda name: flushed[name])
    difference, norm = (
        float(np.sqrt(sum(np.sum(np.square(each)) for each in leaves)))
        for leaves in ([a - b for a, b in pairs.values()], [b for _, b in pairs.values()])
    )
    return Comparison(
        flushed=sum(lost.values()) / max(sum(nonzero.values()), 1),
        error=difference / norm if norm else 0.0,
        worst=worst if flushed[worst] else "",
        worst_flushed=flushed[worst],
    )


def _float32_gradients(
    loss_of: Callable[[Any, Any], Any], params: Any, arrays: list[Any]
) -> Any | None:
    """Returns the gradients with all narrower operations in float32, or `None` if they cannot."""
    if all(jnp.finfo(dtype).bits >= 32 for dtype in _dtypes(loss_of, params, arrays)):
        return jax.jit(jax.grad(loss_of))(params, arrays)
    closed, shapes = jax.make_jaxpr(jax.grad(loss_of), return_shape=True)(params, arrays)
    structure = jax.tree.structure(shapes)
    interpreter = Interpreter(Planner(), is_wide=lambda place: True)
    inputs = [Value(leaf) for leaf in jax.tree.leaves((params, arrays))]
    try:
        outputs = interpreter.run(closed, inputs, (BACKWARD,) * structure.num_leaves)
    except IncomparableError:
        return None
    return structure.unflatten(value.array for value in outputs)


def _layers(histograms: Any, loss_scale: float) -> Underflow:
    """Returns what formats lose of each leaf, or of the deepest layers that fit in a picture."""
    found = underflow(histograms, loss_scale=loss_scale)
    deepest = max(name.count("/") for name in found.layers)
    for depth in range(deepest, 0, -1):
        if len(found.layers) <= _MOST_LAYERS:
            break
        found = underflow(histograms, loss_scale=loss_scale, depth=depth)
    return found


def _dtypes(loss_of: Callable[[Any, Any], Any], params: Any, arrays: list[Any]) -> tuple[str, ...]:
    """Returns the floating dtypes in which a loss is computed."""
    closed = jax.make_jaxpr(loss_of)(params, arrays)
    inner = (var for jaxpr in _jaxprs(closed.jaxpr) for eqn in jaxpr.eqns for var in eqn.outvars)
    dtypes = {getattr(var.aval, "dtype", None) for var in (*inner, *closed.jaxpr.outvars)}
    return tuple(sorted(str(d) for d in dtypes if d and jnp.issubdtype(d, jnp.floating)))


def _jaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    yield jaxpr
    for eqn in jaxpr.eqns:
        for param in jax.tree.leaves(
            eqn.params, is_leaf=lambda node: isinstance(node, (Jaxpr, ClosedJaxpr))
        ):
            if isinstance(param, ClosedJaxpr):
                yield from _jaxprs(param.jaxpr)
            elif isinstance(param, Jaxpr):
                yield from _jaxprs(param)

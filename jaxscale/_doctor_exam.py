"""All diagnostics of one loss, its parameters and a batch, at the scale that it would train at."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from ._diagnose_calibrate import Calibration, calibrate
from ._diagnose_findings import TraceReport
from ._diagnose_histogram import Histogram, Shares, histogram, leaf_histograms, shares
from ._diagnose_leaves import LeafTable, nonfinite, table
from ._diagnose_suggest import Suggestion, suggest_scale
from ._diagnose_trace import trace
from ._diagnose_underflow import Underflow, underflow
from ._doctor_target import Target, is_numbers
from ._state import init_state
from ._value_and_grad import grad

MOST_LAYERS = 40  # in the map of layers


class Exam(NamedTuple):
    """What was measured. All of it is on the host, but for the histogram."""

    target: str
    loss: float
    loss_scale: float
    is_dynamic: bool
    dtypes: tuple[str, ...]
    calibration: Calibration | None  # None if the loss itself is not finite
    leaves: LeafTable
    histogram: Histogram
    shares: dict[str, Shares]
    layers: Underflow
    suggestion: Suggestion
    trace: TraceReport

    @property
    def is_half(self) -> bool:
        """Whether anything is computed in a format whose range is too small for gradients."""
        return any(jnp.finfo(dtype).nexp < 8 for dtype in self.dtypes)


def examine(target: Target, loss_scale: float | None) -> Exam:
    """Returns the results of all diagnostics at a loss scale, or at that which fits."""
    name, loss_fn, params, batch = target
    leaves, structure = jax.tree.flatten(batch)
    arrays = [leaf for leaf in leaves if is_numbers(leaf)]

    def of_arrays(params: Any, arrays: list[Any]) -> Any:
        # Compiled programs take arrays; what else is in a batch stays as it is.
        given = iter(arrays)
        return loss_fn(
            params,
            jax.tree.unflatten(
                structure, [next(given) if is_numbers(leaf) else leaf for leaf in leaves]
            ),
        )

    loss = float(jax.jit(of_arrays)(params, arrays))
    calibration = None
    if jnp.isfinite(loss):
        calibration = calibrate(of_arrays, params, [arrays], allow_int=True)
    # A dynamic scale ends near the largest that does not overflow, wherever it started.
    fits = calibration.init_scale if calibration else None
    used = loss_scale if loss_scale is not None else (fits or 1.0)
    compiled = jax.jit(
        lambda state, params, arrays: grad(of_arrays, state, allow_int=True)(params, arrays)
    )
    grads = compiled(init_state(used), params, arrays)
    # What the gradients are is best seen at the largest scale: little is flushed on the way.
    seen = grads if used == (fits or used) else compiled(init_state(fits or used), params, arrays)
    counted = histogram(seen)
    return Exam(
        target=name,
        loss=loss,
        loss_scale=used,
        is_dynamic=loss_scale is None,
        dtypes=tuple(sorted(_dtypes(jax.make_jaxpr(of_arrays)(params, arrays)))),
        calibration=calibration,
        leaves=table(nonfinite(grads, loss_scale=used)),
        histogram=counted,
        shares=shares(counted, loss_scale=used),
        layers=_layers(leaf_histograms(seen), used),
        suggestion=suggest_scale(counted),
        trace=trace(loss_fn, init_state(used), allow_int=True)(params, batch),
    )


def _layers(histograms: Any, loss_scale: float) -> Underflow:
    """Returns the losses of each leaf, or of as deep a level of the tree as fits a picture."""
    found = underflow(histograms, loss_scale=loss_scale)
    deepest = max(name.count("/") for name in found.layers)
    for depth in range(deepest, 0, -1):
        if len(found.layers) <= MOST_LAYERS:
            break
        found = underflow(histograms, loss_scale=loss_scale, depth=depth)
    return found


def _dtypes(closed: ClosedJaxpr) -> set[str]:
    """Returns the floating dtypes in which a program computes."""
    inner = (var for jaxpr in _jaxprs(closed.jaxpr) for eqn in jaxpr.eqns for var in eqn.outvars)
    dtypes = {getattr(var.aval, "dtype", None) for var in (*inner, *closed.jaxpr.outvars)}
    return {str(dtype) for dtype in dtypes if dtype and jnp.issubdtype(dtype, jnp.floating)}


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

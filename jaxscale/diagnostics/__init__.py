"""Shows what happened: where gradients overflow, what underflows, which loss scale would work.

- Which loss scale fits? `suggest_scale(histogram(grads))`, from float32 gradients; `calibrate` for
  a loss and a batch.
- What would float16 keep of these gradients? `shares` for all of them, `underflow` by leaf.
- Which leaves are inf, NaN or lost? `print(table(grads))`; `leaf_counts` in `jit`.
- Which line did it? `trace`, which runs the backward pass operation by operation.
- Does it run in float16? `print(products(jaxscale.autocast(loss_fn), params, batch))`.
- What happened in the run? Append the `jaxscale.metrics` of each step to a `History`.

>>> import jax.numpy as jnp
>>> from jaxscale import diagnostics
>>> grads = {"w": jnp.array([1e-3, 1e-9])}
>>> diagnostics.shares(diagnostics.histogram(grads))["float16"].flushed  # 1e-9 becomes 0
0.5
>>> diagnostics.shares(diagnostics.histogram(grads), loss_scale=2**15)["float16"].flushed
0.0

A function that takes the result of another one raises a `TypeError` if it gets something else, or
a result that is still traced. A function that judges formats at a loss scale raises a `ValueError`
if the scale is not a power of two in float32's normal range, or if it does not know the format.
The functions that draw raise an `ImportError` without matplotlib.
"""

from ._calibrate import Calibration, calibrate
from ._histogram import Histogram, Shares, histogram, leaf_histograms, shares
from ._history import History
from ._leaves import LeafCounts, LeafRow, LeafTable, leaf_counts, table
from ._pictures import plot_histogram, plot_underflow
from ._products import ProductLine, Products, products
from ._suggest import Suggestion, suggest_scale
from ._text import text_histogram, to_json
from ._trace.backward import trace
from ._trace.report import TracedConstant, TracedNonfinite, TracedUnderflow, TraceReport
from ._underflow import Underflow, underflow

__all__ = [
    "Calibration", "Histogram", "History", "LeafCounts", "LeafRow", "LeafTable", "ProductLine",
    "Products", "Shares", "Suggestion", "TraceReport", "TracedConstant", "TracedNonfinite",
    "TracedUnderflow", "Underflow", "calibrate", "histogram", "leaf_counts", "leaf_histograms",
    "plot_histogram", "plot_underflow", "products", "shares", "suggest_scale", "table",
    "text_histogram", "to_json", "trace", "underflow",
]  # fmt: skip

"""Shows what happened: where gradients overflow, what underflows, which loss scale would work.

- What would float16 keep of these gradients? `shares` of a `histogram`, of all or leaf by leaf.
- Which leaves are inf, NaN or lost? `print(table(histogram(grads, by_leaf=True)))`.
- Which loss scale fits? `calibrate`, for a loss and a batch.
- Which line did it? `trace`, which tries each line in float32 and as it is written.
- Does it run in float16? `print(products(jaxscale.autocast(loss_fn), params, batch))`.
- How does it look? `plot`, of a histogram, or of a list of the `jaxscale.metrics` of each step.

>>> import jax.numpy as jnp
>>> from jaxscale import diagnostics
>>> grads = {"w": jnp.array([1e-3, 1e-9])}
>>> diagnostics.shares(diagnostics.histogram(grads))["float16"].flushed  # 1e-9 becomes 0
0.5
>>> diagnostics.shares(diagnostics.histogram(grads), loss_scale=2**15)["float16"].flushed
0.0

`histogram` works in `jit`. All others run on the host.
"""

import typing as _typing

from .._went import missing_name as _missing_name
from ._calibrate import Calibration, calibrate
from ._histogram import Histogram, Shares, histogram, shares
from ._leaves import LeafRow, LeafTable, table
from ._plot import plot
from ._products import ProductLine, Products, products
from ._switches.trace import TracedLine, TraceReport, trace

__all__ = [
    "Calibration", "Histogram", "LeafRow", "LeafTable", "ProductLine", "Products", "Shares",
    "TraceReport", "TracedLine", "calibrate", "histogram", "plot", "products", "shares", "table",
    "trace",
]  # fmt: skip

# hidden from type checkers, which would take any name for one that it knows
if not _typing.TYPE_CHECKING:

    def __getattr__(name):
        raise _missing_name(__name__, name)

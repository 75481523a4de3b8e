"""Shows what happened: where gradients overflow, what underflows, which loss scale would work.

- What is wrong, and which line did it? `print(doctor(loss_fn, params, batch))`.
- Which gradients are inf, NaN or lost in float16? `print(sizes(grads))`.
- Which loss scale fits? `calibrate`, for a loss and a batch.
- Does it run in float16? `print(products(jaxscale.autocast(loss_fn), params, batch))`.
- How does it look? `plot`, of gradients, or of a list of the `jaxscale.metrics` of each step.

>>> import jax.numpy as jnp
>>> from jaxscale import diagnostics
>>> grads = {"w": jnp.array([1e-3, 1e-9])}
>>> diagnostics.sizes(grads).rows[0].flushed  # 1e-9 becomes 0
1
>>> diagnostics.sizes(grads, loss_scale=2.0**15).rows[0].flushed
0

All of these run on the host. `histogram`, `shares`, `table` and `trace` go in 0.7.0.
"""

import typing as _typing

from .._went import going as _going
from .._went import missing_name as _missing_name
from ._calibrate import Calibration, calibrate
from ._examine import doctor
from ._histogram import Histogram, Shares, histogram, shares
from ._leaves import LeafRow, LeafTable, sizes, table
from ._plot import plot
from ._products import ProductLine, Products, products
from ._switches.trace import TracedLine, TraceReport, trace

__all__ = [
    "Calibration", "Histogram", "LeafRow", "LeafTable", "ProductLine", "Products", "Shares",
    "TraceReport", "TracedLine", "calibrate", "doctor", "histogram", "plot", "products", "shares",
    "sizes", "table", "trace",
]  # fmt: skip

# The doctor calls what is inside, and gets no warning.
histogram = _going(histogram)
shares = _going(shares)
table = _going(table)
trace = _going(trace)

# hidden from type checkers, which would take any name for one that it knows
if not _typing.TYPE_CHECKING:

    def __getattr__(name):
        raise _missing_name(__name__, name)

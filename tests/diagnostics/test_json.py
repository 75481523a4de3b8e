"""Every report, through JSON and back: the same numbers, to the last bit."""

import dataclasses
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted import HALF, trace

import jaxscale
from jaxscale import diagnostics

pytestmark = pytest.mark.standard_promotion

W = jnp.array([1e-9, 2e-5, 1.0, jnp.inf, jnp.nan, -0.0], jnp.float32)
GRADS = {"w": W, "b": [jnp.ones(2, HALF), None]}


def _report():
    """An overflow, an underflow, a number rounded to 0, and a loss that is not finite."""

    def fun(w):
        y = w * HALF(60000) * HALF(60000) + w * HALF(2.0**-11) * HALF(2.0**-11)
        return -jnp.sum((y + 1e-9).astype(jnp.float32))

    return trace(fun, jnp.ones(3, HALF), loss_scale=1)


def _history():
    history = diagnostics.History()
    for loss in (1.5, jnp.inf, -jnp.inf, jnp.nan, 1 / 3):
        history.append(jaxscale.DynamicLossScale().init(), loss=loss)
    return history.columns()


def _calibrated():
    return diagnostics.calibrate(lambda w, x: jnp.sqrt(w * x), jnp.float32(1), [jnp.float32(0)])


def test_all_results_go_through_json_and_back():
    report, histogram = _report(), diagnostics.histogram(GRADS)
    counts, leaves = diagnostics.leaf_counts(GRADS), diagnostics.leaf_histograms(GRADS)
    table, nothing = diagnostics.table(counts), diagnostics.histogram(jnp.zeros(1))
    results = {
        "Calibration": _calibrated(),
        "Histogram": [histogram, leaves],
        "History": _history(),
        "LeafCounts": counts,
        "LeafTable": table,
        "LeafRow": table.rows[0],
        "Shares": diagnostics.shares(histogram),
        "Suggestion": list(map(diagnostics.suggest_scale, (histogram, nothing))),
        "TraceReport": report,
        "TracedConstant": report.constants[0],
        "TracedNonfinite": report.nonfinite[0],
        "TracedUnderflow": report.underflows[0],
        "Underflow": diagnostics.underflow(leaves),
    }
    classes = {name for name, value in vars(diagnostics).items() if isinstance(value, type)}
    assert set(results) == classes
    assert report.loss == -np.inf
    text = json.dumps(diagnostics.to_json(results), allow_nan=False)
    assert plain(read(json.loads(text))) == plain(results)


def plain(value):
    """The values of a report in dictionaries and lists: floats as bits, and all NaN as one."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    if isinstance(value, (jax.Array, np.ndarray)):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float):
        return "NaN" if np.isnan(value) else struct.pack("d", value)
    return value


def read(value):
    """What was read from JSON, with the numbers that JSON lacks put back."""
    if isinstance(value, dict):
        return {name: read(each) for name, each in value.items()}
    if isinstance(value, list):
        return [read(each) for each in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value

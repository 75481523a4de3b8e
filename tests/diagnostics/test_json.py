"""Every report, through JSON and back: the same numbers, to the last bit."""

import dataclasses
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import cases

import jaxscale
from jaxscale import diagnostics

pytestmark = pytest.mark.standard_promotion

W = jnp.array([1e-9, 2e-5, 1.0, jnp.inf, jnp.nan, -0.0], jnp.float32)
GRADS = {"w": W, "b": [jnp.ones(2, jnp.float16), None]}


def _traced(scale, after):
    """The trace of two float16 products, the second of which overflows or underflows."""

    def fun(w):
        return jnp.sum((w * jnp.float16(scale) * jnp.float16(scale)).astype(jnp.float32)) * after

    return diagnostics.trace(fun, jaxscale.FixedLossScale(1.0).init())(jnp.ones(3, jnp.float16))


def _calibrated(factor):
    def loss_fn(w, x):
        return jnp.sqrt(w * x).astype(jnp.float32)

    return diagnostics.calibrate(loss_fn, jnp.float16(1), [jnp.float16(factor)], max_passes=5)


def _history():
    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    state, history = tx.init(W), diagnostics.History()
    for loss in (1.5, jnp.inf, -jnp.inf, jnp.nan, 1 / 3):
        history.append(state, loss=loss)
    return history.columns()


def _rounded():
    def fun(w):
        return jnp.sum((w / 70000 + 1e-9).astype(jnp.float32))

    scaling = jaxscale.FixedLossScale(1.0).init()
    return diagnostics.trace(fun, scaling)(jnp.ones(3, jnp.float16)).constants


def _table():
    return diagnostics.table(diagnostics.leaf_counts(GRADS))


def _reports():
    return [_traced(60000, 1.0), _traced(2.0**-11, 1.0), _traced(60000, 0.0), _traced(60000, -1.0)]


def _suggestions():
    nothing = diagnostics.histogram(jnp.zeros(1))
    return [diagnostics.suggest_scale(h) for h in (diagnostics.histogram(W), nothing)]


def _leaves():
    return diagnostics.leaf_histograms(GRADS)


# For each public class of `diagnostics`, what makes reports with all kinds of values.
REPORTS = {
    "Calibration": lambda: [_calibrated(0), _calibrated(1)],
    "Histogram": lambda: [diagnostics.histogram(GRADS), _leaves()],
    "History": lambda: [_history()],
    "LeafCounts": lambda: [diagnostics.leaf_counts(GRADS, loss_scale=2.0**7)],
    "LeafTable": lambda: [_table()],
    "LeafRow": lambda: [_table().rows[0]],
    "Shares": lambda: [diagnostics.shares(diagnostics.histogram(W))],
    "Suggestion": _suggestions,
    "TraceReport": _reports,
    "TracedConstant": lambda: [_rounded()],
    "TracedNonfinite": lambda: [_traced(60000, 1.0).nonfinite],
    "TracedUnderflow": lambda: [_traced(2.0**-11, 1.0).underflows],
    "Underflow": lambda: [diagnostics.underflow(_leaves(), loss_scale=2.0**9)],
}


def plain(value):
    """The values of a report in dictionaries and lists: floats as bits, and all NaN as one."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
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


@cases("name", REPORTS, fast=["Histogram", "History", "LeafTable", "Suggestion", "TraceReport"])
def test_a_report_goes_through_json_and_back(name):
    reports = REPORTS[name]()
    for report in reports:
        text = json.dumps(diagnostics.to_json(report), allow_nan=False)
        assert plain(read(json.loads(text))) == plain(report)
    if name == "TraceReport":
        losses = [report.loss for report in reports]
        assert (losses[0], losses[3], np.isnan(losses[2])) == (np.inf, -np.inf, True)
        assert reports[0].nonfinite
        assert reports[1].underflows
    if name == "TracedConstant":
        assert [constant.became for constant in reports[0]] == [np.inf, 0]


def test_all_reports_are_there():
    classes = {name for name, value in vars(diagnostics).items() if isinstance(value, type)}
    assert set(REPORTS) == classes

"""The results as JSON. Other programs read it: a version with other fields has another number."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..diagnostics._histogram import EXPONENTS, Histogram
from .compiled import BackwardTrial
from .diagnosis import say_verdict
from .exam import Exam
from .faults import Check
from .finding import Finding, has_problem

_VERSION = 3
_NONFINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}  # as JSON may write them
# What the parts of an exam keep for the text alone.
_NOT_WRITTEN = ("halves_left", "is_raised", "is_divided", "is_lost", "grads", "error")


def make_record(exam: Exam, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the results as what `json.dumps` accepts: the fields of the exam and of its parts.

    Names of files, lines and leaves are as in the text. Infinities and NaN are strings. What
    `jaxscale.diagnostics` returns has the fields that it has there: `calibration`,
    `leaves`, `shares` and `layers`.
    """
    record = {
        "version": _VERSION,
        "found": has_problem(findings),
        "verdict": say_verdict(exam, findings),
        "findings": findings,
    }
    for name, value in exam._asdict().items():
        if isinstance(value, BackwardTrial | Check):
            record |= value._asdict()
        else:
            record[name] = value
    for name in _NOT_WRITTEN:
        del record[name]
    record["histogram"] = _record_histogram(exam.histogram)
    return _to_json(record)


def _record_histogram(histogram: Histogram) -> dict[str, Any]:
    """Returns the histogram with its counts by their exponents, those that are not 0."""
    counts = np.asarray(histogram.counts, np.float64).sum(axis=1)
    by_exponent = {k: n for k, n in zip(EXPONENTS, counts, strict=True) if n}
    return histogram._asdict() | {"counts": by_exponent}


def _to_json(result: Any) -> Any:
    """Returns a result as what `json.dumps` accepts, with no number rounded.

    JSON has no NaN and no infinities: they become the strings `"NaN"`, `"Infinity"` and
    `"-Infinity"`, which `float` turns back into numbers.
    """
    if hasattr(result, "_asdict"):
        result = result._asdict()
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = vars(result)
    if isinstance(result, Mapping):
        return {str(key): _to_json(value) for key, value in result.items()}
    if isinstance(result, (np.ndarray, np.generic, jax.Array)):
        result = np.asarray(result).tolist()
    if isinstance(result, (list, tuple)):
        return list(map(_to_json, result))
    if isinstance(result, float) and not math.isfinite(result):
        return _NONFINITE.get(result, "NaN")
    return result

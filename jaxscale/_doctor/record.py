"""The results as JSON. Other programs read it: a version with other fields has another number."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..diagnostics._histogram import EXPONENTS, Histogram
from ..diagnostics._text import to_json
from .compiled import BackwardTrial
from .diagnosis import say_verdict
from .exam import Exam
from .finding import Finding, has_problem
from .float32 import Float32Check

_VERSION = 2
# What the parts of an exam keep for the text alone.
_NOT_WRITTEN = ("is_divided", "is_lost", "grads", "error")


def make_record(exam: Exam, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the results as what `json.dumps` accepts: the fields of the exam and of its parts.

    Names of files, lines and leaves are as in the text. Infinities and NaN are strings. What
    `jaxscale.diagnostics` returns has the fields that it has there: `calibration`, `ceiling`,
    `trace`, `leaves`, `shares`, `layers` and `suggestion`.
    """
    record = {
        "version": _VERSION,
        "found": has_problem(findings),
        "verdict": say_verdict(exam, findings),
        "findings": findings,
    }
    for name, value in exam._asdict().items():
        if isinstance(value, BackwardTrial | Float32Check):
            record |= value._asdict()
        else:
            record[name] = value
    for name in _NOT_WRITTEN:
        del record[name]
    record["histogram"] = _record_histogram(exam.histogram)
    return to_json(record)


def _record_histogram(histogram: Histogram) -> dict[str, Any]:
    """Returns the histogram with its counts by their exponents, those that are not 0."""
    counts = np.asarray(histogram.counts, np.float64).sum(axis=1)
    by_exponent = {k: n for k, n in zip(EXPONENTS, counts, strict=True) if n}
    return histogram._asdict() | {"counts": by_exponent}

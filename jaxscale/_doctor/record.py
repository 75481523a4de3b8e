"""The results as JSON: its fields, one by one. A new version has another number."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..diagnostics._histogram import EXPONENTS, Histogram
from ..diagnostics._text import to_json
from .exam import Exam
from .finding import Finding
from .findings import verdict
from .gradients import Comparison
from .remedy import Culprit, Relief, Remedy
from .scales import Start, find_start

_VERSION = 2


def make_record(exam: Exam, found: Sequence[Finding]) -> dict[str, Any]:
    """Returns the results as what `json.dumps` accepts.

    Names of files, lines and leaves are as in the text. Infinities and NaN are strings. What
    `jaxscale.diagnostics` returns has the fields that it has there.
    """
    against = exam.against
    return to_json(
        {
            "version": _VERSION,
            "found": any(finding.is_problem for finding in found),
            "verdict": verdict(exam, found),
            "findings": [_finding(each) for each in found],
            # What was examined, and how.
            "target": exam.target,
            "autocast": exam.autocast,
            "is_quick": exam.is_quick,
            "is_auto": exam.is_auto,
            "loss": exam.loss,
            "loss_as_written": exam.loss_as_written,
            "dtypes": exam.dtypes,
            "backward_rules": exam.backward_rules,
            # The loss scale.
            "loss_scale": exam.loss_scale,
            "shown_scale": exam.shown_scale,
            "calibration": exam.calibration,
            "start": _start(find_start(exam)),
            "repeats": _repeats(exam),
            "scale_backward_raised": exam.backward_trial.raised if exam.backward_trial else None,
            "largest": exam.largest,
            "is_limited": exam.is_limited,
            "ceiling": exam.ceiling,
            "relief": _relief(exam.relief),
            "comparison": _comparison(exam.comparison),
            # Where numbers get lost.
            "trace": exam.trace,
            "is_finite_in_float32": against.is_finite,
            "float32": _comparison(against.comparison),
            "wrong": against.wrong,
            "culprit": _culprit(against.culprit),
            "remedy": _remedy(against.remedy),
            "unshifted": exam.unshifted,
            "loss_sums": [
                {"where": each.where, "size": each.size, "weight": each.weight}
                for each in exam.loss_sums
            ],
            "zero": exam.zero,
            # The finished gradients, and what storing them would lose.
            "leaves": exam.leaves,
            "histogram": _histogram(exam.histogram),
            "shares": exam.shares,
            "layers": exam.layers,
            "suggestion": exam.suggestion,
        }
    )


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "is_problem": finding.is_problem,
        "title": finding.title,
        "details": finding.details,
        "where": finding.where,
        "source": finding.source,
        "line": finding.line,
    }


def _start(start: Start | None) -> dict[str, Any] | None:
    if start is None:
        return None
    return {"skipped": start.skipped, "retries": start.retries, "code": start.code}


def _repeats(exam: Exam) -> tuple[int, bool] | None:
    """Returns how often `scale_backward` repeats its pass, and whether that is enough."""
    trial = exam.backward_trial
    return None if trial is None or trial.raised else (trial.repeats, trial.is_enough)


def _relief(relief: Relief | None) -> dict[str, Any] | None:
    if relief is None:
        return None
    return {"loss_scale": relief.loss_scale, "lines": relief.lines}


def _remedy(remedy: Remedy | None) -> dict[str, Any] | None:
    if remedy is None:
        return None
    return {"lines": remedy.lines, "works": remedy.works, "error": remedy.error}


def _culprit(culprit: Culprit | None) -> dict[str, Any] | None:
    if culprit is None:
        return None
    return {
        "place": culprit.place,
        "kind": culprit.kind,
        "largest": culprit.largest,
        "error": culprit.error,
        "made_by": culprit.made_by,
    }


def _comparison(comparison: Comparison | None) -> dict[str, Any] | None:
    if comparison is None:
        return None
    return {
        "flushed": comparison.flushed,
        "error": comparison.error,
        "worst": comparison.worst,
        "worst_flushed": comparison.worst_flushed,
        "leaves": [
            {"path": leaf.path, "flushed": leaf.flushed, "error": leaf.error}
            for leaf in comparison.leaves
        ],
    }


def _histogram(histogram: Histogram) -> dict[str, Any]:
    """Returns the histogram with its counts by their exponents, those that are not 0."""
    counts = np.asarray(histogram.counts, np.float64).sum(axis=1)
    by_exponent = {str(k): n for k, n in zip(EXPONENTS, counts, strict=True) if n}
    return histogram._asdict() | {"counts": by_exponent}

"""The results as JSON: its fields, one by one. A new version has another number."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..diagnostics._histogram import EXPONENTS, Histogram
from ..diagnostics._text import to_json
from .compiled import BackwardTrial
from .diagnosis import say_verdict
from .exam import Exam
from .finding import Finding, has_problem
from .gradients import Comparison
from .origins import Sum
from .remedy import Culprit, Relief, Remedy
from .scales import Start, find_start

_VERSION = 2


def make_record(exam: Exam, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the results as what `json.dumps` accepts.

    Names of files, lines and leaves are as in the text. Infinities and NaN are strings. What
    `jaxscale.diagnostics` returns has the fields that it has there: `calibration`, `ceiling`,
    `trace`, `leaves`, `shares`, `layers` and `suggestion`.
    """
    trial = exam.backward_trial
    check = exam.float32
    return to_json(
        {
            "version": _VERSION,
            "found": has_problem(findings),
            "verdict": say_verdict(exam, findings),
            "findings": [_record_finding(finding) for finding in findings],
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
            "shown_scale": exam.judged_scale,
            "calibration": exam.calibration,
            "start": _record_start(find_start(exam)),
            "repeats": _record_repeats(trial),
            "scale_backward_raised": None if trial is None else trial.raised,
            "largest": exam.largest_gradient,
            "is_limited": exam.is_limited,
            "ceiling": exam.ceiling,
            "relief": _record_relief(exam.relief),
            "comparison": _record_comparison(exam.scale_comparison),
            # Where numbers get lost.
            "trace": exam.trace,
            "is_finite_in_float32": check.is_finite,
            "float32": _record_comparison(check.comparison),
            "wrong": check.wrong_leaves,
            "unstable": check.unstable_leaves,
            "right_loss": check.right_loss,
            "mean": None if check.mean is None else _record_sum(check.mean),
            "culprit": _record_culprit(check.culprit),
            "remedy": _record_remedy(check.remedy),
            "compiled_remedy": _record_remedy(check.compiled_remedy),
            "unshifted": exam.unshifted,
            "loss_sums": [_record_sum(total) for total in exam.loss_sums],
            "zero": exam.zero_leaves,
            # The finished gradients, and what storing them would lose.
            "leaves": exam.leaf_table,
            "histogram": _record_histogram(exam.histogram),
            "shares": exam.shares,
            "layers": exam.layers,
            "suggestion": exam.suggestion,
        }
    )


def _record_finding(finding: Finding) -> dict[str, Any]:
    return {
        "is_problem": finding.is_problem,
        "title": finding.title,
        "details": finding.details,
        "where": finding.where,
        "source": [[line.number, line.text] for line in finding.source],
        "line": finding.line,
    }


def _record_start(start: Start | None) -> dict[str, Any] | None:
    if start is None:
        return None
    return {"skipped": start.skipped, "retries": start.retries, "code": start.code}


def _record_repeats(trial: BackwardTrial | None) -> list[Any] | None:
    """Returns how often `scale_backward` repeats its pass, and whether that is enough."""
    if trial is None or trial.raised:
        return None
    return [trial.repeats, trial.is_enough]


def _record_relief(relief: Relief | None) -> dict[str, Any] | None:
    if relief is None:
        return None
    return {"loss_scale": relief.loss_scale, "lines": relief.lines}


def _record_remedy(remedy: Remedy | None) -> dict[str, Any] | None:
    if remedy is None:
        return None
    return {"lines": remedy.lines, "works": remedy.works, "error": remedy.error}


def _record_culprit(culprit: Culprit | None) -> dict[str, Any] | None:
    if culprit is None:
        return None
    return {
        "place": culprit.place,
        "kind": culprit.kind,
        "largest": culprit.largest,
        "error": culprit.error,
        "made_by": culprit.made_by,
    }


def _record_comparison(comparison: Comparison | None) -> dict[str, Any] | None:
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


def _record_sum(total: Sum) -> dict[str, Any]:
    return {"where": total.where, "size": total.size, "weight": total.weight}


def _record_histogram(histogram: Histogram) -> dict[str, Any]:
    """Returns the histogram with its counts by their exponents, those that are not 0."""
    counts = np.asarray(histogram.counts, np.float64).sum(axis=1)
    return {
        "counts": {str(k): n for k, n in zip(EXPONENTS, counts, strict=True) if n},
        "zero": histogram.zero,
        "inf": histogram.inf,
        "nan": histogram.nan,
    }

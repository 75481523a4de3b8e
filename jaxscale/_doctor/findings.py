"""What the results of an exam mean, in plain sentences.

Here the doctor decides what is a problem and what is only worth knowing. A problem is

- inf or NaN in the loss, the auxiliary output or the gradients (`find_nonfinite`);
- gradients that are finite, but far from those in float32 (`find_wrong`);
- a loss scale that was asked for and loses too much of the gradients, or that must be below 1,
  where the default rule skips every step (`find_scale`);
- gradients that are all exactly 0 (`find_zeros`).

Each line of the model is named once: what follows from the first fault is listed under it.
"""

from collections.abc import Iterator, Sequence

from ..diagnostics._trace.report import TracedConstant
from .exam import Exam
from .finding import Finding, list_names, note, say_rounded
from .nonfinite import find_harmless_nonfinite, find_nonfinite
from .scales import find_inward_growth, find_refusal, find_scale, needs_scale
from .wrong import find_effect_of_autocast, find_underflows, find_wrong, find_zeros


def findings(exam: Exam) -> list[Finding]:
    """Returns all findings: the problems first."""
    first, culprit = exam.trace.first_nonfinite, exam.against.culprit
    # The lines that a finding on inf, NaN or wrong gradients begins at.
    begins = [first if first and first.reaches else None, culprit.place if culprit else None]
    named = {(place.file, place.line) for place in begins if place}
    found = [
        *find_nonfinite(exam),
        *find_wrong(exam),
        *find_effect_of_autocast(exam),
        *find_scale(exam),
        *find_inward_growth(exam),
        *find_refusal(exam),
        *_find_constants(exam, named),
        *find_harmless_nonfinite(exam, named),
        *find_underflows(exam),
        *find_zeros(exam),
        *_find_gaps(exam),
    ]
    return sorted(found, key=lambda finding: not finding.is_problem)


def verdict(exam: Exam, found: Sequence[Finding]) -> str:
    if problems := sum(finding.is_problem for finding in found):
        return f"Problems found: {problems}."
    needs = ", with a loss scale: it needs one" * (needs_scale(exam) and exam.is_auto)
    where = f" in {exam.autocast}" if exam.autocast else ""
    return f"Nothing {'overflows' if exam.is_quick else 'is wrong'}{where}{needs}."


def _find_constants(exam: Exam, named: set[tuple[str, int]]) -> Iterator[Finding]:
    for constant in exam.trace.constants:
        if (constant.file, constant.line) in named:
            continue
        words = "It does no harm on this batch."
        if not exam.is_right:
            words = _advise_on_constant(constant)
        yield note(f"{say_rounded(constant)}, at {constant.where}.", words, place=constant)


def _advise_on_constant(constant: TracedConstant) -> str:
    if constant.became:
        use = f"Use a number that {constant.dtype} holds,"
    elif "log" in constant.source:  # most probabilities are far below 1e-3
        return "Compute this line in float32."
    else:
        use = "Use a larger number, such as 1e-3,"
    return f"{use} or compute this line in float32."


def _find_gaps(exam: Exam) -> Iterator[Finding]:
    if exam.trace.not_entered:
        yield note(
            f"The doctor did not look inside {list_names(exam.trace.not_entered)}.",
            "Each ran as one operation: its lines are not named, and its numbers not compared.",
        )
    if exam.is_quick:
        yield note(
            "Gradients that are finite and wrong were not looked for.",
            "Without `--quick` the doctor also compares the gradients with those in float32.",
        )

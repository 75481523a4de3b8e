"""Findings on inf and NaN: those that reach the loss or the gradients, and those that do not."""

import math
from collections.abc import Iterator, Sequence

from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import TracedNonfinite
from .advice import advise_on_nonfinite
from .exam import Exam
from .finding import Finding, at_place, line_of, lines_of, list_names, rounded_at, rule_at
from .findings_of_wrong import explain_culprit


def find_nonfinite(exam: Exam) -> Iterator[Finding]:
    """Notes the inf and NaN in the loss, the auxiliary output and the gradients: problems."""
    report = exam.trace
    bad = report.nonfinite_outputs
    reaching = [place for place in report.nonfinite if place.reaches]
    if report.nonfinite_arguments:
        yield _find_in_arguments(exam, [place for place in reaching if place.cause == "given"])
        reaching = [place for place in reaching if place.cause != "given"]
    elif bad and not reaching:
        yield Finding(
            True, f"{_say_outputs(exam)}, and no line explains why.", _list_worst_leaves(exam)
        )
    if reaching:
        begins = "Inf or NaN is also made at"
        if not report.nonfinite_arguments:
            begins = f"{_say_outputs(exam)}. It begins at"
        # The forward pass first: what goes wrong there explains the backward pass.
        place, *others = sorted(reaching, key=lambda place: place.direction != "forward")
        details = [_explain_cause(place), *_say_operands(place), *rounded_at(place, exam)]
        details += rule_at(place, exam)
        culprit = exam.against.culprit
        if culprit and line_of(culprit.place) != line_of(place):
            words = explain_culprit(culprit)
            details.append(f"It goes wrong before, at {line_of(culprit.place)}: {words}")
        details += advise_on_nonfinite(place, exam)
        if elsewhere := [other for other in others if line_of(other) != line_of(place)]:
            details.append(f"After that, more of them are made at {lines_of(elsewhere)}.")
        details += _list_worst_leaves(exam)
        yield at_place(place, True, f"{begins} {line_of(place)}.", details)
    if not bad and exam.leaves.nonfinite_rows:
        title = (
            "Compiled as one program, the model gives gradients with inf or NaN. Run operation by "
            "operation, it does not."
        )
        yield Finding(True, title, _list_worst_leaves(exam))


def find_harmless_nonfinite(exam: Exam, named: set[tuple[str, int]]) -> Iterator[Finding]:
    """Notes inf and NaN that reach neither the loss nor the gradients, on lines not yet named."""
    places = [
        place
        for place in exam.trace.nonfinite
        if place.file and not place.reaches and (place.file, place.line) not in named
    ]
    if not places:
        return
    title = f"Inf or NaN made at {lines_of(places)} does not reach the loss or the gradients."
    words = "This is fine for a mask, unless a row is masked as a whole: then softmax is NaN."
    if not exam.is_right:
        words += " It is not fine for a norm or a sum."
    yield at_place(places[0], False, title, (words,))


def _find_in_arguments(exam: Exam, entries: Sequence[TracedNonfinite]) -> Finding:
    names = list_names(
        [
            name.replace("args[0]", "params").replace("args[1]", "batch")
            for name in exam.trace.nonfinite_arguments
        ]
    )
    if not exam.trace.nonfinite_outputs:
        title = f"There is inf or NaN in {names}, but none in the loss or the gradients."
        return Finding(False, title, ("This is fine for a mask.",))
    title = f"There is inf or NaN in {names}, before anything is computed."
    advice = "No loss scale or format helps: look where these numbers come from."
    details = (f"{_say_outputs(exam)}.", advice, *_list_worst_leaves(exam))
    if not entries:
        return Finding(True, title, details)
    return at_place(entries[0], True, title, (f"It comes in at {line_of(entries[0])}.", *details))


def _say_outputs(exam: Exam) -> str:
    bad = exam.trace.nonfinite_outputs
    grads = sum(name.startswith("grads") for name in bad)
    share = f"inf or NaN is in {grads} of {len(exam.leaves.rows)} gradients"
    if "loss" in bad:
        return f"The loss is {number(exam.trace.loss)}" + f", and {share}" * (grads > 0)
    if not grads:
        others = [name for name in bad if name.startswith("aux")]
        return f"The loss and the gradients are finite, but {list_names(others)} is not"
    scale = f"at loss scale {power(exam.loss_scale)}"
    if exam.loss_scale == 1:
        scale = "even without a loss scale"
    return f"The loss is finite, {number(exam.loss, 4)}, but {share}, {scale}"


def _list_worst_leaves(exam: Exam) -> tuple[str, ...]:
    names = [row.path for row in exam.leaves.nonfinite_rows]
    return (f"Gradients with inf or NaN, worst first: {list_names(names)}.",) if names else ()


def _explain_cause(place: TracedNonfinite) -> str:
    made = f"`{place.primitive}`, in the {place.direction} pass, makes inf or NaN of "
    made += f"{percent(place.share)} of {place.dtype}{list(place.shape)}"
    return {
        "range": f"{made}: {place.dtype} cannot hold these numbers, but float32 could.",
        "value": f"{made}, and would in float32 too, of the same operands.",
        "infinities": f"{made} from infinities: one minus another, or 0 times one.",
        "given": f"{made}: it was there before, in a constant or an input.",
    }[place.cause]


def _say_operands(place: TracedNonfinite) -> list[str]:
    if place.cause not in ("range", "value") or math.isnan(place.largest_input):
        return []
    words = f"Its operands are between {number(place.least_input, 3)} and "
    words += number(place.largest_input, 3)
    if place.cause == "range":
        words += f"; float32 gives numbers up to {number(place.float32_result, 3)}"
    return [f"{words}."]

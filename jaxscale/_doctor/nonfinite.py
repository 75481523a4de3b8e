"""Findings on inf and NaN, and what to do about them.

Which lines help in float32 was tried (`remedy`). The rest is for what float32 cannot hold either.
"""

import math
from collections.abc import Iterator, Sequence

from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import Place, TracedNonfinite
from .culprit import Culprit
from .cures import say_cure, say_point
from .exam import Exam
from .finding import Finding, make_finding
from .wording import (
    NOT_TRIED,
    list_names,
    name_line,
    name_lines,
    name_operation,
    say_backward_rule,
    say_rounded_at,
)
from .wrong_gradients import (
    advise_on_culprit,
    explain_culprit,
    find_compiled_place,
    say_compiled_remedy,
    say_remedy,
)


def find_nonfinite(exam: Exam) -> Iterator[Finding]:
    """Notes inf and NaN in the loss, the auxiliary output or the gradients."""
    report = exam.trace
    entries = []  # where inf or NaN of the arguments is first used
    beginnings = []
    for place in report.nonfinite:
        if not place.reaches:
            continue
        if report.nonfinite_arguments and place.cause == "given":
            entries.append(place)
        else:
            beginnings.append(place)
    if report.nonfinite_arguments:
        yield _find_in_arguments(exam, entries)
    elif report.nonfinite_outputs and not beginnings:
        title = f"{_say_outputs(exam)}, and no line explains why."
        yield make_finding(title, *_list_worst_leaves(exam), is_problem=True)
    if beginnings:
        # The forward pass first: what goes wrong there explains the backward pass.
        beginnings.sort(key=lambda place: place.direction != "forward")
        first, *others = beginnings
        yield _find_beginning(exam, first, others)
    if not report.nonfinite_outputs and exam.leaves.nonfinite_rows:
        title = (
            "Compiled as one program, the model gives gradients with inf or NaN. Run operation by "
            "operation, it does not."
        )
        details = [*say_compiled_remedy(exam), *_list_worst_leaves(exam)]
        place = find_compiled_place(exam)
        yield make_finding(title, *details, is_problem=True, place=place)


def find_harmless_nonfinite(exam: Exam, named: set[str]) -> Iterator[Finding]:
    """Notes inf and NaN that reach neither the loss nor the gradients, on lines not yet named."""
    places = []
    for place in exam.trace.nonfinite:
        is_named = place.where in named
        if place.where and not place.reaches and not is_named:
            places.append(place)
    if places:
        title = f"Inf or NaN made at {name_lines(places)} does not reach the loss or the gradients."
        words = "This is fine for a mask, unless a whole row is masked: then softmax is NaN."
        yield make_finding(title, words, place=places[0])


def _find_source(exam: Exam) -> Culprit | None:
    """Returns where the numbers come from that became inf or NaN later, if that was found."""
    culprit = exam.check.culprit
    if culprit is None or culprit.kind == "overflow":
        return None
    if not exam.trace.nonfinite_outputs:
        return None
    return culprit


def _find_beginning(
    exam: Exam, symptom: TracedNonfinite, others: Sequence[TracedNonfinite]
) -> Finding:
    """Returns a finding at the line where inf and NaN begin, or where numbers became 0 before."""
    source = _find_source(exam)
    if source is None:
        place: Place = symptom
        details = _explain_symptom(symptom, symptom, exam)
        details += _say_earlier_culprit(symptom, exam)
        details += _advise(symptom, exam)
    else:
        place = source.place
        details = [explain_culprit(source)]
        if name_line(symptom) != name_line(place):
            details.append(f"At {name_line(symptom)} that becomes inf or NaN.")
        details += _explain_symptom(symptom, place, exam)
        details.append("No loss scale helps.")
        details += advise_on_culprit(source, exam)

    named = {name_line(place), name_line(symptom)}
    elsewhere = [other for other in others if name_line(other) not in named]
    if elsewhere:
        details.append(
            f"After that, more inf or NaN is made at {name_lines(elsewhere)}."
        )
    details += _list_worst_leaves(exam)

    title = f"{_say_outputs(exam)}. It begins at {name_line(place)}."
    if exam.trace.nonfinite_arguments:
        title = f"Inf or NaN is also made at {name_line(place)}."
    return make_finding(title, *details, is_problem=True, place=place)


def _explain_symptom(symptom: TracedNonfinite, place: Place, exam: Exam) -> list[str]:
    """Returns how inf or NaN is made, and what is known of the line where the fault is."""
    return [
        _explain_cause(symptom),
        *_say_operands(symptom),
        *say_rounded_at(place, exam),
        *say_backward_rule(place, exam),
    ]


def _say_earlier_culprit(symptom: TracedNonfinite, exam: Exam) -> list[str]:
    """Returns where numbers go wrong before inf or NaN is made of them."""
    culprit = exam.check.culprit
    if culprit is None or name_line(culprit.place) == name_line(symptom):
        return []
    words = explain_culprit(culprit)
    return [
        f"Numbers already go wrong before that, at {name_line(culprit.place)}: {words}"
    ]


def _find_in_arguments(exam: Exam, entries: Sequence[TracedNonfinite]) -> Finding:
    """Returns a finding on inf or NaN in the parameters or the batch, used at `entries` first."""
    names = list_names(exam.trace.nonfinite_arguments)
    names = names.replace("args[0]", "params").replace("args[1]", "batch")
    if not exam.trace.nonfinite_outputs:
        title = (
            f"There is inf or NaN in {names}, but none in the loss or the gradients."
        )
        return make_finding(title, "This is fine for a mask.")
    first = next(iter(entries), None)
    details = []
    if first is not None:
        details.append(f"It comes in at {name_line(first)}.")
    details.append(f"{_say_outputs(exam)}.")
    details.append(
        "No loss scale or format helps: find out where these numbers come from."
    )
    details += _list_worst_leaves(exam)
    title = f"There is inf or NaN in {names}, before anything is computed."
    return make_finding(title, *details, is_problem=True, place=first)


def _say_outputs(exam: Exam) -> str:
    """Returns which of the loss, the auxiliary output and the gradients are not finite."""
    names = exam.trace.nonfinite_outputs
    num_grads = sum(name.startswith("grads") for name in names)
    num_leaves = len(exam.leaves.rows)
    share = f"inf or NaN is in {num_grads} of {num_leaves} gradients"
    if "loss" in names:
        loss = f"The loss is {number(exam.trace.loss)}"
        if not num_grads:
            return loss
        return f"{loss}, and {share}"
    if not num_grads:
        others = [name for name in names if name.startswith("aux")]
        return f"The loss and the gradients are finite, but {list_names(others)} is not"
    scale = f"at loss scale {power(exam.loss_scale)}"
    if exam.loss_scale == 1:
        scale = "even without a loss scale"
    return f"The loss is finite, {number(exam.trace.loss, 4)}, but {share}, {scale}"


def _list_worst_leaves(exam: Exam) -> list[str]:
    names = [row.path for row in exam.leaves.nonfinite_rows]
    if not names:
        return []
    return [f"Gradients with inf or NaN, worst first: {list_names(names)}."]


# What makes inf or NaN, as `TracedNonfinite.cause` names it.
_CAUSES = {
    "range": ": {dtype} cannot hold these numbers, but float32 could.",
    "value": ". In float32 the same operands give inf or NaN as well.",
    "infinities": " from infinities: one minus another, or 0 times one.",
    "given": ": it was there before, in a constant or an input.",
}


def _explain_cause(place: TracedNonfinite) -> str:
    why = _CAUSES[place.cause].format(dtype=place.dtype)
    return (
        f"{name_operation(place)} gives inf or NaN in "
        f"{percent(place.share)} of {place.dtype}{list(place.shape)}{why}"
    )


def _say_operands(place: TracedNonfinite) -> list[str]:
    if place.cause not in ("range", "value") or math.isnan(place.largest_input):
        return []
    least = number(place.least_input, 3)
    largest = number(place.largest_input, 3)
    words = f"Its operands are between {least} and {largest}"
    if place.cause == "range":
        words += f"; float32 gives numbers up to {number(place.float32_result, 3)}"
    return [f"{words}."]


def _advise(place: TracedNonfinite, exam: Exam) -> list[str]:
    """Returns how to keep an inf or a NaN from being made at a place, a sentence or two each."""
    largest = exam.largest_scale
    if place.scaled and largest and largest < exam.loss_scale:
        return [
            f"Loss scale {power(largest)} is the largest that does not overflow here."
        ]
    helpless = "No loss scale helps."
    if place.scaled:
        helpless = "Even a loss scale of 1 overflows here."
    if place.cause == "given":
        return [helpless, "Find out where this number comes from."]
    if place.cause == "infinities":
        return [
            helpless,
            "In a row that is masked as a whole, softmax is NaN. Mask with a number that "
            f"{place.dtype} holds, such as -1e4, and leave such rows out of the loss.",
            NOT_TRIED,
        ]
    cures = say_cure(place, exam)
    return [helpless, *cures, *_say_how_to_compute(place, exam, is_first=not cures)]


def _say_how_to_compute(
    place: TracedNonfinite, exam: Exam, *, is_first: bool
) -> list[str]:
    """Returns which lines to compute in float32, or what to do where float32 does not help.

    It is the `is_first` advice, or comes after another, which may be enough.
    """
    remedy = exam.check.remedy
    if remedy is not None and remedy.works:
        return [say_remedy(remedy, exam, place.where, is_first=is_first)]
    if not is_first:
        return []
    if remedy is not None:
        return [say_remedy(remedy, exam, place.where)]
    if place.cause == "range":
        return ["What would help was not tried."]
    return say_point(place)

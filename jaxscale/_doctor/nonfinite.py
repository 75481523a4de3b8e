"""Findings on inf and NaN, and what to do about them.

Which lines help in float32 was tried (`remedy`). The rest is for what float32 cannot hold either.
"""

import math
import re
from collections.abc import Iterator, Sequence

from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import TracedNonfinite
from .exam import Exam
from .finding import Finding, line_of, lines_of, list_names, note, rounded_at, rule_at
from .wrong import explain_culprit, say_how_to_widen, say_remedy

_MASK = r"mask|-\s*1e\d|finfo"


def find_nonfinite(exam: Exam) -> Iterator[Finding]:
    report = exam.trace
    bad, worst = report.nonfinite_outputs, _list_worst_leaves(exam)
    reaching = [place for place in report.nonfinite if place.reaches]
    if report.nonfinite_arguments:
        yield _find_in_arguments(exam, [place for place in reaching if place.cause == "given"])
        reaching = [place for place in reaching if place.cause != "given"]
    elif bad and not reaching:
        yield note(f"{_say_outputs(exam)}, and no line explains why.", *worst, is_problem=True)
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
        details += _advise(place, exam)
        if elsewhere := [other for other in others if line_of(other) != line_of(place)]:
            details.append(f"After that, more of them are made at {lines_of(elsewhere)}.")
        yield note(f"{begins} {line_of(place)}.", *details, *worst, is_problem=True, place=place)
    if not bad and exam.leaves.nonfinite_rows:
        title = (
            "Compiled as one program, the model gives gradients with inf or NaN. Run operation by "
            "operation, it does not."
        )
        yield note(title, *worst, is_problem=True)


def find_harmless_nonfinite(exam: Exam, named: set[tuple[str, int]]) -> Iterator[Finding]:
    """Notes inf and NaN that reach neither the loss nor the gradients, on lines not yet named."""
    places = [
        place
        for place in exam.trace.nonfinite
        if place.file and not place.reaches and (place.file, place.line) not in named
    ]
    if places:
        title = f"Inf or NaN made at {lines_of(places)} does not reach the loss or the gradients."
        words = "This is fine for a mask, unless a row is masked as a whole: then softmax is NaN."
        yield note(title, words, place=places[0])


def _find_in_arguments(exam: Exam, entries: Sequence[TracedNonfinite]) -> Finding:
    names = list_names(exam.trace.nonfinite_arguments)
    names = names.replace("args[0]", "params").replace("args[1]", "batch")
    if not exam.trace.nonfinite_outputs:
        title = f"There is inf or NaN in {names}, but none in the loss or the gradients."
        return note(title, "This is fine for a mask.")
    return note(
        f"There is inf or NaN in {names}, before anything is computed.",
        *(f"It comes in at {line_of(entry)}." for entry in entries[:1]),
        f"{_say_outputs(exam)}.",
        "No loss scale or format helps: look where these numbers come from.",
        *_list_worst_leaves(exam),
        is_problem=True,
        place=next(iter(entries), None),
    )


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
    return f"The loss is finite, {number(exam.trace.loss, 4)}, but {share}, {scale}"


def _list_worst_leaves(exam: Exam) -> list[str]:
    names = [row.path for row in exam.leaves.nonfinite_rows]
    return [f"Gradients with inf or NaN, worst first: {list_names(names)}."] if names else []


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


def _advise(place: TracedNonfinite, exam: Exam) -> list[str]:
    """Returns how to keep an inf or a NaN from being made at a place, a sentence or two each."""
    fits, remedy = exam.fits, exam.against.remedy
    if place.scaled and fits and fits < exam.loss_scale:
        return [f"Loss scale {power(fits)} is the largest that does not overflow here."]
    said = ["Even a loss scale of 1 overflows here." if place.scaled else "No loss scale helps."]
    tried = [say_remedy(remedy, exam, place.where)] if remedy and remedy.works else []
    if place.cause == "given":
        return [*said, "Look where this number comes from."]
    if place.cause == "infinities":
        return [
            *said,
            "In a row that is masked as a whole, softmax is NaN. Mask with a number that "
            f"{place.dtype} holds, such as -1e4, and leave such rows out of the loss.",
        ]
    is_range = place.cause == "range"
    if is_range and not exam.is_of_autocast and re.search(_MASK, place.source):
        return [*said, "For a mask, use -1e4 instead of -1e9 or `finfo.min`.", *tried]
    if tried:
        return said + tried
    if is_range or exam.is_of_autocast:
        return [*said, f"Compute this line in float32. {say_how_to_widen(exam)}"]
    return [*said, _advise_on_point(place)]


def _advise_on_point(place: TracedNonfinite) -> str:
    """Returns what to do about an operation that is not finite in float32 either."""
    if place.primitive in ("log", "sqrt", "rsqrt", "log1p", "pow") and place.least_input < 0:
        return (
            f"The operand is negative, {number(place.least_input, 3)}, as a difference of two "
            "large numbers may become. An epsilon does not help: compute the difference another "
            "way, a variance as `((x - x.mean())**2).mean()`."
        )
    if place.primitive in ("gather", "dynamic_slice", "scatter"):
        return (
            "An index is out of range: JAX fills in NaN. Look at the labels, tokens or positions."
        )
    if place.primitive in ("exp", "exp2"):
        return (
            "Even float32 cannot hold this exponential: clip the exponent, or subtract the maximum "
            "first, as `jax.nn.softmax` does."
        )
    # By the primitive alone more cannot be told: a `div` may be the derivative of a square root.
    return (
        "Here the function or its derivative has no finite value, as a root, a logarithm or a "
        "division has none at 0. Keep the operand away: clip it, add 1e-3 to it in float32, or "
        "choose another with `jnp.where` before."
    )

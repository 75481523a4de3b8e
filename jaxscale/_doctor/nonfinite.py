"""Findings on inf and NaN, and what to do about them.

Which lines help in float32 was tried (`remedy`). The rest is for what float32 cannot hold either.
"""

import math
import re
from collections.abc import Iterator, Sequence

from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import Place, TracedNonfinite
from .cures import cure_of, cure_of_sum
from .exam import Exam
from .finding import Finding, line_of, lines_of, list_names, note, rounded_at, rule_at
from .remedy import Culprit
from .wrong import explain_culprit, say_how_to_widen, say_remedy

_MASK = r"mask|-\s*1e\d|finfo"


def find_nonfinite(exam: Exam) -> Iterator[Finding]:
    report = exam.trace
    reaching = [place for place in report.nonfinite if place.reaches]
    if report.nonfinite_arguments:
        yield _find_in_arguments(exam, [place for place in reaching if place.cause == "given"])
        reaching = [place for place in reaching if place.cause != "given"]
    elif report.nonfinite_outputs and not reaching:
        title = f"{_say_outputs(exam)}, and no line explains why."
        yield note(title, *_list_worst_leaves(exam), is_problem=True)
    if reaching:
        # The forward pass first: what goes wrong there explains the backward pass.
        reaching.sort(key=lambda place: place.direction != "forward")
        yield _find_beginning(exam, reaching[0], reaching[1:])
    if not report.nonfinite_outputs and exam.leaves.nonfinite_rows:
        title = (
            "Compiled as one program, the model gives gradients with inf or NaN. Run operation by "
            "operation, it does not."
        )
        yield note(title, *_list_worst_leaves(exam), is_problem=True)


def find_harmless_nonfinite(exam: Exam, named: set[tuple[str, int]]) -> Iterator[Finding]:
    """Notes inf and NaN that reach neither the loss nor the gradients, on lines not yet named."""
    places = [
        place
        for place in exam.trace.nonfinite
        if place.file and not place.reaches and (place.file, place.line) not in named
    ]
    if places:
        title = f"Inf or NaN made at {lines_of(places)} does not reach the loss or the gradients."
        words = "This is fine for a mask, unless a whole row is masked: then softmax is NaN."
        yield note(title, words, place=places[0])


def flush_behind(exam: Exam) -> Culprit | None:
    """Returns where the zeros come from that became inf or NaN later, if that was found."""
    culprit = exam.against.culprit
    is_flush = culprit is not None and culprit.kind == "underflow"
    return culprit if is_flush and exam.trace.nonfinite_outputs else None


def _find_beginning(
    exam: Exam, symptom: TracedNonfinite, others: Sequence[TracedNonfinite]
) -> Finding:
    """Returns a finding at the line where inf and NaN begin, or where numbers became 0 before."""
    flush = flush_behind(exam)
    begins = "Inf or NaN is also made at"
    if not exam.trace.nonfinite_arguments:
        begins = f"{_say_outputs(exam)}. It begins at"
    place: Place = flush.place if flush else symptom
    details = []
    if flush is not None:
        details.append(explain_culprit(flush))
        if line_of(symptom) != line_of(flush.place):
            details.append(f"At {line_of(symptom)} that becomes inf or NaN.")
    details += [_explain_cause(symptom), *_say_operands(symptom), *rounded_at(place, exam)]
    details += rule_at(place, exam)
    culprit = exam.against.culprit
    if culprit and not flush and line_of(culprit.place) != line_of(symptom):
        words = explain_culprit(culprit)
        details.append(
            f"Numbers already go wrong before that, at {line_of(culprit.place)}: {words}"
        )
    details += _advise_on_flush(flush, exam) if flush else _advise(symptom, exam)
    named = {line_of(place), line_of(symptom)}
    if elsewhere := [other for other in others if line_of(other) not in named]:
        details.append(f"After that, more inf or NaN is made at {lines_of(elsewhere)}.")
    details += _list_worst_leaves(exam)
    return note(f"{begins} {line_of(place)}.", *details, is_problem=True, place=place)


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
        "No loss scale or format helps: find out where these numbers come from.",
        *_list_worst_leaves(exam),
        is_problem=True,
        place=next(iter(entries), None),
    )


def _say_outputs(exam: Exam) -> str:
    bad = exam.trace.nonfinite_outputs
    grads = sum(name.startswith("grads") for name in bad)
    share = f"inf or NaN is in {grads} of {len(exam.leaves.rows)} gradients"
    if "loss" in bad:
        loss = f"The loss is {number(exam.trace.loss)}"
        return f"{loss}, and {share}" if grads else loss
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
        "value": f"{made}. Of the same operands float32 would make them, too.",
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


def _advise_on_flush(flush: Culprit, exam: Exam) -> list[str]:
    """Returns how to keep the numbers that become 0, before inf or NaN is made of the zeros."""
    remedy = exam.against.remedy
    cures = [*cure_of(flush)]
    if remedy and remedy.works:
        cures.append(say_remedy(remedy, exam, flush.place.where, is_first=not cures))
    elif not cures:
        cures = [f"Compute this line in float32. {say_how_to_widen(exam)}"]
    return ["No loss scale helps.", *cures]


def _advise(place: TracedNonfinite, exam: Exam) -> list[str]:
    """Returns how to keep an inf or a NaN from being made at a place, a sentence or two each."""
    fits, remedy = exam.fits, exam.against.remedy
    if place.scaled and fits and fits < exam.loss_scale:
        return [f"Loss scale {power(fits)} is the largest that does not overflow here."]
    said = ["Even a loss scale of 1 overflows here." if place.scaled else "No loss scale helps."]
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
        said.append("For a mask, use -1e4 instead of -1e9 or `finfo.min`.")
    elif place.where in exam.unshifted:
        said.append(
            "Subtract the maximum of each row before the exponential, as `jax.nn.softmax` and "
            "`jax.nn.logsumexp` do: then no exponential is above 1."
        )
    elif is_range:
        said += cure_of_sum(place, exam)
    is_first = len(said) == 1
    if remedy and remedy.works:
        return [*said, say_remedy(remedy, exam, place.where, is_first=is_first)]
    if not is_first:
        return said
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
            "An index is out of range, where JAX fills in NaN. Check the labels, tokens or "
            "positions."
        )
    if place.primitive in ("exp", "exp2"):
        return (
            "Even float32 cannot hold this exponential: clip the exponent, or subtract the maximum "
            "first, as `jax.nn.softmax` does."
        )
    # By the primitive alone more cannot be told: a `div` may be the derivative of a square root.
    words = (
        "Here the function or its derivative has no finite value, as a root, a logarithm or a "
        "division has none at 0. Keep the operand away: "
    )
    if place.least_input < 0 or place.largest_input > 1:
        return f"{words}clip it, add 1e-3 to it in float32, or choose another with `jnp.where`."
    # Most probabilities are far below 1e-3.
    words += "clip it, or choose another with `jnp.where` before."
    if place.primitive == "log" or "log" in place.source:
        words += (
            " Of a probability, compute the logarithm from the logits, with `jax.nn.log_softmax` "
            "or `jax.nn.log_sigmoid`."
        )
    return words

"""Findings on gradients that are finite, and wrong or 0, and on numbers that become 0."""

import math
from collections.abc import Iterator

from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import TracedUnderflow
from .culprit import Culprit
from .cures import say_cure_of_culprit
from .exam import Exam
from .finding import Finding, make_finding
from .float32 import STABLE
from .gradients import LeafError
from .remedy import Remedy
from .wording import (
    join_lines,
    list_names,
    name_line,
    name_lines,
    name_operation,
    say_backward_rule,
    say_error,
    say_rounded_at,
)

# an underflow may matter if at least this share of the nonzero values becomes 0,
_FLUSHED = 0.5
# and these values had at least this share of the sum of all magnitudes
_LOST_SUM = 0.01
_MANTISSA_BITS = {"float16": 10, "bfloat16": 7}


def find_wrong_gradients(exam: Exam) -> Iterator[Finding]:
    """Notes gradients that are finite, but far from those in float32."""
    check = exam.check
    if not check.wrong or check.float32 is None:
        return
    title = _say_wrong_gradients(exam, check.float32.leaves)
    of_leaves = [f"Wrong gradients, worst first: {list_names(check.wrong)}."]
    of_leaves += _say_losses(exam)
    if check.culprit is None:
        details = say_compiled_remedy(exam) or _say_no_culprit(exam)
        place = find_compiled_place(exam)
        yield make_finding(title, *details, *of_leaves, is_problem=True, place=place)
        return
    place = check.culprit.place
    details = say_rounded_at(place, exam)
    if not details:
        details = [explain_culprit(check.culprit)]
    details += say_backward_rule(place, exam)
    details += advise_on_culprit(check.culprit, exam)
    title = f"{title} It begins at {name_line(place)}."
    yield make_finding(title, *details, *of_leaves, is_problem=True, place=place)


def _say_wrong_gradients(exam: Exam, leaves: tuple[LeafError, ...]) -> str:
    """Returns how many gradients are wrong, and how far the worst one is off."""
    wrong_leaves = exam.check.wrong
    worst = next(leaf for leaf in leaves if leaf.path == wrong_leaves[0])
    num_leaves = len(exam.leaves.rows)
    count = f"{len(wrong_leaves)} of {num_leaves}"
    scale = ""
    if exam.largest_scale:
        scale = f" at loss scale {power(exam.largest_scale)}, the largest that fits"
    off = f"off by {say_error(worst.error)}, compared with float32"
    if worst.flushed == 1:
        off = "flushed to 0"
    return f"Everything is finite, but {count} gradients are wrong{scale}: {worst.path} is {off}."


def _say_no_culprit(exam: Exam) -> list[str]:
    sentences = []
    places = [place for place in exam.trace.underflows if _may_matter(place)]
    if places:
        sentences.append(f"Most of the numbers become 0 at {name_lines(places)}.")
    sentences.append("No single line accounts for it.")
    return sentences


# How an equation makes finite gradients wrong, as `Culprit.kind` names it.
_KINDS = {
    "overflow": "turns numbers that {dtype} cannot hold into inf. That becomes finite again before "
    "it reaches the loss, as 1/inf is 0.",
    "underflow": "flushes {share} of its nonzero numbers to 0{help}.",
    "saturation": "rounds {share} of its numbers to 1 or -1, which float32 tells from them.",
    "rounding": "rounds: its numbers are as large as {largest}, where {dtype} only holds multiples "
    "of {spacing}.",
    "unknown": "gives other numbers than in float32.",
}


def explain_culprit(culprit: Culprit) -> str:
    """Returns how an equation makes finite gradients wrong."""
    place = culprit.place
    kind = culprit.kind
    if kind == "rounding" and not culprit.largest:
        kind = "unknown"
    exponent = math.frexp(culprit.largest)[1] - 1
    words = {
        "dtype": place.dtype,
        "share": percent(place.share),
        "help": "" if place.scaled else ", and no loss scale helps",
        "largest": number(culprit.largest, 4),
        "spacing": number(2.0 ** (exponent - _MANTISSA_BITS.get(place.dtype, 10)), 3),
    }
    return f"{name_operation(place)} {_KINDS[kind].format(**words)}"


def advise_on_culprit(culprit: Culprit, exam: Exam) -> list[str]:
    """Returns what to write instead of a line, if anything, and which lines help in float32."""
    remedy = exam.check.remedy
    if remedy is None:
        return []
    cures = []
    if remedy.works:
        cures = say_cure_of_culprit(culprit)
    where = culprit.place.where
    return [*cures, say_remedy(remedy, exam, where, is_first=not cures)]


def say_remedy(remedy: Remedy, exam: Exam, where: str, *, is_first: bool = True) -> str:
    """Returns which lines in float32 make the gradients right, below the name of one of them.

    It is the `is_first` advice, or comes after another.
    """
    which = join_lines(remedy.lines, where, "this line")
    if not remedy.works:
        return f"With {which} in float32, the gradients are still wrong: more lines need it."
    result = "are those of float32 to the last bit"
    if remedy.error is None:
        result = (
            "are finite. More is not known, as nothing could be compared: rounding in float32 "
            f"alone changes each of them by more than {STABLE:.0%}"
        )
    elif remedy.error:
        result = f"differ from those of float32 by {percent(remedy.error)}"
    verb = "Or compute"
    if is_first:
        verb = "Compute"
    return (
        f"{verb} {which} in float32: that was tried, and the gradients then {result}. "
        f"{say_how_to_widen(exam)}"
    )


def find_compiled_place(exam: Exam) -> str:
    """Returns the line at which only the compiled program goes wrong, or `""`."""
    remedy = exam.check.compiled_remedy
    if remedy is None:
        return ""
    return remedy.lines[0]


def say_compiled_remedy(exam: Exam) -> list[str]:
    """Returns which lines in float32 help where only the compiled program goes wrong."""
    remedy = exam.check.compiled_remedy
    if remedy is None:
        return []
    first = remedy.lines[0]
    return [
        f"It begins at {first}, and only in the compiled program. XLA rewrites operations "
        "there: a sum of n equal numbers as n times the number, or a division as a product.",
        say_remedy(remedy, exam, first),
    ]


def say_how_to_widen(exam: Exam) -> str:
    if exam.blames_autocast:
        return (
            "Exempt it from autocast: call what this line calls, or a function of this line, "
            "through `jaxscale.full_precision`."
        )
    return "Cast what goes into it to float32, and leave its result in float32."


def find_incomparable(exam: Exam) -> Iterator[Finding]:
    """Notes gradients that could not be compared with float32."""
    names = exam.check.unstable
    if not names or exam.check.float32 is None:
        return
    title = f"Could not be compared with float32: {list_names(names)}."
    if exam.check.compares_nothing:
        title = "No gradient could be compared with float32."
    yield make_finding(
        title,
        "Rounding in float32 alone changes each of them about as much as narrower formats do.",
    )


def find_wrong_loss(exam: Exam) -> Iterator[Finding]:
    """Notes a loss that is far from that in float32, though the gradients are right."""
    if exam.check.right_loss is None or not exam.is_right:
        return
    yield make_finding(
        f"{say_wrong_loss(exam.loss, exam.check.right_loss)}. Its gradients are right.",
        "A loss that is logged, compared or used to stop early is better computed in float32.",
    )


def say_wrong_loss(loss: float, right_loss: float) -> str:
    """Returns how far a loss is from that in float32."""
    off = "far off"
    if right_loss:
        off = f"off by {say_error(abs(loss / right_loss - 1))}"
    return (
        f"The loss is {off}: {number(loss, 4)}, and {number(right_loss, 4)} in float32"
    )


def find_effect_of_autocast(exam: Exam) -> Iterator[Finding]:
    """Notes what autocast changes, unless the gradients are wrong."""
    if not exam.autocast:
        return
    if exam.autocast not in exam.dtypes:
        yield make_finding(
            "`jaxscale.autocast` changes nothing: this model has no float32 matrix product or "
            "convolution to cast.",
        )
    elif exam.is_right:
        error = _say_error(exam)
        title = (
            f"The gradients in {exam.autocast} are those in float32, off by {error}."
        )
        yield make_finding(title, *_say_losses(exam))


def find_underflows(exam: Exam) -> Iterator[Finding]:
    """Notes where small numbers become 0, unless a problem explains it."""
    places = [place for place in exam.trace.underflows if place.zeros]
    if exam.trace.nonfinite_outputs or exam.check.wrong or not places:
        return
    worst = max(places, key=lambda place: (_may_matter(place), place.lost_sum))
    words = "They are the smallest values there."
    if exam.is_right:
        words = f"This does no harm: float32 gives the same gradients within {_say_error(exam)}."
    places.sort(key=lambda place: -place.lost_sum)
    title = f"Most of the nonzero numbers become 0 at {name_lines(places)}."
    yield make_finding(title, words, place=worst)


def _may_matter(place: TracedUnderflow) -> bool:
    """Returns whether most values became zero, and not only the smallest of them."""
    return place.zeros >= _FLUSHED * place.nonzero and place.lost_sum >= _LOST_SUM


def find_zeros(exam: Exam) -> Iterator[Finding]:
    """Notes leaves whose gradient is 0 everywhere."""
    num_zero = len(exam.zero)
    num_leaves = len(exam.leaves.rows)
    if not num_zero or exam.trace.nonfinite_outputs:
        return
    count = f"The gradient is exactly 0 everywhere in {num_zero} of {num_leaves} leaves"
    names = list_names(exam.zero)
    if exam.check.float32 is None:
        words = (
            "Either the loss does not depend on them, or they were flushed on the way."
        )
        yield make_finding(f"{count}: {names}.", words, is_problem=exam.is_all_zero)
    else:
        title = f"{count}, as in float32: {names}."
        words = "The loss does not depend on them."
        yield make_finding(title, words, is_problem=num_zero == num_leaves)


def _say_error(exam: Exam) -> str:
    if exam.check.error is None:
        return ""
    return say_error(exam.check.error)


def _say_losses(exam: Exam) -> list[str]:
    """Returns what autocast makes of the loss, or how far it is from that in float32."""
    if exam.loss_as_written is None:
        if exam.check.right_loss is None:
            return []
        return [f"{say_wrong_loss(exam.loss, exam.check.right_loss)}."]
    loss = number(exam.loss, 4)
    loss_as_written = number(exam.loss_as_written, 4)
    return [f"The loss is {loss} in {exam.autocast}, and as written {loss_as_written}."]

"""Findings on gradients that are finite, and wrong or 0, and on numbers that become 0."""

import math
from collections.abc import Iterator

from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import TracedUnderflow
from .cures import cure_of
from .exam import Exam
from .finding import Finding, join_lines, line_of, lines_of, list_names, note, rounded_at, rule_at
from .gradients import CLOSE
from .remedy import Culprit, Remedy

_FLUSHED = 0.5  # an underflow may matter if at least this share of the nonzero values becomes 0,
_LOST_SUM = 0.01  # and these values had at least this share of the sum of all magnitudes
_BITS = {"float16": 10, "bfloat16": 7}  # of the mantissas


def find_wrong(exam: Exam) -> Iterator[Finding]:
    against = exam.against
    if not against.wrong or against.comparison is None:
        return
    worst = next(leaf for leaf in against.comparison.leaves if leaf.path == against.wrong[0])
    count = f"{len(against.wrong)} of {len(exam.leaves.rows)}"
    at = f" at loss scale {power(exam.fits)}, the largest that fits" if exam.fits else ""
    off = f"off by {percent(min(worst.error, 1.0))}, compared with float32"
    if worst.flushed == 1:
        off = "flushed to 0"
    title = f"Everything is finite, but {count} gradients are wrong{at}: {worst.path} is {off}."
    of_leaves = [f"Wrong gradients, worst first: {list_names(against.wrong)}.", *_say_losses(exam)]
    if against.culprit is None:
        places = [place for place in exam.trace.underflows if _may_matter(place)]
        where = [f"Most of the numbers become 0 at {lines_of(places)}."] if places else []
        where.append("No single operation accounts for it.")
        yield note(title, *where, *of_leaves, is_problem=True)
        return
    place = against.culprit.place
    details = rounded_at(place, exam) or [explain_culprit(against.culprit)]
    details += rule_at(place, exam)
    cures = cure_of(against.culprit)
    details += cures
    if against.remedy is not None:
        details.append(say_remedy(against.remedy, exam, place.where, is_first=not cures))
    title = f"{title} It begins at {line_of(place)}."
    yield note(title, *details, *of_leaves, is_problem=True, place=place)


def explain_culprit(culprit: Culprit) -> str:
    """Returns how an equation makes finite gradients wrong."""
    place = culprit.place
    what = f"`{place.primitive}`, in the {place.direction} pass,"
    if culprit.kind == "overflow":
        return (
            f"{what} turns numbers that {place.dtype} cannot hold into inf. That becomes finite "
            "again before it reaches the loss, as 1/inf is 0."
        )
    if culprit.kind == "underflow":
        scaled = "" if place.scaled else ", and no loss scale helps"
        return f"{what} flushes {percent(place.share)} of its nonzero numbers to 0{scaled}."
    if not culprit.largest:
        return f"{what} gives other numbers than in float32."
    spacing = 2.0 ** (math.frexp(culprit.largest)[1] - 1 - _BITS.get(place.dtype, 10))
    return (
        f"{what} rounds: its numbers are as large as {number(culprit.largest, 4)}, where "
        f"{place.dtype} only holds multiples of {number(spacing, 3)}."
    )


def say_remedy(remedy: Remedy, exam: Exam, where: str, *, is_first: bool = True) -> str:
    """Returns which lines in float32 make the gradients right, below the name of one of them.

    It is the `is_first` advice, or comes after another.
    """
    which = join_lines(remedy.lines, where, "this line")
    if not remedy.works:
        return f"With {which} in float32, the gradients are still wrong: more lines need it."
    how = f"within {percent(remedy.error)}" if remedy.error else "to the last bit"
    verb = "Compute" if is_first else "Or compute"
    return (
        f"{verb} {which} in float32: that was tried, and the gradients then are those of float32 "
        f"{how}. {say_how_to_widen(exam)}"
    )


def say_how_to_widen(exam: Exam) -> str:
    if exam.is_of_autocast:
        return (
            "Exempt it from autocast: call what this line calls, or a function of this line, "
            "through `jaxscale.full_precision`."
        )
    return "Cast what goes into it to float32, and its result back."


def find_effect_of_autocast(exam: Exam) -> Iterator[Finding]:
    """Notes what autocast changes, unless the gradients are wrong."""
    if not exam.autocast:
        return
    if exam.autocast not in exam.dtypes:
        yield note(
            "`jaxscale.autocast` changes nothing: this model has no float32 matrix product or "
            "convolution to cast.",
        )
    elif exam.is_right:
        error = _say_error(exam)
        title = f"The gradients in {exam.autocast} are those in float32, off by {error}."
        yield note(title, *_say_losses(exam))


def find_underflows(exam: Exam) -> Iterator[Finding]:
    """Notes where small numbers become 0, unless a problem explains it."""
    places = [place for place in exam.trace.underflows if place.zeros]
    if exam.trace.nonfinite_outputs or exam.against.wrong or not places:
        return
    worst = max(places, key=lambda place: (_may_matter(place), place.lost_sum))
    words = "They are the smallest values there."
    compared = exam.against.comparison
    if exam.is_right and compared and compared.error <= CLOSE:
        words = f"This does no harm: float32 gives the same gradients within {_say_error(exam)}."
    elif exam.is_right:
        words = "The gradients are not stable: rounding in float32 changes them as much."
    places.sort(key=lambda place: -place.lost_sum)
    title = f"Most of the nonzero numbers become 0 at {lines_of(places)}."
    yield note(title, words, place=worst)


def _may_matter(place: TracedUnderflow) -> bool:
    """Returns whether most values became zero, and not only the smallest of them."""
    return place.zeros >= _FLUSHED * place.nonzero and place.lost_sum >= _LOST_SUM


def find_zeros(exam: Exam) -> Iterator[Finding]:
    zero, rows = exam.zero, exam.leaves.rows
    if not zero or exam.trace.nonfinite_outputs:
        return
    title = f"The gradient is exactly 0 everywhere in {len(zero)} of {len(rows)} leaves: "
    title += list_names(zero)
    if exam.against.comparison is None:
        words = "Either the loss does not depend on them, or they were flushed on the way."
        yield note(f"{title}.", words, is_problem=exam.is_all_zero)
    else:
        words = "The loss does not depend on them."
        yield note(f"{title}, in float32 too.", words, is_problem=len(zero) == len(rows))


def _say_error(exam: Exam) -> str:
    return percent(min(exam.against.comparison.error, 1.0)) if exam.against.comparison else ""


def _say_losses(exam: Exam) -> list[str]:
    if exam.loss_as_written is None:
        return []
    losses = number(exam.loss, 4), number(exam.loss_as_written, 4)
    return [f"The loss is {losses[0]} in {exam.autocast}, and as written {losses[1]}."]

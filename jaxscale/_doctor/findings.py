"""What the results of an exam mean, in plain sentences.

Here the doctor decides what is a problem and what is only worth knowing. A problem is

- inf or NaN in the loss, the auxiliary output or the gradients (`find_nonfinite`);
- gradients that are finite, but far from those in float32 (`find_wrong`);
- a loss scale that was asked for and loses too much of the gradients, or that must be below 1,
  where the default rule skips every step (`_find_scale`);
- gradients that are all exactly 0 (`find_zeros`).

Each line of the model is named once: what follows from the first fault is listed under it.
"""

from collections.abc import Iterator, Sequence

from ..diagnostics._text import power
from .advice import join_lines
from .exam import Exam
from .finding import Finding, at_line, at_place, line_of, list_names, say_rounded
from .findings_of_nonfinite import find_harmless_nonfinite, find_nonfinite
from .findings_of_wrong import (
    find_effect_of_autocast,
    find_underflows,
    find_wrong,
    find_zeros,
    is_all_zero,
)
from .scales import (
    judge_largest_scale,
    judge_room,
    judge_shown_scale,
    needs_scale,
    say_how_to_start,
    skips_all,
)


def findings(exam: Exam) -> list[Finding]:
    """Returns all findings: the problems first."""
    named = _named_lines(exam)
    found = [
        *find_nonfinite(exam),
        *find_wrong(exam),
        *find_effect_of_autocast(exam),
        *_find_scale(exam),
        *_find_inward_growth(exam),
        *_find_constants(exam, named),
        *find_harmless_nonfinite(exam, named),
        *find_underflows(exam),
        *find_zeros(exam),
        *_find_gaps(exam),
    ]
    return sorted(found, key=lambda finding: not finding.is_problem)


def verdict(exam: Exam, found: Sequence[Finding]) -> str:
    """Returns whether anything is wrong, in one sentence."""
    if problems := sum(finding.is_problem for finding in found):
        return f"Problems found: {problems}."
    needs = ", with a loss scale: it needs one" * (needs_scale(exam) and exam.is_auto)
    where = f" in {exam.autocast}" if exam.autocast else ""
    return f"Nothing {'overflows' if exam.is_quick else 'is wrong'}{where}{needs}."


def _named_lines(exam: Exam) -> set[tuple[str, int]]:
    """Returns the lines that a finding on inf, NaN or wrong gradients begins at."""
    first, culprit = exam.trace.first_nonfinite, exam.against.culprit
    places = [first] * bool(first and first.reaches) + [culprit.place if culprit else None]
    return {(place.file, place.line) for place in places if place}


def _find_scale(exam: Exam) -> Iterator[Finding]:
    if not exam.is_half:
        yield Finding(
            False,
            f"The model computes in {' and '.join(exam.dtypes)}, and needs no loss scale.",
            (
                "`jaxscale.skip_nonfinite(optimizer)` keeps a bad batch from ruining the run.",
                "If you train it under `jaxscale.autocast`, look again with `--autocast float16`.",
            ),
        )
        return
    if exam.fits is None or is_all_zero(exam):
        reason = "some gradient is not 0" if exam.fits else "everything is finite"
        yield Finding(False, f"Whether it needs a loss scale can only be said once {reason}.")
        return
    largest, details = judge_largest_scale(exam), [*say_how_to_start(exam), *_say_limit(exam)]
    if skips_all(exam):
        # Where a scale of 1 was asked for, what it overflows is a problem already.
        is_problem = not exam.trace.nonfinite_outputs
        if exam.ceiling:
            yield at_place(exam.ceiling, is_problem, largest, details)
        else:
            yield Finding(is_problem, largest, tuple(details))
    elif exam.comparison is None:
        yield Finding(False, largest, tuple(details))
    else:
        is_problem = needs_scale(exam) and not exam.is_auto
        details = [largest, *judge_room(exam), *details]
        yield Finding(is_problem, judge_shown_scale(exam), tuple(details))


def _find_inward_growth(exam: Exam) -> Iterator[Finding]:
    """Notes gradients for which `scale_backward` does not find its scale at once."""
    repeats, is_enough = exam.repeats or (0, True)
    if not repeats or not exam.fits:
        return
    title = "Gradients grow on their way through the model, and "
    often = {1: "once", 2: "twice"}.get(repeats, f"{repeats} times")
    enough = "" if is_enough else ", which is not enough"
    title += f"`scale_backward` repeats the backward pass of this batch {often}{enough}."
    # Room for batches with larger gradients: these may repeat it, too.
    scale = power(exam.fits / 4)
    details = [
        "It begins where those that enter half precision are about 1. Where a trainer owns the "
        f"step, write `jaxscale.scale_backward(loss_fn, scale={scale})`. In a step of your own "
        "`jaxscale.loss_scaled` finds such a scale by itself.",
    ]
    if exam.ceiling:
        yield at_place(exam.ceiling, False, title, details)
    else:
        yield Finding(False, title, tuple(details))


def _say_limit(exam: Exam) -> list[str]:
    place = exam.ceiling
    if place is None:
        return []
    at = power(exam.calibration.overflows_at or 0.0) if exam.calibration else ""
    layer = f", in {place.layer}" if place.layer else ""
    source = f", `{place.source}`" if place.source else ""
    words = f"What limits it is {line_of(place)}{source}{layer}: at {at} `{place.primitive}` "
    words += "overflows there. "
    if exam.relief is None:
        return [words + "If the loss scale falls in training, look at that line first."]
    which = join_lines(exam.relief.lines, place.where, "that line")
    scale = power(exam.relief.loss_scale)
    return [words + f"With {which} in float32, {scale} fits, as was tried."]


def _find_constants(exam: Exam, named: set[tuple[str, int]]) -> Iterator[Finding]:
    for constant in exam.trace.constants:
        if (constant.file, constant.line) in named:
            continue
        words = "Use a larger number, such as 1e-3, or compute this line in float32."
        if constant.became:
            words = f"Use a number that {constant.dtype} holds, or compute this line in float32."
        if exam.is_right:
            words = "It does no harm on this batch."
        yield at_line(constant, False, f"{say_rounded(constant)}, at {constant.where}.", (words,))


def _find_gaps(exam: Exam) -> Iterator[Finding]:
    """Notes what was not looked at."""
    if exam.trace.not_entered:
        title = f"It was not looked inside of {list_names(exam.trace.not_entered)}."
        words = "Each ran as one operation: its lines are not named, and its numbers not compared."
        yield Finding(False, title, (words,))
    if exam.is_quick:
        words = "Without `--quick` the gradients are compared with those in float32, too."
        yield Finding(False, "Gradients that are finite and wrong were not looked for.", (words,))

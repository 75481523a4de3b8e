"""What the results mean, in plain sentences: what is wrong, and what is worth knowing."""

import linecache
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._diagnose_findings import Place, TracedNonfinite, TracedUnderflow
from ._diagnose_words import percent, power
from ._doctor_exam import Exam

_AROUND = 2  # lines of source before and after the one that is meant
_MOST = 5  # places of a kind
_FLUSHED = 0.5  # from what share of zeros on an underflow is a problem


class Finding(NamedTuple):
    """Something that was found.

    Attributes:
      is_problem: whether it is wrong, or only worth knowing.
      title: a sentence.
      details: more sentences.
      where: file and line, or ``""``.
      source: numbered lines of source around it.
      line: the number of the line that is meant, or 0.
    """

    is_problem: bool
    title: str
    details: tuple[str, ...] = ()
    where: str = ""
    source: tuple[tuple[int, str], ...] = ()
    line: int = 0


def findings(exam: Exam) -> list[Finding]:
    """Returns what was found, the problems first, each kind in the order of execution."""
    found = [*_nonfinite(exam), *_underflows(exam), *_scales(exam), *_leaves(exam)]
    return sorted(found, key=lambda finding: not finding.is_problem)


def verdict(found: Sequence[Finding]) -> str:
    """Returns whether anything is wrong, in one sentence."""
    problems = sum(finding.is_problem for finding in found)
    if not problems:
        return "Nothing is wrong."
    return f"{problems} problem{'s' * (problems > 1)} found."


def _nonfinite(exam: Exam) -> Iterator[Finding]:
    report = exam.trace
    if report.nonfinite_arguments:
        names = [
            name.replace("args[0]", "params").replace("args[1]", "batch")
            for name in report.nonfinite_arguments
        ]
        yield Finding(
            True,
            f"There is inf or NaN in what comes in: {_few(names)}.",
            ("Look at the data, and at the parameters: what follows may come of it.",),
        )
    first = report.first_nonfinite
    bad = exam.trace.nonfinite_outputs
    grads = [name for name in bad if name.startswith("grads")]
    if bad and (first is None or not first.reaches):
        yield Finding(True, f"{_outputs(exam, grads)}, and no line explains it.")
    reaching = [place for place in report.nonfinite if place.reaches]
    for place in reaching[:_MOST]:
        if place is first:
            yield _located(
                place,
                True,
                f"{_outputs(exam, grads)}. It begins at {_line(place)}.",
                (_birth(place), _birth_advice(place, exam)),
            )
        else:
            yield _located(place, True, f"More of it is made at {_line(place)}.", (_birth(place),))
    for place in [place for place in report.nonfinite if not place.reaches][:_MOST]:
        yield _located(
            place,
            False,
            f"At {_line(place)} inf or NaN is made, and gone before the loss and the gradients.",
            (_birth(place), "For a mask that is fine. For a norm or a sum it is not."),
        )


def _outputs(exam: Exam, grads: list[str]) -> str:
    is_bad = "loss" in exam.trace.nonfinite_outputs
    number = len(exam.leaves.rows)
    share = "all gradients" if len(grads) == number else f"{len(grads)} of {number} gradients"
    if not grads:
        return f"The loss is {exam.loss:g}" if is_bad else "An output is not finite"
    verb = "are" if len(grads) > 1 or len(grads) == number else "is"
    if is_bad:
        return f"The loss is {exam.loss:g}, and {share} {verb} not finite"
    return (
        f"The loss is finite, {exam.loss:.4g}, but {share} {verb} not, at loss scale "
        f"{power(exam.loss_scale)}"
    )


def _birth(place: TracedNonfinite) -> str:
    made = f"`{place.primitive}`, in the {place.direction} pass, makes inf or NaN of "
    made += f"{percent(place.share)} of {place.dtype}{list(place.shape)}"
    return {
        "range": f"{made}: numbers that {place.dtype} does not hold, and float32 would.",
        "value": f"{made}, and would in float32: a division by zero, log(0), or far too large.",
        "infinities": f"{made} out of infinities: the difference of two, or 0 times one. A row "
        "that is masked throughout has no other numbers.",
        "given": f"{made}: it was there before, in a constant or in what comes in.",
    }[place.cause]


def _birth_advice(place: TracedNonfinite, exam: Exam) -> str:
    if place.cause == "range" and place.scaled and exam.loss_scale > 1:
        return "A lower loss scale may help. Or compute this line in float32."
    if place.cause == "range":
        return (
            "No loss scale can help. Compute this line in float32, or keep its numbers within "
            f"{place.dtype}: a mask of -1e4 instead of -1e9, a mean instead of a sum."
        )
    if place.cause == "infinities":
        return "No loss scale can help. Mask with a number that the format holds, such as -1e4."
    if place.cause == "value":
        return "No loss scale can help. Keep the operand away from where it has no finite result."
    return "No loss scale can help. Look where this number comes from."


def _underflows(exam: Exam) -> Iterator[Finding]:
    places = exam.trace.underflows

    def is_problem(place: TracedUnderflow) -> bool:
        return place.zeros >= _FLUSHED * place.nonzero

    worst_first = sorted(places, key=lambda place: not is_problem(place))
    for place in worst_first[:_MOST]:
        zeros, subnormals = place.zeros / place.nonzero, place.subnormals / place.nonzero
        if place.scaled:
            advice = "A higher loss scale would keep them"
            fits = exam.calibration and exam.calibration.init_scale
            beyond = fits and exam.loss_scale >= fits
            advice += ", but overflows elsewhere: compute this line in float32." * bool(beyond)
            advice += "." * (not beyond)
        else:
            advice = "No loss scale can help. Compute this line in float32, if they matter."
        where = f"In the {place.direction} pass, {percent(zeros)} of the nonzero values become 0"
        title = f"{where} at {_line(place)}."
        if not is_problem(place):
            title = (
                f"In the {place.direction} pass, {percent(zeros + subnormals)} of the nonzero "
                f"values lose bits or become 0 at {_line(place)}."
            )
        detail = (
            f"`{place.primitive}` leaves {percent(zeros)} of {place.dtype}{list(place.shape)} "
            f"zero, and {percent(subnormals)} subnormal, with fewer bits."
        )
        yield _located(place, is_problem(place), title, (detail, advice))
    if len(places) > _MOST:
        rest = len(places) - _MOST
        yield Finding(False, f"{rest} more places where numbers get lost are in the --json.")


def _scales(exam: Exam) -> Iterator[Finding]:
    calibration, suggestion = exam.calibration, exam.suggestion
    if not exam.is_half:
        yield Finding(
            False,
            f"The model computes in {' and '.join(exam.dtypes)}, and needs no loss scale.",
            ("`jaxscale.skip_nonfinite(optimizer)` keeps a bad batch from ruining the run.",),
        )
        return
    lost = exam.shares["float16"]
    if not exam.is_dynamic and lost.flushed > 0.001:
        yield Finding(
            True,
            f"At loss scale {power(exam.loss_scale)} float16 flushes {percent(lost.flushed)} of "
            "the nonzero gradients to zero.",
            (suggestion.sentence,),
        )
    elif exam.leaves.nonfinite:
        yield Finding(False, "Which loss scale it needs can be said once the gradients are finite.")
    elif suggestion.needed is not None:
        yield Finding(False, suggestion.sentence)
    if calibration is None:
        return
    if calibration.init_scale is None:
        yield Finding(False, "No loss scale is low enough: the gradients overflow even at 1.")
    elif calibration.init_scale < 2.0**15 and exam.is_dynamic:
        scale = power(calibration.init_scale)
        yield Finding(
            False,
            f"The largest loss scale that does not overflow on this batch is {scale}.",
            (f"To skip no steps, start there: `DynamicLossScale(init_scale={scale})`.",),
        )
    else:
        yield Finding(False, calibration.sentence)


def _leaves(exam: Exam) -> Iterator[Finding]:
    zero = [row.path for row in exam.leaves.rows if row.size and row.zero == row.size]
    if zero:
        yield Finding(
            False,
            f"The gradient is exactly 0 everywhere in {len(zero)} of {len(exam.leaves.rows)} "
            f"leaves: {_few(zero)}.",
            ("Either the loss does not depend on them, or all of it was flushed on the way.",),
        )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _line(place: Place) -> str:
    return place.where or "no line of the model"


def _located(place: Place, is_problem: bool, title: str, details: tuple[str, ...]) -> Finding:
    extra = [f"It is in {place.layer}."] if place.layer else []
    if place.called_from:
        extra.append(f"Called from {_few(place.called_from)}.")
    if place.iteration:
        extra.append(f"In iteration {', '.join(map(str, place.iteration))}.")
    number = len(linecache.getlines(place.file)) if place.file else 0
    lines = range(max(place.line - _AROUND, 1), min(place.line + _AROUND, number) + 1)
    source = tuple((i, linecache.getline(place.file, i).rstrip("\n")) for i in lines)
    return Finding(is_problem, title, (*details, *extra), place.where, source, place.line)

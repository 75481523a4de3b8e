"""What the results of an exam mean, in plain sentences.

Here the doctor decides what is a problem and what is only worth knowing. A problem is

- inf or NaN in the loss, the auxiliary output or the gradients (`_nonfinite`);
- a loss scale that was asked for and loses too much of the gradients (`_scales`);
- an underflow that may matter, unless the gradients are close to those in float32 (`_is_harm`);
- under `--autocast`, gradients that are far from those in float32 (`_autocast`);
- gradients that are all exactly 0, if no such underflow explains it (`_zeros`).
"""

import linecache
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._checks import and_more
from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import Place, TracedNonfinite, TracedUnderflow
from .advice import (
    about_largest_scale,
    about_shown_scale,
    for_nonfinite,
    for_underflow,
    needs_scale,
    which_scale,
)
from .exam import Exam, may_matter

_AROUND = 2  # lines of source shown before and after the line of a finding
_MOST_PLACES = 5  # of each kind
_MOST_NAMES = 5  # in a list
_CLOSE = 0.1  # gradients are fine if they lose, and are off by, a smaller share than this


class Finding(NamedTuple):
    """Something that was found.

    Attributes:
      is_problem: whether something is wrong, and not only worth knowing.
      title: a sentence that says what was found.
      details: more sentences: why, and what to do.
      where: file and line, or `""`.
      source: lines of source around that line, with their numbers.
      line: the number of that line, or 0.
    """

    is_problem: bool
    title: str
    details: tuple[str, ...] = ()
    where: str = ""
    source: tuple[tuple[int, str], ...] = ()
    line: int = 0


def findings(exam: Exam) -> list[Finding]:
    """Returns all findings: the problems first, and each kind in the order of execution."""
    found = [*_nonfinite(exam), *_autocast(exam), *_scales(exam), *_underflows(exam), *_zeros(exam)]
    return sorted(found, key=lambda finding: not finding.is_problem)


def verdict(exam: Exam, found: Sequence[Finding]) -> str:
    """Returns whether anything is wrong, in one sentence."""
    problems = sum(finding.is_problem for finding in found)
    if problems:
        return f"{problems} problem{'s' * (problems > 1)} found."
    needs = ", with a loss scale: it needs one" * (needs_scale(exam) and exam.is_auto)
    where = f" in {exam.autocast}" if exam.autocast else ""
    return f"Nothing is wrong{where}{needs}."


def _nonfinite(exam: Exam) -> Iterator[Finding]:
    report = exam.trace
    bad = report.nonfinite_outputs
    reaching = [place for place in report.nonfinite if place.reaches]
    made = [place for place in reaching if place.cause != "given"]
    begins = f"{_outputs(exam)}. It begins at "
    if report.nonfinite_arguments:
        yield from _of_arguments(exam, [place for place in reaching if place not in made])
        begins, reaching = "Inf or NaN is also made at ", made
    elif bad and not reaching:
        yield Finding(True, f"{_outputs(exam)}, and no line explains why.", _leaves(exam))
    for place, others in _by_line(reaching)[:_MOST_PLACES]:
        details = [_birth(place), *_there_too(others), for_nonfinite(place, exam)]
        if begins.startswith(_outputs(exam)):
            details += _leaves(exam)
        yield _located(place, True, f"{begins}{_line(place)}.", tuple(details))
        begins = "Inf or NaN is also made at "
    if not bad and exam.leaves.nonfinite_rows:
        yield Finding(
            True,
            "Compiled as one program, the model gives gradients with inf or NaN. Run operation by "
            "operation, it does not.",
            _leaves(exam),
        )
    for place in [place for place in report.nonfinite if not place.reaches][:_MOST_PLACES]:
        yield _located(
            place,
            False,
            f"Inf or NaN made at {_line(place)} does not reach the loss or the gradients.",
            (_birth(place), "This is fine for a mask, but not for a norm or a sum."),
        )


def _by_line(
    places: Sequence[TracedNonfinite],
) -> list[tuple[TracedNonfinite, list[TracedNonfinite]]]:
    """Returns, for each line of the model, the place to report and the other places there.

    The forward pass comes first: its inf or NaN explains those of the backward pass.
    """
    of_line: dict[tuple[str, int], list[TracedNonfinite]] = {}
    for place in sorted(places, key=lambda place: place.direction != "forward"):
        of_line.setdefault((place.file, place.line), []).append(place)
    return [(first, others) for first, *others in of_line.values()]


def _there_too(places: Sequence[TracedNonfinite]) -> list[str]:
    words = dict.fromkeys(f"`{p.primitive}` in the {p.direction} pass" for p in places)
    return [f"So does {_few(list(words))} at this line."] if words else []


def _of_arguments(exam: Exam, entries: Sequence[TracedNonfinite]) -> Iterator[Finding]:
    names = [
        name.replace("args[0]", "params").replace("args[1]", "batch")
        for name in exam.trace.nonfinite_arguments
    ]
    if not exam.trace.nonfinite_outputs:
        title = f"There is inf or NaN in {_few(names)}, but none in the loss or the gradients."
        yield Finding(False, title)
        return
    title = f"There is inf or NaN in {_few(names)}, before anything is computed."
    advice = "No loss scale or format helps: look where these numbers come from."
    details = (f"{_outputs(exam)}.", advice, *_leaves(exam))
    if not entries:
        yield Finding(True, title, details)
        return
    first = f"It comes in at {_line(entries[0])}."
    yield _located(entries[0], True, title, (first, *details))


def _outputs(exam: Exam) -> str:
    bad = exam.trace.nonfinite_outputs
    grads = sum(name.startswith("grads") for name in bad)
    rows = len(exam.leaves.rows)
    some = f"{grads} of {rows}" if grads < rows else f"all {rows}" if rows > 1 else "the"
    share = f"{some} gradient{'s' * (rows > 1)} hold{'s' * (grads == 1)} inf or NaN"
    if "loss" in bad:
        return f"The loss is {number(exam.loss)}" + f", and {share}" * (grads > 0)
    if not grads:
        others = [name for name in bad if name.startswith("aux")]
        return f"The loss and the gradients are finite, but {_few(others)} is not"
    scale = (
        "even without a loss scale"
        if exam.loss_scale == 1
        else f"at loss scale {power(exam.loss_scale)}"
    )
    return f"The loss is finite, {number(exam.loss, 4)}, but {share}, {scale}"


def _leaves(exam: Exam) -> tuple[str, ...]:
    names = [row.path for row in exam.leaves.nonfinite_rows]
    return (f"Gradients with inf or NaN, worst first: {_few(names)}.",) if names else ()


def _birth(place: TracedNonfinite) -> str:
    made = f"`{place.primitive}`, in the {place.direction} pass, makes inf or NaN of "
    made += f"{percent(place.share)} of {place.dtype}{list(place.shape)}"
    return {
        "range": f"{made}: {place.dtype} cannot hold these numbers, but float32 could.",
        "value": f"{made}, and would in float32 too: a division by zero, log(0), or far too large.",
        "infinities": f"{made} from infinities: one minus another, or 0 times one. A row that is "
        "masked everywhere has only infinities.",
        "given": f"{made}: it was there before, in a constant or an input.",
    }[place.cause]


def _underflows(exam: Exam) -> Iterator[Finding]:
    places = exam.trace.underflows
    if exam.trace.nonfinite_outputs:  # beside inf and NaN, small losses only distract
        places = tuple(filter(may_matter, places))
    worst_first = sorted(places, key=lambda place: (not may_matter(place), -place.lost_sum))
    of_lines = {(place.file, place.line): place for place in reversed(worst_first)}
    shown = [place for place in worst_first if place in of_lines.values()]
    for place in shown[:_MOST_PLACES]:
        zeros, subnormals = place.zeros / place.nonzero, place.subnormals / place.nonzero
        where = f"In the {place.direction} pass, "
        if place.zeros > place.subnormals:
            title = f"{where}{percent(zeros)} of the nonzero values become 0 at {_line(place)}."
        else:
            title = (
                f"{where}{percent(zeros + subnormals)} of the nonzero values lose bits or become 0 "
                f"at {_line(place)}."
            )
        details = [
            f"`{place.primitive}` leaves {percent(zeros)} of {place.dtype}{list(place.shape)} "
            f"zero, and {percent(subnormals)} subnormal, with fewer bits."
        ]
        if place.zeros:
            share = percent(place.lost_sum)
            details.append(f"Those that become 0 made up {share} of the sum of all magnitudes.")
        if _is_harm(place, exam):
            details.append(for_underflow(place, exam))
        elif exam.float32 and may_matter(place):
            error = percent(min(exam.float32.error, 1.0))
            details.append(f"This does no harm: float32 gives the same gradients within {error}.")
        elif place.zeros:
            details.append(
                "They are the smallest values. This does no harm in a sum, but it does as a "
                "divisor or in a logarithm."
            )
        yield _located(place, _is_harm(place, exam), title, tuple(details))
    if len(shown) > _MOST_PLACES:
        rest = len(shown) - _MOST_PLACES
        yield Finding(False, f"The --json lists {rest} more lines where numbers get lost.")


def _is_harm(place: TracedUnderflow, exam: Exam) -> bool:
    return may_matter(place) and not _is_close(exam)


def _is_close(exam: Exam) -> bool:
    exact = exam.float32
    return exact is not None and exact.flushed < _CLOSE and exact.error < _CLOSE


def _autocast(exam: Exam) -> Iterator[Finding]:
    if not exam.autocast:
        return
    if exam.autocast not in exam.dtypes:
        yield Finding(
            False,
            "`jaxscale.autocast` changes nothing: no product of float32 matrices, and no "
            "convolution, is left to it in this model.",
        )
        return
    exact = exam.float32
    if exact is None:
        return
    losses = (
        f"The loss is {number(exam.loss, 4)} in {exam.autocast}, and as written "
        f"{number(exam.loss_as_written or 0.0, 4)}."
    )
    error = percent(min(exact.error, 1.0))
    if _is_close(exam):
        title = f"The gradients in {exam.autocast} are those in float32, off by {error}."
        yield Finding(False, title, (losses,))
        return
    title = f"The gradients in {exam.autocast} are off by {error} from those in float32"
    if exact.flushed:
        title += f", and {percent(exact.flushed)} of them become 0"
    worst = (f"Of {exact.worst}, {percent(exact.worst_flushed)} become 0.",) if exact.worst else ()
    yield Finding(True, f"{title}.", (losses, *worst))


def _scales(exam: Exam) -> Iterator[Finding]:
    fits = exam.fits
    if not exam.is_half:
        yield Finding(
            False,
            f"The model computes in {' and '.join(exam.dtypes)}, and needs no loss scale.",
            ("`jaxscale.skip_nonfinite(optimizer)` keeps a bad batch from ruining the run.",),
        )
    elif fits is None or _all_zero(exam):
        reason = "some gradient is not 0" if fits else "everything is finite"
        yield Finding(False, f"Whether it needs a loss scale can only be said once {reason}.")
    elif exam.comparison is None:
        yield Finding(False, about_largest_scale(exam.calibration))
    else:
        is_problem = needs_scale(exam) and not exam.is_auto
        yield Finding(
            is_problem,
            about_shown_scale(exam),
            (about_largest_scale(exam.calibration), which_scale(exam)),
        )


def _zeros(exam: Exam) -> Iterator[Finding]:
    rows = exam.leaves.rows
    zero = [row.path for row in rows if row.size and row.zero == row.size]
    if zero and not exam.trace.nonfinite_outputs:
        yield Finding(
            _all_zero(exam) and not any(_is_harm(place, exam) for place in exam.trace.underflows),
            f"The gradient is exactly 0 everywhere in {len(zero)} of {len(rows)} leaves: "
            f"{_few(zero)}.",
            ("Either the loss does not depend on them, or they were flushed on the way.",),
        )


def _all_zero(exam: Exam) -> bool:
    # In the histogram, which is taken at the largest scale.
    return exam.suggestion.needed is None and not exam.leaves.nonfinite_rows


def _few(names: Sequence[str]) -> str:
    return " ".join([", ".join(names[:_MOST_NAMES]), *and_more(names, _MOST_NAMES)])


def _line(place: Place) -> str:
    return place.where or "no line of the model"


def _located(place: Place, is_problem: bool, title: str, details: tuple[str, ...]) -> Finding:
    extra = [f"It is in {place.layer}."] if place.layer else []
    callers = [caller for caller in place.called_from if caller != place.where]
    if callers:
        extra.append(f"Called from {_few(callers)}.")
    if place.iteration:
        extra.append(f"In iteration {', '.join(map(str, place.iteration))}.")
    length = len(linecache.getlines(place.file)) if place.file else 0
    lines = range(max(place.line - _AROUND, 1), min(place.line + _AROUND, length) + 1)
    source = tuple((i, linecache.getline(place.file, i).rstrip("\n")) for i in lines)
    return Finding(is_problem, title, (*details, *extra), place.where, source, place.line)

"""What the results of an exam mean, in plain sentences.

Here the doctor decides what is a problem and what is only worth knowing. A problem is

- inf or NaN in the loss, the auxiliary output or the gradients (`_nonfinite`);
- gradients that are finite, but far from those in float32 (`_wrong`);
- a loss scale that was asked for and loses too much of the gradients, or that must be below 1,
  where the default rule skips every step (`_scales`);
- gradients that are all exactly 0 (`_zeros`).

Each line of the model is named once: what follows from the first fault is listed under it.
"""

import linecache
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .._trees.checks import and_more
from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import Place, TracedConstant, TracedNonfinite, TracedUnderflow
from .advice import about_remedy, for_nonfinite, these
from .exam import Exam
from .remedy import Culprit
from .scales import (
    about_largest_scale,
    about_room,
    about_shown_scale,
    how_to_start,
    needs_scale,
    skips_all,
)

_AROUND = 2  # lines of source shown before and after the line of a finding
_MOST_NAMES = 5  # in a list
_FLUSHED = 0.5  # an underflow may matter if at least this share of the nonzero values becomes 0,
_LOST_SUM = 0.01  # and these values had at least this share of the sum of all magnitudes


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
    """Returns all findings: the problems first."""
    found = [
        *_nonfinite(exam),
        *_wrong(exam),
        *_autocast_findings(exam),
        *_scale_findings(exam),
        *_constant_findings(exam),
        *_infinities(exam),
        *_underflows(exam),
        *_zero_findings(exam),
        *_left_out(exam),
    ]
    return sorted(found, key=lambda finding: not finding.is_problem)


def verdict(exam: Exam, found: Sequence[Finding]) -> str:
    """Returns whether anything is wrong, in one sentence."""
    problems = sum(finding.is_problem for finding in found)
    if problems:
        return f"{problems} problem{'s' * (problems > 1)} found."
    needs = ", with a loss scale: it needs one" * (needs_scale(exam) and exam.is_auto)
    where = f" in {exam.autocast}" if exam.autocast else ""
    return f"Nothing {'overflows' if exam.is_quick else 'is wrong'}{where}{needs}."


def _nonfinite(exam: Exam) -> Iterator[Finding]:
    report = exam.trace
    bad = report.nonfinite_outputs
    reaching = [place for place in report.nonfinite if place.reaches]
    if report.nonfinite_arguments:
        entries = [place for place in reaching if place.cause == "given"]
        yield from _of_arguments(exam, entries)
        reaching = [place for place in reaching if place.cause != "given"]
    elif bad and not reaching:
        yield Finding(True, f"{_outputs(exam)}, and no line explains why.", _leaf_findings(exam))
    if reaching:
        begins = "Inf or NaN is also made at"
        if not report.nonfinite_arguments:
            begins = f"{_outputs(exam)}. It begins at"
        # The forward pass first: what goes wrong there explains the backward pass.
        place, *others = sorted(reaching, key=lambda place: place.direction != "forward")
        details = [_birth(place), *_operands(place), *_constant_at(place, exam)]
        details += [*_rule_at(place, exam), *_before(place, exam), *for_nonfinite(place, exam)]
        details += [*_following(place, others), *_leaf_findings(exam)]
        yield _located(place, True, f"{begins} {_line(place)}.", details)
    if not bad and exam.leaves.nonfinite_rows:
        yield Finding(
            True,
            "Compiled as one program, the model gives gradients with inf or NaN. Run operation by "
            "operation, it does not.",
            _leaf_findings(exam),
        )


def _of_arguments(exam: Exam, entries: Sequence[TracedNonfinite]) -> Iterator[Finding]:
    names = [
        name.replace("args[0]", "params").replace("args[1]", "batch")
        for name in exam.trace.nonfinite_arguments
    ]
    if not exam.trace.nonfinite_outputs:
        title = f"There is inf or NaN in {_few(names)}, but none in the loss or the gradients."
        yield Finding(False, title, ("This is fine for a mask.",))
        return
    title = f"There is inf or NaN in {_few(names)}, before anything is computed."
    advice = "No loss scale or format helps: look where these numbers come from."
    details = (f"{_outputs(exam)}.", advice, *_leaf_findings(exam))
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
        return f"The loss is {number(exam.trace.loss)}" + f", and {share}" * (grads > 0)
    if not grads:
        others = [name for name in bad if name.startswith("aux")]
        return f"The loss and the gradients are finite, but {_few(others)} is not"
    scale = (
        "even without a loss scale"
        if exam.loss_scale == 1
        else f"at loss scale {power(exam.loss_scale)}"
    )
    return f"The loss is finite, {number(exam.loss, 4)}, but {share}, {scale}"


def _leaf_findings(exam: Exam) -> tuple[str, ...]:
    names = [row.path for row in exam.leaves.nonfinite_rows]
    return (f"Gradients with inf or NaN, worst first: {_few(names)}.",) if names else ()


def _birth(place: TracedNonfinite) -> str:
    made = f"`{place.primitive}`, in the {place.direction} pass, makes inf or NaN of "
    made += f"{percent(place.share)} of {place.dtype}{list(place.shape)}"
    return {
        "range": f"{made}: {place.dtype} cannot hold these numbers, but float32 could.",
        "value": f"{made}, and would in float32 too, of the same operands.",
        "infinities": f"{made} from infinities: one minus another, or 0 times one.",
        "given": f"{made}: it was there before, in a constant or an input.",
    }[place.cause]


def _operands(place: TracedNonfinite) -> list[str]:
    if place.cause not in ("range", "value") or math.isnan(place.largest_input):
        return []
    words = f"Its operands are between {number(place.least_input, 3)} and "
    words += number(place.largest_input, 3)
    if place.cause == "range":
        words += f"; float32 gives numbers up to {number(place.float32_result, 3)}"
    return [f"{words}."]


def _constant_at(place: Place, exam: Exam) -> list[str]:
    return [
        f"{number(constant.value)} is {number(constant.became)} in {constant.dtype}."
        for constant in exam.trace.constants
        if (constant.file, constant.line) == (place.file, place.line)
    ]


def _before(place: Place, exam: Exam) -> list[str]:
    """Returns where numbers went wrong before they became inf or NaN at a place."""
    if exam.culprit is None or _line(exam.culprit.place) == _line(place):
        return []
    return [f"It goes wrong before, at {_line(exam.culprit.place)}: {_went_wrong(exam.culprit)}"]


def _rule_at(place: Place, exam: Exam) -> list[str]:
    rule = exam.backward_rules.get(place.where)
    if rule is None or place.direction != "backward":
        return []
    return [
        f"The line calls a function with a backward rule of its own, `{rule}`: the fault may lie "
        "there."
    ]


def _following(place: Place, others: Iterable[TracedNonfinite]) -> list[str]:
    """Returns where else inf and NaN were made, after a place."""
    elsewhere = dict.fromkeys(_line(o) for o in others if _line(o) != _line(place))
    return [f"After that, more of them are made at {_few(list(elsewhere))}."] if elsewhere else []


def _wrong(exam: Exam) -> Iterator[Finding]:
    if not exam.wrong or exam.float32 is None:
        return
    errors = {leaf.path: leaf for leaf in exam.float32.leaves}
    worst = errors[exam.wrong[0]]
    rows, many = len(exam.leaves.rows), len(exam.wrong)
    which = f"{many} of {rows} gradients are" if many > 1 else f"the gradient of {worst.path} is"
    which = "all gradients are" if many == rows > 1 else which
    off = f"off by {percent(min(worst.error, 1.0))}" + f", in {worst.path}" * (many > 1)
    at = _fitting(exam)
    title = f"Everything is finite, but {which} wrong{at}: {off}, compared with float32."
    flushed = worst.flushed == 1
    if flushed:
        title = f"Everything is finite, but {which} wrong{at}: {worst.path} is flushed to 0."
    of_leaves = [f"Wrong gradients, worst first: {_few(exam.wrong)}."] if many > 1 else []
    of_leaves += _loss_findings(exam)
    culprit = exam.culprit
    if culprit is None:
        places = [place for place in exam.trace.underflows if may_matter(place)]
        lines = list(dict.fromkeys(map(_line, places)))
        where = [f"Most of the numbers become 0 at {_few(lines)}."] if lines else []
        yield Finding(True, title, (*where, "No single line accounts for it.", *of_leaves))
        return
    place = culprit.place
    title = f"{title} It begins at {_line(place)}."
    details = _constant_at(place, exam) or [_went_wrong(culprit)]
    details += _rule_at(place, exam)
    if exam.remedy is not None:
        details.append(about_remedy(exam.remedy, exam, place.where))
    yield _located(place, True, title, (*details, *of_leaves))


def _fitting(exam: Exam) -> str:
    return f" at loss scale {power(exam.fits)}, the largest that fits" if exam.fits else ""


def _went_wrong(culprit: Culprit) -> str:
    place = culprit.place
    what = f"`{place.primitive}`, in the {place.direction} pass,"
    if culprit.kind == "overflow":
        return (
            f"{what} makes inf of numbers that {place.dtype} cannot hold, and that becomes finite "
            "again before it reaches the loss: 1/inf is 0."
        )
    if culprit.kind == "underflow":
        scaled = "" if place.scaled else ", and no loss scale helps"
        return f"{what} makes {percent(place.share)} of its nonzero numbers 0{scaled}."
    if not culprit.largest:
        return f"{what} gives other numbers than in float32."
    spacing = 2.0 ** (math.frexp(culprit.largest)[1] - 1 - _BITS.get(place.dtype, 10))
    return (
        f"{what} rounds: its numbers are as large as {number(culprit.largest, 4)}, where "
        f"{place.dtype} only holds multiples of {number(spacing, 3)}."
    )


_BITS = {"float16": 10, "bfloat16": 7}


def _autocast_findings(exam: Exam) -> Iterator[Finding]:
    if not exam.autocast:
        return
    if exam.autocast not in exam.dtypes:
        yield Finding(
            False,
            "`jaxscale.autocast` changes nothing: no product of float32 matrices, and no "
            "convolution, is left to it in this model.",
        )
    elif exam.float32 is not None and not exam.wrong:
        error = percent(min(exam.float32.error, 1.0))
        title = f"The gradients in {exam.autocast} are those in float32, off by {error}."
        yield Finding(False, title, tuple(_loss_findings(exam)))


def _loss_findings(exam: Exam) -> list[str]:
    if exam.loss_as_written is None:
        return []
    losses = number(exam.loss, 4), number(exam.loss_as_written, 4)
    return [f"The loss is {losses[0]} in {exam.autocast}, and as written {losses[1]}."]


def _scale_findings(exam: Exam) -> Iterator[Finding]:
    if not exam.is_half:
        yield Finding(
            False,
            f"The model computes in {' and '.join(exam.dtypes)}, and needs no loss scale.",
            ("`jaxscale.skip_nonfinite(optimizer)` keeps a bad batch from ruining the run.",),
        )
        return
    if exam.fits is None or _all_zero(exam):
        reason = "some gradient is not 0" if exam.fits else "everything is finite"
        yield Finding(False, f"Whether it needs a loss scale can only be said once {reason}.")
        return
    largest, details = about_largest_scale(exam), [*how_to_start(exam), *_ceiling(exam)]
    if skips_all(exam):
        # Where a scale of 1 was asked for, what it overflows is a problem already.
        is_problem = not exam.trace.nonfinite_outputs
        if exam.ceiling:
            yield _located(exam.ceiling, is_problem, largest, details)
        else:
            yield Finding(is_problem, largest, tuple(details))
    elif exam.comparison is None:
        yield Finding(False, largest, tuple(details))
    else:
        is_problem = needs_scale(exam) and not exam.is_auto
        details = [largest, *about_room(exam), *details]
        yield Finding(is_problem, about_shown_scale(exam), tuple(details))


def _ceiling(exam: Exam) -> list[str]:
    place = exam.ceiling
    if place is None:
        return []
    at = power(exam.calibration.overflows_at or 0.0) if exam.calibration else ""
    layer = f", in {place.layer}" if place.layer else ""
    source = f", `{place.source}`" if place.source else ""
    words = f"What limits it is {_line(place)}{source}{layer}: at {at} `{place.primitive}` "
    words += "overflows there. "
    if exam.relief is None:
        return [words + "If the loss scale falls in training, look at that line first."]
    which = these(exam.relief.lines, place.where, "that line")
    scale = power(exam.relief.loss_scale)
    return [words + f"With {which} in float32, {scale} fits, as was tried."]


def _constant_findings(exam: Exam) -> Iterator[Finding]:
    named = {_first(exam), *((c.place.file, c.place.line) for c in [exam.culprit] if c)}
    for constant in exam.trace.constants:
        if (constant.file, constant.line) in named:
            continue
        title = f"{number(constant.value)} is {number(constant.became)} in {constant.dtype}, at "
        harm = "It does no harm on this batch." if _is_right(exam) else _fix(constant)
        yield _at_line(constant, False, f"{title}{constant.where}.", (harm,))


def _fix(constant: TracedConstant) -> str:
    if constant.became:
        return f"Use a number that {constant.dtype} holds, or compute this line in float32."
    return "Use a larger number, such as 1e-3, or compute this line in float32."


def _first(exam: Exam) -> tuple[str, int]:
    place = exam.trace.first_nonfinite
    return (place.file, place.line) if place and place.reaches else ("", 0)


def _is_right(exam: Exam) -> bool:
    return exam.float32 is not None and not exam.wrong


def _infinities(exam: Exam) -> Iterator[Finding]:
    """Notes inf and NaN that reach neither the loss nor the gradients."""
    named = {_first(exam), *((c.place.file, c.place.line) for c in [exam.culprit] if c)}
    places = [
        place
        for place in exam.trace.nonfinite
        if not place.reaches and (place.file, place.line) not in named
    ]
    if not places:
        return
    lines = list(dict.fromkeys(map(_line, places)))
    title = f"Inf or NaN made at {_few(lines)} does not reach the loss or the gradients."
    words = "This is fine for a mask, unless a row is masked as a whole: then softmax is NaN."
    if not _is_right(exam):
        words += " It is not fine for a norm or a sum."
    yield _located(places[0], False, title, (words,))


def _underflows(exam: Exam) -> Iterator[Finding]:
    """Notes where small numbers become 0, unless a problem explains it."""
    places = [place for place in exam.trace.underflows if place.zeros]
    if exam.trace.nonfinite_outputs or exam.wrong or not places:
        return
    lines = list(dict.fromkeys(map(_line, sorted(places, key=lambda p: -p.lost_sum))))
    worst = max(places, key=lambda place: (may_matter(place), place.lost_sum))
    if exam.float32 is not None:
        error = percent(min(exam.float32.error, 1.0))
        words = f"This does no harm: float32 gives the same gradients within {error}."
    else:
        words = "They are the smallest values there."
    title = f"Most of the nonzero numbers become 0 at {_few(lines)}."
    yield _located(worst, False, title, (words,))


def may_matter(place: TracedUnderflow) -> bool:
    """Returns whether most values became zero, and not only the smallest of them."""
    return place.zeros >= _FLUSHED * place.nonzero and place.lost_sum >= _LOST_SUM


def _zero_findings(exam: Exam) -> Iterator[Finding]:
    zero, rows = exam.zero, exam.leaves.rows
    if not zero or exam.trace.nonfinite_outputs:
        return
    which = f"{len(zero)} of {len(rows)} leaves: {_few(zero)}"
    if exam.float32 is None:
        words = "Either the loss does not depend on them, or they were flushed on the way."
        yield Finding(
            _all_zero(exam), f"The gradient is exactly 0 everywhere in {which}.", (words,)
        )
        return
    title = f"The gradient is exactly 0 everywhere in {which}, in float32 too."
    yield Finding(len(zero) == len(rows), title, ("The loss does not depend on them.",))


def _left_out(exam: Exam) -> Iterator[Finding]:
    if exam.trace.not_entered:
        title = f"It was not looked inside of {_few(exam.trace.not_entered)}."
        words = "Each ran as one operation: its lines are not named, and its numbers not compared."
        yield Finding(False, title, (words,))
    if exam.is_quick:
        words = "Without `--quick` the gradients are compared with those in float32, too."
        yield Finding(False, "Gradients that are finite and wrong were not looked for.", (words,))


def _all_zero(exam: Exam) -> bool:
    # In the histogram, which is taken at the largest scale.
    return exam.suggestion.needed is None and not exam.leaves.nonfinite_rows


def _few(names: Sequence[str]) -> str:
    return " ".join([", ".join(names[:_MOST_NAMES]), *and_more(names, _MOST_NAMES)])


def _line(place: Place) -> str:
    return place.where or "no line of the model"


def _located(place: Place, is_problem: bool, title: str, details: Iterable[str]) -> Finding:
    extra = [f"It is in {place.layer}."] if place.layer else []
    callers = [caller for caller in place.called_from if caller != place.where]
    if callers:
        extra.append(f"Called from {_few(callers)}.")
    if place.iteration:
        extra.append(f"In iteration {', '.join(map(str, place.iteration))}.")
    return _at_line(place, is_problem, title, (*details, *extra))


def _at_line(
    place: Place | TracedConstant, is_problem: bool, title: str, details: Iterable[str]
) -> Finding:
    length = len(linecache.getlines(place.file)) if place.file else 0
    lines = range(max(place.line - _AROUND, 1), min(place.line + _AROUND, length) + 1)
    source = tuple((i, linecache.getline(place.file, i).rstrip("\n")) for i in lines)
    return Finding(is_problem, title, tuple(details), place.where, source, place.line)

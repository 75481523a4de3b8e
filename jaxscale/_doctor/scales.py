"""Findings on the loss scale: whether one is needed, which one fits, and how to start training.

A low scale is not a bad one: twice the loss has twice the gradients and half the scale. What counts
is how far the gradients stay below what float16 holds at that scale.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from .._policies.dynamic import DynamicLossScale
from ..diagnostics._text import number, percent, power
from .cures import find_large_sum, say_mean
from .exam import Exam, is_half
from .finding import Finding, join_lines, line_of, note

_NEEDED = 0.01  # a loss scale is needed if more than this share of the gradients is lost without it
_LOW = 2.0**10  # a largest loss scale below this is worth a word
_RETRIES = 10  # in one step, as in the help
_ROOM = 2.0**-10  # how far a scale that must be below 1 may still fall


class Start(NamedTuple):
    """How to start training at the largest loss scale that fits."""

    skipped: int | None  # first steps like this batch that the default rule skips; `None` for all
    retries: int | None  # with so many the first step finds the scale; `None` if none do
    code: str  # the line to write


def find_start(exam: Exam) -> Start | None:
    """Returns how to start training, or `None` if that is not known."""
    if exam.fits is None:
        return None
    default, arguments = DynamicLossScale(), f"init_scale={power(exam.fits)}"
    skipped = math.ceil(math.log(exam.fits / default.init_scale, default.backoff_factor))
    if skipped <= 0:
        return Start(0, 0, "jaxscale.loss_scaled(optimizer)")
    retries = max(skipped, _RETRIES)
    if exam.fits < default.min_scale:
        arguments += f", min_scale={power(exam.fits * _ROOM)}"
        skipped = retries = None
    policy = f"jaxscale.DynamicLossScale({arguments})"
    return Start(skipped, retries, f"jaxscale.loss_scaled(optimizer, {policy})")


def needs_scale(exam: Exam) -> bool:
    compared = exam.comparison
    return compared is not None and max(compared.flushed, compared.error) > _NEEDED


def find_scale(exam: Exam) -> Iterator[Finding]:
    start = find_start(exam)
    if not is_half(exam.dtypes):
        yield note(
            f"The model computes in {' and '.join(exam.dtypes)}, and needs no loss scale.",
            "`jaxscale.skip_nonfinite(optimizer)` keeps a bad batch from ruining the run.",
            "If you train it under `jaxscale.autocast`, look again with `--autocast float16`.",
        )
    elif start is None or exam.is_all_zero:
        reason = "some gradient is not 0" if start else "everything is finite"
        yield note(f"The doctor can only say whether it needs a loss scale once {reason}.")
    else:
        largest = _judge_largest_scale(exam, start)
        details = [*_say_how_to_start(exam, start), *_say_limit(exam)]
        if start.skipped is None:
            # Where a scale of 1 was asked for, what it overflows is a problem already.
            is_problem = not exam.trace.nonfinite_outputs
            large = find_large_sum(exam)
            if large is not None:
                details.insert(0, say_mean(large, f", at {large.where}" if large.where else ""))
            place = large if large is not None and large.where else exam.ceiling
            yield note(largest, *details, is_problem=is_problem, place=place)
        elif exam.comparison is None:
            yield note(largest, *details)
        else:
            is_problem = needs_scale(exam) and not exam.is_auto
            details = [largest, *_judge_room(exam), *details]
            yield note(_judge_shown_scale(exam), *details, is_problem=is_problem)


def find_inward_growth(exam: Exam) -> Iterator[Finding]:
    """Notes gradients for which `scale_backward` does not find its scale at once."""
    trial = exam.backward_trial
    if trial is None or not trial.repeats or not exam.fits:
        return
    often = {1: "once", 2: "twice"}.get(trial.repeats, f"{trial.repeats} times")
    enough = "" if trial.is_enough else ", which is not enough"
    # Room for batches with larger gradients: these may repeat it, too.
    scale = power(exam.fits / 4)
    yield note(
        "Gradients grow on their way through the model, and `scale_backward` repeats the backward "
        f"pass of this batch {often}{enough}.",
        "It begins where those that enter half precision are about 1. Where a trainer owns the "
        f"step, write `jaxscale.scale_backward(loss_fn, scale={scale})`. In a step of your own "
        "`jaxscale.loss_scaled` finds such a scale by itself.",
        place=exam.ceiling,
    )


def find_refusal(exam: Exam) -> Iterator[Finding]:
    """Notes what `scale_backward` raised when it was tried."""
    trial = exam.backward_trial
    if trial is not None and trial.raised:
        yield note(
            f"`jaxscale.scale_backward` was tried on this loss, and raised {trial.raised}",
            "It matters only if you use `scale_backward`. All other findings are made without it.",
        )


def _judge_shown_scale(exam: Exam) -> str:
    needed, compared = needs_scale(exam), exam.comparison
    losses = "the gradients are the same to the last bit"
    if compared and compared.error:
        losses = f"{percent(compared.flushed)} of the nonzero gradients become 0"
        if 0 < compared.flushed < compared.worst_flushed:
            losses += f" ({percent(compared.worst_flushed)} in {compared.worst})"
        losses += f", and together they are off by {percent(min(compared.error, 1.0))}"
    if exam.shown_scale == 1:
        needs = "It needs a loss scale" if needed else "This batch needs no loss scale"
        return f"{needs}: without one {losses}."
    verdict = "is too low" if needed else "is high enough"
    return f"Loss scale {power(exam.shown_scale)} {verdict}: there {losses}."


def _judge_largest_scale(exam: Exam, start: Start) -> str:
    fits = power(exam.fits or 0.0)
    if exam.calibration is None or exam.calibration.overflows_at is None:
        return f"On this batch no loss scale up to {fits}, the largest tried, overflows."
    words = f"The largest loss scale that does not overflow on this batch is {fits}"
    if start.skipped is None:
        return f"{words}: the default rule, which never goes below 1, will skip every step."
    return f"{words}."


def _judge_room(exam: Exam) -> list[str]:
    fits = exam.fits or 1.0
    if exam.is_limited and fits < _LOW:
        return [
            "That is low: gradients shrink as a model learns, and what limits the scale is far "
            f"larger than they are: at {power(fits)} they only go up to "
            f"{number(fits * exam.largest, 3)}."
        ]
    if fits < _LOW:
        return [
            f"That is not low for gradients as large as these, up to {number(exam.largest, 3)}, "
            "such as those of a sum: at that scale they nearly fill the range of float16."
        ]
    if needs_scale(exam):
        return []
    return ["Gradients shrink as a model learns, and a loss scale costs next to nothing."]


def _say_how_to_start(exam: Exam, start: Start) -> list[str]:
    if start.skipped is None:
        return [
            f"Make the loss smaller, a mean and not a sum, or write `{start.code}`: below 1 a loss "
            "scale makes gradients smaller."
        ]
    if not start.skipped:
        return [f"`{start.code}` finds a good one by itself."] * needs_scale(exam)
    return [
        f"From {power(DynamicLossScale().init_scale)}, the default rule skips steps first, "
        f"{start.skipped} in all: write `{start.code}`, or use `retries={start.retries}` or "
        '`"adaptive"`.'
    ]


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

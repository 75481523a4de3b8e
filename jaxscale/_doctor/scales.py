"""The loss scale in words: whether one is needed, which one fits, and how to start training.

A low scale is not a bad one. Twice the loss has twice the gradients and half the scale, so a sum
has a low one. What counts is how far the gradients stay below what float16 holds at that scale: far
below, if a number on the way to them is much larger than they are.
"""

import math
from typing import NamedTuple

from .._policies.dynamic import DynamicLossScale
from ..diagnostics._text import number, percent, power
from .compare import Comparison
from .exam import Exam

_NEEDED = 0.01  # a loss scale is needed if more than this share of the gradients is lost without it
_LOW = 2.0**10  # a largest loss scale below this is worth a word
_RETRIES = 10  # in one step, as in the help
_ROOM = 2.0**-10  # how far a scale that must be below 1 may still fall


class Start(NamedTuple):
    """How to start training at the largest loss scale that fits."""

    # How many of the first steps the default rule skips, if all are like this batch; `None` if it
    # skips every step, however many.
    skipped: int | None
    # The `retries` with which the first step finds the scale; `None` if none do.
    retries: int | None
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


def skips_all(exam: Exam) -> bool:
    """Returns whether the default rule would skip every step."""
    start = find_start(exam)
    return start is not None and start.skipped is None


def needs_scale(exam: Exam) -> bool:
    """Returns whether too much of the gradients is lost at the scale given, or without one."""
    compared = exam.comparison
    return compared is not None and max(compared.flushed, compared.error) > _NEEDED


def judge_shown_scale(exam: Exam) -> str:
    """Returns what becomes of the gradients at the scale given, or without one."""
    needed = needs_scale(exam)
    if exam.shown_scale == 1:
        needs = "It needs a loss scale" if needed else "This batch needs no loss scale"
        return f"{needs}: without one {_losses(exam.comparison)}."
    verdict = "is too low" if needed else "is high enough"
    return f"Loss scale {power(exam.shown_scale)} {verdict}: there {_losses(exam.comparison)}."


def judge_largest_scale(exam: Exam) -> str:
    """Returns which scale is the largest that does not overflow."""
    fits = power(exam.fits or 0.0)
    if exam.calibration is None or exam.calibration.overflows_at is None:
        return f"On this batch no loss scale up to {fits}, the largest tried, overflows."
    words = f"The largest loss scale that does not overflow on this batch is {fits}"
    if skips_all(exam):
        return f"{words}: the default rule, which never goes below 1, will skip every step."
    return f"{words}."


def judge_room(exam: Exam) -> list[str]:
    """Returns whether the largest loss scale is low for the size of the gradients."""
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
            "such as those of a sum: at it they nearly fill the range of float16."
        ]
    if needs_scale(exam):
        return []
    return ["Gradients shrink as a model learns, and a loss scale costs next to nothing."]


def say_how_to_start(exam: Exam) -> list[str]:
    """Returns which of the first steps the default rule skips, and the line that skips none."""
    start = find_start(exam)
    if start is None:
        return []
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


def _losses(compared: Comparison | None) -> str:
    if compared is None or not compared.error:
        return "the gradients are the same to the last bit"
    share = f"{percent(compared.flushed)} of the nonzero gradients become 0"
    if 0 < compared.flushed < compared.worst_flushed:
        share += f" ({percent(compared.worst_flushed)} in {compared.worst})"
    return f"{share}, and together they are off by {percent(min(compared.error, 1.0))}"

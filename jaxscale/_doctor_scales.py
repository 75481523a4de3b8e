"""Whether a loss scale is needed, and which: what was measured, in words."""

from ._diagnose_calibrate import Calibration
from ._diagnose_words import percent, power
from ._doctor_compare import Comparison
from ._doctor_exam import Exam

_NEEDED = 0.01  # a loss scale is needed if without it that share of the gradients is lost
_DEFAULT_SCALE = 2.0**15  # where a dynamic scale starts


def is_needed(exam: Exam) -> bool:
    """Returns whether gradients are lost at the scale that was given, or without one."""
    compared = exam.comparison
    return compared is not None and max(compared.flushed, compared.error) > _NEEDED


def judged(exam: Exam) -> str:
    """Returns what becomes of the gradients at the scale that was given, or without one."""
    needed = is_needed(exam)
    if exam.shown_scale == 1:
        needs = "It needs a loss scale" if needed else "This batch needs no loss scale"
        return f"{needs}: without one {_lost(exam.comparison)}."
    verdict = "is too low" if needed else "will do"
    return f"Loss scale {power(exam.shown_scale)} {verdict}: there {_lost(exam.comparison)}."


def largest(calibration: Calibration | None) -> str:
    """Returns which scale is the largest that does not overflow."""
    if calibration is None or calibration.init_scale is None:
        return "No loss scale was found that does not overflow."
    fits = power(calibration.init_scale)
    if calibration.overflows_at is None:
        return f"On this batch no loss scale overflows up to {fits}, the largest that was tried."
    return f"The largest loss scale that does not overflow on this batch is {fits}."


def advice(exam: Exam) -> str:
    """Returns which scale to take."""
    if not is_needed(exam):
        return "Gradients shrink as a model learns, and a loss scale costs next to nothing."
    if exam.fits and exam.fits < _DEFAULT_SCALE:
        policy = f"jaxscale.DynamicLossScale(init_scale={power(exam.fits)})"
        return f"To skip no steps, start there: `jaxscale.loss_scaled(optimizer, {policy})`."
    return "`jaxscale.loss_scaled(optimizer)` finds a good one by itself."


def _lost(compared: Comparison | None) -> str:
    if compared is None or not compared.error:
        return "the gradients are the same to the last bit"
    share = f"{percent(compared.flushed)} of the nonzero gradients become 0"
    if 0 < compared.flushed < compared.worst_flushed:
        share += f" ({percent(compared.worst_flushed)} in {compared.worst})"
    return f"{share}, and all together are off by {percent(min(compared.error, 1.0))}"

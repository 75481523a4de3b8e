"""What to do: about a line where numbers get lost, and about the loss scale.

The first half knows what helps at an operation: the tables `_RANGE` and `_VALUE` hold a sentence
for each primitive that often goes wrong. The second half says what becomes of the gradients at
the loss scale that was asked for, and which scale to take instead.
"""

import math

from ..diagnostics._calibrate import Calibration
from ..diagnostics._text import percent, power
from ..diagnostics._trace.report import TracedNonfinite, TracedUnderflow
from .exam import Comparison, Exam

_NEEDED = 0.01  # a loss scale is needed if more than this share of the gradients is lost without it
_DEFAULT_SCALE = 2.0**15  # where a dynamic scale starts

_PRODUCT = (
    "Scale the factors down first, such as the queries by 1/sqrt(width), or compute this line in "
    "float32: `preferred_element_type=jnp.float32` keeps a matrix product from overflowing."
)
_SQUARE = (
    "Compute squares and their sums, as in a norm or a variance, in float32: cast before them."
)

# By primitive: how to keep numbers in the range of a half-precision format.
_RANGE = {
    "convert_element_type": "Here float32 becomes {dtype}. For a mask, use -1e4 instead of -1e9. "
    "For a sum or a mean, stay in float32: `x.astype(jnp.float32).sum()`.",
    "exp": "Subtract the maximum first, as `jax.nn.softmax` does, or compute it in float32.",
    "div": "The divisor is small, perhaps a temperature or an epsilon. Divide in float32.",
    "dot_general": _PRODUCT,
    "conv_general_dilated": _PRODUCT,
    "square": _SQUARE,
    "integer_pow": _SQUARE,
    "pow": _SQUARE,
}

_EPSILON = "an epsilon, about 1e-4 in float16, where 1e-8 is 0"
# By primitive: how to avoid points where the function or its derivative is not finite.
_VALUE = {
    "div": f"The divisor is 0: add {_EPSILON}, or replace it with `jnp.where` first.",
    "log": f"The logarithm of 0 is -inf: add {_EPSILON}, or use `jax.nn.log_softmax`.",
    "rsqrt": f"The operand is 0: add {_EPSILON}.",
    "sqrt": "The operand is negative, or 0, where the derivative is inf: keep it positive.",
    "pow": "The derivative at 0 is inf: keep the base away from 0.",
    "exp": "Even float32 cannot hold the exponential: subtract the maximum first.",
}


def _is_of_autocast(exam: Exam) -> bool:
    """Returns whether half precision is due to autocast, and not written by hand."""
    return bool(exam.autocast) and math.isfinite(exam.loss_as_written or 0.0)


def _in_float32(exam: Exam) -> str:
    if _is_of_autocast(exam):
        return (
            "Exempt it from autocast: call what this line calls, or a function of this line, "
            "through `jaxscale.full_precision`."
        )
    return "Compute this line in float32, and cast its result back."


def for_nonfinite(place: TracedNonfinite, exam: Exam) -> str:
    """Returns how to keep an inf or a NaN from being made at a place."""
    if place.cause == "range":
        fits = exam.fits
        if place.scaled and fits and fits < exam.loss_scale:
            return f"Loss scale {power(fits)} is the largest that does not overflow here."
        help_ = "Even a loss scale of 1 overflows here." if place.scaled else "No loss scale helps."
        # Under autocast, what the line asks for is not what it gets.
        known = None if _is_of_autocast(exam) else _RANGE.get(place.primitive)
        return f"{help_} {(known or _in_float32(exam)).format(dtype=place.dtype)}"
    known = {
        "value": _VALUE.get(
            place.primitive, "Keep the operands away from values without a finite result."
        ),
        "infinities": f"Mask with a number that {place.dtype} holds, such as -1e4.",
        "given": "Look where this number comes from.",
    }[place.cause]
    return f"No loss scale helps. {known}"


def for_underflow(place: TracedUnderflow, exam: Exam) -> str:
    """Returns how to keep numbers from becoming zero at a place."""
    if not place.scaled:
        return f"No loss scale helps. If they matter: {_in_float32(exam)}"
    if exam.fits and exam.loss_scale >= exam.fits:
        return f"A larger loss scale would keep them, but overflows elsewhere. {_in_float32(exam)}"
    if exam.fits:
        return f"A larger loss scale keeps them: {power(exam.fits)} does not overflow."
    return f"A larger loss scale would keep them, but none was found that fits. {_in_float32(exam)}"


def needs_scale(exam: Exam) -> bool:
    """Returns whether too much of the gradients is lost at the scale given, or without one."""
    compared = exam.comparison
    return compared is not None and max(compared.flushed, compared.error) > _NEEDED


def about_shown_scale(exam: Exam) -> str:
    """Returns what becomes of the gradients at the scale given, or without one."""
    needed = needs_scale(exam)
    if exam.shown_scale == 1:
        needs = "It needs a loss scale" if needed else "This batch needs no loss scale"
        return f"{needs}: without one {_losses(exam.comparison)}."
    verdict = "is too low" if needed else "is high enough"
    return f"Loss scale {power(exam.shown_scale)} {verdict}: there {_losses(exam.comparison)}."


def about_largest_scale(calibration: Calibration | None) -> str:
    """Returns which scale is the largest that does not overflow."""
    if calibration is None or calibration.init_scale is None:
        return "No loss scale was found that does not overflow."
    fits = power(calibration.init_scale)
    if calibration.overflows_at is None:
        return f"On this batch no loss scale up to {fits}, the largest tried, overflows."
    return f"The largest loss scale that does not overflow on this batch is {fits}."


def which_scale(exam: Exam) -> str:
    """Returns which loss scale to train with."""
    if not needs_scale(exam):
        return "Gradients shrink as a model learns, and a loss scale costs next to nothing."
    if exam.fits and exam.fits < _DEFAULT_SCALE:
        policy = f"jaxscale.DynamicLossScale(init_scale={power(exam.fits)})"
        return f"To skip no steps, start at it: `jaxscale.loss_scaled(optimizer, {policy})`."
    return "`jaxscale.loss_scaled(optimizer)` finds a good one by itself."


def _losses(compared: Comparison | None) -> str:
    if compared is None or not compared.error:
        return "the gradients are the same to the last bit"
    share = f"{percent(compared.flushed)} of the nonzero gradients become 0"
    if 0 < compared.flushed < compared.worst_flushed:
        share += f" ({percent(compared.worst_flushed)} in {compared.worst})"
    return f"{share}, and together they are off by {percent(min(compared.error, 1.0))}"

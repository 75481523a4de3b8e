"""What to do: about a line where numbers get lost, and about the loss scale.

The first half knows what helps at an operation. It looks at the line as well as at the primitive,
because a `div` may be the derivative of a square root. The second half says what becomes of the
gradients at the loss scale that was asked for, and which scale to take instead.

In float16 an epsilon must be large enough for the derivative, too: that of `rsqrt(x + e)` at 0 is
e**-1.5 / 2, which is beyond 65504 for e below 4e-4, and a loss scale multiplies it.
"""

import math
import re
from collections.abc import Sequence

from ..diagnostics._calibrate import Calibration
from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import TracedNonfinite
from .compare import Comparison
from .exam import LOW, Exam
from .remedy import Remedy

_NEEDED = 0.01  # a loss scale is needed if more than this share of the gradients is lost without it
_DEFAULT_SCALE = 2.0**15  # where a dynamic scale starts

# What a line that does not fit into the range may be about: words of its source, what to do. The
# first that is found counts.
_MASK = (
    r"mask|-\s*1e\d|finfo",
    "For a mask, use -1e4 instead of -1e9 or `finfo.min`.",
)
_OF_LINES = (
    (r"softmax|logsumexp|exp\(", None),  # by the operation, below
    (r"norm|\*\*\s*2|square|var\b|std\b|\.T\b", "Compute squares and their sums in float32."),
    (r"q\b.*k\b|quer|attn|score", "Scale the queries before the product, by 1/sqrt(width)."),
)
_PRODUCT = "`preferred_element_type=jnp.float32` keeps the product in float32."
_OF_RANGE = {
    "exp": "Subtract the maximum first, as `jax.nn.softmax` does, or clip the exponent.",
    "dot_general": _PRODUCT,
    "conv_general_dilated": _PRODUCT,
    "reduce_sum": "Sum in float32: `x.sum(dtype=jnp.float32)`.",
    "cumsum": "Sum in float32: `jnp.cumsum(x, dtype=jnp.float32)`.",
    "scatter-add": "Add up in float32, and cast the sum back.",
}

_ROOT = (
    "The derivative of a square root at 0 is inf. Keep 0 away from it: add 1e-6 in float32 inside "
    "of the root, or choose another operand with `jnp.where` before it."
)
_NEGATIVE = (
    "The operand is negative, {least}, as a difference of two large numbers may become. An epsilon "
    "does not help: compute the difference another way, a variance as `((x - x.mean())**2).mean()`."
)
_INDEX = "An index is out of range: JAX fills in NaN. Look at the labels, tokens or positions."
# Words of the source line, and primitives: how to avoid points without a finite result.
_OF_POINTS = (
    (r"rsqrt", ("rsqrt", "mul", "div", "pow", "integer_pow"), "The operand is 0: compute it in "
     "float32 with an epsilon of 1e-6; in float16 it takes 1e-3."),
    (r"sqrt|norm|std\b|hypot", ("div", "mul", "sqrt", "rsqrt", "pow", "integer_pow"), _ROOT),
    (r"arccos|acos|arcsin|asin", (), "At 1 and -1 the derivative is inf. Clip to 0.999: float16 "
     "has no number between 0.9995 and 1."),
    (r"\*\*|pow\(", ("pow", "div", "mul", "log"), "The derivative of this power at 0 is inf, or "
     "its base is negative: keep the base at 1e-3 or more."),
    (r"log_sigmoid|sigmoid|bce|binary", ("log", "div"), "The logarithm of 0 is -inf: use "
     "`jax.nn.log_sigmoid`, which takes logits."),
    (r"softmax", ("log", "div"), "The logarithm of 0 is -inf: use `jax.nn.log_softmax`, which "
     "takes logits."),
    (r"log|entropy", ("log", "div", "log1p"), "The logarithm of 0 is -inf, and its derivative "
     "inf: compute it in float32, and add 1e-6 there, or `jnp.maximum(x, 1e-6)` before it."),
    (r"", ("div", "integer_pow", "rem"), "The divisor is 0: compute it in float32 and add 1e-6 "
     "there, or replace 0 with `jnp.where` before the division."),
    (r"", ("gather", "dynamic_slice", "scatter"), _INDEX),
    (r"", ("exp", "exp2"), "Even float32 cannot hold this exponential: clip the exponent, or "
     "subtract the maximum first, as `jax.nn.softmax` does."),
)  # fmt: skip


def is_of_autocast(exam: Exam) -> bool:
    """Returns whether half precision is due to autocast, and not written by hand."""
    return bool(exam.autocast) and math.isfinite(exam.loss_as_written or 0.0)


def in_float32(exam: Exam) -> str:
    """Returns how a line is computed in float32."""
    if is_of_autocast(exam):
        return (
            "Exempt it from autocast: call what this line calls, or a function of this line, "
            "through `jaxscale.full_precision`."
        )
    return "Cast what goes into it to float32, and its result back."


def these(lines: Sequence[str], where: str, here: str) -> str:
    """Returns lines in words.

    Args:
      lines: file and line of each.
      where: the one that was named just before.
      here: a word for that one.
    """
    names = [here if line == where else line for line in lines]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def about_remedy(remedy: Remedy, exam: Exam, where: str) -> str:
    """Returns which lines in float32 make the gradients right, as was tried.

    Args:
      remedy: the lines.
      exam: the exam.
      where: the file and line that the sentence stands below.
    """
    which = these(remedy.lines, where, "this line")
    error = percent(min(remedy.error, 1.0))
    if not remedy.works:
        still = f"off by {error}" if math.isfinite(remedy.error) else "not finite"
        return (
            f"With {which} in float32, as was tried, the gradients are still {still}: more lines "
            "need it."
        )
    return (
        f"Compute {which} in float32: that was tried, and the gradients then are those of float32 "
        f"{'within ' + error if remedy.error else 'to the last bit'}. {in_float32(exam)}"
    )


def for_nonfinite(place: TracedNonfinite, exam: Exam) -> list[str]:
    """Returns how to keep an inf or a NaN from being made at a place, a sentence or two each."""
    fits, remedy = exam.fits, exam.remedy
    if place.scaled and fits and fits < exam.loss_scale:
        return [f"Loss scale {power(fits)} is the largest that does not overflow here."]
    said = ["Even a loss scale of 1 overflows here." if place.scaled else "No loss scale helps."]
    if place.cause == "given":
        return [*said, "Look where this number comes from."]
    tried = [about_remedy(remedy, exam, place.where)] if remedy and remedy.works else []
    if place.cause == "infinities":
        return [
            *said,
            "In a row that is masked as a whole, softmax is NaN. Mask with a number that "
            f"{place.dtype} holds, such as -1e4, and leave such rows out of the loss.",
        ]
    if is_of_autocast(exam):
        return [*said, *(tried or [in_float32(exam)])]
    if place.cause == "range":
        if re.search(_MASK[0], place.source):
            return [*said, _MASK[1], *tried]
        known = _of_range(place) or f"Compute this line in float32. {in_float32(exam)}"
    else:
        known = _of_points(place)
    return [*said, *(tried or [known])]


def _of_range(place: TracedNonfinite) -> str | None:
    if place.primitive == "convert_element_type":
        return f"Here float32 becomes {place.dtype}: stay in float32."
    for words, advice in _OF_LINES:
        if re.search(words, place.source):
            return advice or _OF_RANGE.get(place.primitive)
    return _OF_RANGE.get(place.primitive)


def _of_points(place: TracedNonfinite) -> str:
    if place.primitive in ("log", "sqrt", "rsqrt", "log1p", "pow") and place.least_input < 0:
        return _NEGATIVE.format(least=number(place.least_input, 3))
    for words, primitives, advice in _OF_POINTS:
        if re.search(words, place.source) and (not primitives or place.primitive in primitives):
            return advice
    return "Keep the operands away from values without a finite result."


def needs_scale(exam: Exam) -> bool:
    """Returns whether too much of the gradients is lost at the scale given, or without one."""
    compared = exam.comparison
    if exam.is_auto and exam.fits is not None and exam.fits < 1:
        return True
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
        if exam.fits and exam.fits < LOW:
            return "That is low: gradients shrink as a model learns, and become 0 at this scale."
        return "Gradients shrink as a model learns, and a loss scale costs next to nothing."
    if exam.fits and exam.fits < 1:
        policy = f"jaxscale.DynamicLossScale(init_scale={power(exam.fits)}, min_scale=2**-14)"
        return (
            "Below 1, a loss scale makes gradients smaller. Make the loss smaller instead, a mean "
            f"and not a sum, or allow such a scale: `jaxscale.loss_scaled(optimizer, {policy})`."
        )
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

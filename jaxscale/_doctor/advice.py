"""What to do about a line where numbers get lost.

Which lines help in float32 was tried (`remedy`). The rest is for what float32 cannot hold either.
This looks at the line as well as at the primitive, because a `div` may be the derivative of a
square root.
"""

import math
import re
from collections.abc import Sequence

from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import TracedNonfinite
from .exam import Exam
from .remedy import Remedy

_MASK = r"mask|-\s*1e\d|finfo"
_NEGATIVE = (
    "The operand is negative, {least}, as a difference of two large numbers may become. An epsilon "
    "does not help: compute the difference another way, a variance as `((x - x.mean())**2).mean()`."
)
# Words of the source line, and primitives: how to avoid points without a finite result. The first
# that is found counts.
_OF_POINTS = (
    (r"sqrt|norm|std\b|hypot", ("div", "mul", "sqrt", "rsqrt", "pow", "integer_pow"), "The "
     "derivative of a square root at 0 is inf. Keep 0 away from it: add 1e-6 in float32 inside of "
     "the root, or choose another operand with `jnp.where` before it."),
    (r"arc|acos|asin", (), "At 1 and -1 the derivative is inf. Clip to 0.999: float16 has no "
     "number between 0.9995 and 1."),
    (r"log\w*\(|entropy", ("log", "div", "log1p"), "The logarithm of 0 is -inf, and its derivative "
     "inf: compute it in float32, and add 1e-3 there, or `jnp.maximum(x, 1e-6)` before it."),
    (r"", ("div", "integer_pow", "rem"), "The divisor is 0: replace 0 with `jnp.where` "
     "before the division, and compute it in float32 if it may come near 0."),
    (r"", ("gather", "dynamic_slice", "scatter"), "An index is out of range: JAX fills in NaN. "
     "Look at the labels, tokens or positions."),
    (r"", ("exp", "exp2"), "Even float32 cannot hold this exponential: clip the exponent, or "
     "subtract the maximum first, as `jax.nn.softmax` does."),
)  # fmt: skip


def is_of_autocast(exam: Exam) -> bool:
    """Returns whether half precision is due to autocast, and not written by hand."""
    return bool(exam.autocast) and math.isfinite(exam.loss_as_written or 0.0)


def about_float32(exam: Exam) -> str:
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
        f"{'within ' + error if remedy.error else 'to the last bit'}. {about_float32(exam)}"
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
        return [*said, *(tried or [about_float32(exam)])]
    if place.cause == "range":
        if re.search(_MASK, place.source):
            return [*said, "For a mask, use -1e4 instead of -1e9 or `finfo.min`.", *tried]
        known = f"Compute this line in float32. {about_float32(exam)}"
    else:
        known = _of_points(place)
    return [*said, *(tried or [known])]


def _of_points(place: TracedNonfinite) -> str:
    if place.primitive in ("log", "sqrt", "rsqrt", "log1p", "pow") and place.least_input < 0:
        return _NEGATIVE.format(least=number(place.least_input, 3))
    for words, primitives, advice in _OF_POINTS:
        if re.search(words, place.source) and (not primitives or place.primitive in primitives):
            return advice
    return "Keep the operands away from values without a finite result."

"""What to do about a line where numbers get lost.

Which lines help in float32 was tried (`remedy`). The rest is for what float32 cannot hold either.
"""

import math
import re
from collections.abc import Sequence

from ..diagnostics._text import number, percent, power
from ..diagnostics._trace.report import TracedNonfinite
from .exam import Exam
from .remedy import Remedy

_MASK = r"mask|-\s*1e\d|finfo"
_INDEX = "An index is out of range: JAX fills in NaN. Look at the labels, tokens or positions."
_EXPONENTIAL = (
    "Even float32 cannot hold this exponential: clip the exponent, or subtract the maximum first, "
    "as `jax.nn.softmax` does."
)
# By the primitive, where that alone tells. A `div` may be the derivative of a square root.
_OF_POINTS: dict[str, str] = {
    **dict.fromkeys(("gather", "dynamic_slice", "scatter"), _INDEX),
    **dict.fromkeys(("exp", "exp2"), _EXPONENTIAL),
}
_OF_NEGATIVE = (
    "The operand is negative, {least}, as a difference of two large numbers may become. An epsilon "
    "does not help: compute the difference another way, a variance as `((x - x.mean())**2).mean()`."
)
_OF_OTHERS = (
    "Here the function or its derivative has no finite value, as a root, a logarithm or a division "
    "has none at 0. Keep the operand away: clip it, add 1e-3 to it in float32, or choose another "
    "with `jnp.where` before."
)


def is_of_autocast(exam: Exam) -> bool:
    """Returns whether half precision is due to autocast, and not written by hand."""
    return bool(exam.autocast) and math.isfinite(exam.loss_as_written or 0.0)


def say_how_to_widen(exam: Exam) -> str:
    """Returns how a line is computed in float32."""
    if is_of_autocast(exam):
        return (
            "Exempt it from autocast: call what this line calls, or a function of this line, "
            "through `jaxscale.full_precision`."
        )
    return "Cast what goes into it to float32, and its result back."


def join_lines(lines: Sequence[str], where: str, here: str) -> str:
    """Returns files and lines in words, with the word `here` for the one just named, `where`."""
    names = [here if line == where else line for line in lines]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def say_remedy(remedy: Remedy, exam: Exam, where: str) -> str:
    """Returns which lines in float32 make the gradients right, below the name of one of them."""
    which = join_lines(remedy.lines, where, "this line")
    error = percent(min(remedy.error, 1.0))
    if not remedy.works:
        still = f"off by {error}" if math.isfinite(remedy.error) else "not finite"
        return (
            f"With {which} in float32, as was tried, the gradients are still {still}: more lines "
            "need it."
        )
    return (
        f"Compute {which} in float32: that was tried, and the gradients then are those of float32 "
        f"{'within ' + error if remedy.error else 'to the last bit'}. {say_how_to_widen(exam)}"
    )


def advise_on_nonfinite(place: TracedNonfinite, exam: Exam) -> list[str]:
    """Returns how to keep an inf or a NaN from being made at a place, a sentence or two each."""
    fits, remedy = exam.fits, exam.against.remedy
    if place.scaled and fits and fits < exam.loss_scale:
        return [f"Loss scale {power(fits)} is the largest that does not overflow here."]
    said = ["Even a loss scale of 1 overflows here." if place.scaled else "No loss scale helps."]
    if place.cause == "given":
        return [*said, "Look where this number comes from."]
    if place.cause == "infinities":
        return [
            *said,
            "In a row that is masked as a whole, softmax is NaN. Mask with a number that "
            f"{place.dtype} holds, such as -1e4, and leave such rows out of the loss.",
        ]
    tried = [say_remedy(remedy, exam, place.where)] if remedy and remedy.works else []
    if is_of_autocast(exam):
        return [*said, *(tried or [say_how_to_widen(exam)])]
    if place.cause == "range":
        if re.search(_MASK, place.source):
            return [*said, "For a mask, use -1e4 instead of -1e9 or `finfo.min`.", *tried]
        return [*said, *(tried or [f"Compute this line in float32. {say_how_to_widen(exam)}"])]
    return [*said, *(tried or [_advise_on_point(place)])]


def _advise_on_point(place: TracedNonfinite) -> str:
    if place.primitive in ("log", "sqrt", "rsqrt", "log1p", "pow") and place.least_input < 0:
        return _OF_NEGATIVE.format(least=number(place.least_input, 3))
    return _OF_POINTS.get(place.primitive, _OF_OTHERS)

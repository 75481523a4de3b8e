"""Cures that are better than a cast to float32.

`CURES` is the table: what was found, and what to write. The rest of the file finds it.
"""

import math
import re

from ..diagnostics._text import number
from ..diagnostics._trace.report import TracedNonfinite
from . import origins
from .culprit import Culprit
from .exam import Exam
from .origins import Sum
from .wording import NOT_TRIED

_KEEP_AWAY = (
    "Here the function or its derivative has no finite value, as a root, a logarithm or a division "
    "has none at 0. Keep the operand away from such a point: "
)
CURES = {
    # What numbers were made by that become 0 or 1, before their logarithm is taken.
    origins.SOFTMAX: "These are probabilities, and then their logarithm is taken. Write "
    "`jax.nn.log_softmax(logits)` instead of `log(softmax(logits))`: {dtype} holds the logarithm "
    "of a small probability, but not the probability.",
    origins.SIGMOID: "These are probabilities, and then their logarithm is taken. Write "
    "`jax.nn.log_sigmoid(logits)` instead of `log(sigmoid(logits))`, and "
    "`jax.nn.log_sigmoid(-logits)` for the logarithm of 1 minus them.",
    origins.PRODUCT: "This is a product of many numbers. Add up their logarithms instead: {dtype} "
    "holds that sum, but not the product.",
    origins.EXPONENTIAL: "These are exponentials, and then their logarithm is taken. Compute with "
    "the exponents instead: the logarithm of `exp(x)` is `x`.",
    origins.LOG_OF_SUM: "This is the logarithm of a sum of exponentials. Write "
    "`jax.nn.logsumexp(x)` instead: it subtracts the maximum first.",
    # What a narrow format cannot hold.
    "mask": "For a mask, use -1e4 instead of -1e9 or `finfo.min`.",
    "exponential of a row": "Subtract the maximum of each row before the exponential, as "
    "`jax.nn.softmax` and `jax.nn.logsumexp` do: then no exponential is above 1.",
    # What is not finite in float32 either.
    "negative operand": "The operand is negative, {least}, as a difference of two large numbers "
    "may become. An epsilon does not help: compute the difference another way, a variance as "
    "`((x - x.mean())**2).mean()`.",
    "branch that is not taken": "The loss is finite, as a `jnp.where` takes none of these numbers. "
    "Its derivative is 0 times that of this operation, which is NaN. Put another `jnp.where` "
    "inside, around the operand: `jnp.where(ok, f(jnp.where(ok, x, 1.0)), y)` instead of "
    "`jnp.where(ok, f(x), y)`.",
    "index": "An index is out of range, where JAX fills in NaN. Check the labels, tokens or "
    "positions.",
    "exponential of a large number": "Even float32 cannot hold this exponential: clip the "
    "exponent, or subtract the maximum first, as `jax.nn.softmax` does.",
    "operand of any size": f"{_KEEP_AWAY}clip it, add 1e-3 to it in float32, or replace it with "
    "`jnp.where`.",
    # Most probabilities are far below 1e-3.
    "logarithm of a probability": f"{_KEEP_AWAY}clip it, or replace it with `jnp.where` first. "
    "Compute the logarithm of a probability from the logits, with `jax.nn.log_softmax` or "
    "`jax.nn.log_sigmoid`.",
    "operand from 0 to 1": f"{_KEEP_AWAY}clip it, or replace it with `jnp.where` first.",
}

_MASK = r"mask|-\s*1e\d|finfo"
_LARGEST_MASK = 1e4  # in magnitude: a larger one stands for -inf
# The operations that are known by what they are not finite at. Of others the primitive alone does
# not say more: a `div` may be the derivative of a square root.
_OF_NEGATIVE_OPERANDS = ("log", "sqrt", "rsqrt", "log1p", "pow")
_KNOWN_POINTS = {
    **dict.fromkeys(("gather", "dynamic_slice", "scatter"), "index"),
    **dict.fromkeys(("exp", "exp2"), "exponential of a large number"),
}


def say_cure_of_culprit(culprit: Culprit) -> list[str]:
    """Returns what to write instead of numbers that become 0 and whose logarithm is taken."""
    if not culprit.made_by:
        return []
    return _say(culprit.made_by, dtype=culprit.place.dtype)


def say_cure(place: TracedNonfinite, exam: Exam) -> list[str]:
    """Returns what to write instead of an operation, if something is better than a cast."""
    is_range = place.cause == "range"
    if not is_range and place.where in exam.untaken and math.isfinite(exam.trace.loss):
        return _say("branch that is not taken")
    if is_range and not exam.blames_autocast and _is_mask(place, exam):
        return _say("mask")
    if place.where in exam.unshifted:
        return _say("exponential of a row")
    total = exam.check.mean
    if is_range and total is not None and total.where == place.where:
        return [say_mean(total)]
    return []


def say_point(place: TracedNonfinite) -> list[str]:
    """Returns what to do about an operation that is not finite in float32 either."""
    found = "operand from 0 to 1"
    if place.primitive in _OF_NEGATIVE_OPERANDS and place.least_input < 0:
        found = "negative operand"
    elif place.primitive in _KNOWN_POINTS:
        found = _KNOWN_POINTS[place.primitive]
    elif place.least_input < 0 or place.largest_input > 1:
        found = "operand of any size"
    elif place.primitive == "log" or "log" in place.source:
        found = "logarithm of a probability"
    return _say(found, least=number(place.least_input, 3))


def _say(found: str, **words: str) -> list[str]:
    return [f"{CURES[found].format(**words)} {NOT_TRIED}"]


def _is_mask(place: TracedNonfinite, exam: Exam) -> bool:
    """Returns whether an operation makes -inf of a large negative number that stands for a mask."""
    if not re.search(_MASK, place.source):
        return False
    if place.least_input < -_LARGEST_MASK:
        return True
    for constant in exam.trace.constants:
        if constant.where == place.where and constant.became == -math.inf:
            return True
    return False


def say_mean(total: Sum, where: str = "") -> str:
    return (
        f"The loss is a sum over {total.size:,} numbers{where}. Take a mean instead, with "
        "`jnp.mean`: the loss and all gradients become smaller by that factor, and with gradients "
        "as small as that nothing overflows, as was tried."
    )

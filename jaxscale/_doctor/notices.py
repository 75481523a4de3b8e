"""Notices of the doctor: what is worth knowing, and no problem unless all gradients are 0."""

from collections.abc import Iterator

import jax.numpy as jnp

from ..diagnostics._text import number
from .exam import Exam
from .finding import Finding, make_finding
from .wording import list_names, say_error, say_rounded

# What share of a number half of the distance to its neighbour may be.
_SPACING = {"bfloat16": "0.2%", "float16": "0.02%"}
# A sum of so many equal numbers does not change if one more is added.
_MOST_SUMMANDS = {"bfloat16": 2**8, "float16": 2**11}


def find_incomparable(exam: Exam) -> Iterator[Finding]:
    """Notes gradients that could not be compared with float32."""
    names = exam.check.unstable
    if not names or exam.check.float32 is None:
        return
    title = f"Could not be compared with float32: {list_names(names)}."
    if exam.check.compares_nothing:
        title = "No gradient could be compared with float32."
    yield make_finding(
        title,
        "Rounding in float32 alone changes each of them about as much as narrower formats do.",
    )


def find_wrong_loss(exam: Exam) -> Iterator[Finding]:
    """Notes a loss that is far from that in float32, though the gradients are right."""
    if exam.check.right_loss is None or not exam.is_right:
        return
    yield make_finding(
        f"{_say_wrong_loss(exam.loss, exam.check.right_loss)}. Its gradients are right.",
        "A loss that is logged, compared or used to stop early is better computed in float32.",
    )


def _say_wrong_loss(loss: float, right_loss: float) -> str:
    """Returns how far a loss is from that in float32."""
    off = "far off"
    if right_loss:
        off = f"off by {say_error(abs(loss / right_loss - 1))}"
    return (
        f"The loss is {off}: {number(loss, 4)}, and {number(right_loss, 4)} in float32"
    )


def find_effect_of_autocast(exam: Exam) -> Iterator[Finding]:
    """Notes what autocast changes, unless the gradients are wrong."""
    if not exam.autocast:
        return
    if exam.halves_left:
        yield make_finding(*exam.halves_left)
    if exam.autocast not in exam.dtypes:
        yield make_finding(
            "`jaxscale.autocast` changes nothing: this model has no float32 matrix product or "
            "convolution to cast.",
        )
    elif exam.is_right and exam.check.error is not None:
        error = say_error(exam.check.error)
        title = (
            f"The gradients in {exam.autocast} are those in float32, off by {error}."
        )
        yield make_finding(title, *say_losses(exam))


def say_losses(exam: Exam) -> list[str]:
    """Returns what autocast makes of the loss, or how far it is from that in float32."""
    if exam.loss_as_written is None:
        if exam.check.right_loss is None:
            return []
        return [f"{_say_wrong_loss(exam.loss, exam.check.right_loss)}."]
    loss = number(exam.loss, 4)
    loss_as_written = number(exam.loss_as_written, 4)
    return [f"The loss is {loss} in {exam.autocast}, and as written {loss_as_written}."]


def find_constants(exam: Exam) -> Iterator[Finding]:
    """Notes numbers that a format rounds to 0, 1 or inf, on lines not yet named."""
    for constant in exam.constants:
        where = constant.line.where
        if exam.check.fault is not None and exam.check.fault.where == where:
            continue
        words = "It does no harm on this batch."
        if not exam.is_right:
            words = "Whether it does harm is not known."
        title = f"{say_rounded(constant)}, at {where}."
        yield make_finding(title, words, place=where)


def find_half_parameters(exam: Exam) -> Iterator[Finding]:
    """Notes parameters in half precision, which lose what an optimizer adds to them."""
    half = [name for name in exam.dtypes_of_parameters if name in _SPACING]
    for name in half:
        yield make_finding(
            f"Parameters are stored in {name}, and small updates of them are rounded away.",
            f"An update below {_SPACING[name]} of a parameter changes nothing, in each step anew. "
            "`jaxscale.master_weights(optimizer)` keeps the bits that are left out, and "
            "`jaxscale.stochastic_rounding(optimizer)` needs no bytes for it.",
        )


def find_long_sums(exam: Exam) -> Iterator[Finding]:
    """Notes half-precision gradients that are sums of so many numbers that they stop growing."""
    for leaf, dtype, count, where in exam.sums_of_gradients:
        most = _MOST_SUMMANDS[dtype]
        if count <= most:
            continue
        at = f", at {where}" if where else ""
        yield make_finding(
            f"The gradient of {leaf} is a sum of up to {count:,} numbers in {dtype}{at}.",
            f"From about {most:,} numbers of one size on such a sum stops growing. It has more "
            "numbers in a larger batch, so this one need not show what is lost. "
            f'`jaxscale.autocast(loss, "{dtype}")` adds them in float32 and rounds the sum once. '
            "Parameters in float32 have their gradients added in float32, too.",
            place=where,
        )


def find_zeros(exam: Exam) -> Iterator[Finding]:
    """Notes leaves whose gradient is 0 everywhere."""
    num_zero = len(exam.zero)
    num_leaves = len(exam.leaves.rows)
    if not num_zero or exam.nonfinite_outputs:
        return
    count = f"The gradient is exactly 0 everywhere in {num_zero} of {num_leaves} leaves"
    names = list_names(exam.zero)
    if exam.check.float32 is None:
        words = (
            "Either the loss does not depend on them, or they were flushed on the way."
        )
        yield make_finding(f"{count}: {names}.", words, is_problem=exam.is_all_zero)
    else:
        title = f"{count}, as in float32: {names}."
        words = "The loss does not depend on them."
        yield make_finding(title, words, is_problem=num_zero == num_leaves)


def find_half_draws(exam: Exam) -> Iterator[Finding]:
    """Notes random numbers in half precision, of which there are few."""
    for dtype, where in exam.half_draws:
        at = f", at {where}" if where else ""
        values = round(1 / float(jnp.finfo(dtype).eps))
        yield make_finding(
            f"Random numbers are drawn in {dtype}{at}.",
            f"Uniform ones have only {values:,} values there, so a small probability is rounded, "
            "and normal ones have no tails. Draw them in float32 and cast: "
            f"`jax.random.uniform(key, shape).astype(jnp.{dtype})`.",
            place=where,
        )


def find_gaps(exam: Exam) -> Iterator[Finding]:
    """Notes what was not looked at."""
    if exam.not_entered:
        yield make_finding(
            f"The doctor did not look inside {list_names(exam.not_entered)}.",
            "Each ran as one operation: its lines are not named, and its numbers not compared.",
        )
    if exam.is_quick:
        yield make_finding(
            "Gradients that are finite and wrong were not looked for.",
            "Without `--quick` the doctor also compares the gradients with those in float32.",
        )

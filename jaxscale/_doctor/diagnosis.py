"""The diagnosis: the results of an exam in plain sentences.

Here the doctor decides what is a problem and what is only worth knowing. A problem is

- inf or NaN in the loss, the auxiliary output or the gradients (`find_nonfinite`);
- gradients that are finite, but far from those in float32 (`find_wrong_gradients`);
- a loss scale that was asked for and loses too much of the gradients, or that must be below 1,
  where the default rule skips every step (`find_scale`);
- gradients that are all exactly 0 (`find_zeros`).

Each line of the model is named once: what follows from the first fault is listed under it.
"""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from ..diagnostics._text import number, power
from .exam import Exam
from .finding import Finding, make_finding
from .nonfinite import find_harmless_nonfinite, find_nonfinite
from .scales import (
    find_inward_growth,
    find_outliers,
    find_refusal,
    find_scale,
    needs_scale,
)
from .wording import list_names, say_rounded
from .wrong_gradients import (
    find_effect_of_autocast,
    find_incomparable,
    find_underflows,
    find_wrong_gradients,
    find_wrong_loss,
    find_zeros,
)

# What share of a number half of the distance to its neighbour may be.
_SPACING = {"bfloat16": "0.2%", "float16": "0.02%"}
# A sum of so many equal numbers does not change if one more is added.
_MOST_SUMMANDS = {"bfloat16": 2**8, "float16": 2**11}


def diagnose(exam: Exam) -> list[Finding]:
    """Returns all findings: the problems first."""
    named = _find_first_faults(exam)
    findings = [
        *find_nonfinite(exam),
        *find_wrong_gradients(exam),
        *find_wrong_loss(exam),
        *find_incomparable(exam),
        *find_effect_of_autocast(exam),
        *find_scale(exam),
        *find_inward_growth(exam),
        *find_outliers(exam),
        *_find_half_parameters(exam),
        *_find_long_sums(exam),
        *_find_half_draws(exam),
        *find_refusal(exam),
        *_find_constants(exam, named),
        *find_harmless_nonfinite(exam, named),
        *find_underflows(exam),
        *find_zeros(exam),
        *_find_gaps(exam),
    ]
    return sorted(findings, key=lambda finding: not finding.is_problem)


def say_verdict(exam: Exam, findings: Sequence[Finding]) -> str:
    num_problems = sum(finding.is_problem for finding in findings)
    if num_problems:
        return f"Problems found: {num_problems}."
    verdict = "Nothing is wrong"
    if exam.is_quick or exam.check.compares_nothing:
        verdict = "Nothing overflows"
    if exam.autocast:
        verdict += f" in {exam.autocast}"
    if exam.check.compares_nothing:
        verdict += ", and nothing could be compared with float32"
    if exam.check.right_loss is not None:
        verdict += " with the gradients, but the loss is far from that in float32"
    if needs_scale(exam) and exam.is_auto:
        verdict += ", with a loss scale: it needs one"
    return f"{verdict}."


def say_setting(exam: Exam) -> str:
    """Returns what the model computes in, and how it was examined."""
    computes = " and ".join(exam.dtypes)
    if exam.autocast:
        computes += ", by `jaxscale.autocast`"
    if not exam.is_auto:
        scale = f"at loss scale {power(exam.loss_scale)}, as given"
    elif exam.largest_scale is not None:
        scale = f"at loss scale {power(exam.loss_scale)}, the largest that does not overflow"
    else:
        scale = "without a loss scale"
    return (
        f"The loss is {number(exam.loss, 4)}. The model computes in {computes}. It was examined on "
        f"one batch {scale}."
    )


def _find_first_faults(exam: Exam) -> set[str]:
    """Returns the lines that a finding on inf, NaN or wrong gradients begins at."""
    lines = set()
    first = exam.trace.first_nonfinite
    if first is not None and first.reaches:
        lines.add(first.where)
    culprit = exam.check.culprit
    if culprit is not None:
        lines.add(culprit.place.where)
    return lines


def _find_constants(exam: Exam, named: set[str]) -> Iterator[Finding]:
    """Notes numbers that a format rounds to 0, 1 or inf, on lines not yet named."""
    for constant in exam.trace.constants:
        if constant.where in named:
            continue
        words = "It does no harm on this batch."
        if not exam.is_right:
            words = "Whether it does harm is not known."
        title = f"{say_rounded(constant)}, at {constant.where}."
        yield make_finding(title, words, place=constant.where)


def _find_half_parameters(exam: Exam) -> Iterator[Finding]:
    """Notes parameters in half precision, which lose what an optimizer adds to them."""
    half = [name for name in exam.dtypes_of_parameters if name in _SPACING]
    for name in half:
        yield make_finding(
            f"Parameters are stored in {name}, and small updates of them are rounded away.",
            f"An update below {_SPACING[name]} of a parameter changes nothing, in each step anew. "
            "`jaxscale.master_weights(optimizer)` keeps the bits that are left out, and "
            "`jaxscale.stochastic_rounding(optimizer)` needs no bytes for it.",
        )


def _find_long_sums(exam: Exam) -> Iterator[Finding]:
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


def _find_half_draws(exam: Exam) -> Iterator[Finding]:
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


def _find_gaps(exam: Exam) -> Iterator[Finding]:
    """Notes what was not looked at."""
    if exam.trace.not_entered:
        yield make_finding(
            f"The doctor did not look inside {list_names(exam.trace.not_entered)}.",
            "Each ran as one operation: its lines are not named, and its numbers not compared.",
        )
    if exam.is_quick:
        yield make_finding(
            "Gradients that are finite and wrong were not looked for.",
            "Without `--quick` the doctor also compares the gradients with those in float32.",
        )

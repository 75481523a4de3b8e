"""Findings on the loss scale: whether one is needed, which one fits, and how to start training.

A low scale is not a bad one: twice the loss has twice the gradients and half the scale. What counts
is how far the gradients stay below what float16 holds at that scale.
"""

from collections.abc import Iterator

from .._policies.dynamic import DynamicLossScale
from ..diagnostics._text import number, percent, power
from .exam import Exam
from .faults import Fault
from .finding import Finding, make_finding
from .gradients import Comparison
from .start import Start
from .wording import join_lines, say_error, say_mean

# a loss scale is needed if more than this share of the gradients is lost without it
_NEEDED = 0.01
_LOW = 2.0**10  # a largest loss scale below this is worth a word


def needs_scale(exam: Exam) -> bool:
    """Returns whether the judged scale loses too much of the gradients."""
    comparison = exam.comparison
    return (
        comparison is not None and max(comparison.flushed, comparison.error) > _NEEDED
    )


def find_scale(exam: Exam) -> Iterator[Finding]:
    """Notes whether a loss scale is needed, which one fits, and how to start training."""
    if not exam.has_narrow_range:
        details = [
            "`jaxscale.skip_nonfinite(optimizer)` keeps a bad batch from ruining the run."
        ]
        if "bfloat16" not in exam.dtypes:
            details.append(
                "If you train it under `jaxscale.autocast`, look again with `--autocast float16`."
            )
        yield make_finding(
            f"The model computes in {' and '.join(exam.dtypes)}, and needs no loss scale.",
            *details,
        )
        return
    start = exam.start
    if start is None or exam.is_all_zero:
        reason = "some gradient is not 0"
        if start is None:
            reason = "everything is finite"
        yield make_finding(
            f"The doctor can only say whether the model needs a loss scale once {reason}."
        )
    else:
        yield _find_start(exam, start)


def _find_start(exam: Exam, start: Start) -> Finding:
    """Notes which scale fits, whether a lower one would do, and how to start training."""
    title = _judge_largest_scale(exam, start)
    details = [*_say_how_to_start(exam, start), *_say_limit(exam)]
    place: Fault | str | None = None
    is_problem = False
    if start.skipped is None:
        # Where a scale of 1 was asked for, what it overflows is a problem already.
        is_problem = not exam.nonfinite_outputs
        place = exam.ceiling
        if exam.check.mean:
            at = exam.check.mean_at
            place = at or place
            details.insert(0, say_mean(exam.check.mean, f", at {at}" if at else ""))
    elif exam.comparison is not None:
        details = [title, *_judge_room(exam), *details]
        title = _judge_scale(exam, exam.comparison)
        is_problem = needs_scale(exam) and not exam.is_auto
    return make_finding(title, *details, is_problem=is_problem, place=place)


def find_inward_growth(exam: Exam) -> Iterator[Finding]:
    """Notes gradients that grow or shrink, so that `scale_backward` finds its scale later."""
    num_repeats, is_enough = exam.trial.repeats or (0, False)
    if not num_repeats or not exam.largest_scale:
        return
    times = {1: "once", 2: "twice"}.get(num_repeats, f"{num_repeats} times")
    if exam.trial.is_raised:
        yield make_finding(
            "Gradients shrink on their way through the loss, and `scale_backward` repeats the "
            f"backward pass of this batch {times}.",
            "A loop that divides inside, such as a `jax.lax.scan` over micro-batches, does that: "
            "wrap the loss inside the loop in `scale_backward`, and the first pass is enough.",
        )
        return
    if not is_enough:
        times += ", which is not enough"
    # Room for batches with larger gradients, which would repeat it again.
    scale = power(exam.largest_scale / 4)
    yield make_finding(
        "Gradients grow on their way through the model, and `scale_backward` repeats the backward "
        f"pass of this batch {times}.",
        "It begins where the gradients that enter half precision sum to about 2**15, the largest "
        "being at most about 2**10. "
        "Where a trainer owns the step, write "
        f"`jaxscale.scale_backward(loss_fn, scale={scale})`. In a step of your own "
        "`jaxscale.loss_scaled` finds such a scale by itself.",
        place=exam.ceiling,
    )


def find_outliers(exam: Exam) -> Iterator[Finding]:
    """Notes a few cotangents that are so large that all others flush beside them."""
    trial = exam.trial
    if not (trial.is_divided or trial.is_lost):
        return
    effect = "makes three backward passes of this batch"
    if trial.is_lost:
        effect = "returns NaN for this batch, as there would be nothing but zeros"
    yield make_finding(
        "Some cotangents are so much larger than the others that these flush beside them: "
        f"`scale_backward` {effect}.",
        "Look for a division by almost 0, such as by the norm of a row of padding: mask such rows, "
        "or add a larger number to the divisor.",
    )


def find_refusal(exam: Exam) -> Iterator[Finding]:
    """Notes what `scale_backward` raised when it was tried."""
    raised = exam.trial.scale_backward_raised
    if raised:
        yield make_finding(
            f"`jaxscale.scale_backward` was tried on this loss, and raised {raised}",
            "It matters only if you use `scale_backward`. All other findings are made without it.",
        )


def _judge_scale(exam: Exam, comparison: Comparison) -> str:
    """Returns whether the judged scale is high enough, and what the gradients lose there."""
    losses = "the gradients are the same to the last bit"
    if comparison.error:
        losses = f"{percent(comparison.flushed)} of the nonzero gradients become 0"
        if 0 < comparison.flushed < comparison.worst_flushed:
            losses += f" ({percent(comparison.worst_flushed)} in {comparison.worst})"
        losses += f", and together they are off by {say_error(comparison.error)}"
    is_needed = needs_scale(exam)
    if exam.shown_scale == 1:
        verdict = "This batch needs no loss scale"
        if is_needed:
            verdict = "It needs a loss scale"
        return f"{verdict}: without one {losses}."
    verdict = "is high enough"
    if is_needed:
        verdict = "is too low"
    return f"Loss scale {power(exam.shown_scale)} {verdict}: there {losses}."


def _judge_largest_scale(exam: Exam, start: Start) -> str:
    largest = power(exam.largest_scale or 0.0)
    if exam.calibration is None or exam.calibration.overflows_at is None:
        return f"On this batch no loss scale up to {largest}, the largest tried, overflows."
    words = f"The largest loss scale that does not overflow on this batch is {largest}"
    if start.skipped is None:
        return f"{words}: the default rule, which never goes below 1, will skip every step."
    return f"{words}."


def _judge_room(exam: Exam) -> list[str]:
    """Returns whether the gradients may still shrink below what the largest scale keeps."""
    largest = exam.largest_scale or 1.0
    if exam.is_limited and largest < _LOW:
        return [
            "That is low: gradients shrink as a model learns, and what limits the scale is far "
            f"larger than they are: at {power(largest)} they only go up to "
            f"{number(largest * exam.largest, 3)}."
        ]
    if largest < _LOW:
        return [
            "That is not low for gradients as large as these, up to "
            f"{number(exam.largest, 3)}, such as those of a sum: at that scale they "
            "nearly fill the range of float16."
        ]
    if needs_scale(exam):
        return []
    return [
        "Gradients shrink as a model learns, and a loss scale costs next to nothing."
    ]


def _say_how_to_start(exam: Exam, start: Start) -> list[str]:
    if start.skipped is None:
        return [
            f"Make the loss smaller, by a factor of {power(1 / (exam.largest_scale or 1.0))} or "
            f"more, or write `{start.code}`: below 1 a loss scale makes gradients smaller."
        ]
    if start.skipped:
        return [
            f"From {power(DynamicLossScale().init_scale)}, the default rule skips the first steps, "
            f"{start.skipped} in all: write `{start.code}`, or use `retries={start.retries}`."
        ]
    if needs_scale(exam):
        return [f"`{start.code}` finds a good one by itself."]
    return []


def _say_limit(exam: Exam) -> list[str]:
    """Returns where a higher loss scale overflows, and which lines in float32 would let it fit."""
    place = exam.ceiling
    if place is None:
        return []
    what = place.where or "no line of the model"
    if place.layer:
        what += f", in {place.layer}"
    scale = ""
    if exam.calibration is not None:
        scale = power(exam.calibration.overflows_at or 0.0)
    operation = f"`{place.operation}`" if place.operation else "the backward pass"
    limit = f"What limits it is {what}: at {scale} {operation} overflows there."
    if exam.relief is None:
        return [
            f"{limit} If the loss scale falls in training, look at that line first."
        ]
    which = join_lines(exam.relief.lines, place.where, "that line")
    higher = power(exam.relief.loss_scale)
    return [f"{limit} With {which} in float32, {higher} fits, as was tried."]

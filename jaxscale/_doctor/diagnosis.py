"""The diagnosis: the results of an exam in plain sentences.

Here the doctor decides what is a problem and what is only worth knowing. A problem is

- inf or NaN in the loss, the auxiliary output or the gradients (`_find_nonfinite`);
- gradients that are finite, but far from those in float32 (`_find_wrong_gradients`);
- a loss scale that was asked for and loses too much of the gradients, or that must be below 1,
  where the default rule skips every step (`find_scale`);
- gradients that are all exactly 0 (`find_zeros`).
"""

import math
from collections.abc import Iterator, Sequence

from ..diagnostics._switches.search import STABLE
from ..diagnostics._text import number, percent, power
from .cures import CURES
from .exam import Exam
from .faults import Fault
from .finding import Finding, make_finding
from .notices import (
    find_constants,
    find_effect_of_autocast,
    find_gaps,
    find_half_draws,
    find_half_parameters,
    find_incomparable,
    find_long_sums,
    find_wrong_loss,
    find_zeros,
    say_losses,
)
from .scales import (
    find_inward_growth,
    find_outliers,
    find_refusal,
    find_scale,
    needs_scale,
)
from .wording import (
    join_lines,
    list_names,
    name_operation,
    say_error,
    say_mean,
    say_rounded,
)

_MANTISSA_BITS = {"float16": 10, "bfloat16": 7}

# What an operation does to its numbers, by what was measured.
_WORDS = {
    "range": "gives inf or NaN in {bad} of its numbers: {dtype} cannot hold these numbers, but "
    "float32 could. Its operands are between {least} and {most}; float32 gives numbers up to "
    "{largest}.",
    "infinite": "turns numbers that {dtype} cannot hold into inf. That becomes finite again before "
    "it reaches the loss, as 1/inf is 0.",
    "flushed": "flushes {flushed} of its nonzero numbers to 0{help}.",
    "saturated": "rounds {saturated} of its numbers to 1 or -1, which float32 tells from them.",
    "rounded": "rounds: its numbers are as large as {largest}, where {dtype} only holds multiples "
    "of {spacing}.",
    "other": "gives other numbers than in float32.",
    "value": "gives inf or NaN in {bad} of its numbers. In float32 the same operands give inf or "
    "NaN as well. They are between {least} and {most}.",
    "infinities": "gives NaN in {bad} of its numbers, from infinities: one minus another, or 0 "
    "times one.",
}


def diagnose(exam: Exam) -> list[Finding]:
    """Returns all findings: the problems first."""
    findings = [
        *_find_nonfinite(exam),
        *_find_wrong_gradients(exam),
        *find_wrong_loss(exam),
        *find_incomparable(exam),
        *find_effect_of_autocast(exam),
        *find_scale(exam),
        *find_inward_growth(exam),
        *find_outliers(exam),
        *find_half_parameters(exam),
        *find_long_sums(exam),
        *find_half_draws(exam),
        *find_refusal(exam),
        *find_constants(exam),
        *find_zeros(exam),
        *find_gaps(exam),
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


# Inf and NaN.


def _find_nonfinite(exam: Exam) -> Iterator[Finding]:
    """Notes inf and NaN in the loss, the auxiliary output or the gradients."""
    fault = exam.check.fault
    if exam.nonfinite_arguments:
        yield _find_in_arguments(exam)
    elif exam.nonfinite_outputs and fault is None:
        words = "no line explains why"
        details = _list_worst_leaves(exam)
        is_seen = any(not name.startswith("aux") for name in exam.nonfinite_outputs)
        if exam.check.is_finite_in_float32 is False and is_seen:
            words = "it was there before, in a constant or an input"
            details.insert(0, "Find out where this number comes from.")
        title = f"{_say_outputs(exam)}, and {words}."
        yield make_finding(title, *details, is_problem=True)
    elif exam.nonfinite_outputs and fault is not None:
        title = f"{_say_outputs(exam)}. It begins at {_name_line(fault)}."
        if fault.kind == "compiled":
            title = (
                "Compiled as one program, the model gives gradients with inf or NaN. With each "
                "operation rounded by itself, it does not."
            )
        details = _explain(fault, exam) + _advise_on_nonfinite(fault, exam)
        details += _list_worst_leaves(exam)
        yield make_finding(title, *details, is_problem=True, place=fault)


def _find_in_arguments(exam: Exam) -> Finding:
    names = list_names(exam.nonfinite_arguments)
    if not exam.nonfinite_outputs:
        title = (
            f"There is inf or NaN in {names}, but none in the loss or the gradients."
        )
        return make_finding(title)
    title = f"There is inf or NaN in {names}, before anything is computed."
    return make_finding(
        title,
        f"{_say_outputs(exam)}.",
        "Find out where these numbers come from.",
        *_list_worst_leaves(exam),
        is_problem=True,
    )


def _say_outputs(exam: Exam) -> str:
    """Returns which of the loss, the auxiliary output and the gradients are not finite."""
    names = exam.nonfinite_outputs
    num_grads = sum(name.startswith("grads") for name in names)
    share = f"inf or NaN is in {num_grads} of {len(exam.leaves.rows)} gradients"
    if "loss" in names:
        loss = f"The loss is {number(exam.loss)}"
        if not num_grads:
            return loss
        return f"{loss}, and {share}"
    if not num_grads:
        others = [name for name in names if name.startswith("aux")]
        return f"The loss and the gradients are finite, but {list_names(others)} is not"
    scale = f"at loss scale {power(exam.loss_scale)}"
    if exam.loss_scale == 1:
        scale = "even without a loss scale"
    return f"The loss is finite, {number(exam.loss, 4)}, but {share}, {scale}"


def _list_worst_leaves(exam: Exam) -> list[str]:
    names = [row.path for row in exam.leaves.nonfinite_rows]
    if not names:
        return []
    return [f"Gradients with inf or NaN, worst first: {list_names(names)}."]


def _advise_on_nonfinite(fault: Fault, exam: Exam) -> list[str]:
    largest = exam.largest_scale
    if largest and largest < exam.loss_scale:
        return [
            f"Loss scale {power(largest)} is the largest that does not overflow here."
        ]
    if fault.kind == "compiled":
        return _advise(fault, exam)
    helpless = "No loss scale helps."
    if fault.direction == "backward":
        helpless = "Even a loss scale of 1 overflows here."
    if fault.kind != "in float32":
        return [helpless, *_advise(fault, exam)]
    if not fault.cure:
        return [
            helpless,
            "With 0 in the place of what is not finite, more lines are not.",
        ]
    return [
        helpless,
        _say_cure(fault),
        "With 0 in the place of inf and NaN at this line, loss and gradients are finite: that was "
        "tried.",
    ]


# Gradients that are finite and wrong.


def _find_wrong_gradients(exam: Exam) -> Iterator[Finding]:
    """Notes gradients that are finite, but far from those in float32."""
    check = exam.check
    if not check.wrong or check.float32 is None or exam.nonfinite_outputs:
        return
    title = _say_wrong_gradients(exam)
    of_leaves = [f"Wrong gradients, worst first: {list_names(check.wrong)}."]
    of_leaves += say_losses(exam)
    fault = check.fault
    if fault is None:
        no_line = "No single line accounts for it."
        yield make_finding(title, no_line, *of_leaves, is_problem=True)
        return
    if fault.kind != "compiled":
        title = f"{title} It begins at {_name_line(fault)}."
    details = [*_explain(fault, exam), *_advise(fault, exam), *of_leaves]
    yield make_finding(title, *details, is_problem=True, place=fault)


def _say_wrong_gradients(exam: Exam) -> str:
    """Returns how many gradients are wrong, and how far the worst one is off."""
    wrong = exam.check.wrong
    comparison = exam.check.float32
    leaves = comparison.leaves if comparison else ()
    worst = next(leaf for leaf in leaves if leaf.path == wrong[0])
    count = f"{len(wrong)} of {len(exam.leaves.rows)}"
    scale = ""
    if exam.largest_scale:
        scale = f" at loss scale {power(exam.largest_scale)}, the largest that fits"
    off = f"off by {say_error(worst.error)}, compared with float32"
    if worst.flushed == 1:
        off = "flushed to 0"
    return f"Everything is finite, but {count} gradients are wrong{scale}: {worst.path} is {off}."


# What happens at a line, and what helps.


def _name_line(fault: Fault) -> str:
    return fault.where or "no line of the model"


def _explain(fault: Fault, exam: Exam) -> list[str]:
    """Returns what a line does to its numbers."""
    if fault.kind == "compiled":
        return [
            f"It begins at {_name_line(fault)}, and only in the compiled program. XLA rewrites "
            "operations there: a sum of n equal numbers as n times the number, or a division as a "
            "product."
        ]
    words = [
        f"{say_rounded(constant)}."
        for constant in exam.constants
        if constant.line.where == fault.where
    ]
    numbers = fault.numbers
    kind = _find_words(fault)
    exponent = math.frexp(numbers.largest)[1] - 1
    spacing = 2.0 ** (exponent - _MANTISSA_BITS.get(fault.dtype, 10))
    said = _WORDS[kind].format(
        dtype=fault.dtype,
        bad=percent(numbers.bad / max(numbers.total, 1)),
        flushed=percent(numbers.flushed / max(numbers.nonzero, 1)),
        saturated=percent(numbers.saturated / max(numbers.below_one, 1)),
        least=number(numbers.least_input, 3),
        most=number(numbers.largest_input, 3),
        largest=number(numbers.largest, 4),
        spacing=number(spacing, 3),
        help=", and no loss scale helps" if fault.direction == "forward" else "",
    )
    if not (words and kind == "other"):
        words.append(f"{name_operation(fault.operation, fault.direction)} {said}")
    rule = exam.backward_rules.get(fault.where)
    if rule is not None and fault.direction == "backward":
        # The lines of a rule itself are known, unless a library wrote it or it was traced before.
        words.append(
            f"This line calls a function with a backward rule of its own, `{rule}`: the fault may "
            "be there."
        )
    return words


def _find_words(fault: Fault) -> str:
    """Returns which words fit what was measured."""
    numbers = fault.numbers
    if fault.kind == "in float32":
        return "infinities" if numbers.given else "value"
    if numbers.bad and numbers.bad == numbers.bad_in_float32:
        return "value"
    if numbers.bad > numbers.bad_in_float32:
        return "range" if fault.kind == "nonfinite" else "infinite"
    if fault.limit == "underflow" and numbers.flushed:
        return "flushed"
    if fault.limit == "rounding" and fault.kind == "nonfinite" and numbers.saturated:
        return "saturated"
    if fault.limit == "rounding" and numbers.largest:
        return "rounded"
    return "other"


def _advise(fault: Fault, exam: Exam) -> list[str]:
    """Returns what to write instead of a line, and which lines help in float32."""
    cures = []
    if fault.cure:
        cures.append(f"{_say_cure(fault)} What that comes to was tried.")
    elif exam.check.mean and exam.check.mean_at == fault.where:
        cures.append(say_mean(exam.check.mean, ""))
    cures.append(_say_remedy(fault, exam, is_first=not cures))
    if fault.bfloat16:
        cures.append(
            "In bfloat16, with its sums, the gradients are right: that was tried."
        )
    return cures


def _say_cure(fault: Fault) -> str:
    least = number(fault.numbers.least_input, 3)
    return CURES[fault.cure].format(dtype=fault.dtype, least=least)


def _say_remedy(fault: Fault, exam: Exam, *, is_first: bool) -> str:
    """Returns which lines in float32 make the gradients right.

    It is the `is_first` advice, or comes after another.
    """
    which = join_lines(fault.lines, fault.where, "this line")
    if not fault.works:
        return f"With {which} in float32, the gradients are still wrong: more lines need it."
    result = "are those of float32 to the last bit"
    if fault.error is None:
        result = (
            "are finite. More is not known, as nothing could be compared: rounding in float32 "
            f"alone changes each of them by more than {STABLE:.0%}"
        )
    elif fault.error:
        result = f"differ from those of float32 by {percent(fault.error)}"
    verb = "Or compute"
    if is_first:
        verb = "Compute"
    how = "Cast what goes into it to float32, and leave its result in float32."
    if exam.blames_autocast:
        how = (
            "Exempt it from autocast: call what this line calls, or a function of this line, "
            "through `jaxscale.full_precision`."
        )
    return f"{verb} {which} in float32: that was tried, and the gradients then {result}. {how}"

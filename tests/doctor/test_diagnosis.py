"""What the doctor says of small models: what is wrong, and at which line."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from tables import cases

pytestmark = pytest.mark.standard_promotion

SOURCE = (pathlib.Path(__file__).parent / "doctored.py").read_text().splitlines()
NO_PICTURE = (
    "jaxscale doctor: The report will have no picture: it needs matplotlib, which is not "
    "installed: pip install matplotlib\n"
)


def line_of(comment):
    """Returns the place of the line of `doctored.py` with a comment."""
    (number,) = [i for i, text in enumerate(SOURCE, 1) if text.endswith(f"# {comment}")]
    return f"doctored.py:{number}"


class Case(NamedTuple):
    """What the doctor says of a model."""

    status: int
    says: Sequence[str]
    never: Sequence[str] = ()
    options: Sequence[str] = ()


# The first word of a name is the model in `doctored.py`.
HEALTHY = {
    "fine": Case(
        0,
        ["Nothing is wrong.", "the largest that does not overflow"],
    ),
    "pair": Case(0, ["Nothing is wrong."]),
    "number": Case(0, ["Nothing is wrong."]),
    "odd": Case(
        0,
        ["Nothing is wrong.", "1 of 2 leaves, as in float32: unused"],
    ),
    "in_a_pair": Case(
        0,
        [
            "Nothing is wrong.",
            "exactly 0 everywhere in 1 of 3 leaves, as in float32: 1/0",
        ],
    ),
    "mapped": Case(
        0,
        ["Nothing is wrong."],
        never=["did not look inside"],
    ),
    "sure": Case(
        0,
        [
            "Nothing is wrong.",
            "Could not be compared with float32: logits.",
        ],
    ),
    "cancels": Case(0, ["Nothing is wrong."]),
    "masked": Case(
        0,
        [
            "Nothing is wrong.",
            "inf or NaN in batch, but none in the loss or the gradients",
        ],
    ),
    "harmless": Case(
        0,
        [
            "Nothing is wrong.",
            "1e-09 is 0 in float16, at doctored.py",
            "It does no harm on this batch.",
        ],
    ),
}

NONFINITE = {
    "overflow": Case(
        1,
        [
            f"It begins at {line_of('the line')}",
            "y = y * by * by",
            "The loss is inf",
        ],
        never=["needs no", "lower"],
    ),
    "fine at 2**20": Case(
        1,
        [
            "inf or NaN is in 1 of 2 gradients, at loss scale 2**20",
            "Loss scale 2**16 is the largest",
            "worst first: w.",
        ],
        never=["even", "Even"],
        options=["--loss-scale", str(2**20)],
    ),
    "no_scale_fits": Case(
        1,
        ["The loss is finite, 0, but", "even without a loss scale"],
    ),
    "epsilon": Case(
        1,
        [
            f"It begins at {line_of('divides')}",
            "1e-09 is 0 in float16.",
            "Compute this line in float32: that was tried",
        ],
    ),
    "given": Case(
        1,
        [
            "The loss is NaN",
            "it was there before, in a constant or an input",
            "Find out where this number comes from.",
            "70000 is inf in float16",
            "Whether it does harm is not known",
        ],
    ),
    "bad_batch": Case(
        1,
        [
            "inf or NaN in batch['x'], before anything is computed",
            "The loss is NaN",
        ],
        never=["nan"],
    ),
    "bad_pair": Case(
        1,
        ["The loss and the gradients are finite, but aux['ratio'] is not"],
    ),
    "best": Case(
        1,
        [
            "The loss and the gradients are finite, but aux['best'] is not, and no line explains "
            "why."
        ],
    ),
    "rewritten": Case(
        1,
        [
            "Compiled as one program, the model gives gradients with inf or NaN.",
            f"It begins at {line_of('the division')}, and only in the compiled program.",
            "Compute this line in float32: that was tried",
        ],
    ),
    "equal_numbers": Case(
        1,
        [
            f"It begins at {line_of('the sum of its gradient')}.",
            "`reduce_sum`, in the backward pass, gives inf or NaN in 100% of its numbers",
            "that was tried, and the gradients then are those of float32 to the last bit",
        ],
    ),
    "noise_after_overflow": Case(
        1,
        [
            f"It begins at {line_of('overflows')}",
            "the gradients then are finite. More is not known, as nothing could be compared",
        ],
        never=["to the last bit"],
    ),
    "summand": Case(
        1,
        [
            f"It begins at {line_of('both')}",
            "Compute this line in float32: that was tried",
        ],
        never=["Take a mean"],
    ),
    "minimum": Case(
        1,
        [
            f"It begins at {line_of('the minimum')}",
            "0.9999 is 1 in float16",
            "in float32: that was tried",
        ],
        never=["become 0", "log_softmax"],
    ),
    "clip": Case(
        1,
        [
            f"It begins at {line_of('the clip')}",
            "of its numbers to 1 or -1",
            "in float32: that was tried",
        ],
        never=["become 0", "log_softmax"],
    ),
}

WRONG = {
    "underflow": Case(
        1,
        [
            "1 of 2 gradients are wrong",
            f": w is flushed to 0. It begins at {line_of('the line')}",
        ],
        never=["nan"],
    ),
    "repeated": Case(
        1,
        [
            "w is flushed to 0.",
            f"It begins at {line_of('the line')}",
        ],
        never=["No single"],
    ),
    "spread": Case(
        1,
        [
            "w is flushed to 0.",
            "Compute this line, doctored.py:",
            " in float32: that was tried",
        ],
        never=["No single"],
    ),
    "mostly_one": Case(
        1,
        [
            f"It begins at {line_of('the worst')}",
            "Compute this line, doctored.py:",
            " in float32: that was tried",
        ],
        never=["No single"],
    ),
    "inverted": Case(
        1,
        [
            "w is flushed to 0.",
            f"It begins at {line_of('the division')}, and only in the compiled program.",
            "Compute this line in float32: that was tried",
        ],
        never=["No single"],
    ),
    "index_of_floats": Case(
        1,
        [
            f"It begins at {line_of('the index')}",
            "where float16 only holds multiples of 2",
        ],
    ),
    "shifted": Case(
        1,
        [f"It begins at {line_of('the exponential')}", "in float32: that was tried"],
        never=["Subtract the maximum"],
    ),
    "coupled": Case(
        1,
        [f"It begins at {line_of('the scale')}", "in float32: that was tried"],
        never=["logsumexp", "the logarithm of `exp(x)`"],
    ),
    "offset": Case(
        0,
        [
            "Nothing is wrong with the gradients, but the loss is far from that in float32.",
            "The loss is off by 11.2%: ",
        ],
        never=["Nothing is wrong."],
    ),
    "noise": Case(
        0,
        [
            "Nothing overflows, and nothing could be compared with float32.",
            "No gradient could be compared with float32.",
        ],
        never=["Nothing is wrong"],
    ),
    "cancelled": Case(
        1,
        [
            f"It begins at {line_of('the sum')}",
            "`reduce_sum`, in the forward pass, gives other numbers than in float32.",
        ],
    ),
    "disconnected": Case(1, ["exactly 0 everywhere in 2 of 2 leaves"]),
}

SCALES = {
    "tiny": Case(
        0,
        [
            "Nothing is wrong, with a loss scale: it needs one.",
            "without one 100% of the nonzero",
        ],
    ),
    "tiny at 1": Case(
        1,
        ["It needs a loss scale: without one 100%"],
        options=["--loss-scale", "1"],
    ),
    "tiny at 2**20": Case(
        0,
        ["Loss scale 2**20 is high enough", "to the last bit"],
        options=["--loss-scale", str(2**20)],
    ),
    "uneven at 8": Case(
        1,
        [
            "Loss scale 2**3 is too low: there 50.0% of the nonzero gradients become 0 (100% in w)",
        ],
        options=["--loss-scale", "8"],
    ),
    "on_the_way": Case(
        0,
        ["it needs one", "without one 100% of the nonzero gradients become 0"],
    ),
    "summed": Case(
        0,
        [
            "This batch needs no loss scale",
            "is not low for gradients as large as these, up to 768",
            "From 2**15, the default rule skips the first steps, 8 in all: write",
            "(init_scale=2**7))`, or use `retries=10` or",
        ],
        never=["low:", "shrink", "costs next to nothing"],
    ),
    "below": Case(
        1,
        [
            "! The largest loss scale that does not overflow on this batch is 2**-4: the default "
            "rule, which never goes below 1, will skip every step.",
            "Make the loss smaller, by a factor of 2**4 or more, or write",
            "jaxscale.DynamicLossScale(init_scale=2**-4, min_scale=2**-14)",
        ],
    ),
    "below at 1": Case(
        1,
        [
            "even without a loss scale",
            "2**-4 is the largest",
            "min_scale=2**-14",
        ],
        options=["--loss-scale", "1"],
    ),
    "confident": Case(
        0,
        [
            "Nothing is wrong.",
            f"What limits it is {line_of('the ceiling')}",
            "overflows there. With that line",
            "fits, as was tried.",
            "That is low: gradients shrink",
        ],
        never=["costs next to nothing"],
    ),
    "inward": Case(
        0,
        [
            "repeats the backward pass of this batch once.",
            "jaxscale.scale_backward(loss_fn, scale=2**6)",
            "# the line",
        ],
        never=["not enough"],
    ),
    "shrinking": Case(
        0,
        [
            "All gradients shrink on their way through the loss, and `scale_backward` repeats the "
            "backward pass of this batch once.",
            "wrap the loss inside the loop",
        ],
        never=["Gradients grow"],
    ),
    "outlying": Case(
        0,
        [
            "so much larger than the others that these flush beside them: `scale_backward` makes "
            "three backward passes of this batch.",
            "a division by almost 0",
        ],
        never=["repeats the backward pass", "NaN"],
    ),
    "far_inward": Case(
        0,
        [
            "twice, which is not enough.",
            "jaxscale.scale_backward(loss_fn, scale=2**10)",
        ],
    ),
    "wide": Case(
        0,
        [
            "Nothing is wrong.",
            "computes in float32. It was examined on one batch without a loss scale.",
            "float32, and needs no loss scale",
            "`--autocast float16`",
        ],
        never=["float16"],
    ),
}

IN_FLOAT16 = ["--autocast", "float16"]
AUTOCAST = {
    "dense in float16": Case(
        0,
        [
            "Nothing is wrong in float16, with a loss scale: it needs one.",
            "without one 100% of the nonzero",
            "float16 and float32, by `jaxscale.autocast`",
            "The gradients in float16 are those in float32, off by",
        ],
        never=["changes nothing"],
        options=IN_FLOAT16,
    ),
    "dense in bfloat16": Case(
        0,
        ["Nothing is wrong in bfloat16.", "bfloat16 and float32, by", "needs no loss"],
        never=["If you train it under"],
        options=["--autocast", "bfloat16"],
    ),
    "scores in float16": Case(
        1,
        [
            f"It begins at {line_of('more than float16 holds')}",
            "float16 cannot hold these numbers, but float32 could",
            "or a function of this line, through `jaxscale.full_precision`",
        ],
        never=["preferred_element_type"],
        options=IN_FLOAT16,
    ),
    "rounded in float16": Case(
        1,
        [
            "1 of 1 gradients are wrong at loss scale 2**13",
            "w is off by 60.0%, compared with float32",
            f"It begins at {line_of('float16 holds every fourth number near it')}",
            "as large as 4098, where float16 only holds multiples of 4",
            "Compute this line in float32: that was tried, and the gradients then",
            "The loss is 16 in float16, and as written 6.25.",
        ],
        never=["become 0"],
        options=IN_FLOAT16,
    ),
    "wide in float16": Case(
        0,
        ["`jaxscale.autocast` changes nothing"],
        never=["off by"],
        options=IN_FLOAT16,
    ),
}

LONG_SUMS = {
    "embedded": Case(
        0,
        [
            "The gradient of table is a sum of up to 300 numbers in bfloat16",
            f"in bfloat16, at {line_of('each token adds to the gradient')}.",
            "adds them in float32",
        ],
    ),
    "embedded in bfloat16": Case(
        0,
        ["Nothing is wrong"],
        never=["is a sum of"],
        options=["--autocast", "bfloat16"],
    ),
    "in_a_loop": Case(
        1,  # it has stopped growing
        [
            "The gradient of w is a sum of up to 300 numbers in bfloat16",
            f"in bfloat16, at {line_of('each turn adds to the gradient')}.",
        ],
    ),
    "noisy": Case(
        0,
        [
            "Nothing is wrong",
            f"Random numbers are drawn in bfloat16, at {line_of('the noise')}.",
            "only 128 values",
        ],
        never=["drawn in float32"],
    ),
    "module": Case(
        1,
        [
            "inf or NaN is in 2 of 2 gradients",
            f"begins at {line_of('the root')}",
        ],
    ),
    "in_a_short_loop": Case(0, ["Nothing is wrong"], never=["is a sum of"]),
}

QUICK = {
    "tiny": Case(0, ["Nothing overflows, with a loss scale: it needs one."]),
    "confident": Case(
        0,
        [
            "is 2**9.",
            f"What limits it is {line_of('the ceiling')}",
            "skips the first steps, 6 in all",
        ],
    ),
    "below": Case(1, ["What limits it is doctored.py:"]),
    "overflow": Case(
        1,
        [
            f"It begins at {line_of('the line')}",
            "float16 cannot hold these numbers",
        ],
    ),
    "bad_pair": Case(
        1, ["The loss and the gradients are finite, but aux['ratio'] is not"]
    ),
    "disconnected": Case(1, ["exactly 0 everywhere in 2 of 2 leaves"]),
}

CASES = HEALTHY | NONFINITE | WRONG | SCALES | AUTOCAST | LONG_SUMS


# By the exit status, what is said and what is not.
VERDICTS = [("Nothing ", "Problems"), ("Problems found: 1.", "Nothing")]


def assert_said(answer, case):
    assert answer.status == case.status
    said, unsaid = VERDICTS[case.status]
    for words in (said, *case.says):
        assert words in answer.flowing
    others = answer.flowing.replace("look again with `--autocast float16`", "")
    for words in (unsaid, *case.never):
        assert words not in others
    # Problems come first.
    lines = answer.out.splitlines()
    marks = [line[0] for line in lines if line.startswith(("! ", "- "))]
    assert marks == sorted(marks)
    assert marks.count("!") == case.status


@pytest.mark.worlds
@cases("name", CASES, fast=["uneven at 8", "number"])
def test_it_says_what_is_wrong_and_where(name, doctor, no_pictures):
    case = CASES[name]
    answer = doctor(f"doctored:{name.split()[0]}", *case.options)
    assert_said(answer, case)
    assert answer.err == NO_PICTURE
    assert "The report is in jaxscale-doctor.html." in answer.out
    assert pathlib.Path("jaxscale-doctor.html").stat().st_size


@cases("name", QUICK, fast=["overflow", "confident"])
def test_a_quick_look_says_what_overflows_and_what_it_left_out(name, doctor):
    answer = doctor(f"doctored:{name}", "--quick")
    assert_said(answer, QUICK[name])
    assert answer.err == ""
    assert "finite and wrong were not looked for" in answer.flowing
    assert "Nothing is wrong" not in answer.flowing
    assert "report is in" not in answer.flowing
    assert not pathlib.Path("jaxscale-doctor.html").exists()

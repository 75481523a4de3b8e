"""The doctor on a zoo of models: verdicts, lines at fault, and cures.

The models in `zoo/faulty.py` reproduce faults from public reports, which they name. Those in
`zoo/healthy.py` look suspicious and are not, and those in `zoo/deep.py` have twelve layers. Those
in `zoo/small.py` are there for something that the doctor says, or as it advises to write them. A
model that was changed until the doctor is right shows nothing.

What the doctor cannot see:

- what is not in the batch that it gets, such as a row that is masked as a whole, or weights after a
  thousand steps;
- which line of a backward rule is at fault, if the rule is a library's, or in a jitted function
  that was called before: then it names the function;
- what happens inside of a kernel or a callback;
- rounding that builds up over many lines, of which no single one is to blame.
"""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import cases
from zoo_entries import KINDS, load_models

import jaxscale
from jaxscale._doctor.cures import CURES
from jaxscale._doctor.target import load

pytestmark = [
    pytest.mark.standard_promotion,
    # JAX converts the constant 70000 to float16, and NumPy warns. Users see that as well.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]

LITERAL = """
import jax.numpy as jnp

def too_large():
    def loss_fn(w, x):
        y = (w * x).astype(jnp.float16)
        y = y * jnp.float16(60000)
        return jnp.mean(y.astype(jnp.float32))
    return loss_fn, jnp.float32(2.0), jnp.array([1.0, 3.0])
"""


def test_a_product_of_three_and_60000_is_found_at_its_line(doctor, no_pictures):
    pathlib.Path("model.py").write_text(LITERAL)
    answer = doctor("model:too_large", "--json-file", "results.json")
    assert answer.status == 1
    assert answer.out.startswith("Problems found: 1.\nThe loss is inf.")
    assert "It begins at model.py:7." in answer.flowing
    results = json.loads(pathlib.Path("results.json").read_text())
    problem = results["findings"][0]
    assert (problem["where"], problem["line"]) == ("model.py:7", 7)
    assert problem["source"][2] == [7, "        y = y * jnp.float16(60000)"]


HERE = pathlib.Path(__file__).parent
REAL = ["faulty", "healthy", "deep"]  # models as people write them
MODELS = load_models(*REAL, "small")
NUMBERS = {"faulty": (43, 0), "healthy": (0, 23), "deep": (5, 4)}  # faulty and healthy
REPORT = r"[\w.-]+/[\w.-]+/(issues|pull)/\d+"
# Of a model: the relative error of its worst leaf, at the loss scale where that is least.
WRONG = 0.1  # above this it is faulty
CLOSE = 0.05  # below this it is healthy
SCALES = [4.0**k for k in range(-6, 21)]
LOSS = "[0]"


@cases("module", NUMBERS)
def test_models_have_public_reports_and_marked_lines(module):
    models = load_models(module)
    entries = [model.entry for model in models.values()]
    faulty = [entry for entry in entries if entry.is_faulty]
    assert (len(faulty), len(entries) - len(faulty)) == NUMBERS[module]
    assert {entry.kind for entry in faulty} <= set(KINDS)
    for name, model in models.items():
        is_report = bool(re.fullmatch(REPORT, model.entry.source))
        assert is_report == model.entry.is_faulty == bool(model.lines), name
    marked = (HERE / "zoo" / f"{module}.py").read_text().count("# fault\n")
    assert marked == sum(len(model.lines) for model in models.values())


def compile_gradients(model, half):
    """Returns a function of the loss scale: the loss and the gradients of a model, by name."""
    loss_fn, params, batch = model(half)
    arrays, numbers = eqx.partition(params, eqx.is_array)

    @jax.jit
    def differentiate(arrays, batch, scale):
        def scaled_loss(arrays):
            return loss_fn(eqx.combine(arrays, numbers), batch) * scale

        return jax.value_and_grad(scaled_loss)(arrays)

    def differentiate_at(scale):
        outputs = differentiate(arrays, batch, jnp.float32(scale))
        by_name = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
            by_name[jax.tree_util.keystr(path)] = np.asarray(leaf, float) / scale
        return by_name

    return differentiate_at


def is_finite(leaves):
    return all(np.all(np.isfinite(leaf)) for leaf in leaves.values())


def find_worst_error(leaves, exact, noise):
    """Returns the error of the worst gradient, without those that are noise."""
    worst = 0.0
    for name, exact_leaf in exact.items():
        if name != LOSS and not (noise and noise in name):
            # A gradient that should be 0 is far off if it is anything else.
            norm = np.linalg.norm(exact_leaf) or 1e-30
            worst = max(worst, np.linalg.norm(leaves[name] - exact_leaf) / norm)
    return worst


@pytest.mark.slow
@cases("name", load_models(*REAL))
def test_each_model_is_what_it_says(name):
    """Without the doctor: compiled, at each loss scale, against the same model in float32."""
    model = MODELS[name]
    exact = compile_gradients(model, jnp.float32)(1.0)
    assert is_finite(exact) == (model.entry.kind != "input")
    tried = list(map(compile_gradients(model, jnp.float16), SCALES))
    errors = [
        find_worst_error(leaves, exact, model.entry.noise)
        for leaves in filter(is_finite, tried)
    ]
    least = min(errors, default=np.inf)  # if no scale is finite
    if model.entry.is_faulty:
        assert least > WRONG
    else:
        assert least < CLOSE


# Besides its fault, no loss scale of at least 1 fits.
LOW_SCALE = "faulty:auxiliary_head"


def examine(doctor, name, *options):
    """Returns the answer on a model, and the results as JSON."""
    answer = doctor(name, *options, "--json-file", "results.json")
    results = json.loads(pathlib.Path("results.json").read_text())
    are_problems = [finding["is_problem"] for finding in results["findings"]]
    assert are_problems == sorted(are_problems, reverse=True), "problems come first"
    assert any(are_problems) == answer.status
    verdict = "Nothing "
    if answer.status:
        # One fault is one problem.
        assert sum(are_problems) == 1 + (name == LOW_SCALE)
        verdict = f"Problems found: {sum(are_problems)}."
    assert results["verdict"].startswith(verdict)
    assert results["verdict"] in answer.flowing
    return answer, results


def assert_says(answer, model, says, never):
    """Checks what is said, with `{line}` for the marked line."""
    text = answer.flowing.replace("look again with `--autocast float16`", "")
    for words in says:
        if "{line}" in words:
            (line,) = model.lines
            words = words.format(line=f"small.py:{line}")
        assert words in answer.flowing
    for words in never:
        assert words not in text


FAST = [
    "faulty:reciprocal_in_a_rule",
    "small:number",
    "small:log_of_density",
    "small:log_softmax",
]
EXAMINED = [name for name in MODELS if name != "small:in_units"]


@pytest.mark.worlds
@cases("name", EXAMINED, fast=FAST)
def test_the_verdict_the_line_and_the_cure_are_right(name, doctor, no_pictures):
    model = MODELS[name]
    entry = model.entry
    answer, results = examine(doctor, name)
    assert answer.status == entry.is_faulty
    if entry.is_faulty and model.lines and entry.has_line:
        problem = results["findings"][0]
        assert problem["line"] in model.lines
        assert f"{name.split(':')[0]}.py" in problem["where"]
    fault = results["fault"] or {"cure": ""}
    assert fault["cure"] == entry.cure
    if entry.cure:
        start, *_ = CURES[entry.cure].split("{")
        assert start in answer.flowing
    assert_says(answer, model, entry.says, entry.never)


class Asked(NamedTuple):
    """The doctor's answer on a model, asked with options."""

    options: Sequence[str]
    status: int
    says: Sequence[str]
    never: Sequence[str] = ()


AT_1 = ["--loss-scale", "1"]
AT_2_TO_THE_20 = ["--loss-scale", str(2**20)]
IN_FLOAT16 = ["--autocast", "float16"]
IN_BFLOAT16 = ["--autocast", "bfloat16"]
QUICK = ["--quick"]
# The first word of a name is the model, one of `zoo/small.py` if it does not say where.
ASKED = {
    "fine at 2**20": Asked(
        AT_2_TO_THE_20,
        1,
        [
            "inf or NaN is in 1 of 2 gradients, at loss scale 2**20",
            "Loss scale 2**16 is the largest",
            "worst first: w.",
        ],
        never=["even", "Even"],
    ),
    "healthy:tiny_gradients at 1": Asked(
        AT_1, 1, ["It needs a loss scale: without one 100%"]
    ),
    "healthy:tiny_gradients at 2**20": Asked(
        AT_2_TO_THE_20,
        0,
        ["Loss scale 2**20 is high enough"],
    ),
    "uneven at 8": Asked(
        ["--loss-scale", "8"],
        1,
        [
            "Loss scale 2**3 is too low: there 50.0% of the nonzero gradients become 0 (100% in w)",
        ],
    ),
    "below at 1": Asked(
        AT_1,
        1,
        ["even without a loss scale", "2**-4 is the largest", "min_scale=2**-14"],
    ),
    "dense in float16": Asked(
        IN_FLOAT16,
        0,
        [
            "Nothing is wrong in float16, with a loss scale: it needs one.",
            "without one 100% of the nonzero",
            "float16 and float32, by `jaxscale.autocast`",
            "The gradients in float16 are those in float32, off by",
        ],
        never=["changes nothing"],
    ),
    "dense in bfloat16": Asked(
        IN_BFLOAT16,
        0,
        ["Nothing is wrong in bfloat16.", "bfloat16 and float32, by", "needs no loss"],
        never=["If you train it under"],
    ),
    "scores in float16": Asked(
        IN_FLOAT16,
        1,
        [
            "It begins at {line}",
            "float16 cannot hold these numbers, but float32 could",
            "or a function of this line, through `jaxscale.full_precision`",
        ],
        never=["preferred_element_type"],
    ),
    "rounded in float16": Asked(
        IN_FLOAT16,
        1,
        [
            "1 of 1 gradients are wrong at loss scale 2**13",
            "w is off by 60.0%, compared with float32. It begins at {line}",
            "as large as 4098, where float16 only holds multiples of 4",
            "Compute this line in float32: that was tried, and the gradients then",
            "The loss is 16 in float16, and as written 6.25.",
        ],
        never=["become 0"],
    ),
    "wide in float16": Asked(
        IN_FLOAT16, 0, ["`jaxscale.autocast` changes nothing"], never=["off by"]
    ),
    "kept in float16": Asked(
        IN_FLOAT16,
        0,
        [
            "leaves products of bfloat16 arrays alone as they are written: 1, the first at",
            "keep the weights in float32 or float16.",
        ],
    ),
    "kept in bfloat16": Asked(
        IN_BFLOAT16, 0, ["Nothing is wrong"], never=["leaves products"]
    ),
    "embedded in bfloat16": Asked(
        IN_BFLOAT16, 0, ["Nothing is wrong"], never=["is a sum of"]
    ),
    "healthy:tiny_gradients, quick": Asked(
        QUICK, 0, ["Nothing overflows, with a loss scale: it needs one."]
    ),
    "confident, quick": Asked(
        QUICK,
        0,
        [
            "is 2**9.",
            "What limits it is {line}",
            "skips the first steps, 6 in all",
        ],
    ),
    "below, quick": Asked(QUICK, 1, ["What limits it is zoo_entries.py:"]),
    "overflow, quick": Asked(
        QUICK,
        1,
        ["It begins at {line}", "float16 cannot hold these numbers"],
    ),
    "bad_pair, quick": Asked(QUICK, 1, ["are finite, but aux['ratio'] is not"]),
    "disconnected, quick": Asked(QUICK, 1, ["exactly 0 everywhere in 1 of 1 leaves"]),
}


@pytest.mark.worlds
@cases("name", ASKED, fast=["uneven at 8", "overflow, quick", "confident, quick"])
def test_options_change_what_is_asked(name, doctor, no_pictures):
    asked = ASKED[name]
    model = re.split(r"[ ,]", name)[0]
    if ":" not in model:
        model = f"small:{model}"
    answer, _ = examine(doctor, model, *asked.options)
    assert answer.status == asked.status
    assert_says(answer, MODELS[model], asked.says, asked.never)
    is_quick = asked.options == QUICK
    assert is_quick == ("finite and wrong were not looked for" in answer.flowing)
    assert is_quick != pathlib.Path("jaxscale-doctor.html").exists()
    assert is_quick != ("The report is in jaxscale-doctor.html." in answer.flowing)


# The start of training that is advised: training does what it says.

NUM_STEPS = 20
SGD = optax.sgd(0.0)


def count_skipped(tx, retries=0):
    """Returns how many of the first steps of a training are skipped."""
    target = load("small:in_units")

    def loss_fn(params):
        return target.loss_fn(params, target.batch)

    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=retries))
    opt_state = tx.init(target.params)
    for _ in range(NUM_STEPS):
        _, opt_state, _ = step(target.params, opt_state)
    return opt_state.total_notfinite


# In some units the gradients have other sizes, and the same digits. Beyond 16 no scale of at least
# 1 fits.
UNITS = [-4, 0, 1, 2, 9, 15, 16, 17, 24]


@pytest.mark.worlds
@cases("unit", UNITS, fast=[9, 17])
def test_training_skips_what_is_said(unit, doctor, monkeypatch):
    monkeypatch.setenv("UNIT", str(unit))
    answer, results = examine(doctor, "small:in_units", "--quick")
    assert results["calibration"]["init_scale"] == 2.0 ** (16 - unit)
    assert "That is low" not in answer.out
    start = results["start"]
    default = jaxscale.loss_scaled(SGD)
    if unit <= 16:
        assert answer.status == 0
        assert start["skipped"] == max(unit - 1, 0)
        assert count_skipped(default) == start["skipped"]
        assert count_skipped(default, start["retries"]) == 0
    else:
        assert answer.status == 1
        assert (start["skipped"], start["retries"]) == (None, None)
        assert count_skipped(default) == NUM_STEPS
    # the optimizer that the doctor writes down
    tx = eval(start["code"], {"jaxscale": jaxscale, "optimizer": SGD})
    assert count_skipped(tx) == 0


EXAMPLE = HERE.parent.parent / "examples" / "doctor.py"


# What is said of the functions of the example.
EXAMPLES = {
    "broken": [
        "inf or NaN is in 6 of 7 gradients, even without a loss scale",
        "worst first: down, embed",
        "-1e4 instead of -1e9",
    ],
    "fixed": ["Nothing is wrong."],
}


@pytest.mark.slow
@cases("function", EXAMPLES)
def test_the_example_is_broken_and_fixed(function, doctor, no_pictures):
    answer, results = examine(doctor, f"{EXAMPLE}:{function}")
    assert answer.status == (function == "broken")
    for words in EXAMPLES[function]:
        assert words in answer.flowing
    if answer.status:
        line = results["findings"][0]["line"]
        assert "mask_value)." in EXAMPLE.read_text().splitlines()[line - 1]

"""Each number of the README and of the site comes from something that computes it.

`CLAIMS` has pieces of these pages with a field for each number, and functions that compute them:
from a file of results, from what an example prints, from the package, from pyproject.toml. A new
number is a new row. Code is left out: `test_package.py` and `test_site.py` run it.
"""

import inspect
import json
import math
import pathlib
import re
import runpy
import sys
import tomllib
import warnings

import behaviors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import cases

import jaxscale
import jaxscale.presets
from jaxscale._progress import limits
from jaxscale._storage import compact

pytestmark = [pytest.mark.standard_promotion, pytest.mark.docs]

ROOT = pathlib.Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def without_code(path):
    """Returns the words of a page, without its programs and the targets of its links."""
    words = re.sub(r"(?s)\A---\n.*?^---$", "", path.read_text(), flags=re.MULTILINE)
    words = re.sub(r"(?ms)^```.*?^```$", "", words).replace("\\*", "*")
    return " ".join(re.sub(r"\]\([^)]*\)", "]", words).split())


SITE = ROOT / ".github" / "site" / "pages"
FILES = {path.relative_to(SITE).as_posix(): path for path in sorted(SITE.rglob("*.md"))}
FILES |= {"README": ROOT / "README.md"}
del FILES[
    "went.md"
]  # as the changelog, it names versions; `test_went.py` runs its rows
PAGES = {name: without_code(path) for name, path in FILES.items()}
# Not in a word, such as float16, H100 or GPT-2. 2**15 is one number, and 0 alone is no figure.
NUMBER = r"(?<![\w.*-])(?!0(?![\w.]))\d+(?:[.,]\d+)*(?:\*\*\d+|e-\d+)?"
WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
]
FIELD = re.compile(r"\{[^}]*\}")


def text(path):
    return (ROOT / path).read_text()


RL = json.loads(text("examples/rl.json"))
RESULTS = {
    path.stem: json.loads(path.read_text())
    for path in (ROOT / "tests" / "benchmarks" / "results").glob("*.json")
}
QUICKSTART = RESULTS["examples-cpu"]["quickstart"]
DEVICES = "tests/benchmarks/results/devices"
H200 = json.loads(text(f"{DEVICES}/nvidia_h200.json"))
DEVICE_STEP = json.loads(text(f"{DEVICES}/nvidia_h200_step.json"))
DEVICE_HALF = json.loads(text(f"{DEVICES}/nvidia_h200_half_params.json"))


def power(number):
    assert math.log2(number).is_integer()
    return f"2**{math.log2(number):.0f}"


def short(version):
    return ".".join(version.split(".")[:2])


# From pyproject.toml, and from the package.


def oldest(*names):
    """Returns the oldest versions of Python and of these packages that are allowed."""
    required = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["flax"]
    versions = dict(requirement.split(">=") for requirement in required)
    return [
        PROJECT["requires-python"].removeprefix(">="),
        *(versions[name] for name in names),
    ]


def newest_of_oldest_python():
    """Returns the oldest version of Python, and the newest JAX for it."""
    newest = "0.10"  # JAX 0.11 dropped it
    if sys.version_info[:2] == (3, 11):
        assert jax.__version_info__[:2] <= tuple(map(int, newest.split(".")))
    return *oldest(), newest


def first_judged_step():
    rule = jaxscale.SpikeRule()
    judge = jax.jit(rule.judge)
    state = rule.init()
    large = jnp.float32(1e9)
    usual = jnp.float32(1)
    step = 1
    while not judge(state, None, large, True)[0]:
        _, state = judge(state, None, usual, True)
        step += 1
    return step


def steps_to_idle():
    """Returns after how many steps the default rule is at a scale that `check` warns of."""
    growths = math.log(limits.HIGH_SCALE / RULE.init_scale, RULE.growth_factor)
    return max(limits.MANY_STEPS, round(growths) * RULE.growth_interval)


def default_rule():
    assert (RULE.growth_factor, RULE.backoff_factor) == (2, 0.5)
    ends = power(RULE.init_scale), RULE.growth_interval, power(RULE.max_scale)
    return [*ends, RULE.min_scale]


def room_for_growth():
    """Returns how much gradients may grow before the first scale of `scale_backward` overflows."""

    def fits(exponent):
        first = jnp.exp2(jnp.float16(exponent // 2))
        second = jnp.exp2(jnp.float16(exponent - exponent // 2))

        def grow(x):
            y = x.astype(jnp.float16) * first * second
            return y.astype(jnp.float32)

        grow = jaxscale.scale_backward(grow, retries=0)
        return jnp.isfinite(jax.grad(grow)(jnp.float32(0)))

    return power(2.0 ** max(exponent for exponent in range(12, 20) if fits(exponent)))


def scalers():
    """Counts the functions that make the rule of another scaler."""
    return len(jaxscale.presets.__all__) - 1  # one is the class of their policies


# From the examples: what they compute here, or what was recorded of them.


def pixels():
    """Returns the millions of numbers in a batch of square crops, the same in both examples."""
    quickstart = text("examples/quickstart.py")
    gradients = text("examples/gradients.py")
    batch_size = number_after("BATCH_SIZE = ", quickstart)
    crop = number_after("CROP = ", quickstart)
    assert number_after(r"main\(batch_size=", gradients) == batch_size
    assert number_after("CROP = ", gradients) == crop
    return batch_size * crop**2 * 3 / 1e6


def number_after(pattern, program):
    (number,) = re.findall(rf"\b{pattern}(\d+)", program)
    return int(number)


def quickstart(run):
    """Returns the cells of a row of the table that the quickstart printed."""
    rows = [line for line in QUICKSTART["printed"] if "│" in line]
    (cells,) = (row.split("│")[2:-1] for row in rows if f" {run} " in row)
    return [re.sub(" dB| steps", "", cell).strip() for cell in cells]


def mismatch(name):
    """Returns the mean of a figure of the reinforcement learning, in bfloat16 and in float16."""
    return [np.mean(RL[dtype][name]) for dtype in ("bfloat16", "float16")]


# From the results.


def parity():
    rows = RESULTS["parity-cpu"]["rows"]
    ways = rows[0]["ways"].values()
    exact, alone, scaled, *_ = [np.array(way["final"]) for way in ways]
    worse = alone.mean() / exact.mean() - 1
    differences = np.abs(scaled / exact - 1)
    limit = math.ceil(differences.max() * 1e4) / 1e4
    programs = WORDS[len(rows)]
    others = WORDS[len(rows) - 1]
    seeds = WORDS[len(exact)]
    return [programs.capitalize(), worse, limit, others, seeds]


def backward_passes():
    """Counts the backward passes of `scale_backward`. None was repeated, and no step skipped."""
    rows = RESULTS["parity-cpu"]["rows"]
    passes = 0
    for row in rows:
        for name, way in row["ways"].items():
            if "scale_backward" in name:
                assert not np.any(way["repeated"]), name
                assert not np.any(way["skipped"]), name
                passes += way["passes"]
    return WORDS[len(rows)], passes


def trainers():
    """Returns how much larger losses are without a scale, in the trainers' README."""
    _, table = text("tests/trainers/README.md").split("| float32 | float16 |")
    ratios = []
    for line in table.splitlines()[2:7]:
        float32, float16 = line.split("|")[2:4]
        ratios.append(float(float16) / float(float32))
    return min(ratios), max(ratios)


def replays():
    folder = ROOT / "tests/policies/traces"
    guide = (folder / "README.md").read_text()

    def read_row(name):
        row = rf"\| \**`{name}\(\)`.* \| (\d+) \| ([\d.]+) \|"
        return re.search(row, guide).groups()

    ours, our_mean = read_row("AdaptiveLossScale")
    theirs, their_mean = read_row("presets.torch")
    assert abs(float(our_mean) - float(their_mean)) < 0.1
    words = r"`AdaptiveLossScale` skips nothing and\s+repeats (\d+) "
    repeated = re.search(words, guide).group(1)
    lengths = [len(np.load(path)["ceiling"]) for path in folder.glob("*.npz")]
    return WORDS[len(lengths)], sum(lengths), ours, theirs, repeated


def faults():
    hosts = runpy.run_path(str(ROOT / "tests/integration/test_multi_host.py"))["HOSTS"]
    return WORDS[jax.device_count()], WORDS[max(number for number, _ in hosts.values())]


def part(name):
    """Returns times relative to plain Optax, by the dtype of the gradients, and kernels.

    Of the two forms of a step, the slower one counts.
    """
    times = {"float32": 0, "float16": 0}
    for row in RESULTS["step-cpu"]["rows"]:
        if row["gradients"] in times:
            time = row["methods"][name]["to_bare"]["median"]
            times[row["gradients"]] = max(time, times[row["gradients"]])
    program = RESULTS["programs"]["rows"][0]
    assert (program["target"], program["layout"]) == ("H100", "optimizer alone")
    methods = program["methods"]
    kernels = methods[name]["kernels"] / methods["bare optax"]["kernels"]
    return times["float32"], times["float16"], kernels


def moved_by_scale_backward():
    """Returns the bytes that a step moves on an H100, relative to plain Optax."""
    methods = next(
        row["methods"]
        for row in RESULTS["programs"]["rows"]
        if (row["target"], row["layout"]) == ("H100", "one device")
    )
    moved = [
        methods[name]["bytes_per_parameter"]
        for name in ("jaxscale.scale_backward", "bare optax")
    ]
    return moved[0] / moved[1]


def compiled(chips):
    """Returns three float32 programs for this many TPU chips: ours, Optax, and it with clipping."""
    wanted = {"target": "TPU v5e", "dtype": "float32", "devices": chips, "width": 2048}
    rows = [
        row
        for row in RESULTS["programs"]["rows"]
        if row.items() >= wanted.items() and row["layout"] != "optimizer alone"
    ]
    (methods,) = [row["methods"] for row in rows]
    return [methods[name] for name in (STEP, "bare optax", "bare optax, clipped")]


def bytes_moved_by_one():
    ours, plain, clipped = (report["bytes_per_parameter"] for report in compiled(1))
    return ours / plain, clipped / plain


def messages(chips):
    """Returns the chips, the bytes that they move, and what they exchange in addition."""
    ours, plain, clipped = compiled(chips)
    assert exchanged(ours) == exchanged(clipped)
    our_bytes, our_messages = exchanged(ours)
    plain_bytes, plain_messages = exchanged(plain)
    moved = ours["bytes_per_parameter"] / plain["bytes_per_parameter"]
    return chips, moved, our_bytes - plain_bytes, our_messages - plain_messages


def exchanged(report):
    """Counts the bytes that devices exchange, and their messages."""
    numbers = report["collectives"]["all-reduce"]
    total = sum(int(size) * number for size, number in numbers.items())
    return total, sum(numbers.values())


def autocast(name):
    """Returns what is kept, and the memory on an H100, relative to float32."""
    unrolled, scanned, *_ = RESULTS["autocast-cpu"]["rows"]
    for row in (unrolled, scanned):
        for direction in ("forward", "backward"):
            counts = row["methods"][name][direction]
            assert counts["half"] == counts["products"]
    methods = unrolled["methods"]
    kept = methods[name]["kept_bytes"] / methods["float32"]["kept_bytes"]
    return kept, memory(0, name), memory(1, name)


def memory(row, name):
    """Returns the memory of a program compiled for an H100, relative to float32."""
    methods = RESULTS["autocast-cpu"]["rows"][row]["methods"]
    in_float32 = methods["float32"]["h100"]["temporary_bytes"]
    return methods[name]["h100"]["temporary_bytes"] / in_float32


def traced():
    """Returns how long tracing and compiling take under `autocast`, relative to float32."""
    methods = RESULTS["autocast-cpu"]["rows"][0]["methods"]
    report = methods["jaxscale.autocast"]
    return report["trace"]["median"], report["compile"]["median"]


def on_h200(form, to="to_float32"):
    """Returns time and memory of both models, relative to float32 or to a form by hand."""
    ratios = []
    for key in ("time", "memory"):
        for model in ("transformer", "ResNet"):
            ratios.append(H200["figures"][model]["forms"][form][to][key])
    return ratios


def steps_on_h200(model, *sizes):
    """Returns sizes of a model, and the time and memory of its step in three precisions."""
    figures = H200["figures"][model]
    numbers = [figures["settings"][size] for size in sizes]
    in_half = ["bfloat16 by autocast, jaxscale", "float16 by autocast, jaxscale"]
    for form in ["float32, optax", *in_half]:
        row = figures["forms"][form]
        numbers += [row["step_s"] * 1e3, row["bytes"] / 1e9]
    return numbers


def kept_on_h100(model, *sizes):
    """Returns sizes of a model, and memory and bytes of 0.4.0 and of now, relative to `dtype=`."""
    row = RESULTS["autocast-h100"]["rows"][model]
    numbers = [row[size] for size in sizes]
    for figure in ("temporary_mb", "moved_mb"):
        for form in ("autocast, 0.4.0", "autocast"):
            numbers.append(row[form][figure] / row["dtype="][figure])
    return numbers


def part_on_h200():
    (row,) = DEVICE_STEP["rows"]
    return row["methods"][STEP]["to_bare"]["median"]


def half_params_on_h200():
    """Returns the time of a step, and the memory of each way, relative to float32."""
    forms = H200["figures"]["transformer"]["forms"]
    others = DEVICE_HALF["figures"]["transformer"]["forms"]
    kept = forms["bfloat16 parameters, master_weights"]["to_float32"]
    at_random = others["bfloat16 parameters, stochastic_rounding, compact_state"]
    wide = forms["bfloat16 by dtype=, optax"]["to_float32"]
    return (
        kept["time"],
        wide["memory"],
        kept["memory"],
        at_random["to_float32"]["memory"],
    )


def bytes_beside_weights(tx, dtype="bfloat16"):
    """Returns the bytes of a weight and of the arrays in its optimizer's state."""
    count = 1 << 14
    params = jax.ShapeDtypeStruct((128, 128), jnp.dtype(dtype))
    state = jax.eval_shape(tx.init, params)
    large = [leaf for leaf in jax.tree.leaves((params, state)) if leaf.size == count]
    return sum(leaf.dtype.itemsize for leaf in large)


def bytes_of_ways():
    adam = optax.adamw(1e-3)
    compact = jaxscale.compact_state(adam)
    return [
        bytes_beside_weights(adam, "float32"),
        bytes_beside_weights(adam),
        bytes_beside_weights(jaxscale.master_weights(adam)),
        bytes_beside_weights(jaxscale.master_weights(compact)),
        bytes_beside_weights(jaxscale.stochastic_rounding(adam)),
        bytes_beside_weights(jaxscale.stochastic_rounding(compact)),
    ]


def bytes_of_copies():
    tx = jaxscale.master_weights(optax.adamw(1e-3), "float32")
    return bytes_beside_weights(tx) - bytes_of_ways()[2]


def bytes_of_moments():
    """Returns those under `skip_nonfinite`, and those of Optax."""
    tx = jaxscale.skip_nonfinite(optax.adamw(1e-3))
    with warnings.catch_warnings(action="ignore"):
        ours = bytes_beside_weights(tx)
    return ours - 2, bytes_of_ways()[1] - 2


def moved_by(way):
    """Returns the bytes that a step moves for each parameter, on three machines."""
    machines = ("H100", "TPU v5e", "CPU")
    return [RESULTS["half-params"]["bytes"][name][way]["moved"] for name in machines]


def ends_of(way):
    """Returns the final losses of three tasks."""
    losses = RESULTS["half-params"]["losses"]
    return [losses[task][way]["mean"] for task in ("teacher", "autoencoder", "text")]


WAYS = {
    "`master_weights`": "remainder",
    "`master_weights(compact_state(tx))`": "remainder + compact",
    "`stochastic_rounding`": "stochastic",
    "`stochastic_rounding(compact_state(tx))`": "stochastic + compact",
}
MOVED = "| {name} | {{:.1f}} | {{:.1f}} | {{:.1f}} |"
ENDS = "| {name} | {{:.4f}} | {{:.4f}} | {{:.4f}} |"
THREE = ("float32", "float16", "float16, scaled")
HALF = jnp.finfo("float16")
BFLOAT = jnp.finfo("bfloat16")
RULE = jaxscale.DynamicLossScale()
TESTED = RESULTS["autocast-cpu"]["machine"]
PARTS = RESULTS["step-cpu"]
RMS = "RMS of log(ratio)"
LARGEST = "largest ratio, less 1"
STEP = "jaxscale.train_step"
APPLY = "jaxscale.apply_gradients"
LINES = "jaxscale optax wrapper"

FLUSHED = "float16 flushes {:.1%} of these gradients"

# A piece of a page; a function, and its arguments. The numbers that the function returns belong
# into the fields.
CLAIMS = {
    "bfloat16 has {} bits of precision: an update below {:.1%} of a weight": (
        lambda: [BFLOAT.nmant + 1, float(BFLOAT.eps) / 4],
    ),
    "Arrays of fewer than {:,} numbers stay in float32": (
        lambda: [compact._LEAST_SIZE],
    ),
    "{} is right, and {} is the bfloat16 number next to it.": (
        lambda: [0.9, float(jnp.bfloat16(0.9))],
    ),
    "| float32 | | {} | |": (lambda: bytes_of_ways()[0],),
    "| bfloat16 | | {} | wrong": (lambda: bytes_of_ways()[1],),
    "`master_weights(tx)` | {} | that": (lambda: bytes_of_ways()[2],),
    "`master_weights(compact_state(tx))` | {} | that": (lambda: bytes_of_ways()[3],),
    "`stochastic_rounding(tx)` | {} | that": (lambda: bytes_of_ways()[4],),
    "`stochastic_rounding(compact_state(tx))` | {} | the same": (
        lambda: bytes_of_ways()[5],
    ),
    "The other {} bits stand beside it": (lambda: 32 - BFLOAT.bits,),
    "keeps a copy instead, for {} bytes more": (bytes_of_copies,),
    "in float32: {} bytes of moments, where Optax keeps {}.": (bytes_of_moments,),
    "They end at {:.0f}.": (lambda: float(HALF.max),),
    "after {:,} steps, means of {} starts": (
        lambda: [RESULTS["half-params"][name] for name in ("steps", "seeds")],
    ),
    MOVED.format(name="float32"): (moved_by, "skip_nonfinite, float32"),
    ENDS.format(name="in float32"): (ends_of, "optax, float32"),
    ENDS.format(name="in plain bfloat16"): (ends_of, "optax, bfloat16"),
    **{MOVED.format(name=name): (moved_by, way) for name, way in WAYS.items()},
    **{ENDS.format(name=f"with {name}"): (ends_of, way) for name, way in WAYS.items()},
    "From step {} on": (first_judged_step,),
    "float16 has {} bits more than bfloat16, so its rounding errors are {:.0f} times smaller.": (
        lambda: [WORDS[HALF.nmant - BFLOAT.nmant], float(BFLOAT.eps / HALF.eps)],
    ),
    "On Python {} pip installs JAX {};": (newest_of_oldest_python,),
    "with the likely cause after more than {} skips in a row": (
        lambda: inspect.signature(jaxscale.check).parameters["max_consecutive"].default,
    ),
    "after {:,} steps with the default rule, if nothing seems to be scaled": (
        steps_to_idle,
    ),
    "by {:.2%} in bfloat16 and by {:.2%} in float16": (mismatch, RMS),
    "at most by {:.0%} and by {:.1%}": (mismatch, LARGEST),
    "(means of {} seeds)": (lambda: WORDS[len(RL["float16"][RMS])],),
    "probabilities differ {:.0f} times less": (lambda: np.divide(*mismatch(RMS)),),
    "Python {}, JAX {}, Optax {}, Flax {} (if you use Flax)": (
        oldest,
        "jax",
        "optax",
        "flax",
    ),
    "tested up to Python {}, JAX {} and Flax {}.": (
        lambda: [
            *map(short, [TESTED["python"], TESTED["versions"]["jax"]]),
            TESTED["versions"]["flax"],
        ],
    ),
    "float16 flushes numbers below {} to zero": (
        lambda: f"{float(HALF.smallest_subnormal) / 2:.0e}".replace("e-0", "e-"),
    ),
    "{} small programs, from PPO to a ResNet, were trained: super-resolution ends {:.0%} above "
    "float32's error without a scale and within {:.2%} with it; for the other {}, {} seeds": (
        parity,
    ),
    "with Python {} or newer": (oldest,),
    "On a CPU with JAX {}, the first command printed": (
        lambda: short(QUICKSTART["machine"]["versions"]["jax"]),
    ),
    "(cubic interpolation: {} dB)": (lambda: quickstart("(cubic alone)")[1],),
    "| float32 | {} | {} dB | {} | {} steps | {} |": (quickstart, THREE[0]),
    "| float16 | {} | {} dB | {} | {} steps | {} |": (quickstart, THREE[1]),
    "| float16, scaled | {} | {} dB | {} | {} steps | {} |": (quickstart, THREE[2]),
    "To show some skips in {} steps": (
        number_after,
        r"main\(num_steps=",
        text("examples/quickstart.py"),
    ),
    "On {} small programs `scale_backward` was as good as a loss scale: in {:,} backward passes": (
        backward_passes,
    ),
    "more than {} times larger inside the model": (room_for_growth,),
    "at {:.1f} to {:.0f} times that loss": (trainers,),
    "a fall from {} to {} in the first steps is normal": (
        lambda: [
            power(RULE.init_scale * RULE.backoff_factor**falls) for falls in (0, 2)
        ],
    ),
    FLUSHED: (
        lambda: runpy.run_path(str(ROOT / "examples" / "gradients.py"))["main"](),
    ),
    "gradients of a mean over {:.1f} million pixels": (pixels,),
    "the scale rises to {} and nothing": (lambda: default_rule()[2],),
    "starts at `init_scale`, {}; after `growth_interval` ({}) finite steps in a row it doubles, up "
    "to {}; on a non-finite step, which is skipped, it halves, down to {:.0f} |": (
        default_rule,
    ),
    "On {} recorded float16 runs, {:,} steps, the adaptive rule skipped {} steps where "
    "PyTorch's rule skipped {}, at the same mean scale; with retries it skipped none and repeated "
    "{} passes": (replays,),
    "the rules of {} other scalers": (scalers,),
    "on one of {} devices, in one of {} processes": (faults,),
    "GPT-2 small in float32 takes {:.2f} times as long with `train_step` as with plain optax; of "
    "ResNet-50, {:.2f} times.": (lambda: on_h200("float32, jaxscale")[:2],),
    "GPT-2 takes {:.2f} times as long as with Flax's `DynamicScale`": (
        lambda: on_h200("float16 by dtype=, jaxscale", "to_by_hand")[0],
    ),
    "a step of AdamW alone takes {:.2f} times as long": (part_on_h200,),
    "| `jaxscale.train_step` | {:.2f} | {:.2f} | {:.2f} |": (part, STEP),
    "| `jaxscale.apply_gradients` | {:.2f} | {:.2f} | {:.2f} |": (part, APPLY),
    "| a step of your own, with `tx.update` | {:.2f} | {:.2f} | {:.2f} |": (
        part,
        LINES,
    ),
    "| Flax `DynamicScale` | {:.2f} | {:.2f} | {:.2f} |": (part, "Flax DynamicScale"),
    "| `optax.apply_if_finite` | {:.2f} | {:.2f} | {:.2f} |": (
        part,
        "optax.apply_if_finite",
    ),
    "| GPT-2 small, {} x {} tokens | {:.1f} ms, {:.1f} GB | {:.1f} ms, {:.1f} GB | {:.1f} ms, "
    "{:.1f} GB |": (steps_on_h200, "transformer", "batch", "length"),
    "| ResNet-50, {} images | {:.1f} ms, {:.1f} GB | {:.1f} ms, {:.1f} GB | {:.1f} ms, "
    "{:.1f} GB |": (
        steps_on_h200,
        "ResNet",
        "batch",
    ),
    "| ResNet-50, {} images of {} x {} | {:.2f} | {:.2f} | {:.2f} | {:.2f} |": (
        kept_on_h100,
        "ResNet-50",
        "batch",
        "side",
        "side",
    ),
    "| GPT-2 small, {} x {} tokens | {:.2f} | {:.2f} | {:.2f} | {:.2f} |": (
        kept_on_h100,
        "GPT-2 small",
        "batch",
        "length",
    ),
    "They were measured with jaxscale {}.": (
        lambda: H200["machine"]["versions"]["jaxscale"],
    ),
    "float16 and bfloat16 hold integers up to {:,.0f} and {:.0f}.": (
        lambda: [2 / HALF.eps, 2 / BFLOAT.eps],
    ),
    "stops growing at about {:.0f} numbers of one size, one in float16 at {:,.0f}.": (
        lambda: [2 / BFLOAT.eps, 2 / HALF.eps],
    ),
    "Without `autocast` it is {:.0f}.": (lambda: 2 / BFLOAT.eps,),
    "In float32, `train_step` takes {:.2f} times as long as plain optax": (
        lambda: on_h200("float32, jaxscale")[0],
    ),
    "on an NVIDIA H200, with version {}.": (
        lambda: H200["machine"]["versions"]["jaxscale"],
    ),
    "AdamW, {:.0f} million parameters as in GPT-2, {} cores of an {}": (
        lambda: [
            PARTS["rows"][0]["parameters"] / 1e6,
            PARTS["machine"]["cores"],
            PARTS["machine"]["processor"],
        ],
    ),
    "float32, `jaxscale.train_step` | {:.2f}, {:.2f} | {:.2f}, {:.2f} |": (
        on_h200,
        "float32, jaxscale",
    ),
    "| bfloat16 by `autocast`, `jaxscale.train_step` | {:.2f}, {:.2f} | {:.2f}, {:.2f} |": (
        on_h200,
        "bfloat16 by autocast, jaxscale",
    ),
    "| float16 by `autocast`, `jaxscale.train_step` | {:.2f}, {:.2f} | {:.2f}, {:.2f} |": (
        on_h200,
        "float16 by autocast, jaxscale",
    ),
    "every layer, `jaxscale.train_step` | {:.2f}, {:.2f} | {:.2f}, {:.2f} |": (
        on_h200,
        "float16 by dtype=, jaxscale",
    ),
    "the same, Flax `DynamicScale` | {:.2f}, {:.2f} | {:.2f}, {:.2f} |": (
        on_h200,
        "float16 by dtype=, Flax DynamicScale",
    ),
    "one run of `tests/benchmarks/device.py` with JAX {}.": (
        lambda: short(H200["machine"]["versions"]["jax"]),
    ),
    "on {} chips of a TPU v5e a whole step moves {:.2f} times the bytes of plain optax and "
    "exchanges {} bytes more in {} messages": (messages, 256),
    "On one chip it moves {:.2f} times the bytes, and clipping {:.2f} times": (
        bytes_moved_by_one,
    ),
    "nothing | all | {:.2f} | {:.2f}; {:.2f} |": (autocast, "jaxscale.autocast"),
    "casts around the model | all | {:.2f} | {:.2f}; {:.2f} |": (autocast, "jmp"),
    "every layer | all | {:.2f} | {:.2f}; {:.2f} |": (autocast, "Flax dtype"),
    "pip keeps your JAX if it is {} or newer.": (lambda: oldest("jax")[1],),
    "PyTorch's first scale, {:.0f}, is too large": (
        lambda: jaxscale.presets.torch().init_scale,
    ),
    "more than {:,.0f} equal float16 numbers": (lambda: HALF.max,),
    "{} such batches in a row": (lambda: behaviors.OVERFLOWS,),
    "{} overflows with a finite loss": (lambda: 3 * behaviors.OVERFLOWS,),
    "the scale is {:.2g}, and nothing is learned": (
        lambda: float(jnp.finfo(jnp.float32).tiny),
    ),
    "Tracing and compiling take longer under `autocast`: {:.2f} and {:.2f} times": (
        traced,
    ),
    "in bfloat16 layers takes {:.2f} times as long as in float32, and {:.2f} times the memory with "
    "float32 weights, {:.2f} with `master_weights`, {:.2f} with": (
        half_params_on_h200,
    ),
    "compiled for an H100, {:.2f} times the bytes": (moved_by_scale_backward,),
}


def spans(claim):
    """Returns where each page has the numbers of a claim. One page must have it, and none twice."""
    words = FIELD.sub("", claim)
    assert not re.search(NUMBER, words), f"a number that nothing computes: {claim}"
    literals = [re.escape(literal) for literal in FIELD.split(claim)]
    pattern = re.compile(r"([A-Za-z]+|[\d.,*e%-]*\d%?)".join(literals))
    fields = range(1, len(literals))
    places = {}
    for name, page in PAGES.items():
        matches = list(pattern.finditer(page))
        assert len(matches) <= 1, f"{len(matches)} times in {name}: {claim}"
        for match in matches:
            places[name] = [match.span(field) for field in fields]
    assert places, f"on no page: {claim}"
    return places


def test_the_table_of_what_others_do_is_that_of_the_figures():
    table = behaviors.markdown(RESULTS["behaviors-cpu"]["rows"])
    assert table in FILES["compared.md"].read_text()


@cases("page", PAGES)
def test_every_number_comes_from_somewhere(page):
    covered = []
    for claim in CLAIMS:
        places = spans(claim)
        covered += places.get(page, [])

    def is_claimed(first, last):
        return any(start <= first and last <= end for start, end in covered)

    def blank(code):
        return "`" * len(code.group())

    # Code becomes as many backticks, so that all else stays where it is.
    plain = re.sub(r"`[^`]*`", blank, PAGES[page])
    for number in re.finditer(NUMBER, plain):
        first, last = number.span()
        context = plain[max(0, first - 40) : last + 20]
        assert is_claimed(first, last), context


# The example computes 3 million gradients, which takes long.
@cases("claim", CLAIMS, fast=[claim for claim in CLAIMS if claim != FLUSHED])
def test_a_number_is_what_its_source_says(claim):
    source, *args = CLAIMS[claim]
    figures = source(*args)
    if not isinstance(figures, list | tuple):
        figures = [figures]
    for name in spans(claim):
        assert claim.format(*figures) in PAGES[name], name

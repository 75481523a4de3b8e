"""The doctor's trial: how many real faults it finds, and how often it cries wolf.

The models in `trial/faulty.py` reproduce a fault of a public report, which each names, and mark its
line with `# fault`. Those in `trial/healthy.py` look suspicious and are not. The doctor examines
all, and this counts

- verdicts: it finds a problem if and only if the model is faulty;
- lines: the first problem of a faulty model points to the line of the fault;
- alarms: healthy models with a problem.

The score is held by `HELD`. A change that raises it raises `HELD`, too.

The doctor was tuned on the entries with `tuned=True` only. The others say how it does on models it
has not seen. So look at these as a number, never one by one: what is missed is named only for
tuned entries.

What the doctor cannot see: what is not in the batch that it gets, such as a row that is masked as
a whole, or weights after a thousand steps; which line of a library's backward rule is at fault, or
of one in a jitted function that was called before, of which it names the function; what happens
inside of a kernel, a `shard_map` or a callback; and rounding that builds up over many lines, of
which no single one is to blame.
"""

import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

from jaxscale._doctor.diagnosis import diagnose
from jaxscale._doctor.measure import examine
from jaxscale._doctor.target import load

pytestmark = [
    pytest.mark.standard_promotion,
    # JAX converts the constant 70000 to float16, and NumPy warns. Users see that, too.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]

TRIAL = pathlib.Path(__file__).parent / "trial"
MODULES = sorted(path.stem for path in TRIAL.glob("*.py") if path.stem != "trial_entry")
FAST = ["faulty:log_of_epsilon"]
TUNED = ["faulty:minus_1e9", "healthy:causal_mask", "healthy:gelu_of_small_numbers", *FAST]
REPORT = r"https://github.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+"
WRONG = 0.1  # a leaf that is off by more than this is wrong, at the scale where it is closest,
CLOSE = 0.05  # and one that is off by less is right
SCALES = [2.0**k for k in range(-12, 42)]
HELD = {"verdicts": 62, "lines": 40, "alarms": 0}


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TRIAL))  # `load` adds the folder of a file, too


def entered(*modules):
    """The models of some files, by the names that the doctor takes."""
    found = {name: vars(importlib.import_module(name)) for name in modules}
    named = {f"{module}:{name}": f for module in modules for name, f in found[module].items()}
    return {name: model for name, model in named.items() if hasattr(model, "entry")}


def test_the_trial_is_large_enough_and_mostly_unseen():
    from trial_entry import KINDS

    entries = [model.entry for model in entered(*MODULES).values()]
    assert sum(entry.is_faulty for entry in entries) >= 42
    assert sum(not entry.is_faulty for entry in entries) >= 22
    assert sum(entry.tuned for entry in entries) * 3 <= len(entries)
    assert {entry.kind for entry in entries} == {*KINDS, ""}
    for module in MODULES:
        models = entered(module)
        for name, model in models.items():
            is_report = bool(re.fullmatch(REPORT, model.entry.source))
            assert bool(model.faults) == is_report == model.entry.is_faulty, name
        # No line outside of a model is marked.
        marked = (TRIAL / f"{module}.py").read_text().count("# fault\n")
        assert marked == sum(len(model.faults) for model in models.values()), module


def gradients(model, half):
    """The loss and the gradients of a model, compiled, as a function of the loss scale."""
    loss_fn, params, batch = model(half)

    @jax.jit
    def scaled(params, batch, scale):
        loss, grads = jax.value_and_grad(lambda params: loss_fn(params, batch) * scale)(params)
        return jax.tree.map(
            lambda leaf: leaf.astype(jnp.float32) / scale, {"loss": loss, "": grads}
        )

    def at(scale):
        leaves = jax.tree_util.tree_leaves_with_path(scaled(params, batch, jnp.float32(scale)))
        return {jax.tree_util.keystr(path): np.asarray(leaf, float) for path, leaf in leaves}

    return at


def is_finite(leaves):
    return all(np.all(np.isfinite(leaf)) for leaf in leaves.values())


def error(model):
    """The share by which the worst leaf is off at the best loss scale; inf if none is finite."""
    exact, at = gradients(model, jnp.float32)(1.0), gradients(model, jnp.float16)
    noise = model.entry.noise or "['loss']"

    def off(leaves, name):
        norm = np.linalg.norm(exact[name])
        return np.linalg.norm(leaves[name] - exact[name]) / norm if norm else np.any(leaves[name])

    names = [name for name in exact if name != "['loss']" and noise not in name]
    tried = [leaves for leaves in map(at, SCALES) if is_finite(leaves)]
    return min((max(off(leaves, name) for name in names) for leaves in tried), default=np.inf)


@pytest.mark.slow
@cases("module", MODULES)
def test_each_model_is_what_it_says(module):
    """Without the doctor: compiled, at each loss scale, against the same model in float32."""
    for name, model in entered(module).items():
        entry, off = model.entry, error(model)
        assert (off > WRONG) if entry.is_faulty else (off < CLOSE), (name, off)
        # A fault is of float16, or of the model itself.
        assert is_finite(gradients(model, jnp.float32)(1.0)) == (entry.kind != "input"), name


def judge(name, model):
    """Whether the doctor's verdict is right, and whether its first problem is at the fault."""
    file, function = name.replace(":", ".py:").split(":")
    found = diagnose(examine(load(f"{TRIAL / file}:{function}"), None))
    problems = [finding for finding in found if finding.is_problem]
    first = [p.line in model.faults and file in p.where for p in problems[:1]]
    return bool(problems) == model.entry.is_faulty, first == [True]


@pytest.mark.slow
def test_the_score_of_the_doctor(record_property):
    found = entered(*MODULES)
    judged = {name: judge(name, model) for name, model in found.items()}
    faulty = [name for name, model in found.items() if model.entry.is_faulty]
    wrong = [name for name, (is_right, _) in judged.items() if not is_right]
    got = {
        "verdicts": len(found) - len(wrong),
        "lines": sum(judged[name][1] for name in faulty),
        "alarms": len({*wrong} - {*faulty}),
    }
    tuned = [name for name, model in found.items() if model.entry.tuned]
    missed = ", ".join(n for n in tuned if judged[n] != (True, n in faulty)) or "none"
    report = f"{got} of {len(faulty)} faulty and {len(found) - len(faulty)} healthy models"
    record_property("trial", [report, f"of those that it was tuned on, it misses: {missed}"])
    assert got["verdicts"] >= HELD["verdicts"], report
    assert got["lines"] >= HELD["lines"], report
    assert got["alarms"] <= HELD["alarms"], report


@cases("name", TUNED, fast=FAST)
def test_some_models_are_judged_right(name):
    model = entered(name.split(":")[0])[name]
    assert model.entry.tuned
    assert judge(name, model) == (True, model.entry.is_faulty)

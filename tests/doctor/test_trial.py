"""The doctor's trial: how many real faults it finds, and how often it cries wolf.

`trial/` holds small models. The faulty ones reproduce a fault of a public report, which each
names, and mark its line with `# fault`. The healthy ones look suspicious and are not. The doctor
examines all, and this counts

- verdicts: it finds a problem if and only if the model is faulty;
- lines: the first problem of a faulty model points to the line of the fault;
- alarms: healthy models with a problem.

The score is held by `HELD`. A change that raises it raises `HELD`, too.

The doctor was tuned on the entries with `tuned=True` only. The others say how it does on models it
has not seen. So look at these as a number, never one by one: what is missed is named only for
tuned entries.

What the doctor cannot see: what is not in the batch that it gets, such as a row that is masked as
a whole, or weights after a thousand steps; which line of a backward rule of one's own is at fault,
of which it names the function; what happens inside of a kernel, a `shard_map` or a callback; and
rounding that builds up over many lines, of which no single one is to blame.

What each model is, `test_each_model_is_what_it_says` establishes without the doctor: compiled, at
each loss scale, against the same model in float32.
"""

import importlib
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

from jaxscale._doctor.exam import examine
from jaxscale._doctor.findings import findings
from jaxscale._doctor.target import load

pytestmark = [
    pytest.mark.standard_promotion,
    # JAX converts the constant 70000 to float16, and NumPy warns. Users see that, too.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]

TRIAL = pathlib.Path(__file__).parent / "trial"
MODULES = sorted(path.stem for path in TRIAL.glob("*.py") if path.stem != "trial_entry")
FAST = ["losses:log_of_epsilon"]
TUNED = ["attention:minus_1e9", "healthy:causal_mask", "healthy:gelu_of_small_numbers", *FAST]
WRONG = 0.1  # a leaf that is off by more than this is wrong, at the scale where it is closest,
CLOSE = 0.05  # and one that is off by less is right
SCALES = [2.0**k for k in range(-12, 42)]


class Score(NamedTuple):
    """How many models the doctor judged right."""

    verdicts: int
    lines: int
    alarms: int


HELD = Score(verdicts=62, lines=39, alarms=0)


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TRIAL))  # `load` adds the folder of a file, too


def factories(module):
    found = vars(importlib.import_module(module)).items()
    return {f"{module}:{name}": f for name, f in found if hasattr(f, "entry")}


def all_factories():
    return {name: f for module in MODULES for name, f in factories(module).items()}


def test_the_trial_is_large_enough_and_mostly_unseen():
    from trial_entry import KINDS, fault_lines

    entries = {name: f.entry for name, f in all_factories().items()}
    assert sum(entry.is_faulty for entry in entries.values()) >= 42
    assert sum(not entry.is_faulty for entry in entries.values()) >= 22
    assert sum(entry.tuned for entry in entries.values()) * 3 <= len(entries)
    assert {entry.kind for entry in entries.values()} == {*KINDS, ""}
    for name, factory in all_factories().items():
        assert bool(fault_lines(factory)) == factory.entry.is_faulty, name
        assert factory.entry.source.startswith("https://") == factory.entry.is_faulty, name
    for module in MODULES:  # no line outside of a model is marked
        marked = (TRIAL / f"{module}.py").read_text().count("# fault\n")
        assert marked == sum(len(fault_lines(f)) for f in factories(module).values()), module


def gradients(factory, half):
    """The loss and the gradients of a model, compiled, as a function of the loss scale."""
    loss_fn, params, batch = factory(half)

    @jax.jit
    def scaled(params, batch, scale):
        loss, grads = jax.value_and_grad(lambda params: loss_fn(params, batch) * scale)(params)
        return loss / scale, jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)

    def at(scale):
        loss, grads = scaled(params, batch, jnp.float32(scale))
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        named = {jax.tree_util.keystr(path): np.asarray(leaf, float) for path, leaf in leaves}
        return named | {"the loss": np.asarray(loss, float)}

    return at


def is_finite(leaves):
    return all(np.all(np.isfinite(leaf)) for leaf in leaves.values())


def error(factory):
    """The share by which the worst leaf is off at the best loss scale; inf if none is finite."""
    exact, at = gradients(factory, jnp.float32)(1.0), gradients(factory, jnp.float16)
    noise = factory.entry.noise

    def off(leaves, name):
        norm = np.linalg.norm(exact[name])
        return np.linalg.norm(leaves[name] - exact[name]) / norm if norm else np.any(leaves[name])

    names = [name for name in exact if name != "the loss" and not (noise and noise in name)]
    tried = [leaves for leaves in map(at, SCALES) if is_finite(leaves)]
    return min((max(off(leaves, name) for name in names) for leaves in tried), default=np.inf)


@pytest.mark.slow
@cases("module", MODULES)
def test_each_model_is_what_it_says(module):
    for name, factory in factories(module).items():
        entry, off = factory.entry, error(factory)
        assert (off > WRONG) if entry.is_faulty else (off < CLOSE), (name, off)
        # A fault is of float16, or of the model itself.
        exact = gradients(factory, jnp.float32)(1.0)
        assert is_finite(exact) == (entry.kind != "input"), name


def judge(name, factory):
    """Whether the doctor's verdict is right, and whether its first problem is at the fault."""
    from trial_entry import fault_lines

    module, function = name.split(":")
    exam = examine(load(f"{TRIAL / module}.py:{function}"), None)
    problems = [finding for finding in findings(exam) if finding.is_problem]
    first = [p.line in fault_lines(factory) and f"{module}.py" in p.where for p in problems[:1]]
    return bool(problems) == factory.entry.is_faulty, first == [True]


@pytest.mark.slow
def test_the_score_of_the_doctor(record_property):
    found = all_factories()
    judged = {name: judge(name, factory) for name, factory in found.items()}
    faulty = [name for name, factory in found.items() if factory.entry.is_faulty]
    right = [name for name, (verdict, _) in judged.items() if verdict]
    got = Score(
        verdicts=len(right),
        lines=sum(judged[name][1] for name in faulty),
        alarms=len(found.keys() - set(faulty) - set(right)),
    )
    tuned = [name for name, factory in found.items() if factory.entry.tuned]
    missed = ", ".join(n for n in tuned if judged[n] != (True, n in faulty)) or "none"
    report = f"{got} of {len(faulty)} faulty and {len(found) - len(faulty)} healthy models"
    record_property("trial", [report, f"of those that it was tuned on, it misses: {missed}"])
    assert got.verdicts >= HELD.verdicts, report
    assert got.lines >= HELD.lines, report
    assert got.alarms <= HELD.alarms, report


@cases("name", TUNED, fast=FAST)
def test_some_models_are_judged_right(name):
    factory = factories(name.split(":")[0])[name]
    assert factory.entry.tuned
    assert judge(name, factory) == (True, factory.entry.is_faulty)

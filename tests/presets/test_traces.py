"""Replays what 14 versions of real loss scalers did. `traces/FORMAT.md` explains the files.

What moves here is the reference in plain Python; `tests/policies/test_policies.py` holds that the
real policies move as it does.
"""

import collections
import functools
import gzip
import itertools
import json
import pathlib

import jax
import numpy as np
import optax
import pytest
from references import trajectory
from tables import cases

import jaxscale
from jaxscale import presets

FOLDER = pathlib.Path(__file__).parent / "traces"


def test_pytorchs_scale_doubles_after_the_interval_and_halves_at_an_overflow():
    policy = presets.torch(init_scale=4.0, growth_interval=2)
    state = policy.init()
    scales = []
    for grads_finite in (True, True, False):
        state = policy.adjust(state, grads_finite)
        scales.append(float(state.loss_scale))
    assert scales == [4, 8, 4]


OPTAX = ["optax_apply_if_finite", "optax_multisteps_skip_not_finite"]


@functools.cache
def load(system):
    with gzip.open(FOLDER / f"{system}.json.gz") as file:
        trace = json.load(file)
    assert trace["version"]
    return trace["cases"]


SYSTEMS = {
    "apex_amp_loss_scaler": presets.apex,
    "apex_fp16_utils_dynamic_loss_scaler": presets.apex_fp16_utils,
    "apex_update_scale_hysteresis": presets.apex_hysteresis,
    "deepspeed_dynamic_loss_scaler": presets.deepspeed,
    "flax_dynamic_scale": presets.flax,
    "jmp_dynamic_loss_scale": presets.jmp,
    "keras3_loss_scale_optimizer_jax": presets.keras,
    "keras3_loss_scale_optimizer_tensorflow": presets.keras,
    "megatron_dynamic_grad_scaler": presets.megatron,
    "tf1_contrib_exponential_update": presets.tensorflow_contrib,
    "tf_compat_v1_dynamic_loss_scale": presets.tensorflow,
    "tf_keras_loss_scale_optimizer": presets.tf_keras,
    "torch_grad_scaler": presets.torch,
    "torch_grad_scaler_two_optimizers": presets.torch,
}
# A fixed scale skips nothing by itself, as in TensorFlow; these skip, as `loss_scaled` does.
FIXED_BUT_SKIPPING = {"tf1_contrib_exponential_update", "jmp_dynamic_loss_scale"}
# How the names of a trace's configuration differ from the arguments of the preset.
RENAMED = {
    "flax_dynamic_scale": {"init": "scale"},
    "jmp_dynamic_loss_scale": {"init": "loss_scale", "min": "min_loss_scale"},
}
NO_ARGUMENTS = {"mode", "scale_dtype", "unscale_first", "optimizers"}


def start_policy(system, config):
    """The policy of a case."""
    if "kind" in config:
        return jaxscale.as_loss_scale(config.get("loss_scale"))
    renamed = RENAMED.get(system, {})
    arguments = {}
    for name, value in config.items():
        if name not in NO_ARGUMENTS and not name.startswith("start_"):
            arguments[renamed.get(name, name)] = value
    if "scale_dtype" in config:
        scale_name = renamed["init"]
        arguments[scale_name] = np.asarray(
            arguments[scale_name], config["scale_dtype"]
        )[()]
    if system.startswith("jmp") and config["mode"] == "jit":
        # Under `jit` jmp loses its minimum, and 1 takes its place.
        arguments["min_loss_scale"] = 1.0
    return SYSTEMS[system](**arguments)


def start_state(policy, config):
    """The numbers of the first state of a case."""
    state = policy.init()
    trackers = [value for name, value in config.items() if name.startswith("start_")]
    if any(trackers) and isinstance(policy, presets.PresetLossScale):
        # With a growth delay, the tracker has counted that many steps fewer.
        state = state._replace(
            growth_tracker=np.int32(trackers[0] - policy.growth_delay)
        )
    return tuple(leaf.item() for leaf in state)


def make_gradients(case, steps):
    bad = np.resize([np.inf, -np.inf, np.nan], steps)
    is_finite = np.array(case["finite"][:steps]) == 1
    return np.where(is_finite, 1.0, bad).astype(np.float32)


def is_normal(scale):
    return 2.0**-126 <= float(scale) <= float(np.finfo(np.float32).max)


@cases("system", SYSTEMS)
def test_scale_and_verdict_are_those_of_the_library(system):
    for case in load(system):
        policy = start_policy(system, case["config"])
        start = start_state(policy, case["config"])
        interval = getattr(policy, "growth_interval", start[1] + 1)
        if start[1] >= interval and "tf" not in system:
            continue  # a counter restored beyond the interval, which grows at once here
        # Until the library's scale leaves the normal float32 numbers.
        steps = len(list(itertools.takewhile(is_normal, case["scale"]))) - 1
        finite = np.array(case["finite"][:steps]) == 1
        states = [start, *trajectory(policy, start, finite.tolist())]
        scales = np.float32([scale for scale, *_ in states])

        recorded = np.float64(case["scale"][: steps + 1]).astype(np.float32)
        ulps = np.zeros(len(recorded))
        if "inexact" in case["tags"]:
            has_moved = np.diff(recorded, prepend=recorded[:1]) != 0
            ulps = 2 * np.cumsum(has_moved)
        ulp = np.spacing(np.minimum(recorded, 2.0**127))
        assert np.all(np.abs(scales - recorded) <= ulps * ulp), case["id"]

        is_fixed = isinstance(policy, jaxscale.FixedLossScale | jaxscale.NoOpLossScale)
        if is_fixed and system not in FIXED_BUT_SKIPPING:
            finite[:] = True
        assert finite.tolist() == case["applied"][:steps], case["id"]


def pad(grads):
    """Gradients of many cases in one array, with ones behind those of each."""
    longest = max(map(len, grads)) + 1
    rows = [np.pad(row, (0, longest - len(row)), constant_values=1) for row in grads]
    return np.stack(rows)


def scan_optimizer(tx, grads):
    """Runs an optimizer over rows of gradients: the states after each step, and its updates."""

    def step(state, grad):
        updates, state = tx.update(grad, state)
        return state, (state, updates)

    def run(row):
        _, outcome = jax.lax.scan(step, tx.init(row[0]), row)
        return outcome

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(run))(grads))


def assert_steps_are_those_of_optax(group, inner, state_of):
    """Replays the cases of one optimizer; `state_of` finds the state with Optax's counters."""
    grads = []
    for case in group:
        steps = len(case["finite"])
        grads.append(make_gradients(case, steps))
    tx = jaxscale.skip_nonfinite(inner)
    states, updates = scan_optimizer(tx, pad(grads))
    counters = state_of(states)._asdict()
    counters["last_finite"] = counters.get("step_applied")
    for row, case in enumerate(group):
        where = case["id"]
        finite = np.array(case["finite"])
        steps = len(finite)
        applied = np.array(case["applied"])
        # Optax gave up where it applied a gradient that is not finite. Here no step does.
        expected = (applied == 1) & (finite == 1)
        is_applied = updates[row, :steps] != 0
        assert is_applied.tolist() == expected.tolist(), where
        for name, recorded in case["counters"].items():
            counter = counters[name]
            values = counter[row, :steps]
            assert values.tolist() == recorded[1:], (where, name)


@pytest.mark.worlds
@pytest.mark.standard_promotion
def test_steps_are_skipped_as_in_optax():
    group = load("optax_apply_if_finite")
    assert_steps_are_those_of_optax(group, optax.scale(1.0), lambda states: states)


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_micro_batches_are_skipped_as_in_optax():
    groups = collections.defaultdict(list)
    for case in load("optax_multisteps_skip_not_finite"):
        groups[case["config"]["every_k"]].append(case)
    for every_k, group in groups.items():
        inner = optax.MultiSteps(optax.sgd(-1.0), every_k)
        assert_steps_are_those_of_optax(group, inner, lambda states: states.inner_state)


def test_every_file_is_replayed():
    files = {path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz")}
    assert files == {*SYSTEMS, *OPTAX}
    assert len(files) == 16
    assert "what 14 versions of these scalers did" in presets.__doc__

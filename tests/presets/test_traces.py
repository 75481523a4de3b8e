"""Replays, step by step, what 30 real loss scalers did. `traces/FORMAT.md` explains the files."""

import collections
import dataclasses
import functools
import gzip
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import cases

import jaxscale
from jaxscale import presets

FOLDER = pathlib.Path(__file__).parent / "traces"
LOGMAX, OPTAX = "openseq2seq_logmax", ["optax_apply_if_finite", "optax_multisteps_skip_not_finite"]


@functools.cache
def load(system):
    with gzip.open(FOLDER / f"{system}.json.gz") as file:
        trace = json.load(file)
    assert trace["version"]
    return trace["cases"]


# The fields of our state that the counters of a library and its policy stand for: what each is, or
# a function that says whether it is right.


def direct(growth, hysteresis=None):
    """A library has the same counters, but its second one may fall below 0."""
    return lambda counters, policy: {
        "growth_tracker": counters[growth],
        **({"hysteresis_tracker": np.maximum(counters[hysteresis], 0)} if hysteresis else {}),
    }


def used(growth, hysteresis):
    """It counts the tolerated steps that are used, not those that are left."""
    return lambda counters, policy: {
        "growth_tracker": counters[growth],
        "hysteresis_tracker": np.maximum(policy.hysteresis - counters[hysteresis], 0),
    }


def since(iteration, last, late=0):
    """It remembers the step of its last overflow."""

    def expected(counters, policy):
        finite = counters[iteration] - counters[last] - 1 - late
        return {"growth_tracker": np.where(finite < 0, finite, finite % policy.growth_interval)}

    return expected


ITERATIONS = since("cur_iter", "last_overflow_iter")
TRACKERS, USED = direct("growth_tracker", "hysteresis_tracker"), used("good_steps", "bad_steps")


def deepspeed(counters, policy):
    # Used up, it stays at 1 there and goes to 0 here; both back off on every such step.
    used_up = counters["cur_hysteresis"]
    late = since("cur_iter", "last_overflow_iter", late=1)(counters, policy)
    return late | {"hysteresis_tracker": lambda tracker: np.maximum(tracker, 1) == used_up}


def fairseq(counters, policy):
    return since("iter", "last_overflow_iter")(counters, policy) | {
        "steps_since_change": counters["iter"] - counters["last_rescale_iter"] - 1,
        "overflows_since_backoff": counters["overflows_since_rescale"],
    }


def backoff(counters, policy):
    last = counters["last_overflow_iteration"]
    growth = (counters["iteration"] - last) % policy.growth_interval
    # At first it counts from another step, which shows nowhere: the scale is at its maximum.
    return {"growth_tracker": lambda tracker: (tracker == growth) | (last < 0)}


def mindformers(counters, policy):
    return {
        "growth_tracker": counters["cur_iter"] - counters["last_overflow_iter"] - 1,
        "window_index": counters["list_index"],
        "window_up_count": counters["window_up_count"],
        "window_down_count": counters["window_down_count"],
    }


def chainer(counters, policy):
    return {"overflows": lambda overflows: (overflows > 0) == counters["isnan_ever"]}


# system: (preset, fields)
SYSTEMS = {
    "apex_amp_loss_scaler": (presets.apex, direct("unskipped")),
    "apex_fp16_utils_dynamic_loss_scaler": (presets.apex_fp16_utils, ITERATIONS),
    "apex_update_scale_hysteresis": (presets.apex_hysteresis, TRACKERS),
    "chainer_loss_scaling": (presets.chainer, chainer),
    "colossalai_dynamic_grad_scaler": (presets.colossalai, used("growth_step", "hysteresis_step")),
    "deepspeed_dynamic_loss_scaler": (presets.deepspeed, deepspeed),
    "fairseq_dynamic_loss_scaler": (presets.fairseq, fairseq),
    "flax_dynamic_scale": (presets.flax, direct("fin_steps")),
    "jamp_dynamic_loss_scale": (presets.jamp, direct("counter")),
    "jaxamp_dynamic_scaler": (presets.jaxamp, direct("count")),
    "jmp_dynamic_loss_scale": (presets.jmp, direct("counter")),
    "keras3_loss_scale_optimizer_jax": (presets.keras, direct("step_counter")),
    "keras3_loss_scale_optimizer_tensorflow": (presets.keras, direct("step_counter")),
    "megatron_dynamic_grad_scaler": (presets.megatron, TRACKERS),
    "mindformers_adaptive_loss_scale": (presets.mindformers, mindformers),
    "mindspore_dynamic_loss_scale_manager": (presets.mindspore_manager, ITERATIONS),
    "mindspore_dynamic_loss_scale_update_cell": (presets.mindspore_cell, ITERATIONS),
    "mindspore_dynamic_loss_scaler": (presets.mindspore, direct("counter")),
    "mpx_dynamic_loss_scaling": (presets.mpx, direct("counter")),
    "openseq2seq_backoff": (presets.openseq2seq_backoff, backoff),
    "paddle_grad_scaler": (presets.paddle, used("incr_count", "decr_count")),
    "paddle_update_loss_scaling_op": (presets.paddle_op, used("num_good_steps", "num_bad_steps")),
    "tf1_contrib_exponential_update": (presets.tensorflow_contrib, used("good_steps", "bad_steps")),
    "tf_compat_v1_dynamic_loss_scale": (presets.tensorflow, direct("num_good_steps")),
    "tf_keras_loss_scale_optimizer": (presets.tf_keras, direct("dynamic_counter")),
    "torch_grad_scaler": (presets.torch, direct("growth_tracker")),
    "torch_grad_scaler_two_optimizers": (presets.torch, direct("growth_tracker")),
}
# A fixed scale skips nothing by itself, as in TensorFlow; these skip, as `loss_scaled` does.
FIXED_BUT_SKIPPING = {"tf1_contrib_exponential_update", "jmp_dynamic_loss_scale"}
# How the names of a trace's configuration differ from the arguments of the preset.
RENAMED = {
    "flax_dynamic_scale": {"init": "scale"},
    "jamp_dynamic_loss_scale": {"init": "loss_scale", "min": "min_loss_scale"},
    "jmp_dynamic_loss_scale": {"init": "loss_scale", "min": "min_loss_scale"},
    "mpx_dynamic_loss_scaling": {"init": "loss_scaling", "min": "min_loss_scaling"},
}
NO_ARGUMENTS = {"mode", "scale_dtype", "unscale_first", "optimizers"}


def begun(system, config):
    """The policy of a case, and its first state."""
    if "kind" in config:
        policy = jaxscale.as_loss_scale(config.get("loss_scale"))
        return policy, policy.init()
    start = [value for name, value in config.items() if name.startswith("start_")]
    config = {name: v for name, v in config.items() if not name.startswith("start_")}
    if "scale_dtype" in config:
        config["init"] = np.asarray(config["init"], config["scale_dtype"])[()]
    if system.startswith("jmp") and config["mode"] == "jit":
        config["min"] = 1.0  # under `jit` jmp loses its minimum, and 1 takes its place
    names = RENAMED.get(system, {})
    config = {names.get(name, name): v for name, v in config.items() if name not in NO_ARGUMENTS}
    policy = SYSTEMS[system][0](**config)
    state = policy.init()
    if any(start) and isinstance(policy, presets.PresetLossScale):
        # With a growth delay, the tracker has counted that many steps fewer.
        tracker = jnp.array(start[0] - policy.growth_delay, jnp.int32)
        state = state._replace(growth_tracker=tracker)
    return policy, state


@functools.partial(jax.jit, static_argnums=(0, 1))
def scan(cls, switches, numbers, states, grads):
    """All steps of many policies that differ in their numbers only: the states before them."""

    def run(numbers, state, grads):
        # Past the checks, which want Python numbers: so that many share one program.
        policy = object.__new__(cls)
        for name, value in (*switches, *numbers.items()):
            object.__setattr__(policy, name, value)

        def step(state, grad):
            after, applied = policy.update(state, {"w": grad})
            return after, (state, applied)

        return jax.lax.scan(step, state, grads)[1]

    return jax.vmap(run)(numbers, states, grads)


def replay(policies, states, grads):
    """Every state and verdict of every case, in few programs."""
    groups, outcome = collections.defaultdict(list), {}
    for i, (policy, *columns) in enumerate(zip(policies, states, filled_up(grads), strict=True)):
        fields = dataclasses.asdict(policy).items()
        switches = tuple(field for field in fields if isinstance(field[1], (bool, str, tuple)))
        numbers = dict(field for field in fields if field not in switches)
        groups[type(policy), switches].append((i, numbers, *columns))
    for signature, members in groups.items():
        columns = jax.tree.map(lambda *leaves: np.stack(leaves), *(row[1:] for row in members))
        before, applied = jax.tree.map(np.asarray, scan(*signature, *columns))
        for row, (i, *_) in enumerate(members):
            n = len(grads[i])
            states_of_one = jax.tree.map(lambda x, row=row, n=n: x[row, : n + 1], before)
            outcome[i] = states_of_one, applied[row, :n]
    return [outcome[i] for i in range(len(policies))]


def filled_up(grads):
    """Gradients of many cases in one array, with ones behind those of each."""
    longest = max(map(len, grads)) + 1
    return np.stack([np.pad(g, (0, longest - len(g)), constant_values=1) for g in grads])


def gradients(case, steps):
    bad = np.resize([np.inf, -np.inf, np.nan], steps)
    return np.where(np.array(case["finite"][:steps]) == 1, 1.0, bad).astype(np.float32)


def is_normal(scale):
    return 2.0**-126 <= float(scale) <= float(np.finfo(np.float32).max)


FAST = ["deepspeed_dynamic_loss_scaler", "mpx_dynamic_loss_scaling", "torch_grad_scaler"]


@cases("system", SYSTEMS, fast=FAST)
def test_scale_and_counters_are_those_of_the_library(system):
    replayed = []
    for case in load(system):
        policy, state = begun(system, case["config"])
        tracker = getattr(state, "growth_tracker", 0)
        if tracker >= getattr(policy, "growth_interval", 1) and "tf" not in system:
            continue  # a counter restored beyond the interval, which grows at once here
        # Until the library's scale leaves the normal float32 numbers.
        steps = len(list(itertools.takewhile(is_normal, case["scale"]))) - 1
        replayed.append((case, policy, state, gradients(case, steps)))
    outcome = replay(*zip(*(each[1:] for each in replayed), strict=True))
    for (case, policy, _, grads), (states, applied) in zip(replayed, outcome, strict=True):
        steps, where = len(grads), f"{system} {case['id']}"
        want = np.array(case["scale"][: steps + 1], np.float64).astype(np.float32)
        changes = np.cumsum(np.diff(want, prepend=want[:1]) != 0)
        ulps = 2 * changes * ("inexact" in case["tags"])
        error = np.abs(states.loss_scale - want)
        assert (error <= ulps * np.spacing(np.minimum(want, 2.0**127))).all(), where
        skips = case["config"].get("kind") and system in FIXED_BUT_SKIPPING
        verdict = np.isfinite(grads) if skips else applied
        assert verdict.tolist() == [bool(a) for a in case["applied"][:steps]], where
        if not isinstance(policy, (jaxscale.FixedLossScale, jaxscale.NoOpLossScale)):
            counters = {name: np.array(v[: steps + 1]) for name, v in case["counters"].items()}
            for name, expected in SYSTEMS[system][1](counters, policy).items():
                got = getattr(states, name)
                same = expected(got) if callable(expected) else got == expected
                assert np.all(same), f"{where}: {name} {got}"


def test_logmax_follows_openseq2seq_up_to_its_defects():
    recorded, policies, grads = load(LOGMAX), [], []
    for case in recorded:
        config, amax = dict(case["config"]), np.array(case["amax"], np.float32)
        amax[np.array(case["has_nan"]) == 1] = np.nan
        stops = amax == 0  # its scale is NaN for good
        if config["log_max"] == 4:
            # It counts a non-finite step as 2**log_max. That is what 16 means here.
            config["log_max"] = 16.0
        else:
            stops |= ~np.isfinite(amax)
        policies.append(presets.openseq2seq_logmax(**config))
        grads.append(amax[: np.argmax(stops)] if stops.any() else amax)
    outcome = replay(policies, [policy.init() for policy in policies], grads)
    for case, amax, (states, applied) in zip(recorded, grads, outcome, strict=True):
        want = np.array(case["scale"][: len(amax) + 1])
        np.testing.assert_allclose(states.loss_scale, want, rtol=0.02, err_msg=case["id"])
        assert applied.tolist() == [bool(a) for a in case["applied"][: len(amax)]]
        for name in states._fields[1:]:
            want = np.array(case["counters"][name][: len(amax) + 1])
            got = getattr(states, name)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=case["id"])


@pytest.mark.standard_promotion
@cases("system", OPTAX, fast=OPTAX[:1])
def test_steps_are_skipped_as_in_optax(system):
    recorded = load(system)
    is_multi = "multisteps" in system
    for every_k in sorted({case["config"].get("every_k", 0) for case in recorded}):
        inner = optax.MultiSteps(optax.sgd(-1.0), every_k) if is_multi else optax.scale(1.0)
        tx = jaxscale.skip_nonfinite(inner)

        def step(state, grad, tx=tx):
            updates, state = tx.update(grad, state)
            return state, (state, updates != 0)

        group = [case for case in recorded if case["config"].get("every_k", 0) == every_k]
        grads = [gradients(case, len(case["finite"])) for case in group]
        run = jax.vmap(lambda g, tx=tx, step=step: jax.lax.scan(step, tx.init(g[0]), g)[1])
        states, applied = jax.tree.map(np.asarray, jax.jit(run)(filled_up(grads)))
        source = states.inner_state if is_multi else states
        for i, case in enumerate(group):
            n = len(case["finite"])
            want = np.array(case["applied"]) == 1
            # Where it applied a gradient that is not finite.
            gave_up = want & (np.array(case["finite"]) == 0)
            assert applied[i, :n].tolist() == (want & ~gave_up).tolist(), case["id"]
            for name, counter in case["counters"].items():
                name = "step_applied" if name == "last_finite" else name
                assert getattr(source, name)[i, :n].tolist() == counter[1:], (case["id"], name)


def test_every_file_is_replayed():
    files = {path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz")}
    assert files == {*SYSTEMS, LOGMAX, *OPTAX, "olmo_skip_step_optimizer"}
    assert len(files) == 31
    assert "what 30 versions of these scalers did" in presets.__doc__

"""The preset for each library in the traces, its arguments, and its counters."""

import functools
import gzip
import json
import pathlib

import jax.numpy as jnp
import numpy as np

import jaxscale
from jaxscale import presets

FOLDER = pathlib.Path(__file__).parent.parent / "presets" / "traces"


# How the names of a trace's configuration differ from the arguments of the preset.
RENAMED = {
    "flax_dynamic_scale": {"init": "scale"},
    "jamp_dynamic_loss_scale": {"init": "loss_scale", "min": "min_loss_scale"},
    "jmp_dynamic_loss_scale": {"init": "loss_scale", "min": "min_loss_scale"},
    "mpx_dynamic_loss_scaling": {"init": "loss_scaling", "min": "min_loss_scaling"},
}
NO_ARGUMENTS = {"mode", "scale_dtype", "unscale_first", "optimizers"}


def arguments(system, config):
    """The arguments of the preset for a case of a trace."""
    config = {name: v for name, v in config.items() if not name.startswith("start_")}
    if "scale_dtype" in config:
        config["init"] = np.asarray(config["init"], config["scale_dtype"])[()]
    if system.startswith("jmp") and config["mode"] == "jit":
        config["min"] = 1.0  # under `jit` jmp loses its minimum, and 1 takes its place
    names = RENAMED.get(system, {})
    return {names.get(name, name): v for name, v in config.items() if name not in NO_ARGUMENTS}


def direct(growth, hysteresis=None, of=lambda count, policy: np.maximum(count, 0)):
    """The counters of a library that has the same ones as `LossScaleState`."""

    def expected(counters, policy):
        yield "growth_tracker", counters[growth]
        if hysteresis:
            yield "hysteresis_tracker", of(counters[hysteresis], policy)

    return expected


def left(count, policy):
    """The tolerated steps that are left, where a library counts those already used."""
    return np.maximum(policy.hysteresis - count, 0)


def since(iteration, last, late=0):
    """The growth tracker of a library that remembers the step of its last overflow."""

    def expected(counters, policy):
        finite = counters[iteration] - counters[last] - 1 - late
        yield "growth_tracker", np.where(finite < 0, finite, finite % policy.growth_interval)

    return expected


def deepspeed(counters, policy):
    yield from since("cur_iter", "last_overflow_iter", late=1)(counters, policy)
    # Used up, it stays at 1 there and goes to 0 here; both back off on every such step.
    used_up = counters["cur_hysteresis"]
    yield "hysteresis_tracker", lambda tracker: np.maximum(tracker, 1) == used_up


def fairseq(counters, policy):
    yield from since("iter", "last_overflow_iter")(counters, policy)
    yield "steps_since_change", counters["iter"] - counters["last_rescale_iter"] - 1
    yield "overflows_since_backoff", counters["overflows_since_rescale"]


def backoff(counters, policy):
    finite = counters["iteration"] - counters["last_overflow_iteration"]
    # At first it counts from another step, which shows nowhere: the scale is at its maximum.
    started = counters["last_overflow_iteration"] >= 0
    growth = finite % policy.growth_interval
    yield "growth_tracker", lambda tracker: (tracker == growth) | ~started


def chainer(counters, policy):
    ever = counters["isnan_ever"]
    yield "overflows", lambda overflows: (overflows > 0) == ever


def mindformers(counters, policy):
    yield "growth_tracker", counters["cur_iter"] - counters["last_overflow_iter"] - 1
    yield "window_index", counters["list_index"]
    yield "window_up_count", counters["window_up_count"]
    yield "window_down_count", counters["window_down_count"]


ITERATIONS = since("cur_iter", "last_overflow_iter")
TRACKERS = direct("growth_tracker", "hysteresis_tracker")
GROWTH, COUNTER, STEPS = direct("growth_tracker"), direct("counter"), direct("step_counter")
GOOD_AND_BAD = direct("num_good_steps", "num_bad_steps", left)
# system: (preset, counters)
SYSTEMS = {
    "apex_amp_loss_scaler": (presets.apex, direct("unskipped")),
    "apex_fp16_utils_dynamic_loss_scaler": (presets.apex_fp16_utils, ITERATIONS),
    "apex_update_scale_hysteresis": (presets.apex_hysteresis, TRACKERS),
    "chainer_loss_scaling": (presets.chainer, chainer),
    "colossalai_dynamic_grad_scaler": (
        presets.colossalai,
        direct("growth_step", "hysteresis_step", left),
    ),
    "deepspeed_dynamic_loss_scaler": (presets.deepspeed, deepspeed),
    "fairseq_dynamic_loss_scaler": (presets.fairseq, fairseq),
    "flax_dynamic_scale": (presets.flax, direct("fin_steps")),
    "jamp_dynamic_loss_scale": (presets.jamp, COUNTER),
    "jaxamp_dynamic_scaler": (presets.jaxamp, direct("count")),
    "jmp_dynamic_loss_scale": (presets.jmp, COUNTER),
    "keras3_loss_scale_optimizer_jax": (presets.keras, STEPS),
    "keras3_loss_scale_optimizer_tensorflow": (presets.keras, STEPS),
    "megatron_dynamic_grad_scaler": (presets.megatron, TRACKERS),
    "mindformers_adaptive_loss_scale": (presets.mindformers, mindformers),
    "mindspore_dynamic_loss_scale_manager": (presets.mindspore_manager, ITERATIONS),
    "mindspore_dynamic_loss_scale_update_cell": (presets.mindspore_cell, ITERATIONS),
    "mindspore_dynamic_loss_scaler": (presets.mindspore, COUNTER),
    "mpx_dynamic_loss_scaling": (presets.mpx, COUNTER),
    "openseq2seq_backoff": (presets.openseq2seq_backoff, backoff),
    "paddle_grad_scaler": (presets.paddle, direct("incr_count", "decr_count", left)),
    "paddle_update_loss_scaling_op": (presets.paddle_op, GOOD_AND_BAD),
    "tf1_contrib_exponential_update": (
        presets.tensorflow_contrib,
        direct("good_steps", "bad_steps", left),
    ),
    "tf_compat_v1_dynamic_loss_scale": (presets.tensorflow, direct("num_good_steps")),
    "tf_keras_loss_scale_optimizer": (presets.tf_keras, direct("dynamic_counter")),
    "torch_grad_scaler": (presets.torch, GROWTH),
    "torch_grad_scaler_two_optimizers": (presets.torch, GROWTH),
}
# A fixed scale skips nothing by itself, as in TensorFlow; these skip, as `loss_scaled` does.
FIXED_BUT_SKIPPING = {"tf1_contrib_exponential_update", "jmp_dynamic_loss_scale"}


@functools.cache
def load(system):
    with gzip.open(FOLDER / f"{system}.json.gz") as file:
        trace = json.load(file)
    assert trace["version"]
    return trace["cases"]


def policy_of(system, case):
    config = case["config"]
    if "kind" in config:
        return jaxscale.as_loss_scale(config.get("loss_scale"))
    return SYSTEMS[system][0](**arguments(system, config))


def first_state(system, case, policy):
    state = policy.init()
    start = [value for name, value in case["config"].items() if name.startswith("start_")]
    if any(start) and isinstance(policy, presets.PresetLossScale):
        # With a growth delay, the tracker has counted that many steps fewer.
        tracker = jnp.array(start[0] - policy.growth_delay, jnp.int32)
        state = state._replace(growth_tracker=tracker)
    return state

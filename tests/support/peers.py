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


def renamed(**names):
    """Returns what renames the configuration of a trace to the arguments of its preset."""

    def rename(config):
        config = {names.get(name, name): value for name, value in config.items()}
        return {k: v for k, v in config.items() if k and not k.startswith("start_")}

    return rename


def jmp(config):
    return {
        "loss_scale": np.asarray(config["init"], config["scale_dtype"])[()],
        # Under `jit` jmp loses its minimum, and 1 takes its place.
        "min_loss_scale": 1.0 if config["mode"] == "jit" else config["min"],
        "factor": config["factor"],
        "period": config["period"],
    }


def jamp(config):
    return jmp(config | {"mode": "eager"})


def mpx(config):
    return {
        "loss_scaling": np.asarray(config["init"], config["scale_dtype"])[()],
        "min_loss_scaling": config["min"],
        "factor": config["factor"],
        "period": config["period"],
    }


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


SAME = renamed()
ITERATIONS = since("cur_iter", "last_overflow_iter")
TRACKERS = direct("growth_tracker", "hysteresis_tracker")
# system: (preset, from the traces' configuration to its arguments, counters)
SYSTEMS = {
    "apex_amp_loss_scaler": (presets.apex, SAME, direct("unskipped")),
    "apex_fp16_utils_dynamic_loss_scaler": (presets.apex_fp16_utils, SAME, ITERATIONS),
    "apex_update_scale_hysteresis": (presets.apex_hysteresis, SAME, TRACKERS),
    "chainer_loss_scaling": (presets.chainer, SAME, chainer),
    "colossalai_dynamic_grad_scaler": (
        presets.colossalai,
        SAME,
        direct("growth_step", "hysteresis_step", left),
    ),
    "deepspeed_dynamic_loss_scaler": (presets.deepspeed, SAME, deepspeed),
    "fairseq_dynamic_loss_scaler": (presets.fairseq, SAME, fairseq),
    "flax_dynamic_scale": (presets.flax, renamed(init="scale"), direct("fin_steps")),
    "jamp_dynamic_loss_scale": (presets.jamp, jamp, direct("counter")),
    "jaxamp_dynamic_scaler": (presets.jaxamp, renamed(mode=None), direct("count")),
    "jmp_dynamic_loss_scale": (presets.jmp, jmp, direct("counter")),
    "keras3_loss_scale_optimizer_jax": (presets.keras, SAME, direct("step_counter")),
    "keras3_loss_scale_optimizer_tensorflow": (presets.keras, SAME, direct("step_counter")),
    "megatron_dynamic_grad_scaler": (presets.megatron, SAME, TRACKERS),
    "mindformers_adaptive_loss_scale": (presets.mindformers, SAME, mindformers),
    "mindspore_dynamic_loss_scale_manager": (presets.mindspore_manager, SAME, ITERATIONS),
    "mindspore_dynamic_loss_scale_update_cell": (presets.mindspore_cell, SAME, ITERATIONS),
    "mindspore_dynamic_loss_scaler": (presets.mindspore, SAME, direct("counter")),
    "mpx_dynamic_loss_scaling": (presets.mpx, mpx, direct("counter")),
    "openseq2seq_backoff": (presets.openseq2seq_backoff, SAME, backoff),
    "paddle_grad_scaler": (presets.paddle, SAME, direct("incr_count", "decr_count", left)),
    "paddle_update_loss_scaling_op": (
        presets.paddle_op,
        SAME,
        direct("num_good_steps", "num_bad_steps", left),
    ),
    "tf1_contrib_exponential_update": (
        presets.tensorflow_contrib,
        SAME,
        direct("good_steps", "bad_steps", left),
    ),
    "tf_compat_v1_dynamic_loss_scale": (presets.tensorflow, SAME, direct("num_good_steps")),
    "tf_keras_loss_scale_optimizer": (presets.tf_keras, SAME, direct("dynamic_counter")),
    "torch_grad_scaler": (presets.torch, renamed(unscale_first=None), direct("growth_tracker")),
    "torch_grad_scaler_two_optimizers": (
        presets.torch,
        renamed(optimizers=None),
        direct("growth_tracker"),
    ),
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
    make, arguments, _ = SYSTEMS[system]
    return make(**arguments(config))


def first_state(system, case, policy):
    state = policy.init()
    start = [value for name, value in case["config"].items() if name.startswith("start_")]
    if any(start) and isinstance(policy, presets.PresetLossScale):
        # With a growth delay, the tracker has counted that many steps fewer.
        tracker = jnp.array(start[0] - policy.growth_delay, jnp.int32)
        state = state._replace(growth_tracker=tracker)
    return state

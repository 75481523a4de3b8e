"""The presets: the defaults of each library, what is rejected, and what a library saved."""

import inspect
import json
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import pytest
from flax.training import dynamic_scale
from tables import assert_same_bits, avals, cases

import jaxscale
from jaxscale import presets

# The arguments that a library requires, and the defaults that it documents for the others.
REQUIRED = {
    "tensorflow_contrib": {"init_loss_scale": 2.0**15, "incr_every_n_steps": 1000},
    "jmp": {"loss_scale": 2.0**15},
}
# By name, the exponent of the first scale and these fields.
FIELDS = "growth_factor backoff_factor growth_interval hysteresis min_scale max_scale"
LOW, HIGH = 2.0**-126, jnp.finfo(jnp.float32).max
DEFAULTS = {
    "tensorflow": (15, 2, 0.5, 2000, 1, 1, HIGH),
    "tensorflow_contrib": (15, 2, 0.8, 1000, 2, 1, HIGH),
    "tf_keras": (15, 2, 0.5, 2000, 1, 1, HIGH),
    "keras": (15, 2, 0.5, 2000, 1, LOW, HIGH),
    "torch": (16, 2, 0.5, 2000, 1, LOW, HIGH),
    "flax": (16, 2, 0.5, 2001, 1, LOW, HIGH),
    "jmp": (15, 2, 0.5, 2000, 1, 1, HIGH),
    "apex": (16, 2, 0.5, 2000, 1, LOW, 2.0**24),
    "apex_fp16_utils": (32, 2, 0.5, 1000, 1, 1, HIGH),
    "apex_hysteresis": (16, 2, 0.5, 2000, 1, LOW, HIGH),
    "megatron": (32, 2, 0.5, 1000, 2, 1, HIGH),
    "deepspeed": (32, 2, 0.5, 1000, 1, 1, HIGH),
}


def make(name, **arguments):
    return getattr(presets, name)(**REQUIRED.get(name, {}) | arguments)


def test_the_presets_are_these():
    functions = {
        name for name, value in vars(presets).items() if inspect.isfunction(value)
    }
    saved = {
        "from_torch",
        "to_torch",
        "from_tensorflow",
        "from_keras",
        "from_flax",
        "from_jmp",
    }
    assert functions == {*DEFAULTS, *saved}


def test_tests_that_the_docstring_names_are_there():
    named = set(re.findall(r"test_\w+", presets.__doc__))
    files = pathlib.Path(__file__).parent.parent.rglob("test_*.py")
    defined = set(
        re.findall(r"(?<=def )test_\w+", "".join(file.read_text() for file in files))
    )
    assert named
    assert named <= defined


@cases("name", DEFAULTS)
def test_defaults_are_those_of_the_library(name):
    policy = make(name)
    exponent, *defaults = DEFAULTS[name]
    assert policy.init_scale == 2.0**exponent
    assert [getattr(policy, field, None) for field in FIELDS.split()] == defaults
    assert hash(policy) == hash(make(name))


# Arguments that are ignored, or whose policy checks them under its own names.
NOT_NAMED = {
    "apex": ["scale_factor"],
}


@cases("name", DEFAULTS)
def test_names_in_errors_are_those_of_the_library(name):
    parameters = inspect.signature(getattr(presets, name)).parameters
    for argument, parameter in parameters.items():
        is_switch = isinstance(parameter.default, bool)
        if is_switch or argument in NOT_NAMED.get(name, ()):
            continue
        message = rf"^`presets\.{name}\({argument}=.* got -1"
        with pytest.raises(ValueError, match=message):
            make(name, **{argument: -1})


def test_a_scaler_that_is_off_scales_nothing():
    none = jaxscale.NoOpLossScale()
    assert presets.torch(enabled=False) == none


def test_a_scale_that_is_fixed_does_not_move():
    fixed = jaxscale.FixedLossScale(8)
    assert presets.tf_keras(dynamic=False, initial_scale=8) == fixed


# What a library saved.

TORCH = {
    "scale": 4096.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.25,
    "growth_interval": 50,
}
TORCH |= {"_growth_tracker": 7}
NUMBERS = {"initial_scale": 16.0, "dynamic_growth_steps": 5}
TENSORFLOW = {"initial_loss_scale": 4.0, "increment_period": 3, "multiplier": 4.0}
OLD = {
    "optimizer": {},
    "loss_scale": {"class_name": "DynamicLossScale", "config": TENSORFLOW},
}
FIXED = {"dynamic": False, "initial_scale": 8.0, "dynamic_growth_steps": None}


def test_a_torch_state_dict_round_trips():
    policy, state = presets.from_torch(json.loads(json.dumps(TORCH)))
    assert policy == presets.torch(
        init_scale=4096, backoff_factor=0.25, growth_interval=50
    )
    assert list(presets.to_torch(policy, state).items()) == list(TORCH.items())


def test_a_disabled_torch_scaler_round_trips():
    assert presets.to_torch(*presets.from_torch({})) == {}


def test_any_dynamic_policy_is_written_for_torch():
    policy = jaxscale.DynamicLossScale(growth_interval=50)
    changes = {"scale": 2.0**15, "backoff_factor": 0.5, "_growth_tracker": 0}
    assert presets.to_torch(policy, policy.init()) == TORCH | changes


KERAS_3 = {"name": "x", "inner_optimizer": {}} | NUMBERS
TF_KERAS = {"dynamic": True} | NUMBERS
# How each is read, what was saved, and the policy.
SAVED = {
    "a fixed jmp": (
        presets.from_jmp,
        jmp.StaticLossScale(jnp.float32(8)),
        jaxscale.FixedLossScale(8),
    ),
    "no jmp": (presets.from_jmp, jmp.NoOpLossScale(), jaxscale.NoOpLossScale()),
    "a disabled torch": (presets.from_torch, {}, jaxscale.NoOpLossScale()),
    "tensorflow": (
        presets.from_tensorflow,
        TENSORFLOW,
        presets.tensorflow(**TENSORFLOW),
    ),
    "tensorflow, fixed": (
        presets.from_tensorflow,
        {"loss_scale_value": 8.0},
        jaxscale.FixedLossScale(8),
    ),
    "keras 3": (presets.from_keras, KERAS_3, presets.keras(**NUMBERS)),
    "tf_keras": (presets.from_keras, TF_KERAS, presets.tf_keras(**NUMBERS)),
    "tf_keras, fixed": (presets.from_keras, FIXED, jaxscale.FixedLossScale(8)),
    "an old keras": (presets.from_keras, OLD, presets.tensorflow(**TENSORFLOW)),
}


@cases("name", SAVED)
def test_configurations_are_read(name):
    read, config, expected = SAVED[name]
    policy, state = read(config)
    assert policy == expected
    assert_same_bits(state, expected.init())


@pytest.mark.standard_promotion
def test_a_live_flax_scaler_is_read():
    live = dynamic_scale.DynamicScale(growth_interval=2, scale=64.0, minimum_scale=None)
    for _ in range(2):
        live, _, _, _ = live.value_and_grad(jnp.square)(jnp.float32(1))
    policy, state = presets.from_flax(live)
    assert policy == presets.flax(growth_interval=2, scale=64.0, minimum_scale=None)
    assert state.loss_scale == 64
    assert state.growth_tracker == 2
    assert avals(state) == avals(policy.init())
    assert policy.adjust(state, True).loss_scale == 128


@pytest.mark.standard_promotion
def test_a_live_jmp_scaler_is_read():
    scale = jnp.float16(64)
    live = jmp.DynamicLossScale(
        scale, period=3, factor=4, min_loss_scale=jnp.float16(2)
    )
    policy, state = presets.from_jmp(live.adjust(jnp.array(True)))
    assert policy == presets.jmp(scale, period=3, factor=4, min_loss_scale=2.0)
    assert policy.max_scale == 65504
    assert state.loss_scale == 64
    assert state.growth_tracker == 1


class Bad(NamedTuple):
    """A call that is an error, and what the error says."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    message: str
    error: type[Exception] = ValueError


def write_traced():
    policy = presets.torch()
    return jax.eval_shape(lambda state: presets.to_torch(policy, state), policy.init())


REJECTED = {
    "no dynamic": Bad(
        presets.tf_keras, {"dynamic": False}, "dynamic=False.*initial_scale"
    ),
    "a step of 0": Bad(
        presets.torch, {"growth_interval": 0}, r"torch\(growth_interval.*least 1, got 0"
    ),
    "no clamp": Bad(
        presets.PresetLossScale, {"clamp": "always"}, "clamp.*'moves'.*'always'"
    ),
    "no bool": Bad(
        presets.PresetLossScale, {"clip_growth": 1}, "clip_growth.*True.*got 1"
    ),
    "no delay": Bad(
        presets.PresetLossScale, {"growth_delay": -1}, "growth_delay.*least 0.*-1"
    ),
    "torch keys": Bad(
        presets.from_torch, {"state_dict": {"scale": 1.0}}, "_growth_tracker"
    ),
    "torch scale 0": Bad(
        presets.from_torch, {"state_dict": TORCH | {"scale": 0.0}}, "its scale is 0"
    ),
    "torch hysteresis": Bad(
        presets.to_torch, {"policy": presets.megatron(), "state": None}, "hysteresis=2"
    ),
    "torch delay": Bad(
        presets.to_torch,
        {"policy": presets.deepspeed(), "state": None},
        "growth_delay=1",
    ),
    "torch traced": Bad(write_traced, {}, "inside `jit`", TypeError),
    "tensorflow keys": Bad(
        presets.from_tensorflow, {"config": {"period": 3}}, "period"
    ),
    "keras keys": Bad(
        presets.from_keras, {"config": {"dynamic": True}}, "initial_scale"
    ),
    "no flax": Bad(
        presets.from_flax,
        {"dynamic_scale": types.SimpleNamespace()},
        "no growth_factor",
        TypeError,
    ),
    "no jmp": Bad(presets.from_jmp, {"loss_scale": 3}, "no period", TypeError),
}


@cases("name", REJECTED)
def test_what_cannot_train_or_be_read_is_rejected(name):
    bad = REJECTED[name]
    with pytest.raises(bad.error, match=bad.message):
        bad.call(**bad.arguments)

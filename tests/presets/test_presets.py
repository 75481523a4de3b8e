"""The presets: the defaults of each library, what is rejected, and what a library saved."""

import inspect
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import assert_same_bits, avals, cases

import jaxscale
from jaxscale import presets

# The arguments that a library requires, and the defaults that it documents for the others.
REQUIRED = {
    "tensorflow_contrib": {"init_loss_scale": 2.0**15, "incr_every_n_steps": 1000},
    "jamp": {"loss_scale": 2.0**15},
    "jmp": {"loss_scale": 2.0**15},
    "mpx": {"loss_scaling": 2.0**15, "min_loss_scaling": 1.0},
    "mindspore": {"scale_value": 2.0**10, "scale_factor": 2, "scale_window": 50},
    "mindspore_cell": {"loss_scale_value": 2.0**12, "scale_factor": 2, "scale_window": 1000},
    "mindformers": {"loss_scale_value": 2.0**12, "scale_factor": 2, "scale_window": 20},
}
FIELDS = "init_scale growth_factor backoff_factor growth_interval hysteresis min_scale max_scale"
LOW, HIGH = 2.0**-126, jnp.finfo(jnp.float32).max
DEFAULTS = {
    "tensorflow": (2.0**15, 2, 0.5, 2000, 1, 1, HIGH),
    "tensorflow_contrib": (2.0**15, 2, 0.8, 1000, 2, 1, HIGH),
    "tf_keras": (2.0**15, 2, 0.5, 2000, 1, 1, HIGH),
    "keras": (2.0**15, 2, 0.5, 2000, 1, LOW, HIGH),
    "torch": (2.0**16, 2, 0.5, 2000, 1, LOW, HIGH),
    "flax": (2.0**16, 2, 0.5, 2001, 1, LOW, HIGH),
    "jamp": (2.0**15, 2, 0.5, 2000, 1, 1, HIGH),
    "jaxamp": (2.0**15, 2, 0.5, 2001, 1, LOW, HIGH),
    "jmp": (2.0**15, 2, 0.5, 2000, 1, 1, HIGH),
    "mpx": (2.0**15, 2, 0.5, 2000, 1, 1, 65504),
    "apex": (2.0**16, 2, 0.5, 2000, 1, LOW, 2.0**24),
    "apex_fp16_utils": (2.0**32, 2, 0.5, 1000, 1, 1, HIGH),
    "apex_hysteresis": (2.0**16, 2, 0.5, 2000, 1, LOW, HIGH),
    "megatron": (2.0**32, 2, 0.5, 1000, 2, 1, HIGH),
    "deepspeed": (2.0**32, 2, 0.5, 1000, 1, 1, HIGH),
    "colossalai": (2.0**16, 2, 0.5, 1000, 2, LOW, HIGH),
    "fairseq": (2.0**15, 2, 0.5, 2000, None, 1e-4, HIGH),
    "paddle": (2.0**16, 2, 0.5, 2000, 1, LOW, HIGH),
    "paddle_op": (2.0**15, 2, 0.8, 1000, 2, 1, HIGH),
    "mindspore": (2.0**10, 2, 0.5, 50, 1, 1, HIGH),
    "mindspore_cell": (2.0**12, 2, 0.5, 1000, 1, 1, HIGH),
    "mindspore_manager": (2.0**24, 2, 0.5, 2000, 1, 1, HIGH),
    "mindformers": (2.0**12, 2, 0.5, None, None, 1, HIGH),
    "openseq2seq_backoff": (2.0**14, 2, 0.5, 2000, 1, 1, 2.0**14),
    "openseq2seq_logmax": (1, None, None, None, None, 1, 2.0**14),
    "chainer": (1, 2 ** (1 / 1000), 0.5, None, None, 1, 65504),
    "olmo": (None,) * 7,
}


def make(name, **arguments):
    return getattr(presets, name)(**REQUIRED.get(name, {}) | arguments)


def test_the_presets_are_these():
    functions = {name for name, value in vars(presets).items() if inspect.isfunction(value)}
    saved = {"from_torch", "to_torch", "from_tensorflow", "from_keras", "from_flax", "from_jmp"}
    assert functions == {*DEFAULTS, *saved}


# Arguments that are ignored, or whose policy checks them under its own names.
OTHERS = {"apex": ["scale_factor"], "chainer": ["scale"]}
OTHERS["fairseq"] = ["init_scale", "scale_window", "tolerance", "threshold", "min_loss_scale"]
OTHERS["openseq2seq_logmax"] = inspect.signature(presets.openseq2seq_logmax).parameters


@cases("name", DEFAULTS)
def test_defaults_and_names_in_errors_are_those_of_the_library(name):
    policy = make(name)
    assert tuple(getattr(policy, field, None) for field in FIELDS.split()) == DEFAULTS[name]
    assert hash(policy) == hash(make(name))
    if name == "olmo":
        assert (policy.window, policy.sigmas, policy.min_history) == (128, 6, 63)
    parameters = inspect.signature(getattr(presets, name)).parameters.values()
    numbers = {p.name for p in parameters if not isinstance(p.default, bool)}
    for argument in numbers - set(OTHERS.get(name, ())):
        with pytest.raises(ValueError, match=rf"^`presets\.{name}\({argument}=.* got -1"):
            make(name, **{argument: -1})


def test_there_are_scalers_that_do_not_move():
    fixed = jaxscale.FixedLossScale(8)
    none = jaxscale.NoOpLossScale()
    assert presets.torch(enabled=False) == presets.paddle(enable=False) == none
    assert presets.paddle(init_loss_scaling=8, use_dynamic_loss_scaling=False) == fixed
    assert presets.tf_keras(dynamic=False, initial_scale=8) == presets.chainer(scale=8) == fixed


# What a library saved.

TORCH = {"scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 50}
TORCH |= {"_growth_tracker": 7}
NUMBERS = {"initial_scale": 16.0, "dynamic_growth_steps": 5}
TENSORFLOW = {"initial_loss_scale": 4.0, "increment_period": 3, "multiplier": 4.0}
OLD = {"optimizer": {}, "loss_scale": {"class_name": "DynamicLossScale", "config": TENSORFLOW}}
FIXED = {"dynamic": False, "initial_scale": 8.0, "dynamic_growth_steps": None}


def test_a_torch_state_dict_round_trips_and_goes_on():
    policy, state = presets.from_torch(json.loads(json.dumps(TORCH)))
    assert policy == presets.torch(init_scale=4096, backoff_factor=0.25, growth_interval=50)
    assert list(presets.to_torch(policy, state).items()) == list(TORCH.items())
    state = policy.adjust(state, True)
    assert presets.to_torch(policy, state) == TORCH | {"_growth_tracker": 8}
    policy = jaxscale.DynamicLossScale(growth_interval=50)
    written = presets.to_torch(policy, policy.init())
    assert written == TORCH | {"scale": 2.0**15, "backoff_factor": 0.5, "_growth_tracker": 0}
    assert presets.to_torch(*presets.from_torch({})) == {}


READ = {
    "a disabled torch": (presets.from_torch, {}, jaxscale.NoOpLossScale()),
    "tensorflow": (presets.from_tensorflow, TENSORFLOW, presets.tensorflow(**TENSORFLOW)),
    "tensorflow, fixed": (presets.from_tensorflow, {"loss_scale_value": 8.0}, jaxscale.FixedLossScale(8)),
    "keras 3": (presets.from_keras, {"name": "x", "inner_optimizer": {}} | NUMBERS, presets.keras(**NUMBERS)),
    "tf_keras": (presets.from_keras, {"dynamic": True} | NUMBERS, presets.tf_keras(**NUMBERS)),
    "tf_keras, fixed": (presets.from_keras, FIXED, jaxscale.FixedLossScale(8)),
    "an old keras": (presets.from_keras, OLD, presets.tensorflow(**TENSORFLOW)),
}  # fmt: skip


@cases("name", READ)
def test_configurations_are_read(name):
    read, config, expected = READ[name]
    policy, state = read(config)
    assert policy == expected
    assert_same_bits(state, expected.init())


@pytest.mark.standard_promotion
def test_a_live_flax_scaler_is_read():
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    live = dynamic_scale.DynamicScale(growth_interval=2, scale=64.0, minimum_scale=None)
    for _ in range(2):
        live, _, _, _ = live.value_and_grad(jnp.square)(jnp.float32(1))
    policy, state = presets.from_flax(live)
    assert policy == presets.flax(growth_interval=2, scale=64.0, minimum_scale=None)
    assert (state.loss_scale, state.growth_tracker) == (64, 2)
    assert avals(state) == avals(policy.init())
    assert policy.adjust(state, True).loss_scale == 128


@pytest.mark.standard_promotion
def test_a_live_jmp_scaler_is_read():
    jmp = pytest.importorskip("jmp")
    live = jmp.DynamicLossScale(jnp.float16(64), period=3, factor=4, min_loss_scale=jnp.float16(2))
    policy, state = presets.from_jmp(live.adjust(jnp.array(True)))
    assert policy == presets.jmp(jnp.float16(64), period=3, factor=4, min_loss_scale=2.0)
    assert policy.max_scale == 65504
    assert (state.loss_scale, state.growth_tracker) == (64, 1)
    fixed, _ = presets.from_jmp(jmp.StaticLossScale(jnp.float32(8)))
    assert fixed == jaxscale.FixedLossScale(8)
    assert presets.from_jmp(jmp.NoOpLossScale())[0] == jaxscale.NoOpLossScale()


REJECTED = {
    "no dynamic": (lambda: presets.tf_keras(dynamic=False), ValueError, r"dynamic=False.*initial_scale"),
    "a step of 0": (lambda: presets.torch(growth_interval=0), ValueError, r"torch\(growth_interval.*least 1, got 0"),
    "fairseq threshold": (lambda: presets.fairseq(threshold=np.inf), ValueError, r"fairseq\(threshold=.*finite"),
    "fairseq tolerance": (lambda: presets.fairseq(tolerance=2), ValueError, r"tolerance.*2\.0.*never"),
    "logmax beta": (lambda: presets.openseq2seq_logmax(beta1=1), ValueError, r"beta1.*1\.0.*learn nothing"),
    "logmax bounds": (lambda: presets.openseq2seq_logmax(scale_min=2.0**25), ValueError, r"min_scale <= max_scale"),
    "mindformers windows": (lambda: make("mindformers", max_scale_window=20), ValueError, r"min_scale_window < max_scale_window, got 20 and 20.*mindspore_cell"),
    "window of 0": (lambda: presets.WindowLossScale(windows=(0,)), ValueError, r"windows=.*least 1, got 0"),
    "no window": (lambda: presets.WindowLossScale(start=8), ValueError, r"start=.*has 8, got 8.*Pass 0"),
    "window before the first": (lambda: presets.WindowLossScale(start=-1), ValueError, r"start=.*least 0, got -1"),
    "no cooldown": (lambda: presets.GradualLossScale(cooldown=-1), ValueError, r"cooldown=.*least 0, got -1"),
    "gradual search": (lambda: presets.GradualLossScale(search_factor=1), ValueError, r"search_factor.*above 1"),
    "bounds": (lambda: presets.openseq2seq_backoff(scale_min=2.0**25), ValueError, r"min_scale <= init_scale"),
    "no clamp": (lambda: presets.PresetLossScale(clamp="always"), ValueError, r"clamp.*'moves'.*'always'"),
    "no bool": (lambda: presets.PresetLossScale(clip_growth=1), ValueError, r"clip_growth.*True.*got 1"),
    "no delay": (lambda: presets.PresetLossScale(growth_delay=-1), ValueError, r"growth_delay.*least 0.*-1"),
    "torch keys": (lambda: presets.from_torch({"scale": 1.0}), ValueError, r"_growth_tracker"),
    "torch scale 0": (lambda: presets.from_torch(TORCH | {"scale": 0.0}), ValueError, r"init_scale"),
    "torch hysteresis": (lambda: presets.to_torch(presets.megatron(), None), ValueError, r"hysteresis=2"),
    "torch delay": (lambda: presets.to_torch(presets.deepspeed(), None), ValueError, r"growth_delay=1"),
    "torch logmax": (lambda: presets.to_torch(presets.openseq2seq_logmax(), None), TypeError, r"LogMaxLossScale"),
    "torch traced": (lambda: jax.eval_shape(lambda s: presets.to_torch(presets.torch(), s), presets.torch().init()), TypeError, r"inside `jit`"),
    "tensorflow keys": (lambda: presets.from_tensorflow({"period": 3}), ValueError, r"period"),
    "keras keys": (lambda: presets.from_keras({"dynamic": True}), ValueError, r"initial_scale"),
    "no flax": (lambda: presets.from_flax(types.SimpleNamespace()), TypeError, r"no growth_factor"),
    "no jmp": (lambda: presets.from_jmp(3), TypeError, r"no period"),
}  # fmt: skip


@cases("name", REJECTED)
def test_what_cannot_train_or_be_read_is_rejected(name):
    call, error, message = REJECTED[name]
    with pytest.raises(error, match=message):
        call()


# What no trace has.


def test_logmax_keeps_its_state_through_zeros_and_heals():
    policy = presets.openseq2seq_logmax()
    learned = policy.adjust(policy.init(), True, 0.5)
    for state in (policy.init(), learned):
        assert_same_bits(policy.adjust(state, True, 0.0), state)  # of which there is no logarithm
        assert_same_bits(policy.adjust(state, True), state)
    for bad in (0.0, jnp.nan, jnp.inf):
        ruined = learned._replace(loss_scale=jnp.array(bad, jnp.float32))
        for largest in (0.0, 1.0, jnp.inf):
            healed = policy.adjust(ruined, largest < jnp.inf, largest)
            assert 1 <= healed.loss_scale <= 2.0**24


def test_a_cooldown_holds_a_scale_after_a_backoff():
    policy = presets.GradualLossScale(init_scale=64.0, growth_factor=4.0, cooldown=3)
    for verdicts, expected in [
        # The first backoff is free; of the next bad steps, every third one backs off.
        ([False] * 5, [32, 32, 32, 16, 16]),
        # Finite steps count as well, and grow by `search_factor` before the first bad one.
        ([True, False, False] * 2, [128, 64, 64, 256, 128, 128]),
    ]:
        _, *states = itertools.accumulate(verdicts, policy.adjust, initial=policy.init())
        assert [state.loss_scale for state in states] == expected

"""The presets: the defaults of each library, what is rejected, and what a library saved."""

import functools
import inspect
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tables import avals, cases

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
DEFAULTS = {  # init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale
    "tensorflow": (2.0**15, 2, 0.5, 2000, 1, 1),
    "tensorflow_contrib": (2.0**15, 2, 0.8, 1000, 2, 1),
    "tf_keras": (2.0**15, 2, 0.5, 2000, 1, 1),
    "keras": (2.0**15, 2, 0.5, 2000, 1, 2.0**-126),
    "torch": (2.0**16, 2, 0.5, 2000, 1, 2.0**-126),
    "flax": (2.0**16, 2, 0.5, 2001, 1, 2.0**-126),
    "jamp": (2.0**15, 2, 0.5, 2000, 1, 1),
    "jaxamp": (2.0**15, 2, 0.5, 2001, 1, 2.0**-126),
    "jmp": (2.0**15, 2, 0.5, 2000, 1, 1),
    "mpx": (2.0**15, 2, 0.5, 2000, 1, 1),
    "apex": (2.0**16, 2, 0.5, 2000, 1, 2.0**-126),
    "apex_fp16_utils": (2.0**32, 2, 0.5, 1000, 1, 1),
    "apex_hysteresis": (2.0**16, 2, 0.5, 2000, 1, 2.0**-126),
    "megatron": (2.0**32, 2, 0.5, 1000, 2, 1),
    "deepspeed": (2.0**32, 2, 0.5, 1000, 1, 1),
    "colossalai": (2.0**16, 2, 0.5, 1000, 2, 2.0**-126),
    "fairseq": (2.0**15, 2, 0.5, 2000, None, 1e-4),
    "paddle": (2.0**16, 2, 0.5, 2000, 1, 2.0**-126),
    "paddle_op": (2.0**15, 2, 0.8, 1000, 2, 1),
    "mindspore": (2.0**10, 2, 0.5, 50, 1, 1),
    "mindspore_cell": (2.0**12, 2, 0.5, 1000, 1, 1),
    "mindspore_manager": (2.0**24, 2, 0.5, 2000, 1, 1),
    "mindformers": (2.0**12, 2, 0.5, None, None, 1),
    "openseq2seq_backoff": (2.0**14, 2, 0.5, 2000, 1, 1),
    "openseq2seq_logmax": (1, None, None, None, None, 1),
    "chainer": (1, 2 ** (1 / 1000), 0.5, None, None, 1),
}
FIELDS = [
    "init_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "min_scale",
]
MAX_SCALES = {"apex": 2.0**24, "mpx": 65504, "openseq2seq_backoff": 2.0**14} | {
    "openseq2seq_logmax": 2.0**14,
    "chainer": 65504,
}
FAST = ["deepspeed", "fairseq", "openseq2seq_logmax"]


@functools.cache
def policy_of(name):
    return getattr(presets, name)(**REQUIRED.get(name, {}))


def test_the_presets_are_these():
    functions = {name for name, value in vars(presets).items() if inspect.isfunction(value)}
    read_and_written = {"from_torch", "to_torch", "from_tensorflow", "from_keras"}
    # `olmo` is a rule for spikes: see `test_spikes.py`.
    assert functions == {*DEFAULTS, *read_and_written, "from_flax", "from_jmp", "olmo"}


@cases("name", DEFAULTS)
def test_defaults_are_those_of_the_library(name):
    policy = policy_of(name)
    assert tuple(getattr(policy, field, None) for field in FIELDS) == DEFAULTS[name]
    assert policy.max_scale == MAX_SCALES.get(name, jnp.finfo(jnp.float32).max)
    # And as JSON it is the same policy.
    assert type(policy).from_config(json.loads(json.dumps(policy.get_config()))) == policy
    assert hash(policy) == hash(policy_of(name))


@cases("name", DEFAULTS, fast=FAST)
def test_presets_work_in_a_compiled_step(name):
    policy = policy_of(name)
    tx = jaxscale.loss_scaled(optax.sgd(0.5), policy)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, factor):
        def loss_fn(params):
            return jnp.sum(params * factor)

        loss, grads = jaxscale.value_and_grad(loss_fn, state)(params)
        return jaxscale.apply_gradients(tx, grads, state, params, value=loss)

    state = tx.init(jnp.ones(2))
    first = avals(state)
    params, state = step(jnp.ones(2), state, jnp.float32(2.0**-14))
    assert params.tolist() == [1 - 2.0**-15] * 2
    params, state = step(params, state, jnp.float32(jnp.inf))
    assert params.tolist() == [1 - 2.0**-15] * 2
    assert avals(state) == first
    assert jaxscale.metrics(state)["total_notfinite_loss"] == 1
    lower = policy.adjust(state.scaling, False).loss_scale
    assert 0 < lower <= state.scaling.loss_scale
    assert not policy.update(state.scaling, {"w": jnp.array(jnp.nan)})[1]


def test_there_are_scalers_that_do_not_move():
    assert presets.torch(enabled=False) == jaxscale.NoOpLossScale()
    assert presets.paddle(enable=False) == jaxscale.NoOpLossScale()
    assert presets.paddle(
        init_loss_scaling=8, use_dynamic_loss_scaling=False
    ) == jaxscale.FixedLossScale(8)
    assert presets.tf_keras(dynamic=False, initial_scale=8) == jaxscale.FixedLossScale(8)
    assert presets.chainer(scale=128) == jaxscale.FixedLossScale(128)


def test_the_dtype_of_a_scale_says_how_far_it_grows():
    assert presets.jmp(jnp.float16(8)).max_scale == 65504
    assert presets.jmp(jnp.asarray(8, jnp.bfloat16)).max_scale == float(jnp.finfo("bfloat16").max)
    assert presets.mpx(jnp.asarray(8, jnp.bfloat16), jnp.float32(1)).max_scale == 65536


REJECTED = {
    "backoff negative": (lambda: presets.torch(backoff_factor=-1), r"presets\.torch\(backoff_factor"),
    "growth shrinks": (lambda: presets.torch(growth_factor=0.5), r"growth_factor.*above 1.*0\.5"),
    "interval of 0": (lambda: presets.torch(growth_interval=0), r"presets\.torch\(growth_interval"),
    "scale of 0": (lambda: presets.torch(init_scale=0.0), r"presets\.torch\(init_scale.*turn into 0"),
    "multiplier": (lambda: presets.tensorflow(multiplier=0.5), r"tensorflow\(multiplier.*above 1"),
    "scale inf": (lambda: presets.tensorflow(initial_loss_scale=np.inf), r"initial_loss_scale.*inf"),
    "period": (lambda: presets.tensorflow(increment_period=-1), r"increment_period.*at least 0"),
    "steps": (lambda: presets.keras(dynamic_growth_steps=0), r"keras\(dynamic_growth_steps"),
    "scale NaN": (lambda: presets.keras(initial_scale=np.nan), r"keras\(initial_scale.*nan"),
    "no dynamic": (lambda: presets.tf_keras(dynamic=False), r"dynamic=False.*initial_scale"),
    "jmp factor": (lambda: presets.jmp(8, factor=1), r"presets\.jmp\(factor.*above 1"),
    "jmp minimum": (lambda: presets.jmp(8, min_loss_scale=-1), r"min_loss_scale.*-1"),
    "mpx scale": (lambda: presets.mpx(0, 1), r"presets\.mpx\(loss_scaling"),
    "flax backoff": (lambda: presets.flax(backoff_factor=2), r"flax\(backoff_factor.*2\.0"),
    "paddle ratio": (lambda: presets.paddle(decr_ratio=1.5), r"paddle\(decr_ratio.*1\.5"),
    "contrib count": (lambda: presets.tensorflow_contrib(init_loss_scale=8, incr_every_n_steps=1, decr_every_n_nan_or_inf=0), r"decr_every_n_nan_or_inf"),
    "megatron hysteresis": (lambda: presets.megatron(hysteresis=0), r"megatron\(hysteresis"),
    "deepspeed shift": (lambda: presets.deepspeed(delayed_shift=0), r"deepspeed\(delayed_shift"),
    "fairseq tolerance": (lambda: presets.fairseq(tolerance=2), r"tolerance.*2\.0.*never"),
    "logmax beta": (lambda: presets.openseq2seq_logmax(beta1=1), r"beta1.*1\.0.*learn nothing"),
    "jamp minimum": (lambda: presets.jamp(8, min_loss_scale=-1), r"presets\.jamp\(min_loss_scale"),
    "jaxamp patience": (lambda: presets.jaxamp(patience=-1), r"jaxamp\(patience.*least 0.*-1"),
    "jaxamp factor": (lambda: presets.jaxamp(adjust_factor=1), r"jaxamp\(adjust_factor.*above 1"),
    "chainer interval": (lambda: presets.chainer(interval=0), r"chainer\(interval.*least 1.*0"),
    "chainer scale": (lambda: presets.chainer(scale=0.5), r"loss_scale.*at least 1, got 0\.5"),
    "mindformers windows": (lambda: presets.mindformers(loss_scale_value=8, scale_factor=2, scale_window=9, max_scale_window=20), r"min_scale_window < max_scale_window, got 20 and 20.*mindspore_cell"),
    "mindformers scale": (lambda: presets.mindformers(loss_scale_value=0, scale_factor=2, scale_window=20), r"mindformers\(loss_scale_value"),
    "window of 0": (lambda: presets.WindowLossScale(windows=(0,)), r"windows=.*least 1, got 0"),
    "no window": (lambda: presets.WindowLossScale(start=8), r"start=.*has 8, got 8.*Pass 0"),
    "window before the first": (lambda: presets.WindowLossScale(start=-1), r"start=.*least 0, got -1"),
    "window bounds": (lambda: presets.WindowLossScale(min_scale=2.0**16), r"min_scale <= init_scale"),
    "no cooldown": (lambda: presets.GradualLossScale(cooldown=-1), r"cooldown=.*least 0, got -1"),
    "gradual bounds": (lambda: presets.GradualLossScale(init_scale=0.5), r"min_scale <= init_scale"),
    "gradual search": (lambda: presets.GradualLossScale(search_factor=1), r"search_factor.*above 1"),
    "bounds": (lambda: presets.openseq2seq_backoff(scale_min=2.0**25), r"min_scale <= init_scale"),
    "no clamp": (lambda: presets.PresetLossScale(clamp="always"), r"clamp.*'moves'.*'always'"),
    "no bool": (lambda: presets.PresetLossScale(clip_growth=1), r"clip_growth.*True.*got 1"),
    "no delay": (lambda: presets.PresetLossScale(growth_delay=-1), r"growth_delay.*least 0.*-1"),
}  # fmt: skip


@cases("name", REJECTED)
def test_what_cannot_train_is_rejected(name):
    make, message = REJECTED[name]
    with pytest.raises(ValueError, match=message):
        make()


TORCH = {
    "scale": 4096.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.25,
    "growth_interval": 50,
    "_growth_tracker": 7,
}


def test_a_torch_state_dict_round_trips_and_goes_on():
    policy, state = presets.from_torch(json.loads(json.dumps(TORCH)))
    assert policy == presets.torch(init_scale=4096, backoff_factor=0.25, growth_interval=50)
    assert presets.to_torch(policy, state) == TORCH
    assert list(presets.to_torch(policy, state)) == list(TORCH)
    state = policy.adjust(state, True)
    assert presets.to_torch(policy, state) == TORCH | {"_growth_tracker": 8}
    tx = jaxscale.loss_scaled(optax.sgd(0.1), policy)
    opt_state = tx.init(jnp.ones(2))._replace(scaling=state)
    assert avals(opt_state) == avals(tx.init(jnp.ones(2)))


def test_to_torch_takes_a_policy_that_is_not_a_preset():
    policy = jaxscale.DynamicLossScale(growth_interval=50)
    written = presets.to_torch(policy, policy.init())
    assert written == TORCH | {"scale": 2.0**15, "backoff_factor": 0.5, "_growth_tracker": 0}


def test_switches_belong_to_presets_alone():
    with pytest.raises(TypeError, match=r"DynamicLossScale.*unexpected.*'growth_delay'"):
        jaxscale.DynamicLossScale.from_config(presets.deepspeed().get_config())
    plain = jaxscale.DynamicLossScale(init_scale=8.0, hysteresis=2)
    assert presets.PresetLossScale.from_config(plain.get_config()).hysteresis == 2


def test_a_disabled_torch_scaler_round_trips():
    policy, state = presets.from_torch({})
    assert policy == jaxscale.NoOpLossScale()
    assert presets.to_torch(policy, state) == {}


def test_tensorflow_configs_are_read():
    config = presets.tensorflow(multiplier=4.0), 2.0**15
    read = presets.from_tensorflow(
        {"initial_loss_scale": 2.0**15, "increment_period": 2000, "multiplier": 4.0}
    )
    assert (read[0], read[1].loss_scale) == config
    fixed, state = presets.from_tensorflow({"loss_scale_value": 8.0})
    assert (fixed, state.loss_scale) == (jaxscale.FixedLossScale(8), 8)


def test_keras_configs_are_read():
    keras_3 = {"name": "loss_scale_optimizer", "learning_rate": 0.0, "inner_optimizer": {}}
    numbers = {"initial_scale": 16.0, "dynamic_growth_steps": 5}
    assert presets.from_keras(keras_3 | numbers)[0] == presets.keras(**numbers)
    tf_keras = {"inner_optimizer": {}, "dynamic": True} | numbers
    assert presets.from_keras(tf_keras)[0] == presets.tf_keras(**numbers)
    fixed = {"inner_optimizer": {}, "dynamic": False, "initial_scale": 16.0}
    assert presets.from_keras(fixed | {"dynamic_growth_steps": None})[0] == jaxscale.FixedLossScale(
        16
    )
    inside = {"initial_loss_scale": 4.0, "increment_period": 3, "multiplier": 2.0}
    old = {"optimizer": {}, "loss_scale": {"class_name": "DynamicLossScale", "config": inside}}
    assert presets.from_keras(old)[0] == presets.tensorflow(**inside)


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
    live = jmp.DynamicLossScale(jnp.float32(64), period=3, factor=4, min_loss_scale=jnp.float32(2))
    policy, state = presets.from_jmp(live.adjust(jnp.array(True)))
    assert policy == presets.jmp(64.0, period=3, factor=4, min_loss_scale=2.0)
    assert (state.loss_scale, state.growth_tracker) == (64, 1)
    fixed, _ = presets.from_jmp(jmp.StaticLossScale(jnp.float32(8)))
    assert fixed == jaxscale.FixedLossScale(8)
    assert presets.from_jmp(jmp.NoOpLossScale())[0] == jaxscale.NoOpLossScale()


UNREADABLE = {
    "torch keys": (lambda: presets.from_torch({"scale": 1.0}), ValueError, r"_growth_tracker"),
    "torch scale 0": (lambda: presets.from_torch(TORCH | {"scale": 0.0}), ValueError, r"init_scale"),
    "torch hysteresis": (lambda: presets.to_torch(presets.megatron(), None), ValueError, r"hysteresis=2"),
    "torch delay": (lambda: presets.to_torch(presets.deepspeed(), None), ValueError, r"growth_delay=1"),
    "torch logmax": (lambda: presets.to_torch(presets.openseq2seq_logmax(), None), TypeError, r"LogMaxLossScale"),
    "torch traced": (
        lambda: jax.jit(lambda s: presets.to_torch(presets.torch(), s))(presets.torch().init()), TypeError, r"inside `jit`"
    ),
    "tensorflow keys": (lambda: presets.from_tensorflow({"period": 3}), ValueError, r"period"),
    "keras keys": (lambda: presets.from_keras({"dynamic": True}), ValueError, r"initial_scale"),
    "no flax": (lambda: presets.from_flax(types.SimpleNamespace()), TypeError, r"no growth_factor"),
    "no jmp": (lambda: presets.from_jmp(3), TypeError, r"no period"),
}  # fmt: skip


@cases("name", UNREADABLE)
def test_what_cannot_be_read_says_so(name):
    read, error, message = UNREADABLE[name]
    with pytest.raises(error, match=message):
        read()


def test_logmax_learns_from_the_gradients_inside_the_optimizer():
    policy = presets.openseq2seq_logmax(beta1=0.5)
    tx = jaxscale.loss_scaled(optax.sgd(0.1), policy)
    state = tx.init(jnp.zeros(3))
    for size in (2.0**-4, 2.0**-6):
        grads = jnp.array([0.0, -size, size / 2], jnp.float32)
        _, state = tx.update(grads, state)
    np.testing.assert_allclose(state.scaling.x_hat, -4 * 0.25 - 6 * 0.5, rtol=1e-6)
    before = state.scaling
    _, state = tx.update(jnp.zeros(3), state)  # of which there is no logarithm
    assert state.scaling == before
    _, state = tx.update(jnp.full(3, jnp.inf), state)
    np.testing.assert_allclose(state.scaling.x_hat, before.x_hat / 2 + 8, rtol=1e-6)
    assert 1 <= state.scaling.loss_scale <= 2.0**24


def test_logmax_keeps_a_first_scale_through_zeros_and_heals():
    policy = presets.openseq2seq_logmax()
    state, _ = policy.update(policy.init(), {"w": jnp.zeros(2)})
    assert state == policy.init()
    for bad in (0.0, jnp.nan, jnp.inf):
        ruined = policy.init()._replace(loss_scale=jnp.array(bad, jnp.float32))
        for grads in (jnp.zeros(2), jnp.ones(2), jnp.full(2, jnp.nan)):
            healed, _ = policy.update(ruined, grads)
            assert 1 <= healed.loss_scale <= 2.0**24


def test_devices_agree_on_the_statistics():
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")), ("data",))
    policy = presets.openseq2seq_logmax(beta1=0.0)

    def update(grads):
        return policy.update(policy.init(), grads, axis_name="data")[0]

    agreed = jax.shard_map(update, mesh=mesh, in_specs=P("data"), out_specs=P())
    state = jax.jit(agreed)(2.0 ** -jnp.arange(8.0)[::-1])
    assert state.x_hat == 0


def scales_after(policy, verdicts):
    """The scale after each step."""
    state, scales = policy.init(), []
    for finite in verdicts:
        state = policy.adjust(state, finite)
        scales.append(state.loss_scale.item())
    return scales


def test_a_cooldown_holds_a_scale_after_a_backoff():
    policy = presets.GradualLossScale(init_scale=64.0, growth_factor=4.0, cooldown=3)
    good, bad = True, False
    # The first backoff is free; of the next bad steps, every third one backs off.
    assert scales_after(policy, [bad] * 5) == [32, 32, 32, 16, 16]
    # Finite steps count as well, and grow by `search_factor` before the first bad one.
    verdicts = [good, bad, bad, good, bad, bad]
    assert scales_after(policy, verdicts) == [128, 64, 64, 256, 128, 128]


def test_a_rate_tolerates_overflows():
    policy, good, bad = presets.fairseq(init_scale=8.0, tolerance=0.5, scale_window=2), True, False
    scales = scales_after(policy, [good, bad, good, bad, bad, good, good])
    assert scales == [8, 4, 4, 2, 1, 1, 2]
    ruined = policy.init()._replace(loss_scale=jnp.array(jnp.nan, jnp.float32))
    assert policy.adjust(ruined, True).loss_scale == 8

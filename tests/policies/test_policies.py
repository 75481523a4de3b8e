"""How a loss scale moves: the real rules against those in plain Python in `references.py`."""

import dataclasses
import functools
import itertools
import json
import math
import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import trajectory
from tables import POLICIES, assert_same_bits, avals, cases

import jaxscale
from jaxscale import presets

ADAPTIVE = jaxscale.AdaptiveLossScale()
# A step is its largest gradient. In a bad one it overflows; others may have none.
BAD, NO_GRADIENTS = math.inf, -1.0


@functools.partial(jax.jit, static_argnums=0)
def scanned(policy, state, sizes):
    """The states after each step; the scan checks that they keep their avals."""

    def body(state, size):
        finite = size < jnp.inf
        seen = policy.adjust(state, finite, size)
        state = jaxscale.tree_where(size >= 0, seen, policy.adjust(state, finite))
        return state, state

    return jax.lax.scan(body, state, sizes)[1]


def followed(policy, start, steps):
    """The states after each step from a first one, which are those of the reference."""
    leaves = [jnp.asarray(x, leaf.dtype) for x, leaf in zip(start, policy.init(), strict=True)]
    states = scanned(policy, type(policy.init())(*leaves), np.float32(steps))
    expected = trajectory(policy, start, [(x < BAD, x if x >= 0 else None) for x in steps])
    assert list(zip(*(leaf.tolist() for leaf in states), strict=True)) == expected
    return states


def replaced(state, **fields):
    return state._replace(**{name: jnp.float32(value) for name, value in fields.items()})


# The rules that probe.


def powers(low, high):
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


@st.composite
def dynamic_policies(draw):
    min_scale, init_scale, max_scale = sorted(draw(powers(-20, 30)) for _ in range(3))
    arguments = {
        "growth_factor": draw(st.sampled_from([2.0, 4.0, 2.0**40, 1.5, 3.0])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.25, 2.0**-40, 0.8])),
        "growth_interval": draw(st.integers(1, 5)),
        "hysteresis": draw(st.integers(1, 3)),
        "min_scale": min_scale,
        "max_scale": max_scale,
    }
    if draw(st.booleans()):
        return jaxscale.DynamicLossScale(init_scale=init_scale, **arguments)
    clamp = draw(st.sampled_from(["never", "moves", "steps"]))
    return presets.PresetLossScale(
        init_scale=init_scale if clamp == "never" else draw(powers(-30, 40)),
        growth_delay=draw(st.integers(0, 2)),
        refill_on_finite=draw(st.booleans()),
        refill_on_backoff=draw(st.booleans()),
        clip_growth=draw(st.booleans()),
        clamp=clamp,
        **arguments,
    )


@hypothesis.given(
    dynamic_policies(),
    st.tuples(powers(-30, 40), st.integers(0, 9), st.integers(0, 9)) | st.none(),
    st.lists(st.sampled_from([BAD, NO_GRADIENTS]), min_size=24, max_size=24),
)
def test_it_follows_the_reference_from_its_first_state_and_any_restored_one(policy, start, steps):
    first = policy.init_scale, -getattr(policy, "growth_delay", 0), policy.hysteresis
    assert tuple(leaf.item() for leaf in policy.init()) == first
    followed(policy, start or first, steps)


def test_moves_at_the_bounds_are_those_of_the_reference():
    numbers = {"init_scale": 8, "min_scale": 4, "max_scale": 12, "growth_interval": 1}
    policies = [jaxscale.DynamicLossScale(**numbers)]
    for clip, clamp in itertools.product([True, False], ["never", "moves", "steps"]):
        policies.append(presets.PresetLossScale(**numbers, clip_growth=clip, clamp=clamp))
    for policy, scale, step in itertools.product(policies, [1.0, 8.0, 64.0], [1.0, BAD]):
        followed(policy, (scale, 0, 1), [step])


@pytest.mark.parametrize("step", [1.0, BAD])
def test_no_scale_is_zero_inf_or_nan(step):
    bounds = {"min_scale": 2.0**-126, "max_scale": float(jnp.finfo(jnp.float32).max)}
    policy = jaxscale.DynamicLossScale(
        init_scale=1.0, growth_interval=1, growth_factor=2.0**50, backoff_factor=2.0**-50, **bounds
    )
    last = scanned(policy, policy.init(), np.full(300, step, np.float32)).loss_scale[-1]
    assert last == bounds["min_scale" if step == BAD else "max_scale"]


def test_an_unusable_restored_scale_heals():
    policy = jaxscale.DynamicLossScale(growth_interval=1)
    for scale, finite in itertools.product([0.0, -1.0, np.inf, np.nan], [True, False]):
        healed = policy.adjust(replaced(policy.init(), loss_scale=scale), finite).loss_scale
        assert healed == policy.init_scale * (policy.growth_factor if finite else 0.5)


def test_a_tracker_restored_beyond_the_interval_grows_at_once():
    policy, most = jaxscale.DynamicLossScale(growth_interval=5), jnp.iinfo(jnp.int32)
    for tracker in (10, most.max):  # where it does not wrap
        counters = jnp.array(tracker), jnp.array(most.min)
        state = jaxscale.LossScaleState(jnp.array(8.0, jnp.float32), *counters)
        assert policy.adjust(state, True)[:2] == (16, 0)
        assert policy.adjust(state, False)[0::2] == (4, 0)


# The rule that follows the largest gradient.


@st.composite
def adaptive_policies(draw):
    levels = sorted(draw(st.integers(-14 * 4, 63)) / 4 for _ in range(3))
    scales = sorted(2.0 ** draw(st.integers(-20, 60)) for _ in range(3))
    counts = st.integers(1, 9) | st.integers(1, 2**31 - 1)
    return jaxscale.AdaptiveLossScale(
        **dict(zip(("min_level", "level", "max_level"), levels, strict=True)),
        **dict(zip(("min_scale", "init_scale", "max_scale"), scales, strict=True)),
        **{name: draw(counts) for name in ("memory", "period", "search_period")},
    )


LENGTH = 16  # of a run: one program for all
SIZES = st.lists(
    st.sampled_from([NO_GRADIENTS, 0.0, BAD, BAD])
    | st.floats(-60, 40).map(lambda x: float(np.float32(2.0**x))),
    min_size=LENGTH,
    max_size=LENGTH,
)
# Each policy is a program of its own.
FEW = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 5)


@FEW
@hypothesis.given(adaptive_policies(), SIZES)
def test_the_adaptive_rule_follows_the_reference(policy, sizes):
    states = followed(policy, tuple(leaf.item() for leaf in policy.init()), sizes)
    assert set(np.frexp(states.loss_scale)[0].tolist()) == {0.5}  # powers of two
    assert policy.min_scale <= states.loss_scale.min()
    assert states.loss_scale.max() <= policy.max_scale


UNITS = st.integers(-128 * 2**16, 128 * 2**16) | st.just(-256 * 2**16)


@hypothesis.given(
    st.integers(-30, 60),
    UNITS,
    st.integers(0, int(15.5 * 2**20)),
    UNITS,
    st.integers(0, 2**31 - 100),
    st.integers(0, 2**31 - 100) | st.none(),
    st.integers(0, 9),
    SIZES,
)
# Counters at their end; and between a threshold and its double or half: an overflow that repeats, a
# gradient that comes near the crest, a crest that is held no longer.
@hypothesis.example(8, 0, 0, 2**23, 2**31 - 5, 2**31 - 5, 0, [1.0] * LENGTH)
@hypothesis.example(8, 0, 2**23, 0, ADAPTIVE.period * 3 // 8, None, 0, [BAD] * LENGTH)
@hypothesis.example(4, 0, 2**23, 2**19, 9, 1, 0, [8.0] * LENGTH)
@hypothesis.example(4, 0, 2**23, 2**19, 10**6, ADAPTIVE.period * 3 // 4, 0, [1.0] * LENGTH)
def test_the_adaptive_rule_follows_the_reference_from_any_state(
    exponent, peak, level, crest, finite_steps, held_steps, overflows, sizes
):
    held_steps = finite_steps if held_steps is None else held_steps
    floats = 2.0**exponent, peak / 2**16, level / 2**20, crest / 2**16
    floats = [float(np.float32(x)) for x in floats]
    followed(ADAPTIVE, (*floats, finite_steps, held_steps, overflows), sizes)


adjust = jax.jit(ADAPTIVE.adjust)


def test_a_tree_without_gradients_is_no_gradients_and_no_size_leaves_every_bit():
    state, update = ADAPTIVE.init(), jax.jit(ADAPTIVE.update)
    for grads in (None, {}, {"n": jnp.arange(3)}, [None]):
        assert_same_bits(update(state, grads)[0], adjust(state, True))
    for start in (state, adjust(adjust(state, True, jnp.float32(1)), False)):
        for size in (0.0, 2.0**-140, -0.0, -jnp.nan):  # `adjust` believes that they were finite
            assert_same_bits(adjust(start, True, jnp.float32(size)), start)


def test_a_restored_adaptive_state_heals_or_starts_anew_or_from_the_power_of_two_below():
    first = ADAPTIVE.init()
    fields = jaxscale.AdaptiveState._fields[:4]
    for name, bad, finite in itertools.product(fields, (0.0, -1.0, np.inf, np.nan, 3e38), (1, 0)):
        ruined = replaced(first, **{name: bad})
        for _ in range(3):
            ruined = adjust(ruined, bool(finite), jnp.float32(1))
            assert ADAPTIVE.min_scale <= ruined.loss_scale <= ADAPTIVE.max_scale
            assert math.frexp(ruined.loss_scale)[0] == 0.5
            assert ADAPTIVE.min_level <= ruined.level <= ADAPTIVE.max_level
            assert -256 <= min(ruined.peak, ruined.crest) <= max(ruined.peak, ruined.crest) <= 128
    for bad in (np.inf, -np.inf, np.nan):
        assert_same_bits(adjust(replaced(first, level=bad), True), adjust(first, True))
    state = replaced(first, loss_scale=65504)
    assert adjust(state, False).loss_scale == 2.0**14
    assert adjust(state, True, jnp.float32(0)).loss_scale == 2.0**15


# What it rejects, and what the rule for spikes does.

Rule, Spikes = jaxscale.AdaptiveLossScale, jaxscale.SpikeRule
REJECTED = {
    "level too high": (Rule, {"level": 16}, r"\(level=.*below 16, got 16.*pass 13\.0"),
    "levels": (Rule, {"level": 8, "min_level": 9}, r".*min_level <= level <= max_level, got 9"),
    "scales": (Rule, {"min_scale": 2, "max_scale": 1}, r".*<= max_scale, got 2\.0, 256\.0 and 1"),
    "no power": (Rule, {"init_scale": 1000}, r"\(init_scale=.*power of two.*1000.*2\.0\*\*9"),
    **{name: (Rule, {name: -20}, rf"\({name}=.*got -20") for name in ADAPTIVE.get_config()},
    "window": (Spikes, {"window": 1}, r"\(.*window=.*at least 2, got 1"),
    "a part of a window": (Spikes, {"window": 12.5}, r"\(.*window=.*integer.*got 12\.5"),
    "sigmas 0": (Spikes, {"sigmas": 0}, r"\(.*sigmas=.*above 0.*got 0\..*pass 6\.0"),
    "sigmas NaN": (Spikes, {"sigmas": math.nan}, r"\(.*sigmas=.*got nan"),
    "sigmas inf": (Spikes, {"sigmas": math.inf}, r"\(.*sigmas=.*at most 1e6, got inf"),
    "sigmas bool": (Spikes, {"sigmas": True}, r"\(.*sigmas=.*got True"),
    "sigmas text": (Spikes, {"sigmas": "6"}, r"\(.*sigmas=.*got '6'"),
    "history": (Spikes, {"min_history": 1}, r"\(.*min_history=.*at least 2, got 1"),
    "a long history": (Spikes, {"window": 8, "min_history": 9}, r"\(.*at most window=8, got 9"),
}


@cases("case", REJECTED)
def test_bad_arguments(case):
    rule, arguments, message = REJECTED[case]
    error = TypeError if case in ("a part of a window", "sigmas text") else ValueError
    with pytest.raises(error, match=rf"^`{rule.__name__}{message}"):
        rule(**arguments)


# All policies.

ALL = POLICIES | {
    "preset": presets.deepspeed(delayed_shift=2),
    "tolerance": presets.fairseq(),
    "logmax": presets.openseq2seq_logmax(),
    "gradual": presets.chainer(),
    "window": presets.WindowLossScale(),
}
policies = cases("policy", ALL, fast=["noop", "dynamic", "adaptive"])


@policies
def test_policies_keep_avals_and_follow_the_verdict(policy):
    policy = ALL[policy]
    state = policy.init()
    always = isinstance(policy, jaxscale.NoOpLossScale | jaxscale.FixedLossScale)
    for grads in ({"w": jnp.ones(2)}, {"w": jnp.array([1.0, jnp.nan])}):
        for update in (policy.update, jax.jit(policy.update)):
            new_state, should_apply = update(state, grads)
            verdict = jaxscale.all_finite(grads)
            assert avals(new_state) == avals(state)
            assert avals(should_apply) == avals(verdict)
            assert should_apply == (verdict | always)
            size = jnp.max(jnp.abs(grads["w"]))  # which those that do not need it ignore
            assert_same_bits(new_state, policy.adjust(state, verdict, size))
    # No buffer is in a state twice, which could not be donated.
    assert avals(jax.jit(policy.update, donate_argnums=0)(policy.init(), grads)[0]) == avals(state)
    python = state._replace(loss_scale=state.loss_scale.item())  # strongly typed again
    assert always or avals(policy.adjust(python, True, jnp.float32(1))) == avals(state)


@policies
def test_devices_agree_on_the_next_state(policy):
    policy = ALL[policy]
    update = functools.partial(policy.update, axis_name="data")
    mapped = jax.jit(jax.vmap(update, (None, 0), axis_name="data"))
    for shards, size in (([0.125, 0.0], 0.125), ([0.125, jnp.nan], jnp.nan)):
        after, _ = mapped(policy.init(), jnp.array(shards))
        alone = jax.jit(policy.adjust)(policy.init(), bool(size == size), size)
        assert_same_bits(after, jax.tree.map(lambda x: jnp.stack([x, x]), alone))


def test_no_gradients_and_every_kind_of_scalar_bool_are_taken():
    policy = jaxscale.DynamicLossScale(growth_interval=1)
    state, should_apply = policy.update(policy.init(), [None, {}])
    assert (state.loss_scale, should_apply) == (2.0**16, True)
    for verdict in (True, np.bool_(True), np.array(True)):
        assert policy.adjust(policy.init(), verdict).loss_scale == 2.0**16


def test_policies_are_plain_values():
    for policy in ALL.values():
        again = type(policy).from_config(json.loads(json.dumps(policy.get_config())))
        assert (again, hash(again)) == (policy, hash(policy))
        assert jax.tree.leaves(policy) == [policy]
        assert pickle.loads(pickle.dumps((policy, policy.init()))) == (policy, policy.init())
    numbers = {"init_scale": np.float16(8), "min_scale": np.float32(4)}
    dynamic = jaxscale.DynamicLossScale(**numbers, growth_interval=np.int64(3))
    adaptive = jaxscale.AdaptiveLossScale(**numbers, period=np.int64(3))
    for policy in (dynamic, adaptive, presets.PresetLossScale(**numbers)):
        assert {type(value) for value in policy.get_config().values()} <= {float, int, bool, str}
    assert dynamic == jaxscale.DynamicLossScale(init_scale=8, min_scale=4, growth_interval=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        dynamic.init_scale = 1.0


def test_as_loss_scale():
    for spec in (8, 8.0, np.float32(8), np.int64(8)):
        assert jaxscale.as_loss_scale(spec) == jaxscale.FixedLossScale(8)
    assert jaxscale.as_loss_scale(None) == jaxscale.NoOpLossScale()
    assert jaxscale.as_loss_scale("dynamic") == jaxscale.DynamicLossScale()
    assert jaxscale.as_loss_scale("adaptive") == jaxscale.AdaptiveLossScale()
    assert jaxscale.as_loss_scale(POLICIES["hysteresis"]) is POLICIES["hysteresis"]


def test_a_policy_of_ones_own_needs_no_more_than_init_and_adjust():
    @dataclasses.dataclass(frozen=True)
    class Halving(jaxscale.LossScale):
        start: float = 64.0

        def init(self):
            return jaxscale.FixedLossScale(self.start).init()

        def adjust(self, state, grads_finite):
            return state._replace(loss_scale=state.loss_scale / 2)

    policy = Halving.from_config(Halving(8.0).get_config())
    state, should_apply = policy.update(policy.init(), None)
    assert (state.loss_scale, should_apply) == (4, True)

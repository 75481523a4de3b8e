"""How a loss scale moves: the real rule against the documented one in `references.py`."""

import dataclasses
import functools
import json
import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import trajectory
from tables import POLICIES, assert_same_bits, avals, policies

import jaxscale
from jaxscale import presets
from jaxscale._gradients.scaled import Scaled
from jaxscale._gradients.verdict import largest


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
    if clamp != "never":
        init_scale = draw(powers(-30, 40))
    return presets.PresetLossScale(
        init_scale=init_scale,
        growth_delay=draw(st.integers(0, 2)),
        refill_on_finite=draw(st.booleans()),
        refill_on_backoff=draw(st.booleans()),
        clip_growth=draw(st.booleans()),
        clamp=clamp,
        **arguments,
    )


def replay(policy, state, steps):
    # `scan` traces `adjust` once, and checks that the carry keeps its avals.
    def body(state, finite):
        return policy.adjust(state, finite), None

    return [leaf.item() for leaf in jax.lax.scan(body, state, jnp.array(steps))[0]]


@hypothesis.given(dynamic_policies(), st.lists(st.booleans(), min_size=24, max_size=24))
def test_update_follows_reference(policy, steps):
    start = policy.init_scale, -getattr(policy, "growth_delay", 0), policy.hysteresis
    assert replay(policy, policy.init(), steps) == list(trajectory(policy, start, steps)[-1])


@hypothesis.given(
    dynamic_policies(),
    st.tuples(powers(-30, 40), st.integers(0, 9), st.integers(0, 9)),
    st.lists(st.booleans(), min_size=16, max_size=16),
)
def test_update_follows_reference_from_any_restored_state(policy, start, steps):
    state = jaxscale.LossScaleState(
        *(jnp.array(x, dtype) for x, dtype in zip(start, ("f4", "i4", "i4"), strict=True))
    )
    assert replay(policy, state, steps) == list(trajectory(policy, start, steps)[-1])


@hypothesis.given(dynamic_policies(), st.booleans(), powers(-30, 40))
def test_a_backoff_never_raises_and_a_growth_never_lowers(policy, finite, scale):
    policy = dataclasses.replace(policy, init_scale=policy.min_scale)
    hypothesis.assume(getattr(policy, "clamp", "never") == "never")
    state = policy.init()._replace(loss_scale=jnp.array(scale, jnp.float32))
    moved = policy.adjust(state, finite).loss_scale
    assert moved >= scale if finite else moved <= scale


# With bounds of 4 and 12: the switches, a scale, and what a growth and a backoff make of it.
AT_BOUNDS = [
    ({}, 8, 12, 4),
    ({}, 1, 2, 1),
    ({}, 64, 64, 32),
    ({"clip_growth": False}, 8, 8, 4),
    ({"clamp": "moves"}, 1, 2, 4),
    ({"clamp": "moves"}, 64, 12, 32),
    ({"clamp": "moves", "clip_growth": False}, 64, 64, 32),
    ({"clamp": "steps"}, 1, 4, 4),
    ({"clamp": "steps"}, 64, 12, 12),
]


@pytest.mark.parametrize(("switches", "scale", "grown", "lowered"), AT_BOUNDS)
def test_moves_at_the_bounds(switches, scale, grown, lowered):
    numbers = {"init_scale": 8, "min_scale": 4, "max_scale": 12, "growth_interval": 1}
    policies = [presets.PresetLossScale(**numbers, **switches)]
    policies += [] if switches else [jaxscale.DynamicLossScale(**numbers)]
    for policy in policies:
        state = policy.init()._replace(loss_scale=jnp.array(scale, jnp.float32))
        assert policy.adjust(state, True).loss_scale == grown
        assert policy.adjust(state, False).loss_scale == lowered


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
@pytest.mark.parametrize("finite", [True, False])
def test_an_unusable_restored_scale_heals(scale, finite):
    policy = jaxscale.DynamicLossScale(growth_interval=1)
    state = policy.init()._replace(loss_scale=jnp.array(scale, jnp.float32))
    healed = policy.adjust(state, finite).loss_scale
    assert healed == policy.init_scale * (policy.growth_factor if finite else 0.5)


def test_a_tracker_restored_beyond_the_interval_grows_at_once():
    policy = jaxscale.DynamicLossScale(growth_interval=5)
    state = policy.init()._replace(growth_tracker=jnp.array(10, jnp.int32))
    state = policy.adjust(state, True)
    assert (state.loss_scale, state.growth_tracker) == (2.0**16, 0)


def test_trackers_at_the_end_of_their_range_do_not_wrap():
    policy = jaxscale.DynamicLossScale()
    info = jnp.iinfo(jnp.int32)
    state = jaxscale.LossScaleState(
        jnp.array(8.0, jnp.float32), jnp.array(info.max), jnp.array(info.min)
    )
    assert policy.adjust(state, True).loss_scale == 16
    assert policy.adjust(state, False)[0::2] == (4.0, 0)


@policies
def test_policies_keep_avals_and_follow_the_verdict(policy):
    policy = POLICIES[policy]
    state = policy.init()
    always = isinstance(policy, jaxscale.NoOpLossScale | jaxscale.FixedLossScale)
    if isinstance(policy, jaxscale.DynamicLossScale):
        assert avals(state) == avals(jaxscale.DynamicLossScale().init())
    for grads in ({"w": jnp.ones(2)}, {"w": jnp.array([1.0, jnp.nan])}):
        for update in (policy.update, jax.jit(policy.update)):
            new_state, should_apply = update(state, grads)
            verdict = jaxscale.all_finite(grads)
            assert avals(new_state) == avals(state)
            assert avals(should_apply) == avals(verdict)
            assert should_apply == (verdict | always)
            size = largest(Scaled(grads))  # which those that do not need it ignore
            assert_same_bits(new_state, policy.adjust(state, verdict, size))


@pytest.mark.parametrize("grads", [None, [], {}, {"w": None}, [None, jnp.ones(2)]])
def test_none_gradients_are_accepted_and_ignored(grads):
    policy = jaxscale.DynamicLossScale(growth_interval=1)
    state, should_apply = policy.update(policy.init(), grads)
    assert should_apply
    assert state.loss_scale == 2.0**16


@pytest.mark.parametrize("verdict", [True, np.bool_(True), jnp.array(True), np.array(True)])
def test_adjust_takes_every_kind_of_scalar_bool(verdict):
    policy = jaxscale.DynamicLossScale(growth_interval=1)
    assert policy.adjust(policy.init(), verdict).loss_scale == 2.0**16


@policies
def test_config_round_trips_through_json(policy):
    policy = POLICIES[policy]
    config = json.loads(json.dumps(policy.get_config()))
    assert type(policy).from_config(config) == policy


def test_policies_are_plain_values():
    policy = jaxscale.DynamicLossScale(init_scale=np.float32(8), growth_interval=np.int64(3))
    assert policy == jaxscale.DynamicLossScale(init_scale=8, growth_interval=3)
    assert hash(policy) == hash(jaxscale.DynamicLossScale(init_scale=8, growth_interval=3))
    assert {type(value) for value in policy.get_config().values()} == {float, int}
    preset = presets.PresetLossScale(init_scale=np.float32(8), growth_delay=np.int64(3))
    assert {type(value) for value in preset.get_config().values()} == {float, int, bool, str}
    assert jax.tree.leaves(policy) == [policy]
    assert pickle.loads(pickle.dumps((policy, policy.init()))) == (policy, policy.init())
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.init_scale = 1.0


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        (None, jaxscale.NoOpLossScale()),
        (8, jaxscale.FixedLossScale(8)),
        (8.0, jaxscale.FixedLossScale(8)),
        (np.float32(8), jaxscale.FixedLossScale(8)),
        (np.int64(8), jaxscale.FixedLossScale(8)),
        ("dynamic", jaxscale.DynamicLossScale()),
        ("adaptive", jaxscale.AdaptiveLossScale()),
        (POLICIES["hysteresis"], POLICIES["hysteresis"]),
    ],
)
def test_as_loss_scale(spec, policy):
    assert jaxscale.as_loss_scale(spec) == policy


def test_a_policy_of_ones_own():
    @dataclasses.dataclass(frozen=True)
    class Halving(jaxscale.LossScale):
        start: float = 64.0

        def init(self):
            return jaxscale.FixedLossScale(self.start).init()

        def adjust(self, state, grads_finite):
            return state._replace(loss_scale=state.loss_scale / 2)

    state, should_apply = Halving().update(Halving().init(), None)
    assert (state.loss_scale, should_apply) == (32, True)
    assert Halving.from_config(Halving(8.0).get_config()) == Halving(8.0)
    with pytest.raises(TypeError, match="abstract"):
        jaxscale.LossScale()


LIBRARIES = {
    "preset": presets.deepspeed(delayed_shift=2),
    "tolerance": presets.fairseq(),
    "logmax": presets.openseq2seq_logmax(),
    "adaptive": jaxscale.AdaptiveLossScale(),
    "gradual": presets.chainer(),
    "window": presets.WindowLossScale(),
}


@pytest.mark.parametrize("policy", [*POLICIES, *LIBRARIES])
def test_a_policy_that_needs_the_largest_gradient_says_so(policy):
    policy = (POLICIES | LIBRARIES)[policy]
    state = policy.init()
    unknown, *moved = (policy.adjust(state, True, size) for size in (None, 0.5, jnp.float32(0.125)))
    apart = [not jax.tree.all(jax.tree.map(jnp.array_equal, unknown, after)) for after in moved]
    assert apart == [policy.needs_largest] * 2


@pytest.mark.parametrize("policy", [*POLICIES, *LIBRARIES])
def test_devices_agree_on_the_next_state(policy):
    policy = (POLICIES | LIBRARIES)[policy]
    update = functools.partial(policy.update, axis_name="data")
    for shards, size in (([0.125, 0.0], 0.125), ([0.125, jnp.nan], jnp.nan)):
        after, _ = jax.vmap(update, (None, 0), axis_name="data")(policy.init(), jnp.array(shards))
        alone = policy.adjust(policy.init(), bool(size == size), size)
        assert_same_bits(after, jax.tree.map(lambda x: jnp.stack([x, x]), alone))


def test_logmax_learns_nothing_from_a_step_of_unknown_size():
    state = LIBRARIES["logmax"].init()
    assert_same_bits(LIBRARIES["logmax"].adjust(state, True), state)


def test_a_scale_set_from_a_python_number_is_strongly_typed_again():
    policy = jaxscale.DynamicLossScale()
    state = policy.init()._replace(loss_scale=8.0)
    assert avals(policy.adjust(state, True)) == avals(policy.init())


def test_adjust_is_vmapped_over_states_and_verdicts():
    policy = jaxscale.DynamicLossScale(growth_interval=1)
    states = jax.vmap(lambda _: policy.init())(jnp.arange(2))
    states = jax.vmap(policy.adjust)(states, jnp.array([True, False]))
    assert states.loss_scale.tolist() == [2.0**16, 2.0**14]

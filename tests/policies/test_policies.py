"""How a loss scale moves: the real rule against the documented one in `references.py`."""

import dataclasses
import functools
import itertools
import json
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


@hypothesis.given(
    dynamic_policies(),
    st.tuples(powers(-30, 40), st.integers(0, 9), st.integers(0, 9)) | st.none(),
    st.lists(st.booleans(), min_size=24, max_size=24),
)
def test_it_follows_the_reference_from_its_first_state_and_any_restored_one(policy, start, steps):
    first = policy.init_scale, -getattr(policy, "growth_delay", 0), policy.hysteresis
    start = start or first
    state = jaxscale.LossScaleState(
        *(jnp.array(x, dtype) for x, dtype in zip(start, ("f4", "i4", "i4"), strict=True))
    )
    assert replay(policy, state, steps) == list(trajectory(policy, start, steps)[-1])
    assert tuple(leaf.item() for leaf in policy.init()) == first


def test_moves_at_the_bounds_are_those_of_the_reference():
    numbers = {"init_scale": 8, "min_scale": 4, "max_scale": 12, "growth_interval": 1}
    policies = [jaxscale.DynamicLossScale(**numbers)]
    for clip, clamp in itertools.product([True, False], ["never", "moves", "steps"]):
        policies.append(presets.PresetLossScale(**numbers, clip_growth=clip, clamp=clamp))
    for policy, scale, finite in itertools.product(policies, [1.0, 8.0, 64.0], [True, False]):
        (expected, *_), *_ = trajectory(policy, (scale, 0, 1), [finite])
        state = policy.init()._replace(loss_scale=jnp.array(scale, jnp.float32))
        assert policy.adjust(state, finite).loss_scale == expected


def test_an_unusable_restored_scale_heals():
    policy = jaxscale.DynamicLossScale(growth_interval=1)
    for scale, finite in itertools.product([0.0, -1.0, np.inf, np.nan], [True, False]):
        state = policy.init()._replace(loss_scale=jnp.array(scale, jnp.float32))
        healed = policy.adjust(state, finite).loss_scale
        assert healed == policy.init_scale * (policy.growth_factor if finite else 0.5)


@pytest.mark.parametrize("finite", [True, False])
def test_no_scale_is_zero_inf_or_nan(finite):
    largest, smallest = float(jnp.finfo(jnp.float32).max), 2.0**-126
    factors = {"growth_factor": 2.0**50, "backoff_factor": 2.0**-50}
    policy = jaxscale.DynamicLossScale(
        init_scale=1.0, growth_interval=1, min_scale=smallest, max_scale=largest, **factors
    )
    assert replay(policy, policy.init(), [finite] * 300)[0] == (largest if finite else smallest)


def test_a_tracker_restored_beyond_the_interval_grows_at_once():
    policy, most = jaxscale.DynamicLossScale(growth_interval=5), jnp.iinfo(jnp.int32)
    for tracker in (10, most.max):  # where it does not wrap
        counters = jnp.array(tracker), jnp.array(most.min)
        state = jaxscale.LossScaleState(jnp.array(8.0, jnp.float32), *counters)
        assert policy.adjust(state, True)[:2] == (16, 0)
        assert policy.adjust(state, False)[0::2] == (4, 0)


LIBRARIES = {
    "preset": presets.deepspeed(delayed_shift=2),
    "tolerance": presets.fairseq(),
    "logmax": presets.openseq2seq_logmax(),
    "gradual": presets.chainer(),
    "window": presets.WindowLossScale(),
}
ALL = POLICIES | LIBRARIES
GRADS, BAD = {"w": jnp.ones(2)}, {"w": jnp.array([1.0, jnp.nan])}
policies = cases("policy", ALL, fast=["noop", "dynamic", "adaptive"])


@policies
def test_policies_keep_avals_and_follow_the_verdict(policy):
    policy = ALL[policy]
    state = policy.init()
    always = isinstance(policy, jaxscale.NoOpLossScale | jaxscale.FixedLossScale)
    for grads in (GRADS, BAD):
        for update in (policy.update, jax.jit(policy.update)):
            new_state, should_apply = update(state, grads)
            verdict = jaxscale.all_finite(grads)
            assert avals(new_state) == avals(state)
            assert avals(should_apply) == avals(verdict)
            assert should_apply == (verdict | always)
            size = jnp.max(jnp.abs(grads["w"]))  # which those that do not need it ignore
            assert_same_bits(new_state, policy.adjust(state, verdict, size))
    # No buffer is in a state twice, which could not be donated.
    assert avals(jax.jit(policy.update, donate_argnums=0)(policy.init(), GRADS)[0]) == avals(state)
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


@policies
def test_a_member_of_a_population_has_a_scale_of_its_own(policy):
    update, first = jax.jit(ALL[policy].update), ALL[policy].init()
    sizes = jnp.array([2.0**-3, jnp.inf, 0.0, 2.0**-9])
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[update(first, s)[0] for s in sizes])
    together = jax.jit(jax.vmap(ALL[policy].update))(states, sizes)[0]
    for i, size in enumerate(sizes):
        state, after = (jax.tree.map(lambda x, i=i: x[i], tree) for tree in (states, together))
        if policy != "logmax":  # whose logarithms may be rounded differently in another program
            assert_same_bits(after, update(state, size)[0])


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

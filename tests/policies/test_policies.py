"""Moves of a loss scale: the real rules against those in plain Python in `references.py`."""

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
import optax
import pytest
from references import trajectory
from tables import POLICIES, assert_same_bits, avals, cases, stack

import jaxscale
from jaxscale import presets


def test_two_good_steps_double_the_scale_and_a_bad_one_halves_it():
    policy = jaxscale.DynamicLossScale(init_scale=4.0, growth_interval=2)
    state = policy.init()
    scales = []
    for grads_finite in (True, True, False):
        state = policy.adjust(state, jnp.array(grads_finite))
        scales.append(float(state.loss_scale))
    assert scales == [4, 8, 4]


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


def follow(policy, start, steps):
    """The states after each step from a first one, which are those of the reference."""
    like = policy.init()
    first = type(like)(*start)
    first = jax.tree.map(lambda x, leaf: jnp.asarray(x, leaf.dtype), first, like)
    states = scanned(policy, first, np.float32(steps))
    verdicts = []
    for size in steps:
        largest = size if size >= 0 else None
        verdicts.append((size < BAD, largest))
    numbers = [leaf.tolist() for leaf in states]
    assert list(zip(*numbers, strict=True)) == trajectory(policy, start, verdicts)
    return states


def replaced(state, **fields):
    return state._replace(**jax.tree.map(jnp.float32, fields))


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
    clamp = draw(st.sampled_from(["never", "moves"]))
    return presets.PresetLossScale(
        init_scale=init_scale if clamp == "never" else draw(powers(-30, 40)),
        growth_delay=draw(st.integers(0, 2)),
        refill_on_finite=draw(st.booleans()),
        refill_on_backoff=draw(st.booleans()),
        clip_growth=draw(st.booleans()),
        clamp=clamp,
        **arguments,
    )


@pytest.mark.worlds
@pytest.mark.device
@hypothesis.given(
    dynamic_policies(),
    st.tuples(powers(-30, 40), st.integers(0, 9), st.integers(0, 9)) | st.none(),
    st.lists(st.sampled_from([BAD, NO_GRADIENTS]), min_size=24, max_size=24),
)
def test_it_follows_the_reference_from_its_first_state_and_any_restored_one(
    policy, start, steps
):
    growth_delay = getattr(policy, "growth_delay", 0)
    first = (policy.init_scale, -growth_delay, policy.hysteresis)
    assert tuple(leaf.item() for leaf in policy.init()) == first
    follow(policy, start or first, steps)


@pytest.mark.parametrize("step", [1.0, BAD])
def test_no_scale_is_zero_inf_or_nan(step):
    bounds = {"min_scale": 2.0**-126, "max_scale": float(jnp.finfo(jnp.float32).max)}
    policy = jaxscale.DynamicLossScale(
        init_scale=1.0,
        growth_interval=1,
        growth_factor=2.0**50,
        backoff_factor=2.0**-50,
        **bounds,
    )
    last = scanned(policy, policy.init(), np.full(300, step, np.float32)).loss_scale[-1]
    assert last == bounds["min_scale" if step == BAD else "max_scale"]


def test_a_tracker_restored_beyond_the_interval_grows_at_once():
    policy = jaxscale.DynamicLossScale(growth_interval=5)
    info = jnp.iinfo(jnp.int32)
    for tracker in (10, info.max):  # where it does not wrap
        state = jaxscale.LossScaleState(
            loss_scale=jnp.float32(8),
            growth_tracker=jnp.array(tracker),
            hysteresis_tracker=jnp.array(info.min),
        )
        grown = policy.adjust(state, True)
        assert (grown.loss_scale, grown.growth_tracker) == (16, 0), tracker
        lowered = policy.adjust(state, False)
        assert (lowered.loss_scale, lowered.hysteresis_tracker) == (4, 0), tracker


# All policies.

ALL = POLICIES | {
    "preset": presets.deepspeed(delayed_shift=2),
}
policies = cases("policy", ALL, fast=["noop", "dynamic", "following"])


def always_applies(policy):
    return isinstance(policy, jaxscale.NoOpLossScale | jaxscale.FixedLossScale)


GRADS = {
    "finite": {"w": jnp.ones(2)},
    "a NaN": {"w": jnp.array([1.0, jnp.nan])},
    "none": {"w": None},
}


@pytest.mark.device
@policies
@cases("grads", GRADS)
def test_policies_keep_avals_and_follow_the_verdict(policy, grads):
    policy = ALL[policy]
    grads = GRADS[grads]
    state = policy.init()
    verdict = jaxscale.all_finite(grads)
    size = None  # which those that do not need it ignore
    if grads["w"] is not None:
        size = jnp.max(jnp.abs(grads["w"]))
    expected = policy.adjust(state, verdict, size)
    # No buffer is in a state twice, which could not be donated.
    donating = jax.jit(policy.update, donate_argnums=0)
    for update in (policy.update, donating):
        next_state, should_apply = update(policy.init(), grads)
        assert avals(next_state) == avals(state)
        assert avals(should_apply) == avals(verdict)
        assert should_apply == (verdict | always_applies(policy))
        assert_same_bits(next_state, expected)


@policies
@cases("finite", [True, False])
def test_a_restored_scale_that_a_policy_never_has_is_replaced(policy, finite):
    policy = ALL[policy]
    first = policy.init()
    if always_applies(policy) or policy == POLICIES["following"]:
        return  # whose state stays as it is, or whose range is not known
    unusable = (0.0, 1e-40, -1.0, np.inf, np.nan)
    replacements = dict.fromkeys(unusable, policy.init_scale)
    for outside in (1e-12, 3e38):  # PyTorch's scaler has no bounds
        nearest = np.clip(outside, policy.min_scale, policy.max_scale)
        replacements[outside] = nearest
    for size, (scale, taken) in itertools.product((1.0, 0.0), replacements.items()):
        after = policy.adjust(first._replace(loss_scale=scale), finite, size)
        expected = policy.adjust(replaced(first, loss_scale=taken), finite, size)
        assert_same_bits(after, expected)
        assert avals(after) == avals(first)  # also of a number of Python


@policies
def test_devices_agree_on_the_next_state(policy):
    policy = ALL[policy]
    state = policy.init()
    update = functools.partial(policy.update, axis_name="data")
    mapped = jax.jit(jax.vmap(update, (None, 0), axis_name="data"))
    adjust = jax.jit(policy.adjust)
    for largest in (0.0, jnp.nan):
        after, _ = mapped(state, jnp.array([0.125, largest]))
        size = 0.125 + largest
        alone = adjust(state, not math.isnan(size), size)
        assert_same_bits(after, stack(alone, alone))


@pytest.mark.parametrize("policy", ALL.values(), ids=ALL)
def test_a_policy_is_a_plain_value_and_made_again_from_its_config(policy):
    assert jax.tree.leaves(policy) == [policy]
    pair = (policy, policy.init())
    assert pickle.loads(pickle.dumps(pair)) == pair
    config = json.loads(json.dumps(policy.get_config()))
    again = type(policy).from_config(config)
    assert again == policy
    assert hash(again) == hash(policy)


def test_numbers_of_numpy_become_those_of_python():
    numbers = {"init_scale": np.float16(8), "min_scale": np.float32(4)}
    policy = presets.PresetLossScale(**numbers, growth_interval=np.int64(3))
    types = {type(value) for value in policy.get_config().values()}
    assert types <= {float, int, bool, str}


def test_as_loss_scale():
    for spec in (8, 8.0, np.float32(8), np.int64(8)):
        assert jaxscale.as_loss_scale(spec) == jaxscale.FixedLossScale(8)
    assert jaxscale.as_loss_scale(None) == jaxscale.NoOpLossScale()
    assert jaxscale.as_loss_scale("dynamic") == jaxscale.DynamicLossScale()
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


def test_a_fixed_policy_with_an_adjust_of_its_own_moves():
    class Annealed(jaxscale.FixedLossScale):
        def adjust(self, state, grads_finite, largest=None):
            return state._replace(loss_scale=state.loss_scale / 2)

    tx = jaxscale.loss_scaled(optax.sgd(0.1), Annealed(128.0))
    params = jnp.ones(2)
    step = jaxscale.train_step(jnp.sum, tx, retries=1)
    _, state = tx.update(params, tx.init(params), params)
    assert state.scaling.loss_scale == 64
    _, state, _ = step(params, state)
    assert state.scaling.loss_scale == 32


# What the `adjust` of a policy makes of a state, and the error of the step.
MISTAKES = {
    "another dtype": (
        lambda state: state._replace(loss_scale=state.loss_scale.astype(jnp.float16)),
        TypeError,
        "equal dtypes: those at .loss_scale have float16 and float32. Cast",
    ),
    "another shape": (
        lambda state: state._replace(loss_scale=state.loss_scale * jnp.ones(2)),
        ValueError,
        r"equal shapes: those at .loss_scale have \(2,\) and \(\)",
    ),
    "another structure": (
        lambda state: (state.loss_scale,),
        ValueError,
        "two trees of one structure",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_step_says_what_a_policy_of_ones_own_changed(name):
    change, error, words = MISTAKES[name]

    class Changing(jaxscale.DynamicLossScale):
        def adjust(self, state, grads_finite, largest=None):
            return change(state)

    tx = jaxscale.loss_scaled(optax.sgd(0.1), Changing())
    params = jnp.ones(2)
    with pytest.raises(error, match=words):
        tx.update(params, tx.init(params), params)

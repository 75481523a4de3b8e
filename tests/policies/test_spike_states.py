"""The state of the rule for spikes: what it counts, under transformations, saved and restored."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spike_runs import STREAMS, judge_all, judge_one, state_after, take_last
from tables import assert_same_bits, avals, cases

import jaxscale
from jaxscale import SpikeRule

RULE = SpikeRule(window=8)


def test_rules_are_values():
    assert SpikeRule() == SpikeRule(window=np.int64(128), sigmas=np.float32(6))
    assert hash(SpikeRule()) == hash(SpikeRule(sigmas=6))
    assert SpikeRule() != SpikeRule(window=64)


MOST = np.iinfo(np.int32).max


# The window holds no more entries than it has places.
@pytest.mark.parametrize(("name", "after"), [("total_spikes", MOST), ("loss_count", 4)])
def test_a_counter_stays_at_its_largest_value(name, after):
    rule = SpikeRule(window=4)
    state = state_after(rule, [1.0, 1.1, 9.0, 99.0, 1.0])
    state = state._replace(**{name: jnp.int32(MOST)})
    is_spike, state = judge_one(rule, state, 1e6, 1)
    assert is_spike
    assert getattr(state, name) == after


@cases("place", [4, 7], fast=[7])
@cases("poison", [math.nan, math.inf, -math.inf], fast=[math.inf])
def test_a_poisoned_window_heals(place, poison):
    # A window that a port of OLMo's rule had written: without its NaN it judges as before. The
    # newest entry is in the last place.
    state = state_after(RULE, [1.0, 1.1, 0.9, 1.0, 1.1, 0.9])
    state = state._replace(losses=state.losses.at[place].set(poison))
    for loss, expected in {1.0: False, 9.0: True}.items():
        is_spike, next_state = judge_one(RULE, state, loss, 1)
        assert is_spike == expected, loss
        assert jnp.isfinite(next_state.loss_threshold), loss


# Under transformations.

# Two streams of 12 steps, the first with a spike.
VALUES = jnp.stack([STREAMS[name][0][62:74] for name in ("spikes", "steady")])


def assert_close(actual, expected):
    """Equal to rounding: the order of a sum is the compiler's."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4)
    jax.tree.map(close, actual, expected)


def stack(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@pytest.mark.worlds
def test_a_population_is_judged_under_vmap():
    judge = functools.partial(judge_all, RULE)
    _, together = jax.vmap(judge)(VALUES, VALUES)
    alone = [judge(values, values)[1] for values in VALUES]
    assert_close(together, stack(*alone))


# No buffer is in a state twice, which could not be donated.
@pytest.mark.worlds
@pytest.mark.parametrize("judge", [RULE.judge, jax.jit(RULE.judge, donate_argnums=0)])
def test_steps_alone_are_judged_as_in_a_scan(judge):
    state = RULE.init()
    for value in VALUES[0]:
        _, state = judge(state, value, value, True)
        assert avals(state) == avals(RULE.init())
    _, states = judge_all(RULE, VALUES[0], VALUES[0])
    assert_close(state, take_last(states))


# Saved and restored. The window holds six entries, of eight.

NUMBERS = [1.0, 2.0, 3.0, 2.0, 1.0, 2.5]


@cases("length", [2, 5, 8, 11], fast=[5, 8, 11])
def test_a_state_is_restored_into_another_window(length):
    # as if earlier steps had no loss
    state = state_after(RULE, NUMBERS)._replace(loss_count=jnp.int32(3))
    target = SpikeRule(window=length).init()
    restored = jaxscale.from_state_dict(target, jaxscale.to_state_dict(state))
    num_kept = min(length, 6)
    zeros = [0.0] * (length - num_kept)
    assert restored.grad_norms.tolist() == zeros + NUMBERS[-num_kept:]
    assert restored.norm_count == num_kept
    assert restored.loss_count == min(length, 3)
    assert restored.total_spikes == state.total_spikes
    assert avals(restored) == avals(target)
    if target.losses.shape == state.losses.shape:
        assert_same_bits(restored, state)
    population = jaxscale.to_state_dict(stack(*[state] * 3))
    restored_population = jaxscale.from_state_dict(stack(*[target] * 3), population)
    assert_same_bits(restored_population, stack(*[restored] * 3))

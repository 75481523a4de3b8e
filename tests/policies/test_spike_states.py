"""The state of the rule for spikes: what it counts, under transformations, saved and restored."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from spike_runs import STREAMS, judge_all, judge_one, state_after, take_last
from tables import assert_same_bits, avals, cases

import jaxscale
from jaxscale import SpikeRule, presets

RULE = SpikeRule(window=8)


def test_rules_are_values():
    assert SpikeRule() == SpikeRule(window=np.int64(128), sigmas=np.float32(6))
    assert hash(SpikeRule()) == hash(SpikeRule(sigmas=6))
    assert SpikeRule() != presets.olmo()
    assert presets.olmo() == presets.olmo(rolling_interval_length=128)


def test_spikes_are_counted_in_all_and_in_a_row():
    rule = SpikeRule(window=4)
    state = state_after(rule, [1.0, 1.1, 9.0, 99.0])
    assert (state.loss_count, state.total_spikes, state.spike_count) == (4, 2, 2)
    _, state = judge_one(rule, state, 1, 1)
    assert (state.loss_count, state.total_spikes, state.spike_count) == (4, 2, 0)


def test_a_counter_stays_at_its_largest_value():
    rule = SpikeRule(window=4)
    most = jnp.int32(np.iinfo(np.int32).max)
    state = state_after(rule, [1.0, 1.1, 9.0, 99.0, 1.0])
    is_spike, state = judge_one(rule, state._replace(total_spikes=most), 1e6, 1)
    assert is_spike
    assert state.total_spikes == most


def test_a_restored_number_of_entries_is_at_most_the_window():
    rule = SpikeRule(window=4)
    most = jnp.int32(np.iinfo(np.int32).max)
    state = state_after(rule, [1.0, 1.1, 9.0, 99.0, 1.0])
    is_spike, state = judge_one(rule, state._replace(loss_count=most), 1e6, 1)
    assert is_spike
    assert state.loss_count == 4


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


def test_a_population_is_judged_under_vmap():
    judge = functools.partial(judge_all, RULE)
    _, together = jax.vmap(judge)(VALUES, VALUES)
    alone = [judge(values, values)[1] for values in VALUES]
    assert_close(together, stack(*alone))


def test_a_step_without_jit_is_judged_as_in_a_scan():
    state = RULE.init()
    for value in VALUES[0]:
        _, state = RULE.judge(state, value, value, True)
    _, states = judge_all(RULE, VALUES[0], VALUES[0])
    assert_close(state, take_last(states))


def test_a_state_can_be_donated():
    # No buffer is in a state twice, which could not be donated.
    donating = jax.jit(RULE.judge, donate_argnums=0)
    one = jnp.float32(1)
    _, state = donating(RULE.init(), one, one, True)
    _, state = donating(state, one, one, True)
    assert avals(state) == avals(RULE.init())


# Saved and restored. The window holds six entries, of eight.

NUMBERS = [1.0, 2.0, 3.0, 2.0, 1.0, 2.5]


def saved_state():
    # as if earlier steps had no loss
    return state_after(RULE, NUMBERS)._replace(loss_count=jnp.int32(3))


@cases("length", [2, 5, 8, 11], fast=[5, 11])
def test_a_state_is_restored_into_another_window(length):
    state = saved_state()
    target = SpikeRule(window=length).init()
    restored = jaxscale.from_state_dict(target, jaxscale.to_state_dict(state))
    num_kept = min(length, 6)
    zeros = [0.0] * (length - num_kept)
    assert restored.grad_norms.tolist() == zeros + NUMBERS[-num_kept:]
    assert restored.norm_count == num_kept
    assert restored.loss_count == min(length, 3)
    assert restored.total_spikes == state.total_spikes
    assert avals(restored) == avals(target)


@cases("length", [2, 5, 8, 11], fast=[5, 11])
def test_a_population_is_restored_into_another_window(length):
    state = saved_state()
    target = SpikeRule(window=length).init()
    alone = jaxscale.from_state_dict(target, jaxscale.to_state_dict(state))
    several = jaxscale.to_state_dict(stack(*[state] * 3))
    restored = jaxscale.from_state_dict(stack(*[target] * 3), several)
    assert_same_bits(restored, stack(*[alone] * 3))


OLDER = {
    *("losses", "loss_count", "loss_threshold", "loss_deviation"),
    *("grad_norms", "norm_count", "norm_threshold", "norm_deviation"),
    *("total_spikes", "spike_count"),
}


def test_a_state_without_the_newer_fields_is_read():
    state = state_after(RULE, [1.0, 1.1, 0.9, 1.0, 50.0])
    saved = jaxscale.to_state_dict(state)
    assert set(saved) > OLDER
    older = {name: saved[name] for name in {"version", *OLDER}}
    restored = jaxscale.from_state_dict(RULE.init(), older)
    expected = RULE.init()._replace(**{name: getattr(state, name) for name in OLDER})
    assert_same_bits(restored, expected)
    assert avals(restored) == avals(state)
    is_spike, _ = judge_one(RULE, restored, 50, 1)
    assert is_spike


def test_a_state_is_read_back():
    state = state_after(RULE, [1.0, 1.1, 0.9, 1.0, 50.0])
    saved = jaxscale.to_state_dict(state)
    assert_same_bits(jaxscale.from_state_dict(RULE.init(), saved), state)


def test_a_saved_state_may_have_fields_that_are_gone():
    """Version 0.3.0 also followed the level of the loss."""
    state = state_after(SpikeRule(window=4), [1.0, 1.1, 9.0])
    saved = jaxscale.to_state_dict(state)
    levels = {"recent_losses": np.zeros(8), "past_levels": np.zeros(64)}
    saved |= levels | {"level_count": np.int32(3), "level_threshold": np.float32("inf")}
    target = SpikeRule(window=4).init()
    assert_same_bits(jaxscale.from_state_dict(target, saved), state)

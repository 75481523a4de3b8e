"""The level of the loss, which the rule for spikes follows: whether it stands above its past."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import spike_streams
from hypothesis import assume, given
from hypothesis import strategies as st
from spike_reference import ReferenceLevel
from spike_runs import judge_all
from tables import cases

import jaxscale
from jaxscale import SpikeRule
from jaxscale._policies.level import find_raised_level

RULE = SpikeRule(window=2)
STEPS = 4000
# So much above 3 a loss stays for so many steps. NaN is a bad step.
HEIGHTS = st.tuples(st.sampled_from([0, 1, 2, 5, -3, math.nan]), st.integers(1, 900))


@given(
    heights=st.lists(HEIGHTS, max_size=8),
    noise=st.sampled_from([0, 1, 8]),
    seed=st.integers(0, 99),
)
def test_it_is_followed_as_by_the_reference(heights, noise, seed):
    """Losses are multiples of 1/64, so that medians are exact."""
    above = [0.0] * 700
    for height, number in heights:
        above += [height] * number
    above += above[-1:] * STEPS
    units = np.random.default_rng(seed).integers(-noise, noise + 1, STEPS)
    losses = 3 + np.array(above[:STEPS]) + units / 64
    finite = np.isfinite(losses)

    reference = ReferenceLevel()
    counts = []
    thresholds = []
    for loss, is_finite in zip(losses.tolist(), finite, strict=True):
        if is_finite:
            reference.step(loss)
        else:
            reference.wait()
        counts.append(reference.count)
        thresholds.append(reference.threshold)
    # no decision may hang on a rounding
    assume(min(reference.margins, default=1) > 1e-5)
    norms = np.ones(STEPS, np.float32)
    _, states = judge_all(RULE, np.float32(losses), norms, finite)
    assert states.level_count.tolist() == counts
    np.testing.assert_allclose(states.level_threshold, thresholds, rtol=1e-5)


@jax.jit
@jax.vmap
def count_runs(losses):
    _, states = judge_all(RULE, losses, jnp.ones_like(losses))
    return states.level_count


def find_raised(losses):
    """Whether the level of each run counts as raised, step by step."""
    return np.asarray(count_runs(np.float32(losses))) >= 16


# The share of runs of 6000 steps in which a level counts as raised, at most.
FALSE_ALARMS = dict.fromkeys(spike_streams.HEALTHY, 0.0) | {"heavy tails": 0.04}


@pytest.mark.slow
@cases("name", spike_streams.HEALTHY)
def test_that_of_a_healthy_run_is_not_raised(name):
    is_raised = find_raised(spike_streams.HEALTHY[name](100))
    assert is_raised.any(1).mean() <= FALSE_ALARMS[name]


class Rise(NamedTuple):
    """A rise of a loss of about 1, and when its level must be raised."""

    options: dict
    after: int  # the median run within this many steps
    share: float = 1.0  # at least this share of the runs within 100 steps


RISES = {
    "0.5": Rise({"rise": 0.5}, 21, share=0.9),
    "1": Rise({"rise": 1.0}, 20),
    "9": Rise({"rise": 9.0}, 19),
    "1e6": Rise({"rise": 1e6}, 19),
    "0.5, less noise": Rise({"rise": 0.5, "noise": 0.05}, 19),
    "0.2, little noise": Rise({"rise": 0.2, "noise": 0.01}, 19),
    "1 over 30": Rise({"rise": 1.0, "takes": 30}, 32),
    "1 over 100": Rise({"rise": 1.0, "takes": 100}, 65, share=0.9),
}


@pytest.mark.slow
@cases("name", RISES)
def test_a_rise_of_the_loss_raises_it(name):
    rise = RISES[name]
    losses = spike_streams.raised(**rise.options, runs=60)
    is_raised = find_raised(losses)[:, spike_streams.RISE :]
    assert is_raised[:, :100].any(1).mean() >= rise.share
    first = np.where(is_raised.any(1), is_raised.argmax(1) + 1, np.inf)
    assert np.median(first) <= rise.after


# How far a loss of 2 rises, in which dtype, and whether its level is raised.
ROUNDINGS = {
    "rounding in float32": (jnp.float32, 2.0**-22, False),
    "more in float32": (jnp.float32, 2.0**-10, True),
    "rounding in bfloat16": (jnp.bfloat16, 2.0**-6, False),
    "more in bfloat16": (jnp.bfloat16, 2.0**-2, True),
}


@cases("name", ROUNDINGS, fast=["rounding in float32", "more in float32"])
def test_only_a_rise_beyond_rounding_raises_it(name):
    dtype, rise, expected = ROUNDINGS[name]
    losses = jnp.where(jnp.arange(700) >= 600, 2.0 + rise, 2.0).astype(dtype)
    _, states = judge_all(RULE, losses, jnp.ones(700))
    assert (states.level_count >= 16).any() == expected


# What a state says of it. A population stands for the states after each step of one run, whose loss
# rises at step 1000. Every seventh step is bad: it says nothing of the loss, and counts.


@functools.cache
def make_population():
    steps = np.arange(STEPS)
    losses = np.where(steps < 1000, 1.0, 3.0) + 0.1 * steps % 0.3
    _, states = judge_all(RULE, np.float32(losses), np.ones(STEPS), steps % 7 > 0)
    state = jaxscale.skip_nonfinite(optax.sgd(0.1), spikes=RULE).init(jnp.zeros(1))
    total_steps = jnp.arange(1, STEPS + 1, dtype=jnp.int32)
    return state._replace(total_steps=total_steps, spikes=states)


FORMS = {"eager": find_raised_level, "compiled": jax.jit(find_raised_level)}
forms = pytest.mark.parametrize("form", FORMS)


def find_levels(form):
    return jax.tree.map(np.asarray, FORMS[form](make_population()))


@forms
def test_it_counts_as_raised_in_one_run_of_steps_and_then_is_forgotten(form):
    level = find_levels(form)
    (raised,) = np.nonzero(level.is_raised)
    first = raised[0]
    assert 1000 < first <= 1025
    assert raised.tolist() == list(range(first, first + len(raised)))
    assert 2000 < len(raised) < 2048


@forms
def test_its_steps_are_those_of_the_state(form):
    expected = make_population().spikes.level_count
    assert find_levels(form).num_steps.tolist() == expected.tolist()


@forms
def test_checkpoints_from_before_the_rise_are_good(form):
    level = find_levels(form)
    good_until = level.good_until[level.is_raised]
    assert (good_until <= 1000).all()
    assert (good_until > 900).all()


@forms
def test_checkpoints_are_good_where_it_is_not_raised(form):
    level = find_levels(form)
    others = ~level.is_raised
    total_steps = make_population().total_steps
    assert (level.good_until[others] == total_steps[others]).all()


def test_there_is_none_without_a_rule():
    state = jaxscale.skip_nonfinite(optax.sgd(0.1)).init(jnp.zeros(1))
    assert state.spikes is None
    assert find_raised_level(state) is None

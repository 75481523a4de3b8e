"""The rule for spikes: which steps it skips, and its state.

Decisions are those of a reference in float64. Numbers agree only up to rounding,
as sums of 128 entries in float32 are rounded. Where a stream is scaled by a power of two,
arithmetic is exact, and bits are compared.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from spike_reference import ReferenceRule
from spike_runs import (
    STREAMS,
    judge_all,
    judge_one,
    state_after,
    take_last,
)
from tables import assert_same_bits, avals, cases, stack

import jaxscale
from jaxscale import SpikeRule


def test_a_norm_of_9_among_norms_of_1_is_a_spike():
    rule = SpikeRule(window=4, min_history=2)
    state = rule.init()
    verdicts = []
    for norm in (1.0, 1.1, 0.9, 9.0):
        is_spike, state = rule.judge(state, None, jnp.float32(norm), True)
        verdicts.append(bool(is_spike))
    assert verdicts == [False, False, False, True]


OPTIONS = {"default": {}, "short": {"window": 16, "sigmas": 4.0, "min_history": 3}}


def assert_windows_are(state, reference, rtol):
    """The newest entries of both windows are those of the reference."""
    windows = {"losses": reference.losses, "grad_norms": reference.norms}
    for field, expected in windows.items():
        window = np.asarray(getattr(state, field))
        newest = window[len(window) - len(expected) :]
        np.testing.assert_allclose(newest, expected, rtol=rtol, err_msg=field)


# The rounding of a look at a window, relative and absolute.
ROUNDING = {"threshold": (1e-4, 0), "deviation": (1e-3, 0.1)}


def assert_thresholds_are(states, looks):
    """The thresholds and deviations of both windows are those of the reference in each step.

    `looks` holds a pair for each step: the reference's `Look` at the loss, and that at the norm.
    """
    for kind, of_kind in zip(["loss", "norm"], zip(*looks, strict=True), strict=True):
        for name, (rtol, atol) in ROUNDING.items():
            with np.errstate(over="ignore"):  # a deviation beyond float32 is inf
                expected = np.float32([getattr(look, name) for look in of_kind])
            numbers = getattr(states, f"{kind}_{name}")
            np.testing.assert_allclose(numbers, expected, rtol=rtol, atol=atol)


@pytest.mark.worlds
@cases(
    "name",
    STREAMS,
    fast=["spikes", "1e30", "not finite", "up", "negative", "zeros", "huge"],
)
@cases("options", OPTIONS, fast=["default"])
def test_the_rule_decides_like_the_reference(name, options):
    losses, norms = STREAMS[name]
    chosen = OPTIONS[options]
    reference = ReferenceRule(**chosen)
    expected = reference.find_spikes(np.float64(losses), np.float64(norms))
    margin = min(reference.margins, default=math.inf)
    assert margin > 1e-3, "no decision may hinge on rounding"
    rule = SpikeRule(**chosen)
    is_spike, states = judge_all(rule, losses, norms)
    assert is_spike.tolist() == expected
    expected_totals = np.cumsum(expected)
    assert states.total_spikes.tolist() == expected_totals.tolist()
    last = take_last(states)
    assert_windows_are(last, reference, rtol=1e-4)
    assert_thresholds_are(states, reference.looks)


# What a usual loss is multiplied by, what is added to it, and what the norm is multiplied by.
STEP_KINDS = {
    "usual": (1, 0, 1),
    "high norm": (1, 0, 8),
    "far loss": (1, 1e4, 1),
    "low": (1, -1e3, 2.0**-6),
    "huge norm": (1, 0, 1e30),
    "norm of 0": (1e3, 0, 0),
    "norm overflows": (1, 0, math.inf),
    "not finite": (1, math.nan, math.inf),
}


class Steps(NamedTuple):
    """The losses and norms of some steps, and whether each is finite."""

    losses: np.ndarray
    norms: np.ndarray
    finite: np.ndarray


def draw_steps(runs, seed, length=200):
    """Draws `length` steps: `number` of each `(kind, number)` in `runs`, then usual ones."""
    kinds = []
    for kind, number in runs:
        kinds += [kind] * number
    kinds += ["usual"] * length  # always as many steps, so that one program serves all
    times, plus, norm_times = np.transpose(
        [STEP_KINDS[kind] for kind in kinds[:length]]
    )
    noise = np.random.default_rng(seed).normal(size=(2, length))
    losses, norms = np.exp(0.1 * noise)
    losses = np.float32(times * losses + plus)
    return Steps(losses, np.float32(norm_times * norms), np.isfinite(losses))


RUN = st.tuples(st.sampled_from(list(STEP_KINDS)), st.integers(1, 15))


@pytest.mark.worlds
@given(
    runs=st.lists(RUN, max_size=25),
    seed=st.integers(0, 99),
    options=st.sampled_from(list(OPTIONS)),
)
def test_any_steps_are_judged_as_by_the_reference(runs, seed, options):
    if options == "default":
        # The default rule judges nothing before a window has 64 entries.
        runs = [("usual", 70), *runs]
    steps = draw_steps(runs, seed)
    reference = ReferenceRule(**OPTIONS[options])
    losses = np.float64(steps.losses)
    expected = reference.find_spikes(losses, np.float64(steps.norms), steps.finite)
    # no decision may hinge on rounding
    assume(min(reference.margins, default=1) > 1e-3)
    is_spike, states = judge_all(SpikeRule(**OPTIONS[options]), *steps)
    last = take_last(states)
    assert is_spike.tolist() == expected
    assert last.total_spikes == reference.total
    assert last.spike_count == reference.num_in_row
    assert last.total_norm_overflows == reference.overflows
    assert last.cooldown == reference.cooldown
    assert last.loss_count == len(reference.losses)
    assert last.norm_count == len(reference.norms)
    assert_windows_are(last, reference, rtol=1e-3)


# What the docstring of `SpikeRule` says.


@pytest.mark.worlds
@cases(("sigma", "per_10_000"), [(0.3, 3), (0.6, 22), (1.0, 57)], fast=[(1.0, 57)])
def test_good_steps_of_a_heavy_tailed_norm_are_taken_for_spikes(sigma, per_10_000):
    norms = np.exp(sigma * np.random.default_rng(0).standard_normal(100_000))
    is_spike, _ = judge_all(SpikeRule(), None, norms)
    assert is_spike.sum() / 10 == pytest.approx(per_10_000, rel=0.2)


# The dtype of a loss of 2, how far the loss rises, and whether that is a spike. The next number
# after 2 in bfloat16 is 1/64 higher.
ROUNDINGS = {
    "one spacing of bfloat16": (jnp.bfloat16, 2.0**-6, False),
    "four spacings of bfloat16": (jnp.bfloat16, 2.0**-4, True),
    "as much in float32": (jnp.float32, 2.0**-6, True),
    "four times as much in float32": (jnp.float32, 2.0**-4, True),
}


@cases("name", ROUNDINGS)
def test_only_a_rise_beyond_rounding_is_a_spike(name):
    dtype, rise, expected = ROUNDINGS[name]
    losses = jnp.where(jnp.arange(400) < 200, 2.0, 2.0 + rise)
    is_spike, _ = judge_all(SpikeRule(), losses.astype(dtype), jnp.ones(400))
    assert is_spike.any() == expected


# Fields that have the unit of the loss.
OF_LOSSES = ["losses", "loss_threshold"]


@cases("exponent", [-100, -30, 60, 120])
def test_the_unit_does_not_matter(exponent):
    # All arithmetic is in units of a power of two, so that this holds to the bit.
    rule = SpikeRule()
    losses, norms = STREAMS["spikes"]
    unit = np.float32(2.0**exponent)
    is_spike, states = judge_all(rule, losses, norms)
    is_spike_scaled, scaled = judge_all(rule, losses * unit, norms)
    assert is_spike_scaled.tolist() == is_spike.tolist()
    in_unit = {name: getattr(states, name) * unit for name in OF_LOSSES}
    assert_same_bits(scaled, states._replace(**in_unit))


# Steps that say less than others.

# A loss and a norm, and whether the step is finite.
WITHOUT_TRACE = {
    "norm of 0": (1.0, 0, True),
    "norm of 0, far loss": (1e9, 0, True),
    "norm of 0, no loss": (None, 0, True),
    "not finite": (99, 1, False),
}


@cases("name", WITHOUT_TRACE)
def test_a_step_that_says_nothing_leaves_no_trace(name):
    rule = SpikeRule(window=4)
    state = state_after(rule, [1.0, 1.1, 0.9, 99.0])
    assert state.spike_count == 1
    is_spike, next_state = judge_one(rule, state, *WITHOUT_TRACE[name])
    assert not is_spike
    assert_same_bits(next_state, state)


# Fields that a step without a loss does not touch.
UNTOUCHED = [*OF_LOSSES, "loss_count", "loss_deviation"]


def test_without_a_loss_the_norm_judges_alone():
    rule = SpikeRule()
    losses, norms = STREAMS["spiking norm"]
    is_spike, states = judge_all(rule, None, norms)
    is_spike_with_loss, states_with_loss = judge_all(rule, np.ones_like(losses), norms)
    assert is_spike.tolist() == is_spike_with_loss.tolist()
    # The state after the run with a constant loss, with the fields of the loss as at the start.
    untouched = {name: getattr(rule.init(), name) for name in UNTOUCHED}
    expected = take_last(states_with_loss)._replace(**untouched)
    assert_same_bits(take_last(states), expected)


@pytest.mark.worlds
def test_other_dtypes_are_judged_in_float32():
    rule = SpikeRule(window=4)
    state = state_after(rule, [1.0, 1.25, 0.75])
    for number in (jnp.bfloat16(9), jnp.float16(9), np.float64(9), 9.0):
        is_spike, next_state = rule.judge(state, 1.0, number, True)
        assert is_spike, type(number)
        assert avals(next_state) == avals(rule.init())


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


# States under transformations.

# Two streams of 12 steps, the first with a spike.
VALUES = jnp.stack([STREAMS[name][0][62:74] for name in ("spikes", "steady")])


def assert_close(actual, expected):
    """Equal to rounding: the order of a sum is the compiler's."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4)
    jax.tree.map(close, actual, expected)


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


# In an optimizer. `tests/step/test_runs.py` has whole runs.

SAFE = jaxscale.skip_nonfinite(optax.sgd(0.01), spikes=RULE)


def test_a_loss_of_9_among_losses_of_1_is_skipped():
    rule = SpikeRule(window=4, min_history=2)
    tx = jaxscale.skip_nonfinite(optax.sgd(0.1), spikes=rule)
    state = tx.init(jnp.ones(2))
    for loss, is_made in ((1.0, True), (1.1, True), (9.0, False), (1.0, True)):
        _, state = jax.jit(tx.update)(jnp.ones(2), state, value=jnp.float32(loss))
        assert state.step_applied == is_made


@cases("last, shown", [(3.0, 5.0), (jnp.inf, jnp.inf)])
def test_nans_that_are_errors_are_not_made(last, shown):
    state = SAFE.init(jnp.ones(2))
    update = jax.jit(SAFE.update)
    with jax.debug_nans(True):
        for number in (3.0, 3.0, 3.0, 3.0, last):
            _, state = update(jnp.array([number, 4.0]), state)
    np.testing.assert_allclose(state.grad_norm, shown, rtol=1e-6)

"""The rule for spikes: what it skips, and what it keeps.

Decisions are those of a reference in float64, and of OLMo-core. Numbers are equal to rounding only,
as sums of 128 entries in float32 are rounded; where arithmetic is exact, in scaled streams, bits
are compared.
"""

import functools
import gzip
import itertools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import assert_same_bits, avals, cases

import jaxscale
from jaxscale import SpikeRule, presets


class Promised:
    """`SpikeRule`, in float64 and on lists. It also says by how little each decision was made."""

    def __init__(self, window=128, sigmas=6.0, min_history=None):
        self.window, self.sigmas = window, sigmas
        self.history = max(2, window // 2) if min_history is None else min_history

    def spikes(self, losses, norms):
        """Whether each step is skipped. `seen` has both thresholds and deviations of each."""
        self.windows, self.margins, self.seen, skipped = ([], []), [], [], []
        for values in zip(losses, norms, strict=True):
            is_spike, seen = [False], self.seen and self.seen[-1]
            if all(map(math.isfinite, values)):
                is_spike, seen = zip(*map(self.look, self.windows, values), strict=True)
            skipped.append(any(is_spike))
            self.seen.append(seen)
        return skipped

    def look(self, window, value):
        is_spike, seen, judges = False, (math.inf, 0.0), len(window) >= self.history
        if judges or len(window) >= 4:
            mean = math.fsum(window) / len(window)
            squares = math.fsum((x - mean) ** 2 for x in window)
            std = max(math.sqrt(squares / (len(window) - 1)), 1e-6 * abs(mean))
            if std > 0:
                if judges:
                    seen = mean + self.sigmas * std, (value - mean) / std
                    is_spike = value > seen[0]
                    self.margins.append(abs(seen[1] - self.sigmas))
                reach = 5 * self.sigmas * std
                value = min(max(value, mean - reach), mean + reach)
        window.append(value)
        del window[: -self.window]
        return is_spike, seen


TESTS = pathlib.Path(__file__).parent.parent
RECORDED = TESTS / "benchmarks" / "results" / "spikes-cpu.json"
with gzip.open(TESTS / "presets" / "traces" / "olmo_skip_step_optimizer.json.gz") as file:
    OLMO = json.load(file)
# Losses and norms, made up and recorded, that OLMo-core's own optimizers were run on.
STREAMS = {
    name: tuple(np.array(stream[key], np.float32) for key in ("loss", "grad_norm"))
    for name, stream in OLMO["streams"].items()
}
STEPS = 400


@functools.partial(jax.jit, static_argnums=0)
def judge_all(rule, losses, norms):
    """Whether each step is a spike, and the states after each step. There may be no losses."""

    def step(state, values):
        is_spike, state = rule.judge(state, *values, jaxscale.all_finite(values))
        return state, (is_spike, state)

    return jax.lax.scan(step, rule.init(), (losses, norms))[1]


OPTIONS = {"default": {}, "short": {"window": 16, "sigmas": 4.0, "min_history": 3}}


def after(rule, losses):
    """The state after some steps with these losses and norms."""
    state = rule.init()
    for loss in losses:
        _, state = rule.judge(state, jnp.float32(loss), jnp.float32(loss), True)
    return state


# What it decides.


@cases("name", STREAMS, fast=["spikes", "1e30", "not finite", "up", "negative", "zeros", "huge"])
@cases("options", OPTIONS, fast=["default"])
def test_it_decides_as_promised(name, options):
    reference = Promised(**OPTIONS[options])
    expected = reference.spikes(*np.float64(STREAMS[name]))
    rule = SpikeRule(**OPTIONS[options])
    is_spike, states = judge_all(rule, *STREAMS[name])
    assert min(reference.margins) > 1e-3, "no decision may hang on a rounding"
    assert is_spike.tolist() == expected
    assert states.total_spikes.tolist() == np.cumsum(expected).tolist()
    for field, window in zip(["losses", "grad_norms"], reference.windows, strict=True):
        kept = np.asarray(getattr(states, field)[-1])[-len(window) :]
        np.testing.assert_allclose(kept, window, rtol=1e-4)
    with np.errstate(over="ignore"):  # a deviation beyond float32 is inf
        threshold, deviation = np.float32(reference.seen).transpose(2, 1, 0)
    close = np.testing.assert_allclose
    close([states.loss_threshold, states.norm_threshold], threshold, rtol=1e-4)
    close([states.loss_deviation, states.norm_deviation], deviation, rtol=1e-3, atol=0.1)


def test_recorded_runs_are_judged_as_promised():
    # The plain ones of `benchmarks/spikes.py`, of each seed and player.
    spikes = 0
    for row in json.loads(RECORDED.read_text())["rows"]:
        both = (itertools.chain(*row["ways"]["plain"][key]) for key in ("losses", "norms"))
        for pair in zip(*both, strict=True):
            pair = np.array(pair, np.float32)
            pair = pair[:, np.isfinite(pair).all(0)]  # one that diverged is not, in the end
            reference = Promised()
            expected = reference.spikes(*np.float64(pair))
            assert min(reference.margins) > 1e-4, row["program"]
            assert judge_all(SpikeRule(), *pair)[0].tolist() == expected, row["program"]
            spikes += sum(expected)
    assert spikes > 10


LEVELS = {(100, 5), (1000, 7), (1e5, 12)}


@cases(("deviations", "skips"), LEVELS, fast=[(100, 5)])
def test_a_new_level_is_accepted_after_as_many_steps_as_the_docstring_says(deviations, skips):
    numbers = []
    for seed in range(5):
        losses = 1 + 0.01 * np.random.default_rng(seed).standard_normal(STEPS)
        losses[200:] += 0.01 * deviations
        found = np.flatnonzero(judge_all(SpikeRule(), losses, np.ones(STEPS))[0])
        assert set(found.tolist()) <= set(range(200, 200 + skips))
        numbers.append(len(found))
    assert max(numbers) in (skips, skips - 1)


def test_rounding_is_not_a_spike():
    # The next number after 2 in bfloat16 is 1/64 higher. In float32 that is a spike, at first.
    norms = jnp.ones(STEPS)
    for rise, in_bfloat16, in_float32 in ((2.0**-6, False, True), (2.0**-4, True, True)):
        losses = jnp.where(jnp.arange(STEPS) < 200, 2.0, 2.0 + rise)
        assert judge_all(SpikeRule(), losses.astype(jnp.bfloat16), norms)[0].any() == in_bfloat16
        assert judge_all(SpikeRule(), losses, norms)[0].any() == in_float32


@cases(("sigma", "per_10_000"), [(0.3, 3), (0.6, 22), (1.0, 57)], fast=[(1.0, 57)])
def test_false_alarms_of_heavy_tails_are_as_the_docstring_says(sigma, per_10_000):
    norms = np.exp(sigma * np.random.default_rng(0).standard_normal(100_000))
    alarms = judge_all(SpikeRule(), None, norms)[0].sum()
    assert alarms / 10 == pytest.approx(per_10_000, rel=0.2)


def test_the_unit_does_not_matter():
    # All arithmetic is in units of a power of two, so that this holds to the bit.
    rule, (losses, norms) = SpikeRule(), STREAMS["spikes"]
    is_spike, states = judge_all(rule, losses, norms)
    for exponent in (-100, -30, 60, 120):
        unit = np.float32(2.0**exponent)
        again, scaled = judge_all(rule, losses * unit, norms)
        assert again.tolist() == is_spike.tolist()
        fields = {name: getattr(states, name) * unit for name in ("losses", "loss_threshold")}
        assert_same_bits(scaled, states._replace(**fields))


# Of the runs whose steps that are not finite OLMo let into its windows, those without are replayed.
# Here such steps were there, and must leave no mark.
OLMO_RUNS = {case["id"]: case for case in OLMO["cases"] if all(case["finite"])}


@cases("name", OLMO_RUNS, fast=["rough 1, 6, 3", "not finite, 128, 6, only finite"])
def test_the_preset_decides_as_olmo_did(name):
    run = OLMO_RUNS[name]
    expected = [factor == 0 for factor in run["step_factor"]]
    if run["config"]["rolling_interval_length"] < 6:
        # OLMo-core skips the second step whatever it holds: the deviation of one number is NaN.
        expected[1] = False
    losses, norms = STREAMS[run["seq"]]
    is_finite = np.isfinite(losses) & np.isfinite(norms)
    is_spike = judge_all(presets.olmo(**run["config"]), losses, norms)[0]
    assert is_spike[is_finite].tolist() == expected
    assert not is_spike[~is_finite].any()


# What it keeps.


def test_a_norm_that_overflows_is_a_spike_and_never_enters():
    rule = SpikeRule(window=4)
    for steps, expected in ((1, False), (2, True)):
        state = after(rule, [1.0] * steps)
        is_spike, state = rule.judge(state, jnp.float32(1), jnp.float32(jnp.inf), True)
        assert is_spike == expected
        assert jnp.isfinite(state.grad_norms).all()
        assert (state.loss_count, state.norm_count) == (steps + 1, steps + expected)


def test_without_a_loss_the_norm_judges_alone():
    rule, (losses, norms) = SpikeRule(), STREAMS["spiking norm"]
    (found, states), (expected, with_loss) = (
        judge_all(rule, each, norms) for each in (None, np.ones_like(losses))
    )
    assert found.tolist() == expected.tolist()
    untouched = ("losses", "loss_count", "loss_threshold", "loss_deviation")
    blank = {name: getattr(rule.init(), name) for name in untouched}
    last, expected = (jax.tree.map(lambda leaf: leaf[-1], tree) for tree in (states, with_loss))
    assert_same_bits(last, expected._replace(**blank))


def test_counts_and_totals():
    rule, one = SpikeRule(window=4), jnp.float32(1)
    state = after(rule, [1.0, 1.1, 9.0, 99.0])
    assert (state.loss_count, state.total_spikes, state.spike_count) == (4, 2, 2)
    is_spike, same = rule.judge(state, jnp.float32(99), one, False)  # leaves no trace
    assert not is_spike
    assert_same_bits(same, state)
    _, state = rule.judge(state, one, one, True)
    assert (state.loss_count, state.total_spikes, state.spike_count) == (4, 2, 0)
    most = jnp.int32(np.iinfo(np.int32).max)
    state = state._replace(total_spikes=most, loss_count=most)  # from a checkpoint, say
    is_spike, state = rule.judge(state, jnp.float32(1e6), one, True)
    assert is_spike
    assert (state.total_spikes, state.loss_count) == (most, 4)


def test_a_poisoned_window_heals():
    # A window that a port of OLMo's rule had written: without its NaN it judges as before.
    rule = SpikeRule(window=8)
    state = after(rule, [1.0, 1.1, 0.9, 1.0, 1.1, 0.9])
    state = state._replace(losses=state.losses.at[4].set(jnp.nan))
    for loss, expected in ((1.0, False), (9.0, True)):
        assert rule.judge(state, jnp.float32(loss), jnp.float32(1), True)[0] == expected


def test_it_composes_with_transformations():
    rule = SpikeRule(window=8)
    values = jnp.stack([STREAMS[name][0][62:74] for name in ("spikes", "steady")])
    states = [judge_all(rule, v, v)[1] for v in values]
    many = jax.vmap(functools.partial(judge_all, rule))(values, values)[1]
    # To rounding: the order of a sum is the compiler's.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4)
    jax.tree.map(close, many, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    jax.tree.map(close, after(rule, values[0]), jax.tree.map(lambda leaf: leaf[-1], states[0]))
    # No buffer is in a state twice, which could not be donated.
    donating = jax.jit(rule.judge, donate_argnums=0)
    _, state = donating(rule.init(), jnp.float32(1), jnp.float32(1), True)
    assert avals(donating(state, jnp.float32(1), jnp.float32(1), True)[1]) == avals(rule.init())


def test_other_dtypes_are_judged_in_float32():
    rule = SpikeRule(window=4)
    for number in (jnp.bfloat16(9), jnp.float16(9), np.float64(9), 9.0):
        is_spike, state = rule.judge(after(rule, [1.0, 1.25, 0.75]), 1.0, number, True)
        assert is_spike
        assert avals(state) == avals(rule.init())


def test_rules_are_values():
    assert SpikeRule() == SpikeRule(window=np.int64(128), sigmas=np.float32(6))
    assert hash(SpikeRule()) == hash(SpikeRule(sigmas=6))
    assert SpikeRule() != presets.olmo()
    assert presets.olmo() == presets.olmo(rolling_interval_length=128)


# Saved and restored.


@cases("length", [2, 5, 8, 11], fast=[5, 11])
def test_states_are_restored_into_another_window(length):
    values = [1.0, 2.0, 3.0, 2.0, 1.0, 2.5]
    state = after(SpikeRule(window=8), values)
    state = state._replace(loss_count=jnp.int32(3))  # as if earlier steps had no loss
    one = SpikeRule(window=length).init()
    several = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), (state, one))
    many = jaxscale.from_state_dict(several[1], jaxscale.to_state_dict(several[0]))
    restored = jaxscale.from_state_dict(one, jaxscale.to_state_dict(state))
    assert_same_bits(many, jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), restored))
    kept = min(length, 6)
    assert restored.grad_norms.tolist() == [0.0] * (length - kept) + values[-kept:]
    assert (restored.norm_count, restored.loss_count) == (kept, min(length, 3))
    assert restored.total_spikes == state.total_spikes
    assert avals(restored) == avals(one)

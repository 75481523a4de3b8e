"""Policies replayed over recorded and made-up runs: what they skip, and how low their scale is."""

import functools
import itertools
import pathlib

import numpy as np
import pytest
import replay_tables
import simulator
from tables import cases

ADAPTIVE, TORCH = replay_tables.ADAPTIVE, replay_tables.TORCH
RECORDED = simulator.recorded()
README = pathlib.Path(__file__).parent / "traces" / "README.md"


@functools.cache
def recorded(policy, retries=0):
    return simulator.replay(policy, RECORDED, retries)


def totals(policy, retries=0):
    rows = [recorded(policy, retries)[name].summary(trace) for name, trace in RECORDED.items()]
    return {key: sum(row[key] for row in rows) for key in rows[0]}


@cases("retries", [0, 3], fast=[3])
def test_the_simulator_does_what_pytorchs_rule_says(retries):
    for name, trace in RECORDED.items():
        exponent, streak, expected = 16, 0, []
        for ceiling in trace.ceiling.tolist():
            extra = min(max(exponent - ceiling, 0), retries)
            exponent, streak = exponent - extra, 0 if extra else streak
            bad = exponent > ceiling
            expected.append((2.0**exponent, bad, extra))
            streak = 0 if bad else streak + 1
            exponent = exponent - 1 if bad else exponent + (streak == 2000)
            streak %= 2000
        replay = recorded(TORCH, retries)[name]
        seen = replay.scale.tolist(), replay.skipped.tolist(), replay.extra.tolist()
        assert list(zip(*seen, strict=True)) == expected


def test_a_fifth_of_pytorchs_skips_at_a_scale_as_high():
    ours, theirs = totals(ADAPTIVE), totals(TORCH)
    assert theirs["skips"] == 38
    assert ours["skips"] <= theirs["skips"] / 5
    for key in ("late", "mean"):
        assert ours[key] / 5 >= theirs[key] / 5 - 0.5


def test_with_retries_no_step_is_lost_and_few_are_repeated():
    ours = totals(ADAPTIVE, retries=8)
    assert ours["skips"] == 0
    assert ours["extra"] <= sum(len(trace.ceiling) for trace in RECORDED.values()) / 10_000


@pytest.mark.parametrize("name", RECORDED)
def test_it_finds_its_level_within_a_few_dozen_steps_and_without_a_skip(name):
    replay, ceiling = recorded(ADAPTIVE)[name], RECORDED[name].ceiling
    assert not replay.skipped[:100].any()
    assert np.log2(replay.scale[30]) >= np.median(ceiling[:60]) - 4


# The usual largest gradient, that of rare batches, and their share.
SIZES = [(1e-8, 1.0), (1e-6, 1.0), (1e-4, 1.0), (1e-8, 1e-2), (1e-6, 1e-2), (1e-10, 30.0)]
SHARES = [0.001, 0.003, 0.01, 0.03]
# A handful of bursts is over before they are learned. So are twenty batches in 20,000 steps if each
# is of another size: up to nine of eighteen were lost.
WAYS = {"alike": ({}, SHARES), "of many sizes": ({"noise": 1.0}, SHARES[1:])}
WAYS |= {"five at a time": ({"burst": 5}, SHARES[2:])}


@cases("way, seed", itertools.product(WAYS, range(8)), fast=[("alike", 0)])
def test_rare_large_batches_are_learned_and_not_lost(way, seed):
    options, shares = WAYS[way]
    runs = {
        (sizes, share): simulator.rare(*sizes, share, seed=seed, **options)
        for sizes, share in itertools.product(SIZES, shares)
    }
    traces = {run: trace for run, (trace, _) in runs.items()}
    once, again = (simulator.replay(ADAPTIVE, traces, retries) for retries in (0, 20))
    for run, (trace, is_large) in runs.items():
        # A quarter, or a handful where there are fewer than two dozen.
        assert once[run].skipped[is_large].sum() <= max(is_large.sum() / 4, 6), run
        assert once[run].skipped.sum() <= 25, run
        # The scale makes room for them, and not much more.
        room = np.median(trace.ceiling[is_large]) - np.log2(once[run].scale[10_000:]).mean()
        assert room <= 7, run
        assert not again[run].skipped.any(), run
        assert again[run].extra.sum() <= 25, run


@pytest.mark.slow
def test_the_table_of_runs_that_are_made_up():
    assert set(replay_tables.made_up_rows()) <= set(README.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("name", replay_tables.POLICIES)
def test_a_row_of_the_table(name):
    assert replay_tables.recorded_row(name, RECORDED) in README.read_text().splitlines()

"""Policies over recorded and made-up runs, and in live ones: skips, and how low the scale is."""

import itertools

import numpy as np
import pytest
import simulator
from departing import adaptive
from tables import cases

from jaxscale import presets


def test_a_fall_from_2_to_the_16_to_a_ceiling_of_2_to_the_14_loses_two_steps():
    trace = simulator.Trace(np.full(5, 14), np.full(5, 1.0))
    replay = simulator.replay(presets.torch(), {"low": trace})["low"]
    assert replay.skipped.tolist() == [True, True, False, False, False]
    assert replay.scale.tolist() == [65536, 32768, 16384, 16384, 16384]


TORCH = presets.torch()
ADAPTIVE = adaptive()
RECORDED = simulator.recorded()


def totals(policy, retries=0):
    replays = simulator.replay(policy, RECORDED, retries)
    rows = [replays[name].summary(trace) for name, trace in RECORDED.items()]
    return {key: sum(row[key] for row in rows) for key in rows[0]}


@pytest.mark.worlds
def test_a_fifth_of_pytorchs_skips_at_a_scale_as_high():
    ours, theirs = totals(ADAPTIVE), totals(TORCH)
    assert theirs["skips"] == 38
    assert ours["skips"] <= theirs["skips"] / 5
    for key in ("late", "mean"):
        assert ours[key] / 5 >= theirs[key] / 5 - 0.5


@pytest.mark.worlds
def test_with_retries_no_step_is_lost_and_few_are_repeated():
    ours, theirs = totals(ADAPTIVE, retries=8), totals(TORCH, retries=1)
    assert (ours["skips"], theirs["skips"], theirs["extra"]) == (0, 0, 38)
    assert (
        ours["extra"] <= sum(len(trace.ceiling) for trace in RECORDED.values()) / 10_000
    )


def test_it_finds_its_level_within_a_few_dozen_steps_and_without_a_skip():
    for name, replay in simulator.replay(ADAPTIVE, RECORDED).items():
        assert not replay.skipped[:100].any(), name
        assert (
            np.log2(replay.scale[30]) >= np.median(RECORDED[name].ceiling[:60]) - 4
        ), name


# The usual largest gradient, that of rare batches, and their share.
SIZES = [
    (1e-8, 1.0),
    (1e-6, 1.0),
    (1e-4, 1.0),
    (1e-8, 1e-2),
    (1e-6, 1e-2),
    (1e-10, 30.0),
]
SHARES = [0.001, 0.003, 0.01, 0.03]
# A handful of bursts is over before they are learned. So are twenty batches in 20,000 steps if each
# is of another size: up to nine of eighteen were lost.
WAYS = {"alike": ({}, SHARES), "of many sizes": ({"noise": 1.0}, SHARES[1:])}
WAYS |= {"five at a time": ({"burst": 5}, SHARES[2:])}


@pytest.mark.worlds
@cases("way, seed", itertools.product(WAYS, range(2)), fast=[("alike", 0)])
def test_rare_large_batches_are_learned_and_not_lost(way, seed):
    options, shares = WAYS[way]
    traces = {}
    large = {}
    for sizes, share in itertools.product(SIZES, shares):
        run = (sizes, share)
        traces[run], large[run] = simulator.rare(*sizes, share, seed=seed, **options)
    once = simulator.replay(ADAPTIVE, traces)
    again = simulator.replay(ADAPTIVE, traces, retries=20)
    for run, trace in traces.items():
        is_large = large[run]
        # A quarter, or a handful where there are fewer than two dozen.
        assert once[run].skipped[is_large].sum() <= max(is_large.sum() / 4, 6), run
        assert once[run].skipped.sum() <= 25, run
        # The scale makes room for them, and not much more.
        room = (
            np.median(trace.ceiling[is_large])
            - np.log2(once[run].scale[10_000:]).mean()
        )
        assert room <= 7, run
        assert not again[run].skipped.any(), run
        assert again[run].extra.sum() <= 25, run

"""Policies over recorded and made-up runs, and in live ones: skips, and how low the scale is."""

import functools
import itertools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replay_tables
import simulator
import transformer
from replay_tables import ADAPTIVE, TORCH
from tables import cases

import jaxscale
from jaxscale import presets

RECORDED = simulator.recorded()
README = pathlib.Path(__file__).parent / "traces" / "README.md"


def totals(policy, retries=0):
    rows = list(replay_tables.summaries(policy, RECORDED, retries).values())
    return {key: sum(row[key] for row in rows) for key in rows[0]}


def test_a_fifth_of_pytorchs_skips_at_a_scale_as_high():
    ours, theirs = totals(ADAPTIVE), totals(TORCH)
    assert theirs["skips"] == 38
    assert ours["skips"] <= theirs["skips"] / 5
    for key in ("late", "mean"):
        assert ours[key] / 5 >= theirs[key] / 5 - 0.5


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


@cases("way, seed", itertools.product(WAYS, range(8)), fast=[("alike", 0)])
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


@pytest.mark.slow
def test_the_table_of_runs_that_are_made_up():
    assert set(replay_tables.made_up_rows()) <= set(README.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("name", replay_tables.POLICIES)
def test_a_row_of_the_table(name):
    assert replay_tables.recorded_row(name, RECORDED) in README.read_text().splitlines()


# Live training in float16, of a small transformer.

STEPS, BATCH, LENGTH, WORDS, WIDTH = 2000, 8, 16, 24, 64


def batches():
    """Sentences that count up by a step of their own, with some words replaced at random."""
    rng = np.random.default_rng(0)
    first, step = rng.integers(0, WORDS, (2, STEPS, BATCH, 1))
    words = (first + step % 5 * np.arange(LENGTH + 1)) % WORDS
    noise = rng.integers(0, WORDS, words.shape)
    return jnp.asarray(
        np.where(rng.random(words.shape) < 0.05, noise, words).astype(np.int32)
    )


class Trained(NamedTuple):
    """A live run: its last state, and means over its last steps."""

    state: Any
    exponent: float  # of the scale, over the second half
    loss: float  # over the last 100 steps


def train(policy, retries=0):
    """Trains a small transformer in float16."""
    tx = jaxscale.loss_scaled(optax.adam(3e-3), policy)
    train_step = jaxscale.train_step(transformer.loss_fn, tx, retries=retries)

    def step(carry, words):
        params, state = carry
        scale = state.scaling.loss_scale
        params, state, loss = train_step(params, state, words)
        return (params, state), (scale, loss)

    params = transformer.init_params(np.random.default_rng(1), WIDTH, 1, LENGTH)
    params["tokens"] = params["tokens"][:WORDS]
    scan = jax.jit(functools.partial(jax.lax.scan, step))
    (_, state), (scales, losses) = scan((params, tx.init(params)), batches())
    last_loss = float(losses[-100:].mean())
    assert last_loss < losses[:100].mean() / 2
    exponents = jnp.log2(scales)[STEPS // 2 :]
    return Trained(state, float(exponents.mean()), last_loss)


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_live_training_skips_little_and_keeps_its_scale():
    ours = train(ADAPTIVE)
    theirs = train(TORCH)
    # PyTorch's rule probes once in 2,000 steps; with an interval of 200 it probes as a long run.
    probing = train(presets.torch(growth_interval=200))
    for run in (ours, theirs, probing):
        print(int(run.state.total_notfinite), run.exponent, run.loss)
    assert ours.state.total_notfinite <= probing.state.total_notfinite / 4
    assert ours.exponent >= theirs.exponent - 2
    assert abs(ours.loss - theirs.loss) < 0.05


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize("scale", [2.0**8, 2.0**24])
def test_with_retries_no_batch_of_live_training_is_lost(scale):
    # From 2**8, and from where every batch overflows.
    state = train(jaxscale.AdaptiveLossScale(init_scale=scale), retries=10).state
    assert (state.total_steps, state.total_notfinite) == (STEPS, 0)
    assert state.total_retries <= 2 + 2 * (scale > 2.0**8)

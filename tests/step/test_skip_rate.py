"""Words of `check` on runs that lose steps: none on healthy ones, and the cause of others.

A run is simulated: the real update, of gradients that are inf where the scale is above what a step
allows. Its states after all steps are a population to `check`, which judges each in its own right:
if that is silent, no call was told anything, however often it came.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probe import after, simulate, texts_of_check
from tables import cases, stack

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_a_tenth_of_a_thousand_steps_is_more_than_a_healthy_run_loses():
    state = jaxscale.skip_nonfinite(optax.sgd(0.1)).init(jnp.zeros(2))
    state = state._replace(total_steps=jnp.array(1000), total_notfinite=jnp.array(100))
    jaxscale.check(state._replace(skip_rate=jnp.array(0.04)))
    with pytest.warns(UserWarning, match=r"one step in 20 or more .* gradients were"):
        jaxscale.check(state._replace(skip_rate=jnp.array(0.1)))


STEPS = 10_000
FINE, NEVER = 2.0**18, 0.0  # up to which scale the gradients of a step are finite
SGD = optax.sgd(0.0)


class Run(NamedTuple):
    """An optimizer and what each step brings it; one number serves all steps."""

    tx: Any
    highest: Any  # f32[n], up to which scale the gradients of each step are finite
    loss: Any = 0.0  # f32[n], the loss of each step
    size: Any = 0.25  # f32[n], the gradient of each step


def states_of(run):
    """The states after each step."""
    return simulate(*run[:2], run.size, run.loss)


def some(share, seed=0, steps=STEPS):
    """Steps drawn at random."""
    return np.random.default_rng(seed).random(steps) < share


def every(share, steps=STEPS):
    """Steps that are spread evenly."""
    return np.diff(np.floor(np.arange(steps + 1) * share + 1e-9)) > 0


def overflowing(bad, at=FINE):
    """Steps whose gradients are finite at no scale, and otherwise up to one."""
    return np.where(bad, NEVER, at)


def noisy(binades, seed=0):
    return 2.0 ** np.floor(
        18 + binades * np.random.default_rng(seed).standard_normal(STEPS)
    )


def weighed_rate(states):
    """The rate by which `check` judges: that of few steps counts by how many they are."""
    return states.skip_rate * -np.expm1(states.total_steps / -1000)


def rows(length, at, steps=STEPS):
    """Steps in a row, from some on."""
    place = np.arange(steps)
    return np.any([(place >= start) & (place < start + length) for start in at], axis=0)


def dynamic(**options):
    return jaxscale.loss_scaled(SGD, jaxscale.DynamicLossScale(**options))


def nan_where(bad):
    """The loss of each step: NaN in the bad ones."""
    return np.where(bad, np.nan, 0.0)


TX = dynamic()
SAFE = jaxscale.skip_nonfinite(SGD)
HIGH = dynamic(init_scale=2.0**40, max_scale=2.0**40)
HASTY = dynamic(growth_interval=3, max_scale=2.0**40)
PATIENT = dynamic(growth_interval=3, max_scale=2.0**40, hysteresis=2)
WIDE = dynamic(
    growth_interval=3, max_scale=2.0**40, growth_factor=4.0, backoff_factor=0.25
)
WINDOW = jaxscale.multi_steps(TX, 4)

HEALTHY = {
    "3 % of gradients": Run(SAFE, overflowing(some(0.03))),
    "3 % of losses": Run(SAFE, FINE, nan_where(some(0.03, 1))),
    "down from 2**40": Run(HIGH, FINE, nan_where(every(0.03))),
    "50 in a row": Run(SAFE, overflowing(rows(50, [300, 6000]))),
    "grows every 3 steps, noise": Run(HASTY, noisy(1.5)),
    "grows every 3 steps, and falls in two": Run(PATIENT, noisy(0.5)),
    "grows by 4": Run(WIDE, noisy(1.0)),
    "3 % of micro-batches": Run(WINDOW, FINE, nan_where(some(0.03))),
}
# Far from 0.05, so that it is no luck; these alone come close.
CLOSE = {"50 in a row", "down from 2**40"}


@cases(
    "name",
    HEALTHY,
    fast=["3 % of gradients", "grows every 3 steps, noise", "50 in a row"],
)
def test_a_healthy_run_hears_nothing_however_often_it_asks(name):
    run = HEALTHY[name]
    states = states_of(run)
    assert texts_of_check(states, run.tx) == []
    # What a policy that grows every few steps loses is known to `check` alone.
    if "grows" not in name:
        assert weighed_rate(states).max() < (0.049 if name in CLOSE else 0.045)


NORMED = jaxscale.loss_scaled(SGD, max_norm=1.0)
# Gradients that grow, and something in the model that leaves the range at lower and lower scales.
LOUDER = 2.0 ** (np.arange(2000) // 200)
GROWING = {"highest": 2.0**15 / LOUDER, "size": LOUDER / 4}
SINKING = {"highest": 2.0**15 / LOUDER}
DECAYS = {
    "gradients grow": (NORMED, GROWING, ["the gradients have grown"], ["doctor"]),
    "a line of the model": (
        NORMED,
        SINKING,
        ["in the model", "doctor"],
        ["have grown"],
    ),
    "nobody knows": (TX, GROWING, ["`grad_norm`", "in the model", "doctor"], []),
}


@cases("name", DECAYS, fast=["gradients grow"])
def test_a_decay_is_told_with_what_has_grown(name):
    tx, steps, says, says_not = DECAYS[name]
    states = states_of(Run(tx, **steps))
    texts = texts_of_check(after(states, 2000), tx)
    (text,) = [text for text in texts if "again and" in text]
    assert_says(text, says, says_not)


LOSS = "Mostly the loss itself was not finite"
GRADS = "Mostly the gradients were not finite"
UNSCALED = [
    "Check the batch for NaN",
    "0/0",
    "square root",
    "-inf",
]  # where bad numbers come from
NAN = nan_where(some(0.1, 3))


# A run that loses too many steps, within how many it is told, and what is said and not said.
BROKEN = {
    "6 % of gradients": (
        Run(TX, overflowing(every(0.06))),
        2500,
        [GRADS, "floor or fixed"],
        [LOSS, *UNSCALED[:1]],
    ),
    "6 % of losses": (
        Run(TX, FINE, nan_where(every(0.06))),
        2500,
        [LOSS, "no loss scale can help"],
        [GRADS],
    ),
    "10 % of gradients": (Run(TX, overflowing(every(0.1))), 1000, [GRADS], [LOSS]),
    "10 % in bfloat16": (
        Run(SAFE, overflowing(every(0.1))),
        1000,
        [GRADS, *UNSCALED, "On a CPU"],
        [LOSS, "scale"],
    ),
    "10 % of losses in bfloat16": (
        Run(SAFE, FINE, NAN),
        1000,
        [LOSS, *UNSCALED],
        [GRADS, "scale", "On a CPU"],
    ),
    # what its own growth costs is told apart only over more steps
    "10 % of losses, grows every 3 steps": (
        Run(HASTY, FINE, NAN),
        5000,
        [LOSS],
        [GRADS],
    ),
    "10 % of micro-batches": (
        Run(WINDOW, overflowing(every(0.1))),
        4000,
        [GRADS],
        [LOSS],
    ),
}


@cases("name", BROKEN, fast=["6 % of gradients", "10 % in bfloat16"])
def test_a_broken_run_is_told_in_time_however_often_it_asks(name):
    run, within, says, says_not = BROKEN[name]
    states = states_of(run)
    # From then on at each step, so whichever it asks at.
    assert (weighed_rate(states)[within - 1 :] >= 0.05).all()
    for period in (1, 7, 100, 2500, STEPS):
        first = period * math.ceil(within / period)
        texts = texts_of_check(after(states, first), run.tx)
        (text,) = [text for text in texts if "skipped lately" in text]
        # `skip_rate` is the name of a counter.
        assert_says(text, says, says_not, ("`skip_rate`", "jaxscale"))


def assert_says(text, says, says_not, names=()):
    """Checks what words a text has, and not, but for some names."""
    for words in says:
        assert words in text
    for name in names:
        text = text.replace(name, "")
    for words in says_not:
        assert words not in text


DIVERGED = {"from the start": (TX, 2), "late": (TX, 5000)}


@cases("name", DIVERGED)
def test_a_row_of_bad_losses_is_told_long_before_it_is_an_error(name):
    """As where a run has diverged: from its tenth step on, and in none before."""
    tx, start = DIVERGED[name]
    bad = np.arange(STEPS) >= start
    states = states_of(Run(tx, FINE, nan_where(bad)))
    assert texts_of_check(after(states, start + 9), tx) == []
    (text,) = texts_of_check(after(states, start + 10), tx)
    assert "not finite in 10 steps in a row" in text
    assert "loss scale" not in text


# A run that was healthy before and one that was not, in which the present row is another.
LOSS_ROW, GRADS_ROW = (
    "The loss itself is not finite",
    "it is finite, and the backward pass",
)
MIXED = {
    "bad losses long ago, overflows now": (True, GRADS_ROW, LOSS_ROW),
    "overflows long ago, bad losses now": (False, LOSS_ROW, GRADS_ROW),
}


@cases("name", MIXED)
def test_the_cause_is_that_of_the_present_row(name):
    begins_with_loss, says, says_not = MIXED[name]
    bad_loss = rows(300, [0], 1000)
    bad_grads = rows(60, [940], 1000)
    expected_counts = [300, 0, 0]
    if not begins_with_loss:
        bad_loss = rows(60, [940], 1000)
        bad_grads = rows(300, [0], 1000)
        expected_counts = [0, 0, 60]
    states = states_of(Run(SAFE, overflowing(bad_grads), nan_where(bad_loss)))
    (text,) = texts_of_check(after(states, 1000))
    assert_says(text, [says], [says_not])
    counts = states.row_notfinite_loss[[299, 300, 999]]
    assert counts.tolist() == expected_counts


UNSCALED_FROM = 18_000  # by then the policy, which grows every 2000 steps, is at 2**24


@functools.cache
def states_without_overflow(tx):
    return states_of(Run(tx, np.full(25_000, np.inf)))


# The optimizer, the number of steps that never overflow, and whether it is told after them.
GROWN = {
    "to 2**24 in as many steps": (TX, UNSCALED_FROM, True),
    "one step less": (TX, UNSCALED_FROM - 1, False),
    "one step more": (TX, UNSCALED_FROM + 1, True),
    "at 2**24 after few steps": (dynamic(init_scale=2.0**24), 9_999, False),
    "fixed at 2**24": (jaxscale.loss_scaled(SGD, 2.0**24), 25_000, False),
}


@cases("name", GROWN)
def test_that_nothing_is_scaled_is_told_of_a_scale_that_grew_far(name):
    tx, steps, is_warned_of = GROWN[name]
    states = states_without_overflow(tx)
    assert len(texts_of_check(after(states, steps))) == is_warned_of
    if not is_warned_of:  # nor in any step before
        assert texts_of_check(jax.tree.map(lambda leaf: leaf[:steps], states)) == []


def test_each_member_of_a_population_is_judged_in_its_own_right():
    fine = states_of(Run(TX, np.full(100, np.inf)))
    stuck = states_of(Run(TX, overflowing(rows(60, [40], 100))))
    skipping = states_of(Run(TX, overflowing(rows(30, [70], 100))))
    lossy = states_of(Run(TX, overflowing(every(0.6, 100))))

    def population(*members):
        """The members after 100 steps, two by two."""
        return jax.tree.map(
            lambda leaf: leaf[:, -1].reshape(2, 2, *leaf.shape[2:]), stack(*members)
        )

    assert texts_of_check(population(fine, fine, skipping, fine)) == []
    start = "Of a population of shape (2, 2), the member at"
    (text,) = texts_of_check(population(fine, skipping, stuck, fine))
    assert text.startswith(f"{start} [1, 0]: 60 steps in a")
    (text,) = texts_of_check(population(fine, skipping, fine, fine), max_consecutive=29)
    assert text.startswith(f"{start} [0, 1]: 30 steps in a")
    (text,) = texts_of_check(population(fine, skipping, lossy, fine))
    assert "skipped lately" in text


# Fields of the state of a rule for spikes, how many steps were not finite, and the warning.
SPIKED = {
    "in a row": ({"spike_count": 20}, 0, "again and again"),
    "many": ({"total_spikes": 51}, 0, "again and again"),
    "mostly spikes": ({"total_spikes": 40}, 10, "spikes are skipped again and again"),
    "mostly overflows": ({"total_spikes": 10}, 40, "gradients were not finite"),
    "as many of both": ({"total_spikes": 40}, 40, "gradients were not finite"),
}


@cases("name", SPIKED)
def test_spikes_without_end_are_told_if_most_of_the_skipped_steps_were_such(name):
    fields, total_notfinite, warning = SPIKED[name]
    momentum = optax.sgd(0.1, momentum=0.9)
    tx = jaxscale.skip_nonfinite(momentum, spikes=jaxscale.SpikeRule())
    state = tx.init(jnp.zeros(2))
    # Its optimizer has had gradients, so that only counters may be told of.
    state = state._replace(inner_state=jax.tree.map(jnp.ones_like, state.inner_state))
    assert texts_of_check(state) == []
    numbers = {"total_steps": 1000, "total_notfinite": total_notfinite}
    state = state._replace(
        spikes=state.spikes._replace(**jax.tree.map(jnp.array, fields)),
        skip_rate=jnp.array(0.08 if total_notfinite else 0.0),
        **jax.tree.map(jnp.array, numbers),
    )
    (text,) = texts_of_check(state)
    assert warning in text

"""Whether the level of the loss stands above that of its past.

A run that is ruined, such as by a learning rate that was too high for some steps, keeps a high loss
for good. No rule that skips spikes says so, as each of them accepts a new level. So the level of
the loss is followed beside the spikes. That skips no step, as new data may also lift a loss.

All numbers here are medians, which a few spikes do not move. The level is the median of the last 8
losses. Every 8 steps it enters the past, unless it stands above it already. So the past holds
medians of blocks that share no loss, and the likeness of neighboring losses does not make their
spread small.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._state.optimizer import LossScaledState, SpikeState
from .._trees.numbers import float_bits, float_of_bits, increment, increment_if

# The level is the median of this many losses.
BLOCK = 8
# The past is this many levels: it is known after 512 steps.
PAST = 64

# This many of the newest levels do not count yet, or a rise over 50 steps would hide itself.
_TOO_NEW = 4

# A level stands above the past if it exceeds all of these:
# - the median of the past, by this many standard deviations. A normal distribution has 1.349 of
#   them between its quartiles;
_SIGMAS = 10.0
_QUARTILE_DISTANCE = 1.349
# - the median, by this many times the distance from there to the fourth highest level. That one is
#   far away where losses have a heavy tail. With 5 instead of 6, the level of twice as many healthy
#   runs of that kind would stand above the past;
_TAILS = 6.0
# - the highest level of the past. Losses with few values, such as rewards, may have no other
#   distance than that.

# After this many steps above its past, a level starts a new past. That is four times as long as it
# takes to learn one: a loop that looks every thousand steps sees the raised level, and new data are
# not held against a run for ever.
_FORGET_AFTER = 2048

# A level may stand above its past by chance for some steps. After this many in a row it is raised.
_RAISED_AFTER = 16
# The level rises some steps after the loss: as a median of 8 after 4 or 5, and later if the loss
# rises slowly. It takes at most this many.
_RISE_TAKES = 64


class RaisedLevel(NamedTuple):
    """What a state says of the level of its loss. Each field has the shape of a population.

    Attributes:
      is_raised: `bool[]`, whether the level has stood above its past for 16 steps or more.
      num_steps: `i32[]`, for how many steps.
      good_until: `i32[]`, up to which of `total_steps` the loss was at its old level, with room
        for a slow rise: a checkpoint from there is good. Without a raised level all steps are.
    """

    is_raised: jax.Array
    num_steps: jax.Array
    good_until: jax.Array


def find_raised_level(state: LossScaledState) -> RaisedLevel | None:
    """Returns what a state says of the level of its loss, `None` without a `SpikeRule`.

    Works on the host and under `jit`, and on the state of a population.
    """
    if state.spikes is None:
        return None
    num_steps = jnp.asarray(state.spikes.level_count)
    total_steps = jnp.asarray(state.total_steps)
    is_raised = num_steps >= _RAISED_AFTER
    good_until = jnp.maximum(total_steps - num_steps - _RISE_TAKES, 0)
    return RaisedLevel(
        is_raised=is_raised,
        num_steps=num_steps,
        good_until=jnp.where(is_raised, good_until, total_steps),
    )


def follow_level(
    state: SpikeState, loss: jax.Array, *, min_relative_deviation: float
) -> SpikeState:
    """Enters a finite loss, of float32, into the level of the loss and its past.

    Levels deviate by at least `min_relative_deviation` of their median.
    """
    recent_losses = jnp.concatenate([state.recent_losses[1:], loss[None]])
    level = _find_middle(_sort(recent_losses))
    stands_above = level > state.level_threshold
    level_count = jnp.where(stands_above, increment(state.level_count), 0)

    num_losses = state.level_steps + 1
    ends_block = num_losses >= BLOCK
    # A restored window may hold an inf or a NaN.
    enters = ends_block & ~stands_above & jnp.isfinite(level)
    longer_past = jnp.concatenate([state.past_levels[1:], level[None]])
    past_levels = jnp.where(enters, longer_past, state.past_levels)
    longer_count = jnp.minimum(state.past_count, PAST - 1) + 1
    past_count = jnp.where(enters, longer_count, state.past_count)

    forgets = level_count >= _FORGET_AFTER
    past_count = jnp.where(forgets, 0, past_count)
    threshold = _find_threshold(past_levels, min_relative_deviation)
    is_known = (past_count >= PAST) & jnp.isfinite(threshold)
    return state._replace(
        level_count=jnp.where(forgets, 0, level_count),
        level_threshold=jnp.where(is_known, threshold, jnp.inf),
        recent_losses=recent_losses,
        past_levels=past_levels,
        level_steps=jnp.where(ends_block, 0, num_losses),
        past_count=past_count,
    )


def count_blind_step(state: SpikeState) -> SpikeState:
    """Counts a step that says nothing of the loss: a raised level stays where it is."""
    is_raised = state.level_count > 0
    return state._replace(level_count=increment_if(is_raised, state.level_count))


def _find_threshold(levels: jax.Array, min_relative_deviation: float) -> jax.Array:
    """Returns what a level must exceed to stand above the levels of the past."""
    ordered = _sort(levels[:-_TOO_NEW])
    middle = _find_middle(ordered)
    num_levels = ordered.shape[0]
    quarter = num_levels // 4
    third_quartile = ordered[3 * quarter - 1]
    first_quartile = ordered[quarter]
    deviation = (third_quartile - first_quartile) / _QUARTILE_DISTANCE
    # Equal losses deviate by rounding, at least.
    deviation = jnp.maximum(deviation, min_relative_deviation * jnp.abs(middle))
    of_spread = _SIGMAS * deviation
    of_tail = _TAILS * (ordered[-4] - middle)
    threshold = middle + jnp.maximum(of_spread, of_tail)
    return jnp.maximum(threshold, ordered[-1])


def _find_middle(ordered: jax.Array) -> jax.Array:
    """Returns the median of an even number of sorted values."""
    half = ordered.shape[0] // 2
    # Halved before they are added, as their sum may overflow.
    return ordered[half - 1] / 2 + ordered[half] / 2


def _sort(numbers: jax.Array) -> jax.Array:
    """Sorts float32 numbers, as integers: XLA does that several times as fast on a CPU."""
    integers = jnp.sort(_flip_negative(float_bits(numbers)))
    return float_of_bits(_flip_negative(integers))


def _flip_negative(bits: jax.Array) -> jax.Array:
    """Maps the bits of floats to integers of the same order, and these back to the bits."""
    # The sign stays. The other bits of a negative float say how far below zero it is.
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

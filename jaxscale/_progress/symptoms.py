"""Symptoms that `check` warns of: questions of a state on the host, and their texts.

A state may be that of a population: its leaves have an axis of members then, and each question is
answered for each member.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from .._policies.base import CheckedLossScale, LossScale
from .._policies.fixed import NoOpLossScale
from .._state.scale import AdaptiveState, LossScaleState, UnitLossScaleState
from . import texts
from .limits import (
    FULL_RANGE,
    HIGH_SCALE,
    LOW_SCALE,
    MANY_BAD_LOSSES,
    MANY_FALLS,
    MANY_STEPS,
    MEMORY,
    OFTEN,
    UNUSED_ROOM,
)


class _Symptom(NamedTuple):
    """A text, and in which members of a population it holds."""

    text: str
    holds: Any


def list_warnings(members: Any, policy: LossScale | None) -> list[str]:
    """Returns the texts of what holds in any member of a population."""
    skips_often = loses_often(members, policy)
    if members.spikes is not None:
        skips_often &= ~_are_mostly_spikes(members)
    is_loss = blames_loss(members, policy)
    rate_of_loss = texts.RATE_LOSS
    rate_of_grads = texts.RATE_GRADS
    if is_unscaled(members, policy):
        rate_of_loss = texts.RATE_UNSCALED_LOSS
        rate_of_grads = texts.RATE_UNSCALED_GRADS

    symptoms = [
        _Symptom(rate_of_loss, skips_often & is_loss),
        _Symptom(rate_of_grads, skips_often & ~is_loss),
        _Symptom(texts.BAD_LOSSES, members.row_notfinite_loss >= MANY_BAD_LOSSES),
        _Symptom(texts.EXHAUSTED, members.total_exhausted >= MANY_FALLS),
        *_find_decays(members),
        _Symptom(texts.IDLE, _is_idle(members)),
    ]
    if members.spikes is not None:
        symptoms.append(_find_spikes(members, policy))
    return [symptom.text for symptom in symptoms if np.any(symptom.holds)]


def loses_often(members: Any, policy: LossScale | None) -> Any:
    """Returns whether so many steps were lost lately that it is no accident.

    In the first thousand steps `skip_rate` is a mean of few: it counts by how many they are.
    """
    certainty = -np.expm1(members.total_steps / -MEMORY)
    lost = members.skip_rate - _lost_to_growth(policy)
    return lost * certainty >= OFTEN


def _lost_to_growth(policy: LossScale | None) -> float:
    """Returns the share of steps that a policy loses if nothing is wrong.

    A growth that goes too far costs as many overflows as it takes to undo it.
    """
    interval = getattr(policy, "growth_interval", None)
    # a name may mean something else in others
    if not isinstance(policy, CheckedLossScale) or interval is None:
        return 0.0
    growth_factor = getattr(policy, "growth_factor", 2.0)
    backoff_factor = getattr(policy, "backoff_factor", 0.5)
    hysteresis = getattr(policy, "hysteresis", 1)
    lost = hysteresis * math.log2(growth_factor) / -math.log2(backoff_factor)
    return lost / (interval + lost)


def _find_decays(members: Any) -> list[_Symptom]:
    """Finds members whose scale decays, and says what has grown as far as that is known."""
    decays = _decays(members)
    sizes = _sizes_of_grads(members)
    is_known = np.isfinite(sizes)
    fills_range = is_known & (sizes * members.scaling.loss_scale >= FULL_RANGE)
    return [
        _Symptom(texts.DECAY_OF_GRADS, decays & fills_range),
        _Symptom(texts.DECAY_IN_MODEL, decays & is_known & ~fills_range),
        _Symptom(texts.DECAY, decays & ~is_known),
    ]


def _sizes_of_grads(members: Any) -> Any:
    """Returns about how large the gradients are, inf or NaN where that is not known."""
    if isinstance(members.scaling, AdaptiveState):
        return np.exp2(members.scaling.peak)
    if members.grad_norm is not None:
        return members.grad_norm
    return np.full_like(members.skip_rate, np.nan)


def _decays(members: Any) -> Any:
    """Returns whether the scale fell again and again, and is low."""
    scaling = members.scaling
    falls = members.backoff_count >= MANY_FALLS
    if isinstance(scaling, AdaptiveState):
        is_guess = scaling.held_steps == scaling.finite_steps
        is_small = scaling.loss_scale * np.exp2(scaling.peak) < 1
        has_unused_room = scaling.crest - scaling.peak >= UNUSED_ROOM
        falls |= is_guess & is_small & has_unused_room
    return falls & (scaling.loss_scale < LOW_SCALE)


def _is_idle(members: Any) -> Any:
    """Returns whether the scale has grown far, and nothing has ever overflowed."""
    scaling = members.scaling
    if not isinstance(scaling, LossScaleState):
        return False  # others may start there, as they see gradients
    skipped_overflows = members.total_notfinite - members.total_notfinite_loss
    overflows = skipped_overflows + members.total_retries
    # One that is fixed tracks nothing. One that grows has 0 finite steps just after it grew, but as
    # nothing overflowed, all of its hysteresis is left.
    moves = (scaling.growth_tracker > 0) | (scaling.hysteresis_tracker > 0)
    is_high = scaling.loss_scale >= HIGH_SCALE
    is_late = members.total_steps >= MANY_STEPS
    return moves & is_high & (overflows == 0) & is_late


def _are_mostly_spikes(members: Any) -> Any:
    """Returns whether more steps were skipped as spikes than as non-finite."""
    return members.spikes.total_spikes > members.total_notfinite


def _find_spikes(members: Any, policy: LossScale | None) -> _Symptom:
    """Finds members that skip spikes again and again, and says whether norms overflowed."""
    spikes = members.spikes
    steps = members.total_steps
    skips_often = (spikes.total_spikes > steps // 20) & (steps >= 1000)
    skips_often |= spikes.spike_count >= 20
    skips_often |= loses_often(members, policy) & _are_mostly_spikes(members)
    text = texts.SPIKES
    if np.any(skips_often & (spikes.total_norm_overflows > 0)):
        text += texts.NORMS
    return _Symptom(text, skips_often)


def blames_loss(members: Any, policy: LossScale | None = None) -> Any:
    """Returns whether most steps that were skipped had a bad loss.

    Those of the present row decide, as what was long ago may have had another cause. Between two
    rows all do. There the overflows of a policy that grows every few steps are many, so it is also
    the loss if that alone explains half of the recent rate.
    """
    blames_in_row = 2 * members.row_notfinite_loss >= members.notfinite_count
    bad_losses = members.total_notfinite_loss
    share = bad_losses / np.maximum(members.total_steps, 1)
    blames_in_all = 2 * bad_losses >= members.total_notfinite
    lost = members.skip_rate - _lost_to_growth(policy)
    blames_in_all |= 2 * share >= np.maximum(lost, OFTEN)
    return np.where(members.notfinite_count > 0, blames_in_row, blames_in_all)


def is_unscaled(state: Any, policy: LossScale | None) -> bool:
    """Returns whether the state is that of `skip_nonfinite`, without a loss scale."""
    if isinstance(policy, NoOpLossScale):
        return True
    return isinstance(state.scaling, UnitLossScaleState)

"""Symptoms: what the numbers of a run say is wrong with it, and the texts of that."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from .._policies.base import LossScale
from .._policies.dynamic import DynamicLossScale
from . import texts
from .limits import (
    FULL_RANGE,
    HIGH_SCALE,
    LOW_SCALE,
    MANY_BAD_LOSSES,
    MANY_FALLS,
    MANY_STEPS,
    MANY_ZEROS,
    MEMORY,
    OFTEN,
)
from .optimizers import are_finite, is_zero, list_moments


def find_symptoms(run: SimpleNamespace) -> dict[str, Any]:
    """Returns all texts, each with whether it holds in the members of a population."""
    lost_lately = run.skip_rate - _lost_to_growth(run.policy)
    # In the first thousand steps it is a mean of few: it counts by how many they are.
    is_often = lost_lately * -np.expm1(run.total_steps / -MEMORY) >= OFTEN
    is_mostly_spikes = run.total_spikes > run.total_notfinite
    is_loss = _is_mostly_loss(run, lost_lately)

    decays = (run.backoff_count >= MANY_FALLS) & (run.loss_scale < LOW_SCALE)
    is_known = np.isfinite(run.grad_norm)
    fills_range = run.grad_norm * run.loss_scale >= FULL_RANGE

    spikes = (run.total_spikes > run.total_steps // 20) & (run.total_steps >= 1000)
    spikes |= (run.spike_count >= 20) | (is_often & is_mostly_spikes)
    had_inf_norms = run.total_norm_overflows > 0

    is_late = run.optimizer_steps >= MANY_ZEROS
    # In a healthy run the first one that is read is not 0.
    moments = list_moments(run.inner_state, len(run.axes))
    has_zeros = len(moments) > 0 and is_late.all() and all(map(is_zero, moments))
    # The window of a `SpikeRule` takes in each norm that is finite and not 0.
    had_norms = (run.norm_count > 0) | had_inf_norms
    return {
        texts.ZERO_MOMENTS: has_zeros,
        texts.BAD_MOMENTS: not are_finite(moments),
        texts.ZERO_NORMS: is_late & ~had_norms & (not moments),
        run.words.rate_of_loss: is_often & ~is_mostly_spikes & is_loss,
        run.words.rate_of_gradients: is_often & ~is_mostly_spikes & ~is_loss,
        texts.BAD_LOSSES: run.row_notfinite_loss >= MANY_BAD_LOSSES,
        texts.EXHAUSTED: run.total_exhausted >= MANY_FALLS,
        texts.DECAY_OF_GRADS: decays & is_known & fills_range,
        texts.DECAY_IN_MODEL: decays & is_known & ~fills_range,
        texts.DECAY: decays & ~is_known,
        texts.IDLE: _is_idle(run),
        texts.SPIKES: spikes & ~had_inf_norms,
        texts.SPIKES_OF_NORMS: spikes & had_inf_norms,
    }


def _lost_to_growth(policy: LossScale | None) -> float:
    """Returns the share of steps that a policy loses if nothing is wrong.

    A growth that goes too far costs as many overflows as it takes to undo it.
    """
    if not isinstance(policy, DynamicLossScale):
        return 0.0
    growth = math.log2(policy.growth_factor)
    lost = policy.hysteresis * growth / -math.log2(policy.backoff_factor)
    return lost / (policy.growth_interval + lost)


def _is_mostly_loss(run: SimpleNamespace, lost_lately: Any) -> Any:
    """Returns whether most steps that were skipped had a bad loss.

    Those of the present row decide, as what was long ago may have had another cause. Between two
    rows all do. There the overflows of a policy that grows every few steps are many, so it is also
    the loss if that alone explains half of the recent rate.
    """
    share = run.total_notfinite_loss / np.maximum(run.total_steps, 1)
    in_all = 2 * run.total_notfinite_loss >= run.total_notfinite
    in_all |= 2 * share >= np.maximum(lost_lately, OFTEN)
    return np.where(run.notfinite_count > 0, is_row_of_losses(run), in_all)


def is_row_of_losses(run: SimpleNamespace) -> Any:
    """Returns whether most steps of the present row had a bad loss."""
    return 2 * run.row_notfinite_loss >= run.notfinite_count


def _is_idle(run: SimpleNamespace) -> Any:
    """Returns whether the scale has grown far, and nothing has ever overflowed."""
    overflows = run.total_notfinite - run.total_notfinite_loss + run.total_retries
    # One that is fixed tracks nothing. One that grows has 0 finite steps just after it grew, but as
    # nothing overflowed, all of its hysteresis is left.
    moves = (run.growth_tracker > 0) | (run.hysteresis_tracker > 0)
    is_high = run.loss_scale >= HIGH_SCALE
    return moves & is_high & (overflows == 0) & (run.total_steps >= MANY_STEPS)

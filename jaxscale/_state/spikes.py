"""The state of a spike rule, the losses and gradient norms of the last steps, and its resizing."""

from typing import NamedTuple

import jax
import numpy as np


class SpikeState(NamedTuple):
    """The state that a `jaxscale.SpikeRule` carries from one step to the next.

    Attributes:
      losses: `f32[window]`, the losses of the last steps, the newest at the end. Places that are
        not filled yet are at the front. A spike is in here as what the rule made of it.
      grad_norms: `f32[window]`, the same for the global norms of the gradients.
      loss_count: `i32[]`, how many entries `losses` has, up to `window`.
      norm_count: `i32[]`, how many entries `grad_norms` has, up to `window`.
      total_spikes: `i32[]`, steps skipped as spikes since `init`.
      spike_count: `i32[]`, spikes in a row, up to now. Steps that were not finite do not end the
        row, as they say nothing of the level.
      loss_threshold: `f32[]`, what the loss of the last finite step had to exceed to be a spike;
        inf if it was not judged.
      norm_threshold: `f32[]`, the same for the norm.
      loss_deviation: `f32[]`, by how many standard deviations the loss of the last finite step
        stood above the mean; 0 if it was not judged.
      norm_deviation: `f32[]`, the same for the norm.

    Counters stay at their largest value instead of wrapping around.

    Example:
      >>> import jaxscale
      >>> jaxscale.SpikeRule(window=4).init().losses
      Array([0., 0., 0., 0.], dtype=float32)
    """

    losses: jax.Array  # f32[window]
    grad_norms: jax.Array  # f32[window]
    loss_count: jax.Array  # i32[]
    norm_count: jax.Array  # i32[]
    total_spikes: jax.Array  # i32[]
    spike_count: jax.Array  # i32[]
    loss_threshold: jax.Array  # f32[]
    norm_threshold: jax.Array  # f32[]
    loss_deviation: jax.Array  # f32[]
    norm_deviation: jax.Array  # f32[]


# The windows of a state, and the field that counts the entries of each.
WINDOWS = {"losses": "loss_count", "grad_norms": "norm_count"}


def resize(window: np.ndarray, length: int) -> np.ndarray:
    """Returns a window of another length, with its newest entries at the end.

    Args:
      window: entries along the last axis, the newest at the end.
      length: how many entries the result has.

    Returns:
      The newest entries. If there are fewer than `length`, zeros stand in the places in front,
      which the count of entries leaves out.
    """
    kept = window[..., max(window.shape[-1] - length, 0) :]
    front = [(0, 0)] * (window.ndim - 1) + [(length - kept.shape[-1], 0)]
    return np.pad(kept, front)

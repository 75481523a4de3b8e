"""The state of an optimizer under a loss scale, and what is in it: windows, and spikes."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from .nodes import states_in
from .scale import LossScaleState


class LossScaledState(NamedTuple):
    """The state that `loss_scaled` carries from one step to the next.

    Attributes:
      scaling: the state of the loss scale.
      inner_state: the state of the wrapped transformation; inside a `MultiStepsState`
        if gradients are accumulated by `multi_steps`.
      step_applied: `bool[]`, whether the last step was applied; with accumulation, whether
        the last micro-batch counted. `False` if the gradients or the loss were not finite, or
        stood out as a spike, or if `check_updates` found that the new values were not finite.
      notfinite_count: `i32[]`, steps in a row, up to now, that were not finite; a spike ends it.
      total_notfinite: `i32[]`, steps skipped since `init`, without spikes.
      total_notfinite_loss: `i32[]`, those of them whose loss itself was not finite.
      total_steps: `i32[]`, steps since `init`, skipped or not.
      total_retries: `i32[]`, backward passes that `jaxscale.train_step` repeated inside of a
        step, at a lower scale.
      total_exhausted: `i32[]`, steps skipped although their backward pass was repeated: their
        gradients were not finite in the last pass either. The scale was not to blame, and moved
        as after one overflow. Within the first 25 steps a row of them counts as one, because the
        scale may come down from a high start.
      backoff_count: `i32[]`, how often an overflow lowered the scale since it last grew. Several
        falls in a row of skipped steps count as one, and those of the first 25 steps do not
        count: a scale that comes down from a high start does not decay.
      skip_rate: `f32[]`, the recent share of skipped steps, including spikes: the mean of the first
        thousand steps, then an exponential mean over about a thousand. With accumulation it counts
        micro-batches.
      row_notfinite_loss: `i32[]`, how many of the `notfinite_count` steps had a loss that itself
        was not finite.
      spikes: with `spikes=SpikeRule()` a `jaxscale.SpikeState`, which counts the steps that were
        skipped because they stood out. Otherwise `None`.
      nonfinite_leaves: with `track_leaves=True` the leaves that the last overflow was in: a
        tree with the structure of the parameters and a `bool[]` for each gradient, which
        `jaxscale.metrics` and `jaxscale.check` name. Otherwise `None`.
      grad_norm: with `max_norm` or `spikes` an `f32[]`, the global norm of the last gradients
        before they were clipped, even if the step was skipped; inf if they were not finite, or
        their squares overflow. With accumulation and `max_norm` it is that of the last step of the
        optimizer. With `axis_name` it is the norm that those devices agree on.
        Without `max_norm` and `spikes` it is `None`.
      weights: what `jaxscale.master_weights` or `jaxscale.stochastic_rounding` keep beside
        half-precision parameters: `remainders`, `copies` or a `key`. Otherwise `None`.

    Counters stay at their largest value instead of wrapping around.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> jaxscale.loss_scaled(optax.sgd(0.1)).init(jnp.zeros(2)).total_steps
      Array(0, dtype=int32)
    """

    scaling: LossScaleState
    inner_state: Any
    step_applied: jax.Array  # bool[]
    notfinite_count: jax.Array  # i32[]
    total_notfinite: jax.Array  # i32[]
    total_notfinite_loss: jax.Array  # i32[]
    total_steps: jax.Array  # i32[]
    total_retries: Any = np.int32(0)  # i32[]
    total_exhausted: Any = np.int32(0)  # i32[]
    backoff_count: Any = np.int32(0)  # i32[]
    skip_rate: Any = np.float32(0)  # f32[]
    row_notfinite_loss: Any = np.int32(0)  # i32[]
    spikes: Any = None  # SpikeState or None
    nonfinite_leaves: Any = None
    grad_norm: Any = None  # f32[] or None
    weights: Any = None  # WeightsState or None

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The dictionary of the one `optax.inject_hyperparams` inside, to read and to write."""
        injected = states_in(self.inner_state, _has_hyperparams)
        if len(injected) != 1:
            # An `AttributeError`, as trainers ask by `hasattr` whether there are any.
            raise AttributeError(
                "`LossScaledState.hyperparams` needs exactly one `optax.inject_hyperparams` inside "
                f"of `loss_scaled`, got {len(injected)}."
            )
        ((_, node),) = injected
        return node.hyperparams


def _has_hyperparams(node: object) -> bool:
    return "hyperparams" in getattr(node, "_fields", ())


class MultiStepsState(NamedTuple):
    """The state that `jaxscale.multi_steps` carries from one micro-batch to the next.

    Its fields are named as in `optax.MultiStepsState`.

    Attributes:
      mini_step: `i32[]`, micro-batches of this window so far, dropped ones included.
      gradient_step: `i32[]`, optimizer steps made so far.
      counted: `i32[]`, micro-batches of this window that are in `acc_grads`.
      acc_grads: the sum of their gradients, divided by `divisor`; in float32 or wider, with the
        structure of the parameters.
      acc_value: `f32[]`, the same for their losses, 0 if none was passed as `value`.
      inner_opt_state: the state of the wrapped transformation.
      divisor: `i32[]`, the length that this window had as it began, 0 before its first micro-batch.
        A resumed run may end it with another length.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.multi_steps(optax.sgd(0.1), 4)
      >>> tx.init(jnp.zeros(2)).inner_state.mini_step
      Array(0, dtype=int32)
    """

    mini_step: jax.Array  # i32[]
    gradient_step: jax.Array  # i32[]
    counted: jax.Array  # i32[]
    acc_grads: Any
    acc_value: jax.Array  # f32[]
    inner_opt_state: Any
    divisor: Any = np.int32(0)  # i32[]


class SpikeState(NamedTuple):
    """The state that a `jaxscale.SpikeRule` carries from one step to the next.

    Attributes:
      losses: `f32[window]`, the losses of the last steps, the newest at the end. Places that are
        not filled yet are at the front. A spike is in here as the rule entered it.
      grad_norms: `f32[window]`, the same for the global norms of the gradients.
      loss_count: `i32[]`, how many entries `losses` has, up to `window`.
      norm_count: `i32[]`, how many entries `grad_norms` has, up to `window`.
      total_spikes: `i32[]`, steps skipped as spikes since `init`.
      spike_count: `i32[]`, spikes in a row, up to now. Steps that were not finite, or whose norm
        was 0, do not end the row, because they say nothing about the level.
      loss_threshold: `f32[]`, what the loss of the last judged step had to exceed to be a spike;
        inf if there were too few to judge by.
      norm_threshold: `f32[]`, the same for the norm.
      loss_deviation: `f32[]`, by how many standard deviations the loss of the last judged step
        stood above the mean; 0 if there were too few to judge by.
      norm_deviation: `f32[]`, the same for the norm.
      total_norm_overflows: `i32[]`, those of `total_spikes` whose gradients were finite, but so
        large that their norm was not.
      cooldown: `i32[]`, for how many more steps a spike would not be the only one in its window.

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
    total_norm_overflows: Any = np.int32(0)  # i32[]
    cooldown: Any = np.int32(0)  # i32[]


# Of each kind of value that is judged: the entries of its window, their number, and what was found.
SPIKE_WINDOWS = {
    "norm": ("grad_norms", "norm_count", "norm_threshold", "norm_deviation"),
    "loss": ("losses", "loss_count", "loss_threshold", "loss_deviation"),
}

# The states of windows, which count the steps of the optimizer under the same names.
WINDOW_STATES = (MultiStepsState, optax.MultiStepsState)

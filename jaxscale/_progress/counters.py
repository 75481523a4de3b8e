"""The scale and the counters of a training state, as numbers for a log."""

import jax

from .._state.find import find_scale_state, is_loss_scaled, restore_types
from .._state.nodes import states_in
from .._trees.pytrees import PyTree
from .numbers import numbers_of


def metrics(tree: PyTree, *, prefix: str = "") -> dict[str, jax.Array]:
    """Returns the loss scale and the counters of a training state, for logging.

    Works inside `jit` and never waits for the device.

    Args:
      tree: a `jaxscale.LossScaledState` or `jaxscale.LossScaleState`, or a tree that holds exactly
        one, such as `opt_state`, a `TrainState`, or the `nnx.state` of an optimizer of Flax NNX.
      prefix: what each name begins with, such as `"train/"`.

    Returns:
      A dictionary of scalar arrays, all of them finite: for an inf it has the largest number of its
      dtype. So `json.dumps` of it is JSON. It has `loss_scale` and the trackers of the policy,
      which its state explains (`jaxscale.LossScaleState`). If there is an optimizer state, it has
      `step_applied` and the counters that `jaxscale.LossScaledState` explains. With
      `jaxscale.multi_steps` these count micro-batches. Then, and with an `optax.MultiSteps` inside
      `loss_scaled`, there are also `mini_step` and `gradient_step`.
      Without a loss scale, as with `jaxscale.skip_nonfinite`, `loss_scale` is 1, and there are no
      trackers, `backoff_count`, `total_retries` and `total_exhausted`. The mappings of `nnx.state`
      and `nnx.split` do not tell such a state from others: of them these are shown, too, and are 0.
      With `max_norm` or `spikes` there is `grad_norm`, the norm of the last gradients before they
      were clipped. With `spikes` there are the counters, thresholds and deviations that
      `jaxscale.SpikeState` explains.
      With `track_leaves=True` there is also a `bool[]` for each gradient, whether the last overflow
      was in it, under a name such as `nonfinite_leaves/params/Dense_0/kernel`.

    Raises:
      ValueError: if `tree` holds no such state, or several.
      TypeError: if `prefix` is not a string.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> opt_state = jaxscale.loss_scaled(optax.adam(0.1)).init(jnp.zeros(3))
      >>> jaxscale.metrics(opt_state)["loss_scale"]
      Array(32768., dtype=float32)
    """
    if not isinstance(prefix, str):
        raise TypeError(
            f"`metrics(prefix=...)` must be a string, got {prefix!r}. Pass what each name begins "
            'with, such as "train/".'
        )
    tree = restore_types(tree)
    scaling = find_scale_state("metrics", tree)
    state = None  # there may be a policy's alone
    for _, node in states_in(tree, is_loss_scaled):
        state = node
    numbers = numbers_of(scaling, state)
    return {f"{prefix}{name}": number for name, number in numbers.items()}

"""What happened, as numbers on the device."""

from typing import Any

import jax
import jax.numpy as jnp

from ._accumulate import MultiStepsState
from ._nonfinite_leaves import named_flags
from ._scaling import find_scaling, is_loss_scaled
from ._state import unwrapped

# What a `LossScaledState` counts, besides the state of the policy itself.
_COUNTERS = (
    "grads_finite",
    "notfinite_count",
    "total_notfinite",
    "total_notfinite_loss",
    "total_steps",
)


# What `multi_steps` counts besides.
_WINDOW_COUNTERS = ("mini_step", "gradient_step")


def metrics(tree: Any) -> dict[str, jax.Array]:
    """Returns the loss scale and the counters of a training state, for logging.

    Works inside ``jit`` and never waits for the device.

    Args:
      tree: a :class:`jaxscale.LossScaledState` or :class:`jaxscale.LossScaleState`, or a
        tree that holds exactly one, such as ``opt_state`` or a ``TrainState``.

    Returns:
      A dictionary of scalar arrays: ``loss_scale`` and the trackers of the policy and, if
      there is an optimizer state, ``grads_finite``, ``notfinite_count``,
      ``total_notfinite``, ``total_notfinite_loss`` and ``total_steps``, as explained in
      :class:`jaxscale.LossScaledState`. Under :func:`jaxscale.multi_steps` these count
      micro-batches, and ``mini_step`` and ``gradient_step`` come with them. Under
      ``track_leaves=True`` there is a ``bool[]`` for each gradient, under names such as
      ``nonfinite_leaves/params/Dense_0/kernel``: whether the last overflow was in it.

    Raises:
      ValueError: if ``tree`` holds no such state, or several.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> opt_state = jaxscale.loss_scaled(optax.adam(0.1)).init(jnp.zeros(3))
      >>> jaxscale.metrics(opt_state)["loss_scale"]
      Array(32768., dtype=float32)
    """
    values = find_scaling("metrics", tree)._asdict()
    for node in jax.tree.leaves(tree, is_leaf=is_loss_scaled):
        if is_loss_scaled(node):
            values |= {name: jnp.asarray(getattr(node, name)) for name in _COUNTERS}
            if isinstance(node.inner_state, MultiStepsState):
                window: Any = node.inner_state
                values |= {name: jnp.asarray(getattr(window, name)) for name in _WINDOW_COUNTERS}
            values |= {
                f"nonfinite_leaves/{name}": jnp.asarray(flag)
                for name, flag in named_flags(unwrapped(node.nonfinite_leaves)).items()
            }
    return values

"""Update and apply in one: what most training loops want."""

from typing import Any

import optax

from ._step import LossScaled
from ._tree import apply_updates


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Returns the parameters and the optimizer state after one step.

    The same as ``tx.update`` followed by ``optax.apply_updates``. Where ``tx`` is a
    :func:`loss_scaled` optimizer, both are skipped as one, which is the fastest form: no
    updates are stored. Leaves without a gradient, integers and typed keys among them, stay as
    they are if the optimizer passes their ``float0`` gradients on, as ``optax.masked`` does.

    Args:
      tx: the optimizer.
      grads: the gradients, with the structure of ``params``.
      opt_state: the state of ``tx``.
      params: the parameters.
      **extra_args: passed to ``tx.update``: ``value=loss`` and so on.

    Returns:
      The new parameters, with the avals of ``params``, and the new state. After a
      non-finite step the parameters are the old ones, bit for bit.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.5))
      >>> params = jnp.array(1.0)
      >>> params, opt_state = jaxscale.apply_gradients(
      ...     tx, jnp.array(1.0), tx.init(params), params
      ... )
      >>> params
      Array(0.5, dtype=float32)
    """
    rule = getattr(tx.update, "__self__", None)
    if isinstance(rule, LossScaled):
        return rule.apply(grads, opt_state, params, **extra_args)
    tx = optax.with_extra_args_support(tx)
    updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
    return apply_updates(params, updates), opt_state

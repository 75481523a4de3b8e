"""Update and apply in one: what most training loops want."""

from typing import Any

import optax

from ._step import LossScaledState, wrapper_of
from ._tree import apply_updates, joined, split


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
    updates are stored.

    Leaves without a gradient stay as they are. Where the gradient is ``None``, as those of
    ``equinox.filter_grad`` are for functions, text and integers, the leaf may be anything, and
    the optimizer is shown ``None`` for it. Integers and typed keys with ``float0`` gradients
    stay if the optimizer passes these on, as ``optax.masked`` does. A leaf whose update is
    ``None`` stays, too.

    Args:
      tx: the optimizer.
      grads: the gradients, with the structure of ``params``, or ``None`` for a leaf.
      opt_state: the state of ``tx``. For an Equinox module ``model`` it is made by
        ``tx.init(equinox.filter(model, equinox.is_inexact_array))``.
      params: the parameters.
      **extra_args: passed to ``tx.update``: ``value=loss`` and so on.

    Returns:
      The new parameters, with the avals of ``params``, and the new state. After a
      non-finite step the parameters are the old ones, bit for bit.

    Raises:
      TypeError: if ``tx`` is not a gradient transformation, or if ``opt_state`` is not a state
        of it.
      ValueError: if ``grads`` has another structure than ``params``, where these hold leaves
        that are not arrays.

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
    # What has no gradient goes around the step, as only arrays can be selected and compiled.
    trained, rest = split(params, grads)
    wrapper = wrapper_of(tx)
    if wrapper is not None:
        trained, opt_state = wrapper.apply(grads, opt_state, trained, **extra_args)
        return joined(trained, rest), opt_state
    if isinstance(opt_state, LossScaledState):
        raise TypeError(
            "`apply_gradients(tx, grads, opt_state, params)`: `opt_state` is a `LossScaledState`, "
            "but `tx` is a bare optimizer. Pass the one that `loss_scaled` returned."
        )
    if isinstance(tx, optax.MultiSteps):  # has `init` and `update`, but is not a transformation
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            "`apply_gradients(tx, ...)`: `tx` must be an `optax.GradientTransformation`, got "
            f"{tx!r}. Call the function that makes it, as in `optax.adamw(1e-3)`."
        )
    tx = optax.with_extra_args_support(tx)
    updates, opt_state = tx.update(grads, opt_state, trained, **extra_args)
    return joined(apply_updates(trained, updates), rest), opt_state

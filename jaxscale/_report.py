"""What happened: read from the state, on the device or on the host."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._accumulate import MultiStepsState
from ._state import find, find_scaling
from ._step import LossScaledState


class LossScaleStuckError(RuntimeError):
    """Training makes no progress: too many steps in a row were skipped.

    Example:
      >>> import jaxscale
      >>> issubclass(jaxscale.LossScaleStuckError, RuntimeError)
      True
    """


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


def _is_loss_scaled(node: Any) -> bool:
    return isinstance(node, LossScaledState)


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
      micro-batches, and ``mini_step`` and ``gradient_step`` come with them.

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
    for node in jax.tree.leaves(tree, is_leaf=_is_loss_scaled):
        if _is_loss_scaled(node):
            values |= {name: jnp.asarray(getattr(node, name)) for name in _COUNTERS}
            if isinstance(node.inner_state, MultiStepsState):
                window = node.inner_state
                values |= {name: jnp.asarray(getattr(window, name)) for name in _WINDOW_COUNTERS}
    return values


def check(tree: Any, *, max_consecutive: int = 50) -> None:
    """Returns ``None`` if training makes progress, and raises an error if it is stuck.

    For the host, outside of ``jit``: it waits for the device, so call it as often as you
    log. A step skipped now and then is the normal working of a dynamic loss scale.

    Args:
      tree: a :class:`jaxscale.LossScaledState`, or a tree that holds exactly one.
      max_consecutive: how many steps skipped in a row are still accepted. From 2**24
        down to 1, halving takes 24.

    Raises:
      LossScaleStuckError: if more steps than that were skipped in a row. The message has
        the numbers and the likely cause.
      ValueError: if ``tree`` holds no such state, or several.
      TypeError: if called inside ``jit``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.loss_scaled(optax.adam(0.1))
      >>> state = tx.init(jnp.zeros(3))
      >>> jaxscale.check(state)
      >>> for _ in range(3):
      ...     _, state = tx.update(jnp.full(3, jnp.nan), state)
      >>> jaxscale.check(state, max_consecutive=2)  # doctest: +IGNORE_EXCEPTION_DETAIL
      Traceback (most recent call last):
      jaxscale.LossScaleStuckError: 3 steps in a row were skipped (3 of 3 in all, ...)
    """
    state = metrics(find("check", tree, _is_loss_scaled, "`LossScaledState`"))
    if isinstance(state["notfinite_count"], Tracer):
        raise TypeError(
            "`check` reads values, so it cannot run inside `jit`. Call it on the state that "
            "the step returns; inside, use `jaxscale.metrics`."
        )
    # A population has states with a leading axis: report its worst member.
    worst = np.argmax(state["notfinite_count"])
    counters = {name: np.ravel(value)[worst] for name, value in state.items()}
    if counters["notfinite_count"] <= max_consecutive:
        return
    raise LossScaleStuckError(
        "{notfinite_count} steps in a row were skipped ({total_notfinite} of {total_steps} "
        "in all, {total_notfinite_loss} of them with a non-finite loss); the loss scale is "
        "{loss_scale}. ".format_map(counters)
        + _likely_cause(counters)
    )


def _likely_cause(counters: dict[str, Any]) -> str:
    if counters["total_notfinite_loss"] >= counters["notfinite_count"]:
        return (
            "The loss itself is not finite, so no loss scale can help: look for a bad batch, "
            "parameters that have diverged, or an operation in the forward pass that leaves "
            "the range of its dtype; compute norms, softmax and the loss in float32."
        )
    return (
        "If the loss was passed as `value`, it is finite, and the backward pass overflows: at any "
        "scale (a division by zero, the square root of 0, a mask of -inf: run one step under "
        "`with jax.disable_jit(), jax.debug_infs(True)`), or because the scale is fixed and too "
        "high, or still on its way down, or never moves, as `jaxscale.value_and_grad` was called "
        "outside of the step. If it was not, pass it: a bad forward pass is told apart then."
    )

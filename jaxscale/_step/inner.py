"""The update of the wrapped optimizer: clipped gradients go in, and its state keeps its types."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import optax

from .._gradients.verdict import clip_by_global_norm, global_norm
from .._trees.checks import explain_errors
from .._trees.tree import cast_like, map_gradients, widen
from .checks import check_state_kept


def update_inner(
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    norm: jax.Array | None,
    value: Any,
    opt_state: Any,
    params: Any,
    extra_args: Mapping[str, Any],
    *,
    max_norm: float | None,
    keeps_state: bool,
) -> tuple[Any, Any, jax.Array | None]:
    """Returns the updates of the wrapped optimizer, its next state, and the norm if known.

    Args:
      inner: the wrapped optimizer.
      grads: the gradients, unscaled.
      norm: their norm, if it is known.
      value: the loss, if it is known.
      opt_state: the state of the optimizer.
      params: the parameters.
      extra_args: its further arguments.
      max_norm: the norm to clip to, if any.
      keeps_state: whether its state must keep its structure, as a skipped step keeps the state.
    """
    grads = map_gradients(widen, grads)
    if max_norm is not None:
        norm = global_norm(grads) if norm is None else norm
        grads = clip_by_global_norm(grads, norm, max_norm)
    extra_args = with_loss(inner.update, value, extra_args)
    with explain_errors():
        updates, new_state = inner.update(
            grads, opt_state, map_gradients(widen, params), **extra_args
        )
    if keeps_state:
        check_state_kept(new_state, opt_state)
    elif jax.tree.structure(new_state) != jax.tree.structure(opt_state):
        return updates, new_state, norm
    return updates, cast_like(new_state, opt_state), norm


def with_loss(update: Any, value: Any, extra_args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns extra arguments with the loss, under the names by which an inner update takes it.

    Most updates accept arguments that they do not know. A few take only those that they name, and
    would raise an error at `value`, which was meant for the wrapper. Some name it `loss`.
    """
    if value is None:
        return extra_args
    parameters = inspect.signature(update).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    others = {name: each for name, each in extra_args.items() if name != "loss"}
    if "value" in parameters or takes_any:
        others["value"] = value
    if "loss" in parameters or ("loss" in extra_args and takes_any):
        others["loss"] = value
    return others

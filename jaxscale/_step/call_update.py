"""Calls of an optimizer's `update`, with the loss under the name by which it takes that."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import optax

from .._trees.pytrees import OptState

# The arguments of an update beside gradients, state, parameters and loss: those of a training step.
NO_ARGS: Mapping[str, Any] = MappingProxyType({})

_WRITE_THE_STEP = (
    "A `train_step` passes an optimizer the gradients, the parameters and the loss as `value`. If "
    "it needs more, write the step yourself: `loss, grads = jaxscale.value_and_grad(loss_fn, "
    "opt_state)(params, ...)`, or that of JAX for a bare optimizer, then `tx.update(grads, "
    "opt_state, params, ...)` with what it needs, such as `value=loss, grad=grads, value_fn=...` "
    "for a line search, or `grad_fn=...`. `jaxscale.apply_gradients` takes the same."
)


def call_update(
    tx: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    opt_state: OptState,
    params: optax.Params | None,
    value: object,
    extra_args: Mapping[str, Any],
) -> tuple[optax.Updates, Any]:
    """Calls `tx.update`, with the loss under each name that it takes: `value` or `loss`.

    An error in a training step gets a note of what to write if the optimizer needs more.
    """
    arguments = extra_args
    if value is not None:
        arguments = _with_loss(tx, value, extra_args)
    try:
        return tx.update(grads, opt_state, params, **arguments)
    except (KeyError, TypeError, ValueError) as error:
        if extra_args is NO_ARGS:
            error.add_note(_WRITE_THE_STEP)
        raise


def takes_any(function: Callable[..., Any]) -> bool:
    """Returns whether a function takes keyword arguments of any name."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _with_loss(
    tx: optax.GradientTransformationExtraArgs,
    value: object,
    extra_args: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Adds the loss to arguments, but only where `tx.update` takes it: others would raise."""
    parameters = inspect.signature(tx.update).parameters
    arguments = dict(extra_args)
    arguments.pop("loss", None)
    if "value" in parameters or takes_any(tx.update):
        arguments["value"] = value
    if "loss" in parameters or ("loss" in extra_args and takes_any(tx.update)):
        arguments["loss"] = value
    return arguments

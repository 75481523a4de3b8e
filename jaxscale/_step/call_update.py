"""Calls of an optimizer's `update`, with the loss under the name by which it takes that."""

import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import optax

NO_ARGS: Mapping[str, Any] = MappingProxyType({})

# How Python and Optax say that a function needs an argument which it did not get. Neither has a
# type of error for it: optimizers raise the `TypeError` of a call, or a `ValueError` of their own.
_MISSING_ARGUMENT = re.compile(r"required keyword-only argument|must be provided")


def call_update(
    tx: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    opt_state: Any,
    params: optax.Params | None,
    value: Any,
    extra_args: Mapping[str, Any],
) -> tuple[optax.Updates, Any]:
    """Calls `tx.update`, with the loss under each name that it takes: `value` or `loss`."""
    if value is not None:
        extra_args = _with_loss(tx, value, extra_args)
    try:
        return tx.update(grads, opt_state, params, **extra_args)
    except (TypeError, ValueError) as error:
        if not _MISSING_ARGUMENT.search(str(error)):
            raise
        message = (
            f"`tx.update` needs arguments that it was not given, and says: {error} A `train_step` "
            "gives it the loss, as `value`, and no more. If it needs more, write the loop: `loss, "
            "grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, ...)`, and then "
            "`jaxscale.apply_gradients(tx, grads, opt_state, params, value=loss, ...)` with what "
            "is missing."
        )
        if isinstance(error, TypeError):
            raise TypeError(message) from error
        raise ValueError(message) from error


def takes_any(function: Callable[..., Any]) -> bool:
    """Returns whether a function takes keyword arguments of any name."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _with_loss(
    tx: optax.GradientTransformationExtraArgs, value: Any, extra_args: Mapping[str, Any]
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

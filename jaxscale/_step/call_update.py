"""Calls of an optimizer's `update`, with the loss under the name by which it takes that."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import optax

from .._trees.pytrees import OptState

NO_ARGS: Mapping[str, Any] = MappingProxyType({})


def call_update(
    tx: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    opt_state: OptState,
    params: optax.Params | None,
    value: object,
    extra_args: Mapping[str, Any],
) -> tuple[optax.Updates, Any]:
    """Calls `tx.update`, with the loss under each name that it takes: `value` or `loss`."""
    if value is not None:
        extra_args = _with_loss(tx, value, extra_args)
    return tx.update(grads, opt_state, params, **extra_args)


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

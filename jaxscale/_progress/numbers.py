"""Reports of a step: its numbers for a log, by name."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._gradients.facts import named_flags
from .._state.optimizer import WINDOW_STATES, LossScaledState
from .._state.scale import UnitLossScaleState, unwrap
from .._trees.pytrees import ScaleState

# The fields of a `LossScaledState` that are not counters.
_PARTS = {
    "scaling",
    "inner_state",
    "spikes",
    "nonfinite_leaves",
    "grad_norm",
    "weights",
}
# What is not shown of a `SpikeState`.
_WINDOWS = {"losses", "grad_norms", "loss_count", "norm_count", "cooldown"}
# What only a scale that is not 1 for good may ever count.
_OF_SCALE = {"backoff_count", "total_retries", "total_exhausted"}


def numbers_of(
    scaling: ScaleState, state: LossScaledState | None = None
) -> dict[str, Any]:
    """Returns what `jaxscale.metrics` shows of a loss scale and of its optimizer, by name.

    All numbers are finite: a log as JSON has no inf. The largest number stands for it.
    """
    values = list_numbers(scaling, state)
    return {name: _make_finite(unwrap(value)) for name, value in values.items()}


def list_numbers(
    scaling: ScaleState, state: LossScaledState | None = None
) -> dict[str, Any]:
    """Returns the same numbers as the states have them, some of them in variables."""
    values = _fields_of_scale(scaling)
    if state is not None:
        values |= _counters_of(state)
    return values


def _fields_of_scale(scaling: ScaleState) -> dict[str, Any]:
    if isinstance(scaling, UnitLossScaleState):
        return {"loss_scale": scaling.loss_scale}
    return scaling._asdict()


def _make_finite(number: ArrayLike) -> jax.Array:
    number = jnp.asarray(number)
    if not jnp.issubdtype(number.dtype, jnp.inexact):
        return number
    # Shown, and not computed with: a callback takes no derivative.
    return jnp.nan_to_num(jax.lax.stop_gradient(number))


def _counters_of(state: LossScaledState) -> dict[str, Any]:
    """Returns what is shown of a state beside its loss scale, by name."""
    values = _without(state._asdict(), _PARTS)
    if isinstance(state.scaling, UnitLossScaleState):
        values = _without(values, _OF_SCALE)
    if state.spikes is not None:
        values |= _without(state.spikes._asdict(), _WINDOWS)
    if state.grad_norm is not None:
        values["grad_norm"] = state.grad_norm
    window = state.inner_state
    if isinstance(window, WINDOW_STATES):  # the names are those of Optax
        values["mini_step"] = window.mini_step
        values["gradient_step"] = window.gradient_step
    flags = named_flags(unwrap(state.nonfinite_leaves))
    for name, flag in flags.items():
        values[f"nonfinite_leaves/{name}"] = flag
    return values


def _without(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}

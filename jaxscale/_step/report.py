"""Reports of a step: its numbers for a log, and for `on_skip`, a function on the host.

A callback under a condition is called only where that holds, but `vmap` makes a selection of a
condition, and would call the host in every step. So the report has a batching rule of its own,
which keeps the condition: whether any member of the population skipped.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._gradients.facts import named_flags
from .._jax import axes_of_devices, varying
from .._state.optimizer import WINDOW_STATES, LossScaledState
from .._state.scale import UnitLossScaleState, unwrap
from .._trees.pytrees import PyTree, ScaleState

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


def report_skip(
    on_skip: Callable[[dict[str, Any]], Any], state: LossScaledState
) -> None:
    """Calls a function on the host with the numbers of a step if that was skipped.

    In a population it is called for each member that was; along the axes of devices that made the
    same step, once.
    """
    numbers = numbers_of(state.scaling, state)
    skipped = ~state.step_applied

    call_host = functools.partial(_call_host, on_skip)
    leaves = jax.tree.leaves((skipped, numbers))
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        call_host(skipped, numbers)  # nothing is compiled, so neither is this
        return
    # Devices that may differ in what they skip are different runs. The others are one, whose first
    # device reports.
    is_first = jnp.array(True)
    for axis in axes_of_devices():
        if axis not in varying(jax.typeof(skipped)):
            is_first &= jax.lax.axis_index(axis) == 0
    _make_reporter(call_host)(skipped, is_first, numbers)


def _call_host(
    on_skip: Callable[[dict[str, Any]], Any], skipped: Any, numbers: dict[str, Any]
) -> None:
    """Calls `on_skip` on the host, for each member of a population that skipped."""
    skipped = np.asarray(skipped)  # a run that is alone has no axes
    numbers = {name: np.asarray(leaf) for name, leaf in numbers.items()}
    for indices in np.argwhere(skipped):
        member = tuple(indices)
        values = {name: leaf[member].tolist() for name, leaf in numbers.items()}
        if skipped.ndim:
            values["member"] = int(np.ravel_multi_index(member, skipped.shape))
        on_skip(values)


def _make_reporter(
    call_host: Callable[[Any, Any], None],
) -> Callable[[Any, Any, Any], None]:
    """Makes the function that calls the host if any member of a population skipped.

    It takes whether the members skipped, whether this device reports, and the numbers.
    """

    @jax.custom_batching.custom_vmap
    def report(skipped: jax.Array, is_first: jax.Array, numbers: Any) -> None:
        def call() -> None:
            jax.debug.callback(call_host, skipped, numbers)

        jax.lax.cond(jnp.any(skipped) & is_first, call, lambda: None)

    @report.def_vmap
    def report_population(
        size: int,
        batched: PyTree,
        skipped: jax.Array,
        is_first: jax.Array,
        numbers: Any,
    ) -> tuple[None, None]:
        skipped_batched, _, numbers_batched = batched

        def stack(leaf: jax.Array, is_batched: bool) -> jax.Array:
            if is_batched:
                return leaf
            return jnp.broadcast_to(leaf, (size, *leaf.shape))

        if any(jax.tree.leaves((skipped_batched, numbers_batched))):
            skipped = stack(skipped, skipped_batched)
            numbers = jax.tree.map(stack, numbers, numbers_batched)
        _make_reporter(call_host)(skipped, is_first, numbers)
        return None, None

    return report

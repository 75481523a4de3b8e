"""What a step reports: its numbers for a log, and to `on_skip`, a function on the host.

A callback under a condition is called only where that holds, but `vmap` makes a selection of a
condition, and would call the host in every step. So the report has a batching rule of its own,
which keeps the condition: whether any member of the population skipped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._gradients.verdict import named_flags
from .._jax import axes_of_devices, varying
from .._state.optimizer import WINDOW_STATES, LossScaledState
from .._state.scale import unwrap

# The fields of a `LossScaledState` that are not counters.
_PARTS = {"scaling", "inner_state", "spikes", "nonfinite_leaves", "grad_norm"}
# What is not shown of a `SpikeState`.
_WINDOWS = {"losses", "grad_norms", "loss_count", "norm_count", "cooldown"}
_WINDOWS |= {"recent_losses", "past_levels", "level_steps", "past_count"}


def counters_of(state: LossScaledState) -> dict[str, Any]:
    """Returns what `jaxscale.metrics` shows of a state beside its loss scale, by name."""
    values = {name: leaf for name, leaf in state._asdict().items() if name not in _PARTS}
    values["grads_finite"] = values["step_applied"]  # its name in 0.1, until 1.0
    if state.spikes is not None:
        spikes = state.spikes._asdict().items()
        values |= {name: leaf for name, leaf in spikes if name not in _WINDOWS}
    if state.grad_norm is not None:
        values["grad_norm"] = state.grad_norm
    if isinstance(state.inner_state, WINDOW_STATES):
        window = state.inner_state  # has the same names here and in Optax
        values |= {name: getattr(window, name) for name in ("mini_step", "gradient_step")}
    flags = named_flags(unwrap(state.nonfinite_leaves))
    return values | {f"nonfinite_leaves/{name}": flag for name, flag in flags.items()}


def report_skip(on_skip: Callable[[dict[str, Any]], Any], state: LossScaledState) -> None:
    """Calls a function on the host with the numbers of a step if that was skipped.

    In a population it is called for each member that was; along the axes of devices that made the
    same step, once.
    """
    numbers = state.scaling._asdict() | counters_of(state)
    numbers = jax.tree.map(jnp.asarray, numbers)
    skipped = ~state.step_applied

    def tell(skipped: Any, numbers: Any) -> None:
        """Calls `on_skip` for each member of a population, or for the one run."""
        skipped = np.asarray(skipped)
        for index in np.argwhere(skipped):
            place = tuple(index)
            values = {name: np.asarray(leaf)[place].tolist() for name, leaf in numbers.items()}
            if skipped.ndim:
                values["member"] = int(np.ravel_multi_index(place, skipped.shape))
            on_skip(values)

    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((skipped, numbers))):
        tell(skipped, numbers)  # nothing is compiled, so neither is this
        return
    # Devices that may differ in what they skip are different runs. The others are one.
    alike = [axis for axis in axes_of_devices() if axis not in varying(jax.typeof(skipped))]
    is_first = tuple(jax.lax.axis_index(axis) == 0 for axis in alike)
    never = _reporter(tell)(skipped, is_first, numbers)
    # Before JAX 0.8 a function with a batching rule has no effects that its callers know of. Where
    # no state is returned it would be left out, if nothing with an effect needed its result.
    jax.lax.cond(never, lambda: jax.debug.callback(lambda: None), lambda: None)


def _reporter(tell: Callable[[Any, Any], None]) -> Callable[[Any, Any, Any], jax.Array]:
    """Returns a function of whether members skipped, of whether a device is first, and of numbers.

    It calls the host if any member did, and returns a `bool[]` that never holds.
    """

    @jax.custom_batching.custom_vmap
    def report(skipped: Any, is_first: Any, numbers: Any) -> jax.Array:
        calls = jnp.any(skipped)
        for each in is_first:
            calls &= each
        jax.lax.cond(calls, lambda: jax.debug.callback(tell, skipped, numbers), lambda: None)
        return calls & ~calls

    @report.def_vmap
    def report_population(
        size: int, batched: Any, skipped: Any, is_first: Any, numbers: Any
    ) -> tuple[jax.Array, bool]:
        skipped_batched, first_batched, numbers_batched = batched
        # The index along an axis that `vmap` named is batched: its members are no devices.
        flags = zip(is_first, first_batched, strict=True)
        is_first = tuple(each for each, is_batched in flags if not is_batched)

        def stack(leaf: jax.Array, is_batched: bool) -> jax.Array:
            return leaf if is_batched else jnp.broadcast_to(leaf, (size, *leaf.shape))

        if any(jax.tree.leaves((skipped_batched, numbers_batched))):
            are_batched = skipped_batched, numbers_batched
            skipped, numbers = jax.tree.map(stack, (skipped, numbers), are_batched)
        return _reporter(tell)(skipped, is_first, numbers), False

    return report

"""The counters of a step: what happened, so that nothing has to wait for the host."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.verdict import Verdict
from .._state.optimizer import LossScaledState, MultiStepsState

# In so many steps a scale may come down from its start, in falls with a few finite steps between
# them, before `backoff_count` counts.
_DESCENT = 25


def took_step(before: LossScaledState, after: LossScaledState) -> jax.Array:
    """Returns whether the optimizer made a step, which not every micro-batch leads to."""
    windows: Any = before.inner_state, after.inner_state
    if isinstance(windows[0], MultiStepsState):
        return windows[0].gradient_step != windows[1].gradient_step
    return after.grads_finite


def count_retries(
    state: LossScaledState, verdict: Verdict, scaling: Any, number: jax.Array
) -> tuple[LossScaledState, Verdict]:
    """Returns the state and the verdict to go on with after passes were repeated.

    Args:
      state: the state before the step.
      verdict: that of the last pass.
      scaling: the scale state to go on with.
      number: an `i32[]`, how many passes came before the last.
    """
    again, total = number > 0, state.total_retries
    room = jnp.iinfo(total.dtype).max - total
    exhausted = again & ~verdict.grads_finite
    exhausted &= state.grads_finite | (state.total_steps >= _DESCENT)
    state = state._replace(
        scaling=scaling,
        total_retries=total + jnp.minimum(number, room),
        total_exhausted=increment_if(exhausted, state.total_exhausted),
        backoff_count=count_backoffs(state, scaling, again),
    )
    return state, verdict._replace(lowered=again & verdict.grads_finite)


def count_backoffs(state: LossScaledState, scaling: Any, overflow: Any) -> jax.Array:
    """Returns `backoff_count` after the scale moved.

    Args:
      state: the state before the move.
      scaling: the scale state after it.
      overflow: a `bool[]`, whether an overflow moved it. A policy that follows the gradients also
        lowers the scale before anything overflows.
    """
    old, new = state.scaling.loss_scale, scaling.loss_scale
    counts = overflow & (new < old) & state.grads_finite & (state.total_steps >= _DESCENT)
    return jnp.where(new > old, 0, increment_if(counts, state.backoff_count))


def increment_if(event: jax.Array, counter: jax.Array) -> jax.Array:
    return jnp.where(event, optax.safe_increment(counter), counter)

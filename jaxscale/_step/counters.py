"""The counters of a step: what happened, so that nothing has to wait for the host."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._gradients.verdict import Verdict
from .._state.optimizer import LossScaledState

# The first steps, in which a scale comes down from its start: their falls do not count.
_FIRST_STEPS = 25


class Retries(NamedTuple):
    """What came of repeating a backward pass."""

    number: jax.Array  # i32[], how many passes came before the last one
    scaling: Any  # the scale state to go on with


def zero_counters() -> dict[str, jax.Array]:
    """Returns the counters of a first state, each in a buffer of its own, for donation."""
    names = (name for name in LossScaledState._fields if "total_" in name or "_count" in name)
    return {"step_applied": jnp.array(True), **{name: jnp.array(0, jnp.int32) for name in names}}


def count_step(
    state: LossScaledState,
    verdict: Verdict,
    grads_finite: jax.Array,
    is_spike: jax.Array | None,
    scaling: Any,
    retries: Retries | None,
) -> LossScaledState:
    """Returns a state with the counters after one more step, which led to the state `scaling`.

    The verdict is that on the last pass. `grads_finite` covers the updates, too, if checked.
    """
    finite = grads_finite & verdict.loss_finite
    state = state._replace(backoff_count=_count_backoffs(state, grads_finite, scaling, retries))
    if retries is not None:
        total = state.total_retries
        room = jnp.iinfo(total.dtype).max - total
        exhausted = (retries.number > 0) & ~verdict.grads_finite
        # In the first steps a row of them counts as one: the scale comes down from its start.
        exhausted &= state.step_applied | (state.total_steps >= _FIRST_STEPS)
        state = state._replace(
            total_retries=total + jnp.minimum(retries.number, room),
            total_exhausted=increment_if(exhausted, state.total_exhausted),
        )
    return state._replace(
        step_applied=finite if is_spike is None else finite & ~is_spike,
        notfinite_count=jnp.where(finite, 0, optax.safe_increment(state.notfinite_count)),
        total_notfinite=increment_if(~finite, state.total_notfinite),
        total_notfinite_loss=increment_if(~verdict.loss_finite, state.total_notfinite_loss),
        total_steps=jnp.asarray(optax.safe_increment(state.total_steps)),
    )


def _count_backoffs(
    state: LossScaledState, grads_finite: jax.Array, scaling: Any, retries: Retries | None
) -> jax.Array:
    """Returns `backoff_count` after the scale moved: one fall a step, none after growth.

    Falls before anything overflows, by a policy that follows the gradients, do not count.
    """
    before, new = state.scaling.loss_scale, scaling.loss_scale
    start = before if retries is None else retries.scaling.loss_scale
    falls = ~grads_finite & (new < start)
    if retries is not None:
        falls |= (retries.number > 0) & (start < before)
    # Several falls in a row of skipped steps count as one.
    counts = falls & state.step_applied & (state.total_steps >= _FIRST_STEPS)
    return jnp.where(new > start, 0, increment_if(counts, state.backoff_count))


def increment_if(event: jax.Array, counter: jax.Array) -> jax.Array:
    return jnp.where(event, optax.safe_increment(counter), counter)

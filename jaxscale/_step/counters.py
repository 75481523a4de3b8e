"""The counters of a step: what happened, so that nothing has to wait for the host."""

import jax
import jax.numpy as jnp
import optax

from .._gradients.facts import Facts
from .._gradients.value_and_grad import Retries
from .._state.optimizer import LossScaledState
from .._trees.pytrees import OptState, ScaleState

# The first steps, in which a scale comes down from its start: their falls do not count.
_FIRST_STEPS = 25
# After how many steps `skip_rate` has forgotten most of a skipped one.
_MEMORY = 1000.0


def start_state(scaling: ScaleState, inner_state: OptState) -> LossScaledState:
    """Returns a first state: nothing has happened yet."""
    # Each counter in a buffer of its own, as a donated state may hold none twice.
    return LossScaledState(
        scaling=scaling,
        inner_state=inner_state,
        step_applied=jnp.array(True),
        notfinite_count=jnp.array(0, jnp.int32),
        total_notfinite=jnp.array(0, jnp.int32),
        total_notfinite_loss=jnp.array(0, jnp.int32),
        total_steps=jnp.array(0, jnp.int32),
        total_retries=jnp.array(0, jnp.int32),
        total_exhausted=jnp.array(0, jnp.int32),
        backoff_count=jnp.array(0, jnp.int32),
        skip_rate=jnp.array(0, jnp.float32),
        row_notfinite_loss=jnp.array(0, jnp.int32),
    )


def count_step(
    state: LossScaledState,
    facts: Facts,
    applied: jax.Array,
    updates_finite: jax.Array,
    scaling: ScaleState,
    retries: Retries | None,
) -> LossScaledState:
    """Counts one more step, after which the scale state is `scaling`.

    The facts are those of the last pass.
    """
    grads_finite = facts.grads_finite & updates_finite
    finite = grads_finite & facts.loss_finite
    bad_loss = ~facts.loss_finite
    state = state._replace(
        backoff_count=_count_backoffs(state, grads_finite, scaling, retries),
        skip_rate=_move_skip_rate(state, applied),
    )
    if retries is not None:
        state = _count_retries(state, facts, retries)
    row_notfinite_loss = increment_if(bad_loss, state.row_notfinite_loss)
    return state._replace(
        step_applied=applied,
        notfinite_count=jnp.where(
            finite, 0, optax.safe_increment(state.notfinite_count)
        ),
        total_notfinite=increment_if(~finite, state.total_notfinite),
        total_notfinite_loss=increment_if(bad_loss, state.total_notfinite_loss),
        row_notfinite_loss=jnp.where(finite, 0, row_notfinite_loss),
        total_steps=optax.safe_increment(state.total_steps),
    )


def _move_skip_rate(state: LossScaledState, applied: jax.Array) -> jax.Array:
    """Returns `skip_rate` after one more step.

    It is the plain mean of the first thousand steps. From then on each further one weighs a
    thousandth.
    """
    num_steps = jnp.minimum(state.total_steps.astype(jnp.float32) + 1, _MEMORY)
    lost = (~applied).astype(jnp.float32)
    # A product and a sum might be rounded once in one program, and twice in another.
    return state.skip_rate + (lost - state.skip_rate) / num_steps


def _count_retries(
    state: LossScaledState, facts: Facts, retries: Retries
) -> LossScaledState:
    total = state.total_retries
    room = jnp.iinfo(total.dtype).max - total
    exhausted = (retries.number > 0) & ~facts.grads_finite
    # In the first steps a row of them counts as one: the scale comes down from its start.
    exhausted &= state.step_applied | (state.total_steps >= _FIRST_STEPS)
    return state._replace(
        total_retries=total + jnp.minimum(retries.number, room),
        total_exhausted=increment_if(exhausted, state.total_exhausted),
    )


def _count_backoffs(
    state: LossScaledState,
    grads_finite: jax.Array,
    scaling: ScaleState,
    retries: Retries | None,
) -> jax.Array:
    """Returns `backoff_count` after the scale moved: one fall a step, none after growth.

    Falls before anything overflows, by a policy that follows the gradients, do not count.
    """
    before = state.scaling.loss_scale
    after = scaling.loss_scale
    last_pass = before
    if retries is not None:
        last_pass = retries.scaling.loss_scale
    falls = ~grads_finite & (after < last_pass)
    if retries is not None:
        falls |= (retries.number > 0) & (last_pass < before)
    # Several falls in a row of skipped steps count as one.
    counts = falls & state.step_applied & (state.total_steps >= _FIRST_STEPS)
    return jnp.where(after > last_pass, 0, increment_if(counts, state.backoff_count))


def increment_if(event: jax.Array, counter: jax.Array) -> jax.Array:
    """Adds 1 to a counter where something happened. It stays at the largest number."""
    return jnp.where(event, optax.safe_increment(counter), counter)

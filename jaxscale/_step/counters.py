"""The counters of a step: what happened, so that nothing has to wait for the host."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._gradients.verdict import Verdict
from .._policies.base import CheckedLossScale, LossScale
from .._state.optimizer import LossScaledState
from .._trees.numbers import increment, increment_if

# The first steps, in which a scale comes down from its start: their falls do not count.
_FIRST_STEPS = 25
# After how many steps of the optimizer `skip_rate` has forgotten most of a skipped one.
_MEMORY = 1000.0


class Retries(NamedTuple):
    """What came of repeating the backward pass of a step."""

    number: jax.Array  # i32[], how many passes came before the last one
    scaling: Any  # the scale state to go on with


def start_state(scaling: Any, inner_state: Any) -> LossScaledState:
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
    verdict: Verdict,
    grads_finite: jax.Array,
    is_spike: jax.Array | None,
    scaling: Any,
    retries: Retries | None,
) -> LossScaledState:
    """Counts one more step, after which the scale state is `scaling`.

    The verdict is that on the last pass. `grads_finite` also covers the updates, if checked.
    """
    finite = grads_finite & verdict.loss_finite
    state = state._replace(
        backoff_count=_count_backoffs(state, grads_finite, scaling, retries)
    )
    if retries is not None:
        state = _count_retries(state, verdict, retries)
    applied = finite
    if is_spike is not None:
        applied = finite & ~is_spike
    return state._replace(
        step_applied=applied,
        notfinite_count=jnp.where(finite, 0, increment(state.notfinite_count)),
        total_notfinite=increment_if(~finite, state.total_notfinite),
        total_notfinite_loss=increment_if(
            ~verdict.loss_finite, state.total_notfinite_loss
        ),
        row_notfinite_loss=jnp.where(
            finite, 0, increment_if(~verdict.loss_finite, state.row_notfinite_loss)
        ),
        total_steps=increment(state.total_steps),
    )


def _count_retries(
    state: LossScaledState, verdict: Verdict, retries: Retries
) -> LossScaledState:
    total = state.total_retries
    room = jnp.iinfo(total.dtype).max - total
    exhausted = (retries.number > 0) & ~verdict.grads_finite
    # In the first steps a row of them counts as one: the scale comes down from its start.
    exhausted &= state.step_applied | (state.total_steps >= _FIRST_STEPS)
    return state._replace(
        total_retries=total + jnp.minimum(retries.number, room),
        total_exhausted=increment_if(exhausted, state.total_exhausted),
    )


def _count_backoffs(
    state: LossScaledState,
    grads_finite: jax.Array,
    scaling: Any,
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


def move_skip_rate(
    state: LossScaledState,
    policy: LossScale,
    before: Any,
    after: Any,
    num_lost: jax.Array,
    step_share: Any,
    *,
    has_retries: bool,
) -> jax.Array:
    """Returns `skip_rate` after one more step, in which the scale may have moved.

    It is the plain mean of the first thousand steps of the optimizer. From then on each further
    one weighs a thousandth.

    A growth that goes too far costs an overflow, and the scale falls back. A run in which that is
    all that happens is healthy, however often its policy grows: each growth takes back as many
    skipped steps as it takes to undo it. So only skips at a scale that did not grow add up.

    Args:
      state: that before the step.
      policy: how the scale moves.
      before: the scale state of this step.
      after: that of the next step.
      num_lost: how many steps were lost, an `f32[]`: 1 if this one was skipped, otherwise 0; with
        micro-batches, maybe more.
      step_share: which share of a step of the optimizer this was, an `f32[]` or a number.
      has_retries: whether overflows are repeated, so that none of them costs a step.
    """
    net = num_lost
    # A policy that follows the gradients also grows after it fell without an overflow.
    if not (policy.needs_largest or has_retries):
        grows = after.loss_scale > before.loss_scale
        ratio = jnp.where(grows, after.loss_scale / before.loss_scale, 1.0)
        # From 0, NaN and inf, as another scaler may have left them, a scale does not grow.
        binades = jnp.where(jnp.isfinite(ratio), jnp.log2(ratio), 0.0)
        net -= binades * _skips_per_binade(policy)
    rate = state.skip_rate
    num_steps = state.total_steps.astype(jnp.float32) + 1
    weight = jnp.maximum(step_share / _MEMORY, 1 / num_steps)
    return jnp.clip(rate + weight * (net - rate), 0.0, 1.0)


def _skips_per_binade(policy: LossScale) -> float:
    """Returns how many skipped steps it takes a policy to halve its scale."""
    # a name may mean something else in others
    if not isinstance(policy, CheckedLossScale):
        return 1.0
    backoff_factor = getattr(policy, "backoff_factor", 0.5)
    hysteresis = getattr(policy, "hysteresis", 1)
    return hysteresis / -math.log2(backoff_factor)

"""The policy that tolerates some rate of steps that are not finite, as fairseq's does."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._trees.checks import finite_number, limited
from .._trees.numbers import increment
from .base import CheckedLossScale, new_state

_check_rate = limited(
    finite_number,
    lambda rate: 0 <= rate <= 1,
    "lie between 0 and 1",
    " It is the rate of non-finite steps at which the scale backs off: above 1 it never would.",
)


class ToleranceState(NamedTuple):
    """The state that a `ToleranceLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      growth_tracker: `i32[]`, finite steps in a row that count towards growth.
      steps_since_change: `i32[]`, steps since the scale last moved.
      overflows_since_backoff: `i32[]`, non-finite steps since it last backed off.
    """

    # not a field: it tells this type from other named tuples
    is_loss_scale_state = True

    loss_scale: jax.Array
    growth_tracker: jax.Array
    steps_since_change: jax.Array
    overflows_since_backoff: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToleranceLossScale(CheckedLossScale):
    """A loss scale that backs off when a given rate of steps was not finite.

    With `s` the scale:

    - after `growth_interval` finite steps in a row, `s <- min(s * growth_factor, max_scale)`;
    - on a non-finite step, if `overflows / steps >= tolerance`,
      `s <- max(s * backoff_factor, min_scale)`, where `steps` is the number of steps since the
      scale last moved, and `overflows` the number of non-finite ones since it last backed off;
    - a non-finite step clears the growth tracker, whether it backs off or not.

    The scale is never 0, inf or NaN.

    Args:
      init_scale: the scale of the first step.
      growth_factor: what the scale is multiplied by when it grows, above 1.
      backoff_factor: what it is multiplied by when it backs off, between 0 and 1.
      growth_interval: how many finite steps in a row it takes to grow.
      tolerance: the rate, from 0 (each non-finite step backs off) to 1.
      min_scale: a backoff ends at least here. `init_scale` may lie below.
      max_scale: a growth ends at most here.

    References:
      fairseq's `DynamicLossScaler`.
    """

    init_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    tolerance: float = 0.0
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    _state_type = ToleranceState
    _ascending = (("init_scale", "max_scale"), ("min_scale", "max_scale"))
    _checks = CheckedLossScale._checks | {"tolerance": _check_rate}

    def init(self) -> Any:
        """Returns the initial `ToleranceState`."""
        return new_state(ToleranceState, loss_scale=self.init_scale)

    def _after_finite(self, state: ToleranceState) -> ToleranceState:
        steps = increment(state.steps_since_change)
        streak = increment(state.growth_tracker)
        grows = streak >= self.growth_interval
        grown = self._grow(state.loss_scale, self.growth_factor)
        return state._replace(
            loss_scale=jnp.where(grows, grown, state.loss_scale),
            growth_tracker=jnp.where(grows, 0, streak),
            steps_since_change=jnp.where(grows, 0, steps),
        )

    def _after_nonfinite(self, state: ToleranceState) -> ToleranceState:
        steps = increment(state.steps_since_change)
        overflows = increment(state.overflows_since_backoff)
        rate = overflows.astype(jnp.float32) / steps.astype(jnp.float32)
        backs_off = rate >= self.tolerance
        lower = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        return ToleranceState(
            loss_scale=jnp.where(backs_off, lower, state.loss_scale),
            growth_tracker=jnp.zeros_like(state.growth_tracker),
            steps_since_change=jnp.where(backs_off, 0, steps),
            overflows_since_backoff=jnp.where(backs_off, 0, overflows),
        )

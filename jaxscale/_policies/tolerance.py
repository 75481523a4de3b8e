"""The policy that backs off when the rate of overflows is too high.

It is the rule of fairseq, public as `jaxscale.presets.ToleranceLossScale`. It has a state
of its own, as a rate takes two more counters than `DynamicLossScale` has.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._trees.checks import finite_number
from .base import CheckedLossScale, new_state


class ToleranceState(NamedTuple):
    """What a `ToleranceLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, what the next loss is scaled by.
      growth_tracker: `i32[]`, finite steps in a row that count towards growth.
      steps_since_change: `i32[]`, steps since the scale last moved.
      overflows_since_backoff: `i32[]`, non-finite steps since it last backed off.
    """

    is_loss_scale_state = True  # not a field: it tells this type from other named tuples

    loss_scale: jax.Array  # f32[]
    growth_tracker: jax.Array  # i32[]
    steps_since_change: jax.Array  # i32[]
    overflows_since_backoff: jax.Array  # i32[]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToleranceLossScale(CheckedLossScale):
    """A loss scale that backs off when a given rate of steps was not finite.

    With `s` the scale:

    - after `growth_interval` finite steps in a row,
      `s <- min(s * growth_factor, max_scale)`;
    - on a non-finite step, if `overflows / steps >= tolerance`,
      `s <- max(s * backoff_factor, min_scale)`, where `steps` is the number of steps
      since the scale last moved, and `overflows` the number of non-finite ones since it
      last backed off;
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

    Raises:
      ValueError: if an argument is out of range.
      TypeError: if an argument is not a number, or `growth_interval` not an integer.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import presets
      >>> policy = presets.ToleranceLossScale(init_scale=8.0, tolerance=0.5)
      >>> state = policy.init()
      >>> for grads_finite in [True, True, False, False]:
      ...     state = policy.adjust(state, jnp.array(grads_finite))
      ...     print(state.loss_scale)
      8.0
      8.0
      8.0
      4.0

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
    _checks = CheckedLossScale._checks | {"tolerance": finite_number}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tolerance <= 1:
            raise ValueError(
                f"`{type(self).__name__}(tolerance=...)` must lie between 0 and 1, got "
                f"{self.tolerance}. It is the rate of non-finite steps at which the scale backs "
                "off: above 1 it never would."
            )

    def _ascending(self) -> list[tuple[str, ...]]:
        return [("init_scale", "max_scale"), ("min_scale", "max_scale")]

    def init(self) -> Any:
        """Returns the initial `ToleranceState`."""
        return new_state(ToleranceState, self.init_scale, 0, 0, 0)

    def _after_finite(self, state: ToleranceState) -> ToleranceState:
        steps = jnp.asarray(optax.safe_increment(state.steps_since_change))
        streak = jnp.asarray(optax.safe_increment(state.growth_tracker))
        grow = streak >= self.growth_interval
        grown = jnp.minimum(state.loss_scale * self.growth_factor, self.max_scale)
        grown = jnp.maximum(state.loss_scale, grown)
        return ToleranceState(
            loss_scale=jnp.where(grow, grown, state.loss_scale),
            growth_tracker=jnp.where(grow, 0, streak),
            steps_since_change=jnp.where(grow, 0, steps),
            overflows_since_backoff=state.overflows_since_backoff,
        )

    def _after_nonfinite(self, state: ToleranceState) -> ToleranceState:
        steps = jnp.asarray(optax.safe_increment(state.steps_since_change))
        overflows = jnp.asarray(optax.safe_increment(state.overflows_since_backoff))
        rate = overflows.astype(jnp.float32) / steps.astype(jnp.float32)
        back_off = rate >= self.tolerance
        lower = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        return ToleranceState(
            loss_scale=jnp.where(back_off, lower, state.loss_scale),
            growth_tracker=jnp.zeros_like(state.growth_tracker),
            steps_since_change=jnp.where(back_off, 0, steps),
            overflows_since_backoff=jnp.where(back_off, 0, overflows),
        )

"""The default policy: a scale that grows after finite steps and backs off on overflows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._state.scale import LossScaleState
from .._trees.arguments import int32
from .._trees.pytrees import ScaleState
from .base import CheckedLossScale, new_state
from .factors import check_backoff_factor, check_growth_factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale(CheckedLossScale):
    """A loss scale that grows while gradients are finite, and backs off when they are not.

    With `s` the scale:

    - after `growth_interval` finite steps in a row, `s <- min(s * growth_factor, max_scale)`;
    - on the `hysteresis`-th non-finite step since the last growth or the start, and on
      each one after it, `s <- max(s * backoff_factor, min_scale)`;
    - a non-finite step clears the growth tracker.

    A restored scale outside of the bounds is brought to the nearest one before it moves, and one
    of 0, inf or NaN to `init_scale`. The growth tracker is compared with `>=`, so if a restored
    tracker is beyond the interval, the scale grows at once.

    Args:
      init_scale: the scale of the first step, by default the largest power of two in float16.
      growth_factor: the scale is multiplied by this when it grows, above 1.
      backoff_factor: the scale is multiplied by this when it backs off, between 0 and 1.
      growth_interval: how many finite steps in a row it takes to grow.
      hysteresis: how many non-finite steps it takes to back off.
      min_scale: the scale never backs off below this.
      max_scale: the scale never grows above this.

    Keep scales and factors powers of two, as the defaults are: then scaling is exact.

    Raises:
      ValueError: if an argument is out of range, or `init_scale` is not between `min_scale` and
        `max_scale`.
      TypeError: if an argument is not a number, or a count not an integer.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> loss_scale = jaxscale.DynamicLossScale(init_scale=4.0, growth_interval=2)
      >>> state = loss_scale.init()
      >>> for grads_finite in [True, True, False]:
      ...     state = loss_scale.adjust(state, jnp.array(grads_finite))
      ...     print(state.loss_scale)
      4.0
      8.0
      4.0

    References:
      The rule is that of PyTorch's `GradScaler`, with the bounds of NVIDIA's Apex and the
      hysteresis of Megatron-LM, refilled by growth only.
    """

    init_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    _checks = CheckedLossScale._checks | {
        "growth_factor": check_growth_factor,
        "backoff_factor": check_backoff_factor,
        "growth_interval": int32,
        "hysteresis": int32,
    }

    def init(self) -> LossScaleState:
        """Returns the initial state."""
        return new_state(
            LossScaleState,
            loss_scale=self.init_scale,
            hysteresis_tracker=self.hysteresis,
        )

    def _move(self, state: ScaleState, grads_finite: jax.Array) -> Any:
        streak: Any = optax.safe_increment(state.growth_tracker)
        grows = grads_finite & (streak >= self.growth_interval)
        left = jnp.maximum(state.hysteresis_tracker, 1) - 1
        backs_off = ~grads_finite & (left == 0)
        scale = state.loss_scale
        lower = jnp.where(backs_off, self._back_off(scale), scale)
        left = jnp.where(grads_finite, state.hysteresis_tracker, left)
        return LossScaleState(
            loss_scale=jnp.where(grows, self._grow(scale), lower),
            growth_tracker=jnp.where(grads_finite & ~grows, streak, 0),
            hysteresis_tracker=jnp.where(grows, self.hysteresis, left),
        )

    def _grow(self, scale: jax.Array) -> jax.Array:
        return jnp.minimum(scale * self.growth_factor, self.max_scale)

    def _back_off(self, scale: jax.Array) -> jax.Array:
        return jnp.maximum(scale * self.backoff_factor, self.min_scale)

"""The default policy: a scale that grows after finite steps and backs off on overflows.

`DynamicLossScale.adjust` computes the state after a finite step and the state after a
non-finite one, and selects: both are a few scalars. Each is a method of its own, so that
`jaxscale.presets.PresetLossScale` can state what other libraries do differently.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._checks import backoff_factor, growth_factor, int32, normal_float32, scalar_bool
from .._state import LossScaleState, healed, init_state, policy_state
from .._tree import tree_where
from .base import LossScale


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite, and backs off when they are not.

    With `s` the scale:

    - after `growth_interval` finite steps in a row,
      `s <- min(s * growth_factor, max_scale)`;
    - on the `hysteresis`-th non-finite step since the last growth or the start, and on
      each one after it, `s <- max(s * backoff_factor, min_scale)`;
    - a non-finite step clears the growth tracker.

    A growth never lowers the scale and a backoff never raises it, even if a restored
    scale lies outside of the bounds. The scale is never 0, inf or NaN. The growth tracker
    is compared with `>=`, so one restored beyond the interval grows at once.

    Args:
      init_scale: the scale of the first step. The default, 2**15, is the largest power of
        two that float16 holds.
      growth_factor: the scale is multiplied by this when it grows, above 1.
      backoff_factor: the scale is multiplied by this when it backs off, between 0 and 1.
      growth_interval: how many finite steps in a row it takes to grow.
      hysteresis: how many non-finite steps it takes to back off.
      min_scale: the scale never backs off below this.
      max_scale: the scale never grows above this.

    Keep the three scales and both factors powers of two, as the defaults are: scaling and
    unscaling are then exact.

    Raises:
      ValueError: if an argument is out of range, or not
        `min_scale <= init_scale <= max_scale`.
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
      The rule is that of PyTorch's `GradScaler`; bounds as in NVIDIA's Apex;
      hysteresis as in Megatron-LM, refilled by growth only.
    """

    init_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        self._check(normal_float32, "init_scale", "min_scale", "max_scale")
        self._check(growth_factor, "growth_factor")
        self._check(backoff_factor, "backoff_factor")
        self._check(int32, "growth_interval", "hysteresis")
        if not self._in_bounds():
            raise ValueError(
                f"`{type(self).__name__}` needs min_scale <= init_scale <= max_scale, got "
                f"{self.min_scale}, {self.init_scale} and {self.max_scale}."
            )

    def _check(self, checked: Callable[..., Any], *names: str, **kwargs: Any) -> None:
        """Replaces arguments by what a check returns, which raises if one is out of range."""
        for name in names:
            value = checked(type(self).__name__, name, getattr(self, name), **kwargs)
            object.__setattr__(self, name, value)

    def _in_bounds(self) -> bool:
        return self.min_scale <= self.init_scale <= self.max_scale

    def init(self) -> LossScaleState:
        """Returns the initial state."""
        return init_state(self.init_scale, self.hysteresis)

    def adjust(
        self,
        state: LossScaleState,
        grads_finite: jax.Array,
        *,
        grads: Any = None,
        axis_name: Any = None,
    ) -> LossScaleState:
        """Returns the state of the next step, given whether the gradients were finite.

        Args:
          state: the state of this step.
          grads_finite: a `bool[]`, whether the gradients of this step were finite.
          grads: ignored.
          axis_name: ignored.

        Returns:
          The next state, with the shapes and dtypes of `state`.

        Raises:
          TypeError: if `grads_finite` is not a scalar bool, or `state` is the state of
            another policy.
          ValueError: if `state` is the state of a population: call this under `jax.vmap`.
        """
        del grads, axis_name
        call = f"{type(self).__name__}.adjust"
        grads_finite = scalar_bool(call, "grads_finite", grads_finite)
        state = policy_state(call, state, LossScaleState)
        state = state._replace(loss_scale=healed(state.loss_scale, self.init_scale))
        return tree_where(grads_finite, self._after_finite(state), self._after_nonfinite(state))

    def _after_finite(self, state: LossScaleState) -> LossScaleState:
        streak = jnp.asarray(optax.safe_increment(state.growth_tracker))
        grow = streak >= self.growth_interval
        return LossScaleState(
            loss_scale=jnp.where(grow, self._grown(state.loss_scale), state.loss_scale),
            growth_tracker=jnp.where(grow, 0, streak),
            hysteresis_tracker=jnp.where(grow, self.hysteresis, state.hysteresis_tracker),
        )

    def _after_nonfinite(self, state: LossScaleState) -> LossScaleState:
        left = jnp.maximum(state.hysteresis_tracker, 1) - 1
        return LossScaleState(
            loss_scale=jnp.where(left == 0, self._lowered(state.loss_scale), state.loss_scale),
            growth_tracker=jnp.zeros_like(state.growth_tracker),
            hysteresis_tracker=left,
        )

    def _grown(self, scale: jax.Array) -> jax.Array:
        grown = jnp.minimum(scale * self.growth_factor, self.max_scale)
        return jnp.maximum(scale, grown)  # a restored scale may lie above the maximum

    def _lowered(self, scale: jax.Array) -> jax.Array:
        lowered = jnp.maximum(scale * self.backoff_factor, self.min_scale)
        return jnp.minimum(scale, lowered)  # a restored scale may lie below the minimum

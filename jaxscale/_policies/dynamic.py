"""The policy that moves."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._checks import backoff_factor, growth_factor, int32, normal_float32, one_of, scalar_bool
from .._state import LossScaleState, healed, init_state, policy_state
from .._tree import tree_where
from .base import LossScale


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite, and backs off when they are not.

    With `s` the scale:

    - after `growth_interval` finite steps in a row,
      `s <- min(s * growth_factor, max_scale)`;
    - on the `hysteresis`-th non-finite step since the last growth, and on each one
      after it, `s <- max(s * backoff_factor, min_scale)`;
    - a non-finite step clears the growth tracker.

    A growth never lowers the scale and a backoff never raises it, also if a restored
    scale lies outside of the bounds. The scale is never 0, inf or NaN. As the trackers
    are compared with `>=`, one restored beyond the interval grows at once.

    The last five arguments change one thing each, for `jaxscale.presets`, where
    every loss scaler there is has its own.

    Args:
      init_scale: the scale of the first step. The default, 2**15, is the largest power of
        two that float16 holds.
      growth_factor: what the scale is multiplied by when it grows, above 1.
      backoff_factor: what it is multiplied by when it backs off, between 0 and 1.
      growth_interval: how many finite steps in a row it takes to grow.
      hysteresis: how many non-finite steps it takes to back off.
      min_scale: the scale never backs off below this.
      max_scale: the scale never grows above this.
      growth_delay: how many finite steps do not count towards growth, at the start and
        after each non-finite step: the tracker starts from minus this.
      refill_on_finite: whether each finite step, not only a growth, tolerates
        `hysteresis` non-finite steps anew, so that only those in a row back off.
      refill_on_backoff: whether a backoff does, so that each takes that many.
      clip_growth: whether a growth beyond `max_scale` ends there. Otherwise the scale
        stays, which keeps it a power of two below a bound that is none.
      clamp: when a scale outside of the bounds is brought back. `"never"`: it moves
        as said above. `"moves"`: a growth ends at most at `max_scale` and a backoff
        at least at `min_scale`, also if that lowers or raises it. `"steps"`: every
        step ends between the bounds. With the last two, `init_scale` may lie outside.

    Keep the three scales and both factors powers of two, as the defaults are: scaling and
    unscaling are then exact.

    Raises:
      ValueError: if an argument is out of range, or not
        `min_scale <= init_scale <= max_scale` (see `clamp`).
      TypeError: if an argument is no number, or a count no integer.

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
    growth_delay: int = 0
    refill_on_finite: bool = False
    refill_on_backoff: bool = False
    clip_growth: bool = True
    clamp: str = "never"

    def __post_init__(self) -> None:
        call = type(self).__name__

        def check(checked: Callable[..., Any], *names: str, **kwargs: Any) -> None:
            for name in names:
                value = checked(call, name, getattr(self, name), **kwargs)
                object.__setattr__(self, name, value)

        check(normal_float32, "init_scale", "min_scale", "max_scale")
        check(growth_factor, "growth_factor")
        check(backoff_factor, "backoff_factor")
        check(int32, "growth_interval", "hysteresis")
        check(int32, "growth_delay", least=0)
        switches = ("refill_on_finite", "refill_on_backoff", "clip_growth")
        check(one_of, *switches, choices=(False, True))
        check(one_of, "clamp", choices=("never", "moves", "steps"))
        inside = self.min_scale <= self.init_scale <= self.max_scale
        if not (inside or (self.clamp != "never" and self.min_scale <= self.max_scale)):
            raise ValueError(
                f"`{call}` needs min_scale <= init_scale <= max_scale, got "
                f"{self.min_scale}, {self.init_scale} and {self.max_scale}."
            )

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return init_state(self.init_scale, self.hysteresis, -self.growth_delay)

    def adjust(self, state: LossScaleState, grads_finite: jax.Array) -> LossScaleState:
        """Returns the state of the next step, for who has the verdict already.

        Args:
          state: the state of this step.
          grads_finite: a `bool[]`, whether the gradients of this step were finite.

        Returns:
          The next state, with the avals of `state`.

        Raises:
          TypeError: if `grads_finite` is not a scalar bool, or `state` another's.
          ValueError: if `state` is that of a population: call this under `jax.vmap`.
        """
        call = f"{type(self).__name__}.adjust"
        grads_finite = scalar_bool(call, "grads_finite", grads_finite)
        state = policy_state(call, state, LossScaleState)
        scale = healed(state.loss_scale, self.init_scale)

        streak = jnp.asarray(optax.safe_increment(state.growth_tracker))
        grow = streak >= self.growth_interval
        grown = jnp.minimum(scale * self.growth_factor, self.max_scale)
        if not self.clip_growth:
            grown = jnp.where(scale * self.growth_factor > self.max_scale, scale, grown)
        left = jnp.maximum(state.hysteresis_tracker, 1) - 1
        lower = jnp.maximum(scale * self.backoff_factor, self.min_scale)
        if self.clamp == "never":
            grown, lower = jnp.maximum(scale, grown), jnp.minimum(scale, lower)

        refill = grow | self.refill_on_finite
        after_finite = LossScaleState(
            loss_scale=jnp.where(grow, grown, scale),
            growth_tracker=jnp.where(grow, 0, streak),
            hysteresis_tracker=jnp.where(refill, self.hysteresis, state.hysteresis_tracker),
        )
        refill = (left == 0) & self.refill_on_backoff
        after_nonfinite = LossScaleState(
            loss_scale=jnp.where(left == 0, lower, scale),
            growth_tracker=jnp.full_like(state.growth_tracker, -self.growth_delay),
            hysteresis_tracker=jnp.where(refill, self.hysteresis, left),
        )
        after = tree_where(grads_finite, after_finite, after_nonfinite)
        if self.clamp == "steps":
            scale = jnp.clip(after.loss_scale, self.min_scale, self.max_scale)
            after = after._replace(loss_scale=scale)
        return after

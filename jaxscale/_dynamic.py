"""The policy that moves."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from ._checks import finite_number, normal_float32, positive_int32, scalar_bool
from ._loss_scale import LossScale
from ._state import LossScaleState, init_state
from ._tree import tree_where


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite, and backs off when they are not.

    With ``s`` the scale:

    - after ``growth_interval`` finite steps in a row,
      ``s <- min(s * growth_factor, max_scale)``;
    - on the ``hysteresis``-th non-finite step since the last growth, and on each one
      after it, ``s <- max(s * backoff_factor, min_scale)``;
    - a non-finite step clears the growth tracker.

    A growth never lowers the scale and a backoff never raises it, also if a restored
    scale lies outside of the bounds. The scale is never 0, inf or NaN. As the trackers
    are compared with ``>=``, one restored beyond the interval grows at once.

    Args:
      init_scale: the scale of the first step. The default, 2**15, is the largest power of
        two that float16 holds.
      growth_factor: what the scale is multiplied by when it grows, above 1.
      backoff_factor: what it is multiplied by when it backs off, between 0 and 1.
      growth_interval: how many finite steps in a row it takes to grow.
      hysteresis: how many non-finite steps it takes to back off.
      min_scale: the scale never backs off below this.
      max_scale: the scale never grows above this.

    Keep the three scales and both factors powers of two, as the defaults are: scaling and
    unscaling are then exact.

    Raises:
      ValueError: if an argument is out of range, or not
        ``min_scale <= init_scale <= max_scale``.
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
      The rule is that of PyTorch's ``GradScaler``; bounds as in NVIDIA's Apex;
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
        call = type(self).__name__
        for name in ("init_scale", "min_scale", "max_scale"):
            object.__setattr__(self, name, normal_float32(call, name, getattr(self, name)))
        for name in ("growth_factor", "backoff_factor"):
            object.__setattr__(self, name, finite_number(call, name, getattr(self, name)))
        for name in ("growth_interval", "hysteresis"):
            object.__setattr__(self, name, positive_int32(call, name, getattr(self, name)))
        if not self.growth_factor > 1:
            raise ValueError(
                f"`{call}(growth_factor=...)` must be above 1, got {self.growth_factor}. It "
                "multiplies the scale: pass 2.0 to double it, or use `FixedLossScale` for "
                "a scale that does not grow."
            )
        if not 0 < self.backoff_factor < 1:
            raise ValueError(
                f"`{call}(backoff_factor=...)` must lie between 0 and 1, got "
                f"{self.backoff_factor}. It multiplies the scale: pass 0.5 to halve it."
            )
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"`{call}` needs min_scale <= init_scale <= max_scale, got "
                f"{self.min_scale}, {self.init_scale} and {self.max_scale}."
            )

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return init_state(self.init_scale, self.hysteresis)

    def adjust(self, state: LossScaleState, grads_finite: jax.Array) -> LossScaleState:
        """Returns the state of the next step, for who has the verdict already.

        Args:
          state: the state of this step.
          grads_finite: a ``bool[]``, whether the gradients of this step were finite.

        Returns:
          The next state, with the avals of ``state``.

        Raises:
          TypeError: if ``grads_finite`` is not a scalar bool.
        """
        call = f"{type(self).__name__}.adjust"
        grads_finite = scalar_bool(call, "grads_finite", grads_finite)
        # A state may come from elsewhere: a checkpoint of a scaler that had run away.
        usable = jnp.isfinite(state.loss_scale) & (state.loss_scale > 0)
        scale = jnp.where(usable, state.loss_scale, self.init_scale).astype(jnp.float32)

        streak = jnp.asarray(optax.safe_increment(state.growth_tracker))
        grow = streak >= self.growth_interval
        grown = jnp.maximum(scale, jnp.minimum(scale * self.growth_factor, self.max_scale))
        after_finite = LossScaleState(
            loss_scale=jnp.where(grow, grown, scale),
            growth_tracker=jnp.where(grow, 0, streak),
            hysteresis_tracker=jnp.where(grow, self.hysteresis, state.hysteresis_tracker),
        )

        left = jnp.maximum(state.hysteresis_tracker, 1) - 1
        lower = jnp.minimum(scale, jnp.maximum(scale * self.backoff_factor, self.min_scale))
        after_nonfinite = LossScaleState(
            loss_scale=jnp.where(left == 0, lower, scale),
            growth_tracker=jnp.zeros_like(state.growth_tracker),
            hysteresis_tracker=left,
        )

        return tree_where(grads_finite, after_finite, after_nonfinite)

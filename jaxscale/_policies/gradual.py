"""The policy whose scale grows a little in every step.

It is the rule of Chainer, public as `jaxscale.presets.GradualLossScale`. It has a state of its own,
as it remembers whether anything has overflowed yet, and when it last backed off.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._trees.checks import int32
from .base import CheckedLossScale, new_state


class GradualState(NamedTuple):
    """The state that a `GradualLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      steps_since_backoff: `i32[]`, steps since the scale last backed off. It starts at
        `cooldown`.
      overflows: `i32[]`, non-finite steps since the start.
    """

    is_loss_scale_state = True  # not a field: it tells this type from other named tuples

    loss_scale: jax.Array  # f32[]
    steps_since_backoff: jax.Array  # i32[]
    overflows: jax.Array  # i32[]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradualLossScale(CheckedLossScale):
    """A loss scale that grows a little in every finite step.

    With `s` the scale:

    - in a finite step, `s <- min(s * growth_factor, max_scale)`; before the first non-finite
      step, `search_factor` takes the place of `growth_factor`;
    - in a non-finite step, `s <- max(s * backoff_factor, min_scale)`, unless the last backoff
      is less than `cooldown` steps ago.

    The scale is never 0, inf or NaN. It is not a power of two: scaling and unscaling round.

    Args:
      init_scale: the scale of the first step.
      growth_factor: what the scale is multiplied by in a finite step, above 1.
      backoff_factor: what it is multiplied by in a non-finite step, between 0 and 1.
      search_factor: what it is multiplied by in a finite step before the first non-finite
        one, above 1.
      cooldown: for how many steps after a backoff the scale does not back off again.
      min_scale: a backoff ends at least here.
      max_scale: a growth ends at most here.

    Raises:
      ValueError: if an argument is out of range, or not
        `min_scale <= init_scale <= max_scale`.
      TypeError: if an argument is not a number, or `cooldown` not an integer.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import presets
      >>> policy = presets.GradualLossScale(init_scale=8.0, growth_factor=1.5, search_factor=4.0)
      >>> state = policy.init()
      >>> for grads_finite in [True, False, True]:
      ...     state = policy.adjust(state, jnp.array(grads_finite))
      ...     print(state.loss_scale)
      32.0
      16.0
      24.0

    References:
      Chainer's `GradientMethod.loss_scaling`. The cooldown is from Ramesh et al., Zero-Shot
      Text-to-Image Generation, 2021, appendix D, https://arxiv.org/abs/2102.12092, who have
      such a scale for each residual block.
    """

    init_scale: float = 1.0
    growth_factor: float = 2.0 ** (1 / 1000)
    backoff_factor: float = 0.5
    search_factor: float = 2.0
    cooldown: int = 0
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    _state_type = GradualState
    _checks = CheckedLossScale._checks | {
        "search_factor": CheckedLossScale._checks["growth_factor"],
        "cooldown": functools.partial(int32, least=0),
    }

    def init(self) -> Any:
        """Returns the initial `GradualState`."""
        return new_state(GradualState, self.init_scale, self.cooldown, 0)

    def _after_finite(self, state: GradualState) -> GradualState:
        factor = jnp.where(state.overflows > 0, self.growth_factor, self.search_factor)
        grown = jnp.minimum(state.loss_scale * factor.astype(jnp.float32), self.max_scale)
        return GradualState(
            loss_scale=jnp.maximum(state.loss_scale, grown),
            steps_since_backoff=jnp.asarray(optax.safe_increment(state.steps_since_backoff)),
            overflows=state.overflows,
        )

    def _after_nonfinite(self, state: GradualState) -> GradualState:
        steps = jnp.asarray(optax.safe_increment(state.steps_since_backoff))
        backs_off = steps >= self.cooldown
        lower = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        lower = jnp.minimum(state.loss_scale, lower)
        return GradualState(
            loss_scale=jnp.where(backs_off, lower, state.loss_scale),
            steps_since_backoff=jnp.where(backs_off, 0, steps),
            overflows=jnp.asarray(optax.safe_increment(state.overflows)),
        )

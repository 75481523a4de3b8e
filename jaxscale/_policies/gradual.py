"""The policy whose scale grows a little in every finite step, as Chainer's does."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._trees.checks import int32
from .._trees.numbers import increment
from .base import CheckedLossScale, new_state
from .checks import check_growth_factor


class GradualState(NamedTuple):
    """The state that a `GradualLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      steps_since_backoff: `i32[]`, steps since the last backoff. It starts at `cooldown`.
      overflows: `i32[]`, non-finite steps since the start.
    """

    # not a field: it tells this type from other named tuples
    is_loss_scale_state = True

    loss_scale: jax.Array
    steps_since_backoff: jax.Array
    overflows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradualLossScale(CheckedLossScale):
    """A loss scale that grows a little in every finite step.

    With `s` the scale:

    - in a finite step, `s <- min(s * growth_factor, max_scale)`; before the first non-finite step,
      `search_factor` takes the place of `growth_factor`;
    - in a non-finite step, `s <- max(s * backoff_factor, min_scale)`, unless the last backoff was
      less than `cooldown` steps ago.

    The scale is never 0, inf or NaN. It is not a power of two: scaling and unscaling round.

    Args:
      init_scale: the scale of the first step, from `min_scale` to `max_scale`.
      growth_factor: what the scale is multiplied by in a finite step, above 1.
      backoff_factor: what it is multiplied by in a non-finite step, between 0 and 1.
      search_factor: the growth factor before the first non-finite step, above 1.
      cooldown: for how many steps after a backoff the scale does not back off again.
      min_scale: a backoff ends at least here.
      max_scale: a growth ends at most here.

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
        "search_factor": check_growth_factor,
        "cooldown": functools.partial(int32, least=0),
    }

    def init(self) -> Any:
        """Returns the initial `GradualState`."""
        return new_state(
            GradualState,
            loss_scale=self.init_scale,
            steps_since_backoff=self.cooldown,
        )

    def _after_finite(self, state: GradualState) -> GradualState:
        factor = jnp.where(state.overflows > 0, self.growth_factor, self.search_factor)
        return state._replace(
            loss_scale=self._grow(state.loss_scale, factor.astype(jnp.float32)),
            steps_since_backoff=increment(state.steps_since_backoff),
        )

    def _after_nonfinite(self, state: GradualState) -> GradualState:
        steps = increment(state.steps_since_backoff)
        backs_off = steps >= self.cooldown
        lower = self._back_off(state.loss_scale)
        return GradualState(
            loss_scale=jnp.where(backs_off, lower, state.loss_scale),
            steps_since_backoff=jnp.where(backs_off, 0, steps),
            overflows=increment(state.overflows),
        )

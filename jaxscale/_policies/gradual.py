"""The policy whose scale grows a little in every step.

It is the rule of Chainer and of DALL-E, public as `jaxscale.presets.GradualLossScale`. It has a
state of its own, as it remembers whether anything has overflowed yet, and when it last backed off.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._checks import backoff_factor, growth_factor, int32, normal_float32, scalar_bool
from .._state import healed, policy_state
from .._tree import tree_where
from .base import LossScale


class GradualState(NamedTuple):
    """The state that a `GradualLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      steps_since_backoff: `i32[]`, steps since the scale last backed off. It starts at
        `cooldown`.
      overflows: `i32[]`, non-finite steps since the start.

    Example:
      >>> from jaxscale import presets
      >>> presets.chainer().init().overflows
      Array(0, dtype=int32)
    """

    is_loss_scale_state = True  # not a field: it tells this type from other named tuples

    loss_scale: jax.Array  # f32[]
    steps_since_backoff: jax.Array  # i32[]
    overflows: jax.Array  # i32[]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradualLossScale(LossScale):
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
      Chainer's `GradientMethod.loss_scaling`; Ramesh et al., Zero-Shot Text-to-Image
      Generation, 2021, appendix D, https://arxiv.org/abs/2102.12092.
    """

    init_scale: float = 1.0
    growth_factor: float = 2.0 ** (1 / 1000)
    backoff_factor: float = 0.5
    search_factor: float = 2.0
    cooldown: int = 0
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        call = type(self).__name__
        checks = {
            "init_scale": normal_float32,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "search_factor": growth_factor,
            "min_scale": normal_float32,
            "max_scale": normal_float32,
        }
        for name, check in checks.items():
            object.__setattr__(self, name, check(call, name, getattr(self, name)))
        object.__setattr__(self, "cooldown", int32(call, "cooldown", self.cooldown, least=0))
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"`{call}` needs min_scale <= init_scale <= max_scale, got "
                f"{self.min_scale}, {self.init_scale} and {self.max_scale}."
            )

    def init(self) -> Any:
        """Returns the initial `GradualState`."""
        return GradualState(
            loss_scale=jnp.array(self.init_scale, jnp.float32),
            steps_since_backoff=jnp.array(self.cooldown, jnp.int32),
            overflows=jnp.array(0, jnp.int32),
        )

    def adjust(
        self, state: Any, grads_finite: jax.Array, *, grads: Any = None, axis_name: Any = None
    ) -> Any:
        """Returns the state of the next step, given whether the gradients were finite.

        Args:
          state: the `GradualState` of this step.
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
        state = policy_state(call, state, GradualState)
        scale = healed(state.loss_scale, self.init_scale)
        steps = jnp.asarray(optax.safe_increment(state.steps_since_backoff))
        factor = jnp.where(state.overflows > 0, self.growth_factor, self.search_factor)
        grown = jnp.minimum(scale * factor.astype(jnp.float32), self.max_scale)
        after_finite = GradualState(jnp.maximum(scale, grown), steps, state.overflows)
        backs_off = steps >= self.cooldown
        lower = jnp.minimum(scale, jnp.maximum(scale * self.backoff_factor, self.min_scale))
        after_nonfinite = GradualState(
            loss_scale=jnp.where(backs_off, lower, scale),
            steps_since_backoff=jnp.where(backs_off, 0, steps),
            overflows=jnp.asarray(optax.safe_increment(state.overflows)),
        )
        return tree_where(grads_finite, after_finite, after_nonfinite)

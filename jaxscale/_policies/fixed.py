"""The policies whose scale never moves: a fixed one, and none at all."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import AxisNames
from .._state.scale import LossScaleState, UnitLossScaleState
from .._trees.arguments import check_fields, limited, normal_float32
from .._trees.pytrees import Grads, ScaleState
from .._trees.selection import scalar_bool
from .base import LossScale, check_policy_state, new_state

_check_scale = limited(
    normal_float32,
    lambda scale: scale >= 1,
    "be at least 1",
    " A smaller one makes underflow worse; scale the loss itself if it is huge.",
)


@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """A loss scale that stays the same.

    Its ideal value depends on the model. If it is too small, gradients underflow; if it is too
    large, they overflow in every step. A power of two keeps scaling exact. `update` always says
    that the gradients should be applied, as TensorFlow's `FixedLossScale` does, because this scale
    cannot react to an overflow. Inside `jaxscale.loss_scaled` a non-finite step is still skipped.
    A saved state may hold another number: the one here wins, from the first step of
    `jaxscale.train_step` on, and elsewhere from the second.

    Args:
      loss_scale: the scale, at least 1.

    Raises:
      ValueError: if `loss_scale` is below 1, NaN, inf or a bool.
      TypeError: if it is not a Python or NumPy scalar.

    Example:
      >>> import jaxscale
      >>> jaxscale.FixedLossScale(128).init().loss_scale
      Array(128., dtype=float32)
    """

    loss_scale: float

    def __post_init__(self) -> None:
        check_fields(self, {"loss_scale": _check_scale})

    def init(self) -> LossScaleState:
        """Returns the state of every step."""
        return new_state(LossScaleState, loss_scale=self.loss_scale)

    def adjust(
        self,
        state: LossScaleState,
        grads_finite: jax.Array,
        largest: jax.Array | None = None,
    ) -> LossScaleState:
        """Returns `state` with this scale."""
        call = f"{type(self).__name__}.adjust"
        scalar_bool(call, "grads_finite", grads_finite)
        return self.clip_to_bounds(check_policy_state(call, state, LossScaleState))

    def update(
        self, state: LossScaleState, grads: Grads, *, axis_name: AxisNames = None
    ) -> tuple[LossScaleState, jax.Array]:
        """Returns `state` with this scale, and `True`: always apply the gradients."""
        state = check_policy_state(
            f"{type(self).__name__}.update", state, LossScaleState, grads
        )
        return self.clip_to_bounds(state), jnp.array(True)

    def clip_to_bounds(self, state: ScaleState) -> Any:
        """Returns a state with this scale in the place of another, as a resumed run may have.

        A subclass with an `adjust` of its own moves the scale, so it keeps what the state has.
        """
        if type(self).adjust is not FixedLossScale.adjust:
            return state
        return state._replace(loss_scale=jnp.float32(self.loss_scale))


@dataclasses.dataclass(frozen=True)
class NoOpLossScale(LossScale):
    """A loss scale of 1, for bfloat16 and float32: it switches scaling off.

    It adds no operation to the program: the type of its state says that the scale is 1.

    Example:
      >>> import jaxscale
      >>> jaxscale.NoOpLossScale().init().loss_scale
      Array(1., dtype=float32)
    """

    def init(self) -> LossScaleState:
        """Returns the state of every step."""
        return new_state(UnitLossScaleState, loss_scale=1.0)

    adjust = FixedLossScale.adjust
    update = FixedLossScale.update

"""The policy that follows the statistics of the largest gradients, as OpenSeq2Seq's does."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._trees.checks import finite_number, limited
from .._trees.selection import tree_where
from .base import CheckedLossScale, new_state

# The scaled gradients are to stay below 2**16, where the range of float16 ends.
_TARGET = 16.0

_check_share = limited(
    finite_number,
    lambda beta: 0 <= beta < 1,
    "be at least 0 and below 1",
    " It is how much a moving average keeps in a step: at 1 it would learn nothing.",
)


class LogMaxState(NamedTuple):
    """The state that a `LogMaxLossScale` carries from one step to the next.

    With `x` the binary logarithm of the largest magnitude among a step's gradients:

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      x_hat: `f32[]`, the fast moving average of `x`, starting from 0.
      slow_x_hat: `f32[]`, the slow one.
      xsquared_hat: `f32[]`, the slow moving average of the square of `x`.
      b1_correction: `f32[]`, how much of `x_hat` is still the 0 that it started from.
      b2_correction: `f32[]`, the same of the slow averages.
    """

    # not a field: it tells this type from other named tuples
    is_loss_scale_state = True

    loss_scale: jax.Array
    x_hat: jax.Array
    slow_x_hat: jax.Array
    xsquared_hat: jax.Array
    b1_correction: jax.Array
    b2_correction: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogMaxLossScale(CheckedLossScale):
    """A loss scale that predicts overflows from statistics, to avoid them.

    With `x` the binary logarithm of the largest magnitude among the unscaled gradients of a step,
    `mu` its moving average and `sigma` its standard deviation, both corrected for their start from
    0: `s <- 2**(16 - mu - overflow_std_dev * sigma)`, between `min_scale` and `max_scale`. The
    largest scaled gradient would then pass 2**16, the range of float16, in one of a thousand steps
    by default.

    A non-finite step counts as one with `x = log_max`. If all gradients are 0 there is no
    logarithm, and the state stays as it is. The scale is never 0, inf or NaN, but it is not a power
    of two: scaling and unscaling round.

    Args:
      init_scale: the scale of the first step.
      min_scale: the scale is never below this afterwards.
      max_scale: the scale is never above this afterwards.
      log_max: what a non-finite step counts as, a binary logarithm.
      beta1: how much of the fast average is kept in a step, from 0 to below 1.
      beta2: the same for the slow averages, from which the deviation is computed.
      overflow_std_dev: how many standard deviations to stay away from an overflow.

    References:
      The `LogMaxScaler` of NVIDIA's OpenSeq2Seq.
    """

    init_scale: float = 1.0
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    log_max: float = 16.0
    beta1: float = 0.99
    beta2: float = 0.999
    overflow_std_dev: float = 3.09

    needs_largest = True
    _state_type = LogMaxState
    _ascending = (("min_scale", "max_scale"),)
    _checks = CheckedLossScale._checks | {
        "log_max": finite_number,
        "beta1": _check_share,
        "beta2": _check_share,
        "overflow_std_dev": finite_number,
    }

    def init(self) -> Any:
        """Returns the initial `LogMaxState`."""
        return new_state(
            LogMaxState,
            loss_scale=self.init_scale,
            x_hat=0.0,
            slow_x_hat=0.0,
            xsquared_hat=0.0,
            b1_correction=1.0,
            b2_correction=1.0,
        )

    def _move(
        self, state: LogMaxState, grads_finite: jax.Array, largest: jax.Array | None
    ) -> LogMaxState:
        # Without gradients a finite step says nothing about their size, as if all were 0.
        size = jnp.zeros(()) if largest is None else largest
        # The logarithm of 0 is not used: see below.
        x = jnp.log2(jnp.where(size > 0, size, 1.0))
        x = jnp.where(grads_finite, x, self.log_max)
        next_state = self._average(state, x)
        scale = self._predict_scale(next_state)
        scale = jnp.where(jnp.isnan(scale), state.loss_scale, scale)
        next_state = next_state._replace(loss_scale=scale)
        # The logarithm of 0 is -inf, and would stay in the averages for good.
        has_logarithm = ~grads_finite | (size > 0)
        return tree_where(has_logarithm, next_state, state)

    def _average(self, state: LogMaxState, x: jax.Array) -> LogMaxState:
        """Enters the logarithm of a step into the moving averages."""
        return LogMaxState(
            loss_scale=state.loss_scale,
            x_hat=_average(state.x_hat, x, self.beta1),
            slow_x_hat=_average(state.slow_x_hat, x, self.beta2),
            xsquared_hat=_average(state.xsquared_hat, x * x, self.beta2),
            b1_correction=state.b1_correction * self.beta1,
            b2_correction=state.b2_correction * self.beta2,
        )

    def _predict_scale(self, state: LogMaxState) -> jax.Array:
        """Returns the scale that keeps the largest gradient some deviations below an overflow."""
        mean = _correct(state.x_hat, state.b1_correction)
        slow_mean = _correct(state.slow_x_hat, state.b2_correction)
        mean_square = _correct(state.xsquared_hat, state.b2_correction)
        variance = mean_square - slow_mean * slow_mean
        # The variance of a constant is 0, and rounding may take it below.
        deviation = jnp.sqrt(jnp.maximum(variance, 0.0))
        scale = jnp.exp2(_TARGET - (deviation * self.overflow_std_dev + mean))
        return jnp.clip(scale, self.min_scale, self.max_scale)


def _average(old: jax.Array, new: jax.Array, beta: float) -> jax.Array:
    return old * beta + new * (1 - beta)


def _correct(average: jax.Array, correction: jax.Array) -> jax.Array:
    """Removes from a moving average the share of the 0 that it started from."""
    return average / (1 - correction)

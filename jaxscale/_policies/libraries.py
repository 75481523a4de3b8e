"""The policies of Chainer, fairseq and MindFormers, which remember more than `DynamicLossScale`.

They are public in `jaxscale.presets`. OpenSeq2Seq's, which follows statistics, is in `logmax.py`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._trees.checks import finite_number, int32
from .base import CheckedLossScale, new_state


class GradualState(NamedTuple):
    """The state that a `GradualLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      steps_since_backoff: `i32[]`, steps since the last backoff. It starts at `cooldown`.
      overflows: `i32[]`, non-finite steps since the start.
    """

    is_loss_scale_state = True  # not a field: it tells this type from other named tuples

    loss_scale: jax.Array
    steps_since_backoff: jax.Array
    overflows: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradualLossScale(CheckedLossScale):
    """A loss scale that grows a little in every finite step.

    With `s` the scale:

    - in a finite step, `s <- min(s * growth_factor, max_scale)`; before the first non-finite step,
      `search_factor` takes the place of `growth_factor`;
    - in a non-finite step, `s <- max(s * backoff_factor, min_scale)`, unless the last backoff is
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
        "search_factor": CheckedLossScale._checks["growth_factor"],
        "cooldown": functools.partial(int32, least=0),
    }

    def init(self) -> Any:
        """Returns the initial `GradualState`."""
        return new_state(GradualState, self.init_scale, self.cooldown, 0)

    def _after_finite(self, state: GradualState) -> GradualState:
        factor = jnp.where(state.overflows > 0, self.growth_factor, self.search_factor)
        return state._replace(
            loss_scale=self._grown(state.loss_scale, factor.astype(jnp.float32)),
            steps_since_backoff=jnp.asarray(optax.safe_increment(state.steps_since_backoff)),
        )

    def _after_nonfinite(self, state: GradualState) -> GradualState:
        steps = jnp.asarray(optax.safe_increment(state.steps_since_backoff))
        backs_off = steps >= self.cooldown
        lower = self._lowered(state.loss_scale)
        return GradualState(
            loss_scale=jnp.where(backs_off, lower, state.loss_scale),
            steps_since_backoff=jnp.where(backs_off, 0, steps),
            overflows=jnp.asarray(optax.safe_increment(state.overflows)),
        )


class ToleranceState(NamedTuple):
    """The state that a `ToleranceLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      growth_tracker: `i32[]`, finite steps in a row that count towards growth.
      steps_since_change: `i32[]`, steps since the scale last moved.
      overflows_since_backoff: `i32[]`, non-finite steps since it last backed off.
    """

    is_loss_scale_state = True

    loss_scale: jax.Array
    growth_tracker: jax.Array
    steps_since_change: jax.Array
    overflows_since_backoff: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToleranceLossScale(CheckedLossScale):
    """A loss scale that backs off when a given rate of steps was not finite.

    With `s` the scale:

    - after `growth_interval` finite steps in a row, `s <- min(s * growth_factor, max_scale)`;
    - on a non-finite step, if `overflows / steps >= tolerance`,
      `s <- max(s * backoff_factor, min_scale)`, where `steps` is the number of steps since the
      scale last moved, and `overflows` the number of non-finite ones since it last backed off;
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
        grown = self._grown(state.loss_scale, self.growth_factor)
        return state._replace(
            loss_scale=jnp.where(grow, grown, state.loss_scale),
            growth_tracker=jnp.where(grow, 0, streak),
            steps_since_change=jnp.where(grow, 0, steps),
        )

    def _after_nonfinite(self, state: ToleranceState) -> ToleranceState:
        steps = jnp.asarray(optax.safe_increment(state.steps_since_change))
        overflows = jnp.asarray(optax.safe_increment(state.overflows_since_backoff))
        back_off = overflows.astype(jnp.float32) / steps.astype(jnp.float32) >= self.tolerance
        lower = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        return ToleranceState(
            loss_scale=jnp.where(back_off, lower, state.loss_scale),
            growth_tracker=jnp.zeros_like(state.growth_tracker),
            steps_since_change=jnp.where(back_off, 0, steps),
            overflows_since_backoff=jnp.where(back_off, 0, overflows),
        )


_MOVES = 3  # so many growths, or backoffs, move the window


class WindowState(NamedTuple):
    """The state that a `WindowLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      growth_tracker: `i32[]`, steps since the scale last moved.
      window_index: `i32[]`, the place of the growth interval in the list; -1 if it is 1.
      window_up_count: `i32[]`, growths that count towards the next longer interval.
      window_down_count: `i32[]`, backoffs that count towards an interval of 1.
    """

    is_loss_scale_state = True

    loss_scale: jax.Array
    growth_tracker: jax.Array
    window_index: jax.Array
    window_up_count: jax.Array
    window_down_count: jax.Array


def _check_windows(call: str, name: str, windows: Any) -> tuple[int, ...]:
    return tuple(int32(call, name, window) for window in windows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowLossScale(CheckedLossScale):
    """A loss scale whose growth interval lengthens at every third growth.

    The rule is that of `jaxscale.DynamicLossScale` with a growth interval that moves:

    - at every third growth it moves up one place in `windows`;
    - at the third non-finite step without a growth between them it becomes 1, and the next
      three growths move it to the first place; at the first place it stays.

    The scale is never 0, inf or NaN.

    Args:
      init_scale: the scale of the first step, from `min_scale` to `max_scale`.
      growth_factor: what the scale is multiplied by when it grows, above 1.
      backoff_factor: what it is multiplied by in a non-finite step, between 0 and 1.
      windows: the growth intervals, each at least 1.
      start: the place in `windows` to start from.
      min_scale: a backoff ends at least here.
      max_scale: a growth beyond this does not happen.

    References:
      MindFormers' `AdaptiveLossScaleUpdateCell`.
    """

    init_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    windows: tuple[int, ...] = (20, 30, 40, 50, 100, 200, 500, 1000)
    start: int = 0
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    _state_type = WindowState
    _checks = CheckedLossScale._checks | {
        "windows": _check_windows,
        "start": functools.partial(int32, least=0),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.start < len(self.windows):
            raise ValueError(
                f"`{type(self).__name__}(start=...)` must be a place in windows, which has "
                f"{len(self.windows)}, got {self.start}. Pass 0 to start from the first."
            )

    def init(self) -> Any:
        """Returns the initial `WindowState`."""
        return new_state(WindowState, self.init_scale, 0, self.start, 0, 0)

    def _after_finite(self, state: WindowState) -> WindowState:
        steps = jnp.asarray(optax.safe_increment(state.growth_tracker))
        last = len(self.windows) - 1
        windows = jnp.asarray(np.array(self.windows), jnp.int32)
        window = windows[jnp.clip(state.window_index, 0, last)]
        grows = steps >= jnp.where(state.window_index < 0, 1, window)
        grown = state.loss_scale * self.growth_factor
        grown = jnp.where(grown > self.max_scale, state.loss_scale, grown)
        ups = jnp.where(grows, (state.window_up_count + 1) % (_MOVES + 1), state.window_up_count)
        is_up = (ups == _MOVES) & (state.window_index < last)
        return WindowState(
            loss_scale=jnp.where(grows, grown, state.loss_scale),
            growth_tracker=jnp.where(grows, 0, steps),
            window_index=jnp.where(is_up, state.window_index + 1, state.window_index),
            window_up_count=jnp.where(is_up, 0, ups),
            window_down_count=jnp.where(grows, 0, state.window_down_count),
        )

    def _after_nonfinite(self, state: WindowState) -> WindowState:
        lower = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        downs = (state.window_down_count + 1) % (_MOVES + 1)
        is_down = (downs == _MOVES) & (state.window_index > 0)
        return WindowState(
            loss_scale=jnp.minimum(state.loss_scale, lower),
            growth_tracker=jnp.zeros_like(state.growth_tracker),
            window_index=jnp.where(is_down, -1, state.window_index),
            window_up_count=jnp.where(is_down, 0, state.window_up_count),
            window_down_count=jnp.where(is_down, 0, downs),
        )

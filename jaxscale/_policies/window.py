"""The policy whose growth interval lengthens as the scale grows, as MindFormers' does."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._trees.checks import int32
from .._trees.numbers import increment
from .base import CheckedLossScale, new_state

# The window moves after this many growths or backoffs.
_MOVES = 3


class WindowState(NamedTuple):
    """The state that a `WindowLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      growth_tracker: `i32[]`, steps since the scale last moved.
      window_index: `i32[]`, the place of the growth interval in the list; -1 if it is 1.
      window_up_count: `i32[]`, growths that count towards the next longer interval.
      window_down_count: `i32[]`, backoffs that count towards an interval of 1.
    """

    # not a field: it tells this type from other named tuples
    is_loss_scale_state = True

    loss_scale: jax.Array
    growth_tracker: jax.Array
    window_index: jax.Array
    window_up_count: jax.Array
    window_down_count: jax.Array


def _check_windows(call: str, name: str, windows: Any) -> tuple[int, ...]:
    """Returns growth intervals as a tuple of Python ints."""
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
        return new_state(
            WindowState, loss_scale=self.init_scale, window_index=self.start
        )

    def _after_finite(self, state: WindowState) -> WindowState:
        steps = increment(state.growth_tracker)
        last = len(self.windows) - 1
        windows = jnp.asarray(np.array(self.windows), jnp.int32)
        window = windows[jnp.clip(state.window_index, 0, last)]
        grows = steps >= jnp.where(state.window_index < 0, 1, window)
        grown = state.loss_scale * self.growth_factor
        grown = jnp.where(grown > self.max_scale, state.loss_scale, grown)

        next_ups = (state.window_up_count + 1) % (_MOVES + 1)
        ups = jnp.where(grows, next_ups, state.window_up_count)
        moves_up = (ups == _MOVES) & (state.window_index < last)
        return WindowState(
            loss_scale=jnp.where(grows, grown, state.loss_scale),
            growth_tracker=jnp.where(grows, 0, steps),
            window_index=jnp.where(
                moves_up, state.window_index + 1, state.window_index
            ),
            window_up_count=jnp.where(moves_up, 0, ups),
            window_down_count=jnp.where(grows, 0, state.window_down_count),
        )

    def _after_nonfinite(self, state: WindowState) -> WindowState:
        lower = jnp.maximum(state.loss_scale * self.backoff_factor, self.min_scale)
        downs = (state.window_down_count + 1) % (_MOVES + 1)
        moves_down = (downs == _MOVES) & (state.window_index > 0)
        return WindowState(
            loss_scale=jnp.minimum(state.loss_scale, lower),
            growth_tracker=jnp.zeros_like(state.growth_tracker),
            window_index=jnp.where(moves_down, -1, state.window_index),
            window_up_count=jnp.where(moves_down, 0, state.window_up_count),
            window_down_count=jnp.where(moves_down, 0, downs),
        )

"""A policy of a user's own, with a state of its own, that is told the largest gradient."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxscale


class FollowingState(NamedTuple):
    """The state of `Following`."""

    is_loss_scale_state = True

    loss_scale: jax.Array  # f32[]
    peak: jax.Array  # f32[], the largest gradient since the last overflow
    overflows: jax.Array  # i32[], in a row


@dataclasses.dataclass(frozen=True)
class Following(jaxscale.LossScale):
    """Doubles the scale while the largest gradient stays low, and halves it at an overflow."""

    init_scale: float = 2.0**15
    level: float = 2.0**13  # of the largest gradient, times the scale
    min_scale: float = 1.0
    max_scale: float = 2.0**60

    needs_largest = True

    def init(self):
        return FollowingState(
            jnp.float32(self.init_scale),
            jnp.array(0, jnp.float32),
            jnp.array(0, jnp.int32),
        )

    def adjust(self, state, grads_finite, largest=None):
        size = 0.0 if largest is None else largest
        peak = jnp.maximum(state.peak, jnp.where(grads_finite, size, 0.0))
        doubled = jnp.minimum(2 * state.loss_scale, self.max_scale)
        after_finite = FollowingState(
            jnp.where(doubled * peak <= self.level, doubled, state.loss_scale),
            peak,
            jnp.zeros_like(state.overflows),
        )
        after_overflow = FollowingState(
            jnp.maximum(state.loss_scale / 2, self.min_scale),
            jnp.zeros_like(state.peak),
            state.overflows + 1,
        )
        return jaxscale.tree_where(grads_finite, after_finite, after_overflow)

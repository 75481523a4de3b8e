"""The window of `multi_steps`: the mean gradients of the micro-batches that count.

A step calls `add` with each micro-batch, and gets what a step of the optimizer is to be made from,
and whether it is due; `close` empties a window that is full. `EachStep` is no window.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._gradients.scaled import Scaled
from .._state.optimizer import MultiStepsState
from .._trees.leaf import dtype_of, is_inexact_leaf
from .._trees.numbers import increment_if
from .._trees.tree import cast, is_overwrite, leaf_name, tree_where


class Ready(NamedTuple):
    """What a step of the optimizer is made from."""

    due: jax.Array  # bool[], whether it is to be made
    opt_state: Any  # that of the optimizer itself
    stored: Any  # the gradients as they are stored; they may be non-finite if no step is due
    gradients_of: Callable[[Any], Any]  # from them, or zeros in their place, to those of the step
    value: Any


@dataclasses.dataclass(frozen=True)
class EachStep:
    """What is there without `multi_steps`: a step is due whenever the gradients are good."""

    averages = False

    def open(self, params: Any, inner_state: Any) -> Any:
        return inner_state

    def add(
        self, inner_state: Any, grads: Scaled, value: Any, counts: jax.Array
    ) -> tuple[Any, Ready]:
        ready = Ready(counts, inner_state, grads.grads, grads.times_reciprocal, value)
        return inner_state, ready

    def close(self, filled: Any, inner_state: Any, stepped: jax.Array) -> Any:
        return inner_state

    def lets_scale_move(self, verdict: Any, grads_finite: jax.Array, stepped: jax.Array) -> Any:
        return verdict.loss_finite  # a bad loss says nothing about the scale

    def find_part(self, filled: Any) -> float:
        return 1.0

    def count_lost(self, filled: Any, applied: jax.Array, stepped: jax.Array) -> jax.Array:
        return (~applied).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Window:
    """How many micro-batches make a step of the optimizer, and what a bad one costs."""

    length: int | Callable[[jax.Array], Any]  # or a function of the steps made so far
    drop: Literal["micro_batch", "window"]
    growth_unit: Literal["optimizer_step", "micro_batch"]

    averages = True  # whether gradients are means of several micro-batches

    def open(self, params: Any, inner_state: Any) -> MultiStepsState:
        # Each in a buffer of its own, as a donated state may hold none twice.
        return MultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=jnp.zeros((), jnp.int32),
            counted=jnp.zeros((), jnp.int32),
            acc_grads=_emptied(params),
            acc_value=jnp.zeros((), jnp.float32),
            inner_opt_state=inner_state,
        )

    def add(
        self, state: Any, grads: Scaled, value: Any, counts: jax.Array
    ) -> tuple[MultiStepsState, Ready]:
        """Returns the window with one more micro-batch, and what a step is made from."""
        if not isinstance(state, MultiStepsState):
            raise TypeError(
                "`multi_steps(...).update(state=...)` must be a state that its `init` or the last "
                f"step returned, got one with a {type(state).__name__} for its window. Call "
                "`init` of the optimizer that `multi_steps` returned."
            )
        new, length = grads.divided, self._length(state)

        def add_leaf(acc: Any, leaf: Any) -> Any:
            # Divide first, so that a sum overflows only by rounding; this is exact if the length
            # is a power of two. Select, as a gradient that does not count may be NaN.
            share = saturate(cast(leaf, acc.dtype)) / length.astype(acc.dtype)
            return jnp.where(counts, saturate(acc + share), acc)

        def accumulate(path: Any, acc: Any, leaf: Any) -> Any:
            if acc is None:
                return None
            if leaf is None:
                raise ValueError(
                    "`multi_steps(...).update(updates=...)` needs a gradient for each parameter "
                    f"that `init` was called with, got None at {leaf_name(path)}. Call `init` with "
                    "only the parameters that are trained, or pass zeros."
                )
            if is_overwrite(path):  # the largest of the finite ones, as FP8 statistics are maxima
                value = cast(leaf, acc.dtype)
                return jnp.where(counts & jnp.isfinite(value), jnp.maximum(acc, value), acc)
            return add_leaf(acc, leaf)

        state = state._replace(
            mini_step=jnp.asarray(optax.safe_increment(state.mini_step)),
            counted=state.counted + counts.astype(jnp.int32),
            acc_grads=_map(accumulate, state.acc_grads, new),
            acc_value=state.acc_value if value is None else add_leaf(state.acc_value, value),
        )
        whole = state.counted == state.mini_step if self.drop == "window" else state.counted > 0
        due = (state.mini_step >= length) & whole
        # From the sums to the mean of those that counted.
        counted = jnp.maximum(state.counted, 1).astype(jnp.float32)
        ratio = self._length(state).astype(jnp.float32) / counted

        def mean(path: Any, acc: Any, grad: Any) -> Any:
            if acc is None or is_overwrite(path):  # neither has a mean
                return grad if acc is None else acc
            return saturate(acc * ratio.astype(acc.dtype))

        if value is not None:
            value = saturate(state.acc_value * ratio)

        stored = state.acc_grads
        return state, Ready(
            due, state.inner_opt_state, stored, lambda sums: _map(mean, sums, new), value
        )

    def close(
        self, state: MultiStepsState, inner_state: Any, stepped: jax.Array
    ) -> MultiStepsState:
        """Returns the next window, emptied if this one is full."""
        full = state.mini_step >= self._length(state)
        return MultiStepsState(
            mini_step=jnp.where(full, 0, state.mini_step),
            gradient_step=increment_if(stepped, state.gradient_step),
            counted=jnp.where(full, 0, state.counted),
            acc_grads=tree_where(full, _emptied(state.acc_grads), state.acc_grads),
            acc_value=jnp.where(full, 0.0, state.acc_value),
            inner_opt_state=inner_state,
        )

    def lets_scale_move(self, verdict: Any, grads_finite: jax.Array, stepped: jax.Array) -> Any:
        """Returns whether the policy is told of a micro-batch, by `growth_unit`."""
        if self.growth_unit == "micro_batch":
            return verdict.loss_finite
        return verdict.loss_finite & (stepped | ~grads_finite)

    def find_part(self, state: MultiStepsState) -> jax.Array:
        """Returns which part of a step of the optimizer a micro-batch is."""
        return 1 / self._length(state).astype(jnp.float32)

    def count_lost(
        self, state: MultiStepsState, applied: jax.Array, stepped: jax.Array
    ) -> jax.Array:
        """Returns how many micro-batches were lost: this one, or a whole window at its end."""
        full = state.mini_step >= self._length(state)
        wasted = jnp.where(full & ~stepped, state.counted, 0)  # good ones that led to no step
        return (~applied).astype(jnp.float32) + wasted.astype(jnp.float32)

    def _length(self, state: MultiStepsState) -> jax.Array:
        length = self.length(state.gradient_step) if callable(self.length) else self.length
        # A window below 1 would divide its gradients by 0, and lose them.
        return jnp.maximum(jnp.asarray(length, jnp.int32), 1)


def saturate(x: jax.Array) -> jax.Array:
    """Returns numbers with an inf replaced by the largest finite number of that sign.

    A mean is at most the largest of its numbers, so it can overflow only by rounding.
    """
    if jnp.iscomplexobj(x):
        return jax.lax.complex(saturate(x.real), saturate(x.imag))
    largest = jnp.finfo(x.dtype).max
    return jnp.clip(x, -largest, largest)


def _emptied(tree: Any) -> Any:
    """Returns the sums of no gradients, and maxima of no values, each in a buffer of its own."""

    def empty(path: Any, leaf: Any) -> Any:
        if not is_inexact_leaf(leaf):
            return None
        leaf = cast(leaf, dtype_of(leaf))  # strongly typed, as it is after a step
        return jnp.full_like(leaf, -jnp.inf) if is_overwrite(path) else jnp.zeros_like(leaf)

    return jax.tree_util.tree_map_with_path(empty, tree)


# Maps `fun(path, sum, gradient)` over all leaves, `None` among them.
_map = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=lambda leaf: leaf is None)

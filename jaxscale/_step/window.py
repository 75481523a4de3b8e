"""The window of `multi_steps`: the mean gradients of the micro-batches that count.

A step calls `add` with each micro-batch, and gets what a step of the optimizer is to be made from,
and whether it is due; `close` empties a window that is full.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from .._gradients.scaled import Scaled
from .._state.optimizer import MultiStepsState
from .._trees.gradient_leaves import is_overwrite, leaf_name
from .._trees.leaves import cast, dtype_of, is_inexact_leaf, is_none
from .._trees.pytrees import Grads, Leaf, OptState, PyTree
from .._trees.selection import where
from .counters import increment_if


class Ready(NamedTuple):
    """The input of a step of the optimizer."""

    due: jax.Array  # bool[], whether it is to be made
    opt_state: Any  # that of the optimizer itself
    # the gradients as they are stored; they may be non-finite if no step is due
    stored: Any
    # from them, or zeros in their place, to those of the step
    gradients_of: Callable[[Any], Any]
    loss: Any  # that of the step, or the mean of several, `None` if there is none


@dataclasses.dataclass(frozen=True)
class Window:
    """The number of micro-batches that make a step of the optimizer.

    Attributes:
      length: how many, or a function of the number of steps made so far, an `i32[]`.
    """

    length: int | Callable[[jax.Array], Any]

    def open(self, params: optax.Params, opt_state: OptState) -> MultiStepsState:
        """Returns the first window, which is empty."""
        # Each in a buffer of its own, as a donated state may hold none twice.
        return MultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=jnp.zeros((), jnp.int32),
            counted=jnp.zeros((), jnp.int32),
            acc_grads=_empty_sums(params),
            acc_value=jnp.zeros((), jnp.float32),
            inner_opt_state=opt_state,
            divisor=jnp.zeros((), jnp.int32),
        )

    def add(
        self,
        state: MultiStepsState,
        grads: Scaled,
        loss: ArrayLike | None,
        good: jax.Array,
    ) -> tuple[MultiStepsState, Ready]:
        """Adds a micro-batch: returns the window with it, and what a step is made from."""
        new_grads = grads.divided
        length = self._find_length(state)
        # Sums go on being divided by what they began with, if the length is another by now.
        divisor = jnp.where(state.divisor == 0, length, state.divisor)

        def add_to_sum(acc: jax.Array, leaf: object) -> jax.Array:
            # Divide first, so that a sum overflows only by rounding; this is exact if the length
            # is a power of two. Select, as a gradient that does not count may be NaN.
            share = saturate(cast(leaf, acc.dtype)) / divisor.astype(acc.dtype)
            return jnp.where(good, saturate(acc + share), acc)

        def accumulate(path: KeyPath, acc: Leaf, leaf: object) -> Any:
            if acc is None:
                return None
            if leaf is None:
                raise ValueError(
                    "`multi_steps(...).update(updates=...)` needs a gradient for each parameter "
                    f"that `init` was called with, got None at {leaf_name(path)}. Call `init` with "
                    "only the parameters that are trained, or pass zeros."
                )
            # the largest of the finite ones, as FP8 statistics are maxima
            if is_overwrite(path):
                value = cast(leaf, acc.dtype)
                enters = good & jnp.isfinite(value)
                return jnp.where(enters, jnp.maximum(acc, value), acc)
            return add_to_sum(acc, leaf)

        state = state._replace(
            mini_step=optax.safe_increment(state.mini_step),
            counted=increment_if(good, state.counted),
            acc_grads=_map_sums(accumulate, state.acc_grads, new_grads),
            divisor=divisor,
        )
        # From the sums to the mean of those that counted.
        counted = jnp.maximum(state.counted, 1).astype(jnp.float32)
        ratio = divisor.astype(jnp.float32) / counted
        if loss is not None:
            state = state._replace(acc_value=add_to_sum(state.acc_value, loss))
            loss = saturate(state.acc_value * ratio)

        def find_mean(path: KeyPath, acc: Leaf, grad: Leaf) -> Any:
            if acc is None:
                return grad
            if is_overwrite(path):
                return acc
            return saturate(acc * ratio.astype(acc.dtype))

        ready = Ready(
            due=(state.mini_step >= length) & (state.counted > 0),
            opt_state=state.inner_opt_state,
            stored=state.acc_grads,
            gradients_of=lambda sums: _map_sums(find_mean, sums, new_grads),
            loss=loss,
        )
        return state, ready

    def close(
        self, state: MultiStepsState, opt_state: OptState, stepped: jax.Array
    ) -> MultiStepsState:
        """Returns the next window: this one, or an empty one if it is full."""
        full = state.mini_step >= self._find_length(state)
        return MultiStepsState(
            mini_step=jnp.where(full, 0, state.mini_step),
            gradient_step=increment_if(stepped, state.gradient_step),
            counted=jnp.where(full, 0, state.counted),
            acc_grads=where(full, _empty_sums(state.acc_grads), state.acc_grads),
            acc_value=jnp.where(full, 0.0, state.acc_value),
            inner_opt_state=opt_state,
            divisor=jnp.where(full, 0, state.divisor),
        )

    def _find_length(self, state: MultiStepsState) -> jax.Array:
        length = self.length
        if callable(length):
            length = length(state.gradient_step)
        # A window below 1 would divide its gradients by 0, and lose them.
        return jnp.maximum(jnp.asarray(length, jnp.int32), 1)


def saturate(x: jax.Array) -> jax.Array:
    """Replaces each inf by the largest finite number of its sign.

    A mean is at most the largest of its numbers, so it can overflow only by rounding.
    """
    if jnp.iscomplexobj(x):
        return jax.lax.complex(saturate(x.real), saturate(x.imag))
    largest = jnp.finfo(x.dtype).max
    return jnp.clip(x, -largest, largest)


def _empty_sums(tree: PyTree) -> Any:
    """Returns the sums of no gradients, and maxima of no values, each in a buffer of its own."""

    def empty(path: KeyPath, leaf: Leaf) -> Any:
        if not is_inexact_leaf(leaf):
            return None
        leaf = cast(leaf, dtype_of(leaf))  # strongly typed, as it is after a step
        if is_overwrite(path):
            return jnp.full_like(leaf, -jnp.inf)
        return jnp.zeros_like(leaf)

    return jax.tree_util.tree_map_with_path(empty, tree)


def _map_sums(fun: Callable[[Any, Any, Any], Any], sums: PyTree, grads: Grads) -> Any:
    """Maps `fun(path, sum, gradient)` over all leaves, `None` among them."""
    return jax.tree_util.tree_map_with_path(fun, sums, grads, is_leaf=is_none)

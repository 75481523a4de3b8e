"""Scaled gradients: a tree, the number it was multiplied by, and how to divide it again."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._state.find import find_scale
from .._state.scale import UnitLossScaleState
from .._trees.gradient_leaves import map_gradients
from .._trees.leaves import widen, widened
from .._trees.pytrees import Grads, PyTree, ScaleState


def scale(state: ScaleState, tree: PyTree) -> Any:
    """Returns a tree multiplied by the loss scale.

    This is for scaling a loss by hand; `jaxscale.value_and_grad` does it for you.

    Args:
      state: a `LossScaleState`, or a tree that holds exactly one.
      tree: a pytree, such as a loss.

    Returns:
      The tree with its floating-point and complex leaves multiplied, in float32 or wider:
      float16 and bfloat16 leaves come back as float32. Other leaves, and everything under a key
      `_overwrite_with_gradient`, are unchanged.

    Raises:
      ValueError: if `state` holds no loss scale, or several, or those of a population.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> jaxscale.scale(jaxscale.FixedLossScale(8).init(), jnp.float16(3.0))
      Array(24., dtype=float32)
    """
    state = find_scale("scale", "state", state)
    if isinstance(state, UnitLossScaleState):
        return map_gradients(widen, tree)
    return multiply(tree, state.loss_scale)


def unscale(state: ScaleState, tree: PyTree) -> Any:
    """Returns a tree divided by the loss scale.

    Pass the state with which the gradients were scaled, not the updated one.

    Args:
      state: as in `scale`.
      tree: a pytree of scaled gradients.

    Returns:
      The tree as `scale` returns it, but divided: float16 and bfloat16 leaves come back as
      float32, where small gradients do not underflow again.

    Raises:
      ValueError: as `scale` does.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> state = jaxscale.DynamicLossScale(init_scale=2.0**15).init()
      >>> jaxscale.unscale(state, {"w": jnp.float16(1.0), "b": None})
      {'b': None, 'w': Array(3.0517578e-05, dtype=float32)}
    """
    state = find_scale("unscale", "state", state)
    if isinstance(state, UnitLossScaleState):
        return map_gradients(widen, tree)
    return divide(tree, state.loss_scale)


def multiply(tree: PyTree, factor: jax.Array) -> Any:
    """Returns a tree with its gradients multiplied by a scale, in float32 or wider."""
    return _map_with_number(
        jax.lax.mul, tree, lambda dtype: representable(factor, dtype)
    )


def divide(tree: PyTree, divisor: jax.Array) -> Any:
    """Returns a tree with its gradients divided by a scale, in float32 or wider."""
    return _map_with_number(
        jax.lax.div, tree, lambda dtype: representable(divisor, dtype)
    )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("grads", "divisor"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Scaled:
    """Gradients as a backward pass left them, and the number that they are to be divided by.

    Each reader divides. On a CPU a step is skipped by a branch: gradients that are divided before
    it would be written and read again, and inside of it they fuse into the step.
    """

    grads: Any
    divisor: jax.Array | None = None  # `None` if they are unscaled already

    @functools.cached_property
    def divided(self) -> Any:
        """The gradients divided, in float32 or wider."""
        if self.divisor is None:
            return self.grads
        return divide(self.grads, self.divisor)

    def times_reciprocal(self, grads: Grads) -> Any:
        """Returns `grads`, which may be zeros in the place of these, times the reciprocal.

        XLA itself divides in this way. But it treats a written division as expensive, and would
        store the result if two moments use it. If the divisor is a power of two, both are the same.
        """
        divisor = self.divisor
        if divisor is None:
            return grads
        return _map_with_number(
            jax.lax.mul, grads, lambda dtype: 1 / representable(divisor, dtype)
        )


def _map_with_number(
    op: Callable[[Any, Any], jax.Array], tree: PyTree, number: Callable[[Any], Any]
) -> Any:
    """Applies `op` to each gradient in a tree and to the number for its dtype."""
    number_of = functools.cache(number)
    return map_gradients(lambda leaf: _apply(op, leaf, number_of(widened(leaf))), tree)


def _apply(
    op: Callable[[Any, Any], jax.Array], leaf: object, number: jax.Array
) -> jax.Array:
    leaf = widen(leaf)
    if jnp.iscomplexobj(leaf):
        # By parts: the product of two complex numbers also has terms such as inf * 0, a NaN.
        return jax.lax.complex(
            _apply(op, leaf.real, number), _apply(op, leaf.imag, number)
        )
    return op(leaf, number)


def representable(loss_scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns a loss scale as a number of a dtype, safe to multiply and to divide by.

    For a complex dtype the number has the dtype of its parts.
    """
    info = jnp.finfo(dtype)
    # At most the largest power of two, so that scaling stays exact. And at most 2**126: XLA divides
    # by multiplying with the reciprocal. That of 2**127 would be flushed to 0, and all gradients.
    largest = 2.0 ** min(info.maxexp - 1, 126)
    return jnp.clip(loss_scale, float(info.smallest_normal), largest).astype(info.dtype)

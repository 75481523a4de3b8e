"""The states that loss scales carry, and variables of Flax NNX around them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._trees.pytrees import Leaf, PyTree


class LossScaleState(NamedTuple):
    """The state that a loss scale carries from one step to the next.

    It is a `NamedTuple` of arrays and nothing else, so that `jit`, `scan`, `vmap`,
    donation, checkpoints, `optax.tree.get(state, "loss_scale")` and `optax.tree.set`
    work without special code. A `jaxscale.LossScale` moves it, and also makes the
    initial state: `loss_scale.init()`.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled.
      growth_tracker: `i32[]`, finite steps in a row that count towards growth. Below 0
        while a policy lets some pass uncounted.
      hysteresis_tracker: `i32[]`, non-finite steps still tolerated before a backoff.

    Example:
      >>> import jaxscale
      >>> jaxscale.DynamicLossScale().init().loss_scale
      Array(32768., dtype=float32)
    """

    is_loss_scale_state = True  # the mark that `is_policy_state` looks for, not a field

    loss_scale: jax.Array  # f32[]
    growth_tracker: jax.Array  # i32[]
    hysteresis_tracker: jax.Array  # i32[]


class UnitLossScaleState(LossScaleState):
    """A state whose scale is known to be 1 while tracing, from its type alone."""

    __slots__ = ()


class AdaptiveState(NamedTuple):
    """The state that an `AdaptiveLossScale` carries from one step to the next.

    Attributes:
      loss_scale: `f32[]`, the number by which the next loss is scaled, a power of two.
      peak: `f32[]`, the binary logarithm of the usual largest gradient; -256 before the first.
      level: `f32[]`, the binary logarithm that the largest scaled gradient may reach.
      crest: `f32[]`, the binary logarithm of the size that the gradients of rare batches are
        assumed to reach; -256 unless overflows repeat.
      finite_steps: `i32[]`, finite steps since the level was lowered, `period` at first.
      held_steps: `i32[]`, finite steps since the crest was raised or reached.
      overflows: `i32[]`, overflows in a row, up to now.

    Example:
      >>> import jaxscale
      >>> jaxscale.AdaptiveLossScale().init().level
      Array(13., dtype=float32)
    """

    # not a field: it tells this type from other named tuples
    is_loss_scale_state = True

    loss_scale: jax.Array  # f32[]
    peak: jax.Array  # f32[]
    level: jax.Array  # f32[]
    crest: jax.Array  # f32[]
    finite_steps: jax.Array  # i32[]
    held_steps: jax.Array  # i32[]
    overflows: jax.Array  # i32[]


def init_state(loss_scale: float) -> LossScaleState:
    """Returns an initial state, strongly typed so that a step keeps its types."""
    return LossScaleState(
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        growth_tracker=jnp.asarray(0, jnp.int32),
        hysteresis_tracker=jnp.asarray(0, jnp.int32),
    )


def is_policy_state(node: object) -> bool:
    """Tells the state of a policy from any other node of a tree, by the mark of its type.

    A field called `loss_scale` proves nothing: parameters, carries and logs also have them.
    """
    is_marked = getattr(type(node), "is_loss_scale_state", False) is True
    return is_marked and hasattr(node, "_fields")


def is_wrapped(node: object) -> bool:
    """Tells a variable around an array, as in an optimizer of Flax NNX, from any other node."""
    return hasattr(type(node), "__jax_array__") and not isinstance(node, jax.Array)


def unwrap(tree: PyTree) -> Any:
    """Returns a tree with arrays in the place of the variables around them."""

    def get_array(leaf: Leaf) -> Any:
        if is_wrapped(leaf):
            return leaf.__jax_array__()
        return leaf

    return jax.tree.map(get_array, tree, is_leaf=is_wrapped)

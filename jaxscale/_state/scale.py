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
    """What pickles of an `AdaptiveLossScale` name, a policy up to 0.6. Only its scale is read."""

    loss_scale: jax.Array
    peak: jax.Array
    level: jax.Array
    crest: jax.Array
    finite_steps: jax.Array
    held_steps: jax.Array
    overflows: jax.Array


def init_state(loss_scale: float) -> LossScaleState:
    """Returns an initial state, strongly typed so that a step keeps its types."""
    return LossScaleState(
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        growth_tracker=jnp.asarray(0, jnp.int32),
        hysteresis_tracker=jnp.asarray(0, jnp.int32),
    )


def is_policy_state(node: object) -> bool:
    """True for the state of a policy, by the mark of its type.

    A field called `loss_scale` proves nothing: parameters, carries and logs also have them.
    """
    is_marked = getattr(type(node), "is_loss_scale_state", False) is True
    return is_marked and hasattr(node, "_fields")


def is_wrapped(node: object) -> bool:
    """True for a variable around an array, as in an optimizer of Flax NNX."""
    return hasattr(type(node), "__jax_array__") and not isinstance(node, jax.Array)


def unwrap(tree: PyTree) -> Any:
    """Returns a tree with arrays in the place of the variables around them."""

    def get_array(leaf: Leaf) -> Any:
        if is_wrapped(leaf):
            return leaf.__jax_array__()
        return leaf

    return jax.tree.map(get_array, tree, is_leaf=is_wrapped)


def check_alone(argument: str, state: PyTree) -> None:
    """Raises a `ValueError` if a state is that of several members of a population."""
    shape = jnp.shape(getattr(state, "loss_scale", 0.0))
    if shape != ():
        raise ValueError(
            f"`{argument}` must hold the one scale of one training run, got a `loss_scale` that "
            f"has shape {shape}: call it under `jax.vmap`, which gives each member its own."
        )

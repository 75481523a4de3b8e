"""How the loss scale in a training state is found, and scaling by hand.

Public functions take any tree that holds exactly one loss scale: the state of a policy, of an
optimizer, or a `TrainState`.
"""

import collections
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._state import AdaptiveState
from ._state import (
    LossScaleState,
    UnitLossScaleState,
    check_alone,
    divide,
    find,
    is_policy_state,
    multiply,
    unwrapped,
)
from ._step import LossScaledState
from ._tree import map_gradients, widen


def is_loss_scaled(node: Any) -> bool:
    """Returns whether a node of a tree is a `LossScaledState`."""
    return isinstance(node, LossScaledState)


def recovered(tree: Any) -> Any:
    """Returns a tree in which a mapping from the fields of a `LossScaledState` is one again.

    `nnx.state(optimizer)` and `nnx.split(optimizer)` make such mappings of named tuples.
    """
    nodes = jax.tree.leaves(tree, is_leaf=_is_scaling)
    if any(map(_is_scaling, nodes)):
        return tree
    return jax.tree.map(
        lambda node: _with_types(node) if _has_fields(node) else node, tree, is_leaf=_has_fields
    )


def _has_fields(node: Any) -> bool:
    # Not by all fields: what is empty, such as the inner state of plain SGD, is left out.
    fields = {"scaling", "notfinite_count", "total_steps", "backoff_count"}
    return isinstance(node, Mapping) and fields <= set(node)


def _with_types(node: Any) -> LossScaledState:
    fields: dict[str, Any] = {name: node.get(name) for name in LossScaledState._fields}
    scaling, inner_state = fields["scaling"], fields["inner_state"]
    known = {frozenset(kind._fields): kind for kind in (LossScaleState, AdaptiveState)}
    kind: Any = known.get(frozenset(scaling)) or collections.namedtuple(
        "LossScaleState", list(scaling)
    )
    if isinstance(inner_state, Mapping) and "mini_step" in inner_state:
        window: Any = optax.MultiStepsState
        inner_state = window(**{name: inner_state.get(name) for name in window._fields})
    return LossScaledState(**fields | {"scaling": kind(**scaling), "inner_state": inner_state})


def _is_scaling(node: Any) -> bool:
    return is_loss_scaled(node) or is_policy_state(node)


def find_scaling(call: str, tree: Any) -> Any:
    """Returns the one loss scale state in a tree, as arrays.

    The `scaling` of a `LossScaledState` may be of any type; other states need a mark (see
    `is_policy_state`).
    """
    state = find(call, recovered(tree), _is_scaling, "loss scale state")
    scaling = state.scaling if is_loss_scaled(state) else state
    return jax.tree.map(jnp.asarray, unwrapped(scaling))


def find_any(call: str, tree: Any) -> Any:
    """Returns the one loss scale state in a tree, as `find_one` does, or `None` without one."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_scaling)
    return find_one(call, "opt_state", tree) if any(map(_is_scaling, nodes)) else None


def find_one(call: str, argument: str, tree: Any) -> Any:
    """Returns the one loss scale state in a tree, of one training run, as arrays."""
    state = find_scaling(call, tree)
    check_alone(f"{call}({argument})", state)
    return state


def scale(state: Any, tree: Any) -> Any:
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
    state = find_one("scale", "state", state)
    if isinstance(state, UnitLossScaleState):
        return map_gradients(widen, tree)
    return multiply(tree, state.loss_scale)


def unscale(state: Any, tree: Any) -> Any:
    """Returns a tree divided by the loss scale.

    Pass the state by which the gradients were scaled, not the updated one.

    Args:
      state: a `LossScaleState`, or a tree that holds exactly one.
      tree: a pytree of scaled gradients.

    Returns:
      The tree with its floating-point and complex leaves divided, in float32 or wider: float16
      and bfloat16 leaves come back as float32, where small gradients do not underflow
      again; float32, float64 and complex ones keep their dtype. Other leaves, and
      everything under a key `_overwrite_with_gradient`, are unchanged.

    Raises:
      ValueError: if `state` holds no loss scale, or several, or those of a population.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> state = jaxscale.DynamicLossScale(init_scale=2.0**15).init()
      >>> jaxscale.unscale(state, {"w": jnp.float16(1.0), "b": None})
      {'b': None, 'w': Array(3.0517578e-05, dtype=float32)}
    """
    state = find_one("unscale", "state", state)
    if isinstance(state, UnitLossScaleState):
        return map_gradients(widen, tree)
    return divide(tree, state.loss_scale)

"""A search for the loss scale in a training state, and checks of the state that was found.

Public functions take any tree with exactly one: a policy's or optimizer's state, a `TrainState`.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._trees.pytrees import Grads, PyTree
from .optimizer import LossScaledState, SpikeState
from .scale import AdaptiveState, LossScaleState, is_policy_state, unwrap
from .storage import WeightsState

# A mapping with these fields is what NNX made of a `LossScaledState`. Others may be left out, as
# NNX leaves out what is empty, such as the inner state of plain SGD.
_TELLING_FIELDS = {"scaling", "notfinite_count", "total_steps", "backoff_count"}


def is_loss_scaled(node: object) -> bool:
    """Returns whether a node of a tree is a `LossScaledState`."""
    return isinstance(node, LossScaledState)


def is_scaling(node: object) -> bool:
    """Returns whether a node of a tree is, or directly holds, a loss scale state."""
    return is_loss_scaled(node) or is_policy_state(node)


def restore_types(tree: PyTree) -> Any:
    """Turns mappings that Flax NNX made of states back into states.

    `nnx.state(optimizer)` and `nnx.split(optimizer)` make mappings of named tuples.
    """
    nodes = jax.tree.leaves(tree, is_leaf=is_scaling)
    if any(map(is_scaling, nodes)):
        return tree

    def restore(node: PyTree) -> Any:
        if _is_mapping_of_state(node):
            return _restore_state(node)
        return node

    return jax.tree.map(restore, tree, is_leaf=_is_mapping_of_state)


def _is_mapping_of_state(node: object) -> bool:
    return isinstance(node, Mapping) and set(node) >= _TELLING_FIELDS


def _restore_state(mapping: Mapping[str, Any]) -> LossScaledState:
    """Makes a `LossScaledState` of a mapping of its fields."""
    state = _restore_tuple(LossScaledState, mapping)
    window = state.inner_state
    if isinstance(window, Mapping) and "mini_step" in window:
        window = _restore_tuple(optax.MultiStepsState, window)
    return state._replace(
        scaling=_restore_scaling(state.scaling),
        inner_state=window,
        spikes=_restore_tuple(SpikeState, state.spikes),
        weights=_restore_tuple(WeightsState, state.weights),
    )


def _restore_tuple(kind: type, mapping: Mapping[str, Any] | None) -> Any:
    """Makes a named tuple of its fields, if there are any.

    A field that is left out, as it is empty, is `None`.
    """
    if mapping is None:
        return None
    return kind(*map(mapping.get, kind._fields))


def _restore_scaling(fields: Mapping[str, Any]) -> Any:
    """Makes a loss scale state of its fields.

    The types of other policies are not known here. A named tuple with the same fields stands for
    the state of such a policy.
    """
    for known in (LossScaleState, AdaptiveState):
        if set(known._fields) == set(fields):
            return known(**fields)
    stand_in = collections.namedtuple("StateOfAnotherPolicy", list(fields))
    return stand_in(**fields)


def find_scale_state(call: str, tree: PyTree) -> Any:
    """Returns the one loss scale state in a tree, as arrays.

    The `scaling` of a `LossScaledState` may be of any type; other states need a mark.
    """
    state = find_one(call, restore_types(tree), is_scaling, "loss scale state")
    if is_loss_scaled(state):
        state = state.scaling
    return jax.tree.map(jnp.asarray, unwrap(state))


def find_optimizer_state(call: str, tree: PyTree) -> LossScaledState:
    """Returns the one `LossScaledState` in a tree."""
    return find_one(call, tree, is_loss_scaled, "`LossScaledState`")


def find_scale(call: str, argument: str, tree: PyTree) -> Any:
    """Returns the one loss scale state in a tree, of one training run, as arrays."""
    state = find_scale_state(call, tree)
    check_alone(f"{call}({argument})", state)
    return state


def check_policy_state(
    call: str, state: PyTree, kind: type = object, grads: Grads = None
) -> Any:
    """Returns the state that a policy was given, as arrays, or raises a `TypeError`.

    The `grads` that came with it tell whether the arguments were swapped.
    """
    are_swapped = is_scaling(grads) and not is_scaling(state)
    holds_state = is_loss_scaled(state) or hasattr(state, "opt_state")
    if isinstance(state, kind) and not are_swapped and not holds_state:
        state = unwrap(state)
        check_alone(f"{call}(state=...)", state)
        return state
    if are_swapped:
        hint = "The order of the arguments is (state, grads)."
    elif holds_state:
        hint = (
            "Pass `opt_state.scaling`, or call `tx.update`, which moves the scale too."
        )
    else:
        hint = (
            "Pass what the policy's `init`, or its last step, returned. To take over the state of "
            "another policy, use `jaxscale.from_state_dict(policy.init(), "
            "jaxscale.to_state_dict(state))`."
        )
    expected = "the state of a policy" if kind is object else f"a `{kind.__name__}`"
    raise TypeError(
        f"`{call}(state=...)` must be {expected}, got {type(state).__name__}. {hint}"
    )


def check_alone(argument: str, state: PyTree) -> None:
    """Raises a `ValueError` if a state is that of several members of a population."""
    shape = jnp.shape(getattr(state, "loss_scale", 0.0))
    if shape != ():
        raise ValueError(
            f"`{argument}` must hold the one scale of one training run, got a `loss_scale` that "
            f"has shape {shape}: call it under `jax.vmap`, which gives each member its own."
        )


def find_one(call: str, tree: PyTree, matches: Callable[[Any], bool], what: str) -> Any:
    """Returns the one node of a tree that `matches`, or raises a `ValueError`."""
    places = []
    nodes = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=matches):
        if matches(node):
            places.append(jax.tree_util.keystr(path))
            nodes.append(node)
    if len(nodes) == 1:
        return nodes[0]
    message = f"`{call}` needs a tree with exactly one {what}, got "
    if not nodes:
        raise ValueError(
            f"{message}none in a {type(tree).__name__}. {_suggest_state(tree)}"
        )
    raise ValueError(
        f"{message}{len(nodes)}, at {', '.join(places)}. Pass the one that belongs to this loss."
    )


def _suggest_state(tree: PyTree) -> str:
    """Returns what to pass instead of a tree without a state."""
    if hasattr(tree, "init"):
        return "It makes states and is not one itself: pass what its `init` returned."
    # The search could not look inside of a leaf.
    if hasattr(tree, "opt_state") and jax.tree_util.all_leaves([tree]):
        return "Pass its `opt_state`."
    if callable(tree):
        return "The function to differentiate comes first, the state second."
    if "loss_scale" in getattr(tree, "_fields", ()):
        return (
            "If it is the state of a policy of your own, mark it as one: in `class "
            f"{type(tree).__name__}`, write `is_loss_scale_state = True`, without an annotation."
        )
    return (
        "Pass the state that `tx.init(params)` returned in this place, where `tx` is a wrapped "
        "optimizer, as in `tx = jaxscale.loss_scaled(tx)`, or `jaxscale.master_weights(tx)` for "
        "half-precision parameters."
    )

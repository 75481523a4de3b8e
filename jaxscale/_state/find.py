"""A search for the loss scale in a training state, and checks of the state that was found.

Public functions take any tree with exactly one: a policy's or optimizer's state, a `TrainState`.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._trees.pytrees import PyTree
from .nodes import states_in
from .optimizer import LossScaledState, SpikeState
from .scale import LossScaleState, check_alone, is_policy_state, unwrap
from .storage import WeightsState

# A mapping with these fields is what NNX made of a `LossScaledState`. Others may be left out, as
# NNX leaves out what is empty, such as the inner state of plain SGD.
_SIGNATURE = {"scaling", "notfinite_count", "total_steps", "backoff_count"}


def is_loss_scaled(node: object) -> bool:
    """True for a `LossScaledState`."""
    return isinstance(node, LossScaledState)


def is_scaling(node: object) -> bool:
    """True for a node that is, or directly holds, a loss scale state."""
    return is_loss_scaled(node) or is_policy_state(node)


def restore_types(tree: PyTree) -> Any:
    """Turns mappings that Flax NNX made of states back into states.

    `nnx.state(optimizer)` and `nnx.split(optimizer)` make mappings of named tuples.
    """
    if states_in(tree, is_scaling):
        return tree

    def restore(node: PyTree) -> Any:
        if _is_mapping_of_state(node):
            return _restore_state(node)
        return node

    return jax.tree.map(restore, tree, is_leaf=_is_mapping_of_state)


def _is_mapping_of_state(node: object) -> bool:
    return isinstance(node, Mapping) and set(node) >= _SIGNATURE


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
    if set(LossScaleState._fields) == set(fields):
        return LossScaleState(**fields)
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


def find_one(call: str, tree: PyTree, matches: Callable[[Any], bool], what: str) -> Any:
    """Returns the one node of a tree that `matches`, or raises a `ValueError`."""
    found = states_in(tree, matches)
    if len(found) == 1:
        return found[0][1]
    message = f"`{call}` needs a tree with exactly one {what}, got "
    if not found:
        raise ValueError(
            f"{message}none in a {type(tree).__name__}. {_suggest_state(tree)}"
        )
    places = ", ".join(jax.tree_util.keystr(path) for path, _ in found)
    raise ValueError(
        f"{message}{len(found)}, at {places}. Pass the one that belongs to this loss."
    )


def _suggest_state(tree: PyTree) -> str:
    """The hint of what to pass instead of a tree without a state."""
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

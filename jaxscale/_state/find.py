"""How the loss scale in a training state is found, and checks of the state that was found.

Public functions take any tree with exactly one: a policy's or optimizer's state, a `TrainState`.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._trees.grammar import and_more
from .optimizer import LossScaledState, SpikeState
from .scale import AdaptiveState, LossScaleState, is_policy_state, unwrap


def is_loss_scaled(node: Any) -> bool:
    """Returns whether a node of a tree is a `LossScaledState`."""
    return isinstance(node, LossScaledState)


def restore_types(tree: Any) -> Any:
    """Returns a tree in which a mapping from the fields of a `LossScaledState` is one again.

    `nnx.state(optimizer)` and `nnx.split(optimizer)` make such mappings of named tuples.
    """
    nodes = jax.tree.leaves(tree, is_leaf=is_scaling)
    if any(map(is_scaling, nodes)):
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
    if fields["spikes"] is not None:
        fields["spikes"] = SpikeState(**fields["spikes"])
    return LossScaledState(**fields | {"scaling": kind(**scaling), "inner_state": inner_state})


def is_scaling(node: Any) -> bool:
    """Returns whether a node of a tree is, or directly holds, a loss scale state."""
    return is_loss_scaled(node) or is_policy_state(node)


def find_scale_state(call: str, tree: Any) -> Any:
    """Returns the one loss scale state in a tree, as arrays.

    The `scaling` of a `LossScaledState` may be of any type; other states need a mark.
    """
    state = find(call, restore_types(tree), is_scaling, "loss scale state")
    scaling = state.scaling if is_loss_scaled(state) else state
    return jax.tree.map(jnp.asarray, unwrap(scaling))


def find_optimizer_state(call: str, tree: Any) -> LossScaledState:
    """Returns the one `LossScaledState` in a tree."""
    return find(call, tree, is_loss_scaled, "`LossScaledState`")


def find_scale(call: str, argument: str, tree: Any) -> Any:
    """Returns the one loss scale state in a tree, of one training run, as arrays."""
    state = find_scale_state(call, tree)
    check_alone(f"{call}({argument})", state)
    return state


def check_policy_state(call: str, state: Any, kind: type = object, grads: Any = None) -> Any:
    """Returns the state that a policy was given, as arrays, or says what to pass instead.

    The `grads` that came with it tell whether the arguments were swapped.
    """
    if is_scaling(grads) and not is_scaling(state):
        hint = "The order of the arguments is (state, grads)."
    elif is_loss_scaled(state) or hasattr(state, "opt_state"):
        hint = "Pass `opt_state.scaling`, or call `tx.update`, which moves the scale too."
    elif isinstance(state, kind):
        state = unwrap(state)
        check_alone(f"{call}(state=...)", state)
        return state
    else:
        hint = (
            "Pass what the policy's `init`, or its last step, returned. To take over the state of "
            "another policy, use `jaxscale.from_state_dict(policy.init(), "
            "jaxscale.to_state_dict(state))`."
        )
    what = "the state of a policy" if kind is object else f"a `{kind.__name__}`"
    raise TypeError(f"`{call}(state=...)` must be {what}, got {type(state).__name__}. {hint}")


def check_alone(given: str, state: Any) -> None:
    """Raises a `ValueError` if a state is that of several members of a population."""
    shape = jnp.shape(getattr(state, "loss_scale", 0.0))
    if shape != ():
        raise ValueError(
            f"`{given}` must hold the one scale of one training run, got a `loss_scale` that has "
            f"shape {shape}: call it under `jax.vmap`, which gives each member its own."
        )


def find(call: str, tree: Any, matches: Callable[[Any], bool], what: str) -> Any:
    """Returns the one node of a tree that `matches`, or raises a `ValueError` if it is not one."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=matches)
    found = [(jax.tree_util.keystr(path), node) for path, node in nodes if matches(node)]
    if len(found) == 1:
        return found[0][1]
    got = f"none in {_contents(tree)}. {_way_out(tree)}"
    if found:
        places = ", ".join(path for path, _ in found)
        got = f"{len(found)}, at {places}. Pass the one that belongs to this loss."
    raise ValueError(f"`{call}` needs a tree with exactly one {what}, got {got}")


def _way_out(tree: Any) -> str:
    if hasattr(tree, "init"):
        return "It makes states and is not one itself: pass what its `init` returned."
    if hasattr(tree, "opt_state") and jax.tree_util.all_leaves([tree]):  # it was not looked into
        return "Pass its `opt_state`."
    if callable(tree):
        return "The function to differentiate comes first, the state second."
    if "loss_scale" in getattr(tree, "_fields", ()):
        return (
            "If it is the state of a policy of your own, mark it as one: in `class "
            f"{type(tree).__name__}`, write `is_loss_scale_state = True`, without an annotation."
        )
    return (
        "Wrap the optimizer, `tx = jaxscale.loss_scaled(tx)`, and pass the state that "
        "`tx.init(params)` returned."
    )


def _contents(tree: Any, most: int = 8) -> str:
    """Returns the types and places of the outermost named tuples and leaves of a tree."""
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: node is None or hasattr(node, "_fields")
    )
    if nodes and nodes[0][1] is tree:
        return f"the {type(tree).__name__}"
    names = [f"{type(node).__name__} at {jax.tree_util.keystr(path)}" for path, node in nodes]
    return ", ".join(names[:most] + and_more(names, most)) or "an empty tree"

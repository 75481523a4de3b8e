"""Checks that the trees of a step belong together: gradients, parameters, optimizer state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._state.storage import CompactState
from .._storage.rounding import HALF_DTYPES
from .._trees.gradient_leaves import leaf_name
from .._trees.grammar import list_some
from .._trees.leaves import is_array_like
from .._trees.pytrees import OptState, Params, PyTree


class TreeTypes(NamedTuple):
    """Structure and types of a tree: equal for two that may take each other's place. Hashable."""

    structure: Any
    leaves: tuple[tuple[Any, Any], ...]  # shape and dtype, `None` for what has none


def types_of(tree: PyTree) -> TreeTypes:
    """Returns the structure of a tree, and the shape and the dtype of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    types = [
        (getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves
    ]
    return TreeTypes(structure, tuple(types))


def check_gradients(argument: str, grads: optax.Updates, params: optax.Params) -> None:
    """Raises a `ValueError` if gradients are not like the parameters.

    Gradients by example, as differential privacy takes them, have axes of their own in front.
    Trees of two types of one's own, as `optax.lookahead` takes them, are meant to differ.
    """
    with_paths, of_grads = jax.tree_util.tree_flatten_with_path(grads, is_leaf=_is_none)
    leaves, of_params = jax.tree.flatten(params, is_leaf=_is_none)
    if grads is None and params is not None:
        of_grads = jax.tree.structure(grads)  # not every optimizer would notice
    if of_grads != of_params:
        both_plain = _is_plain(grads) and _is_plain(params)
        if type(grads) is not type(params) and not both_plain:
            return
        raise ValueError(
            f"`{argument}` must have the structure of the parameters. "
            f"{_explain_structures(grads, params)} Pass the gradients with respect to these "
            "parameters, with None or zeros for those that have none."
        )
    for (path, grad), param in zip(with_paths, leaves, strict=True):
        if not (is_array_like(grad) and is_array_like(param)):
            continue
        shape = jnp.shape(grad)
        expected = jnp.shape(param)
        own_axes = shape[len(shape) - len(expected) :]
        if len(shape) < len(expected) or own_axes != expected:
            raise ValueError(
                f"`{argument}`: the gradient at {leaf_name(path)} has the shape {shape}, and its "
                f"parameter {expected}. Pass the gradients with respect to these parameters; "
                "nothing is broadcast."
            )


def _explain_structures(grads: optax.Updates, params: optax.Params) -> str:
    """Returns how the structure of gradients differs from that of the parameters."""
    grad_names = _leaf_names(grads)
    param_names = _leaf_names(params)
    if set(grad_names) == set(param_names):
        return (
            f"That of the gradients is {jax.tree.structure(grads)}, and that of the parameters "
            f"{jax.tree.structure(params)}."
        )
    return (
        f"Only among the gradients: {_list_missing(grad_names, param_names)}; only among the "
        f"parameters: {_list_missing(param_names, grad_names)}."
    )


def _is_plain(tree: PyTree) -> bool:
    """Returns whether a tree is none of a class of somebody's own."""
    return is_array_like(tree) or tree is None or type(tree) in (dict, list, tuple)


def _leaf_names(tree: PyTree) -> list[str]:
    return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _list_missing(names: list[str], others: list[str]) -> str:
    """Returns those names as text that are not among the others."""
    return list_some([name for name in names if name not in others], 5) or "none"


def _is_none(leaf: object) -> bool:
    return leaf is None


def are_half(params: Params) -> bool:
    """Returns whether any parameters are in half precision."""
    return any(dtype in HALF_DTYPES for _, dtype in types_of(params).leaves)


def check_not_narrower(inner_state: OptState, expected: TreeTypes) -> None:
    """Raises a `ValueError` if a state is half precision where its optimizer made float32.

    Plain Optax makes such moments for half-precision parameters. They would stay as they are, and
    take in next to nothing.
    """
    types = types_of(inner_state)
    # In a part of it, the size of an array does not say whether `compact_state` means it.
    nodes = jax.tree.leaves(inner_state, is_leaf=_is_compact)
    if types.structure != expected.structure or any(map(_is_compact, nodes)):
        return
    for (_, dtype), (_, made) in zip(types.leaves, expected.leaves, strict=True):
        if dtype in HALF_DTYPES and made == jnp.float32:
            raise ValueError(
                f"`opt_state.inner_state` has {dtype} where this optimizer keeps float32, as plain "
                "Optax makes it for half-precision parameters. Take it over once: `opt_state "
                "= jaxscale.from_state_dict(tx.init(params), jaxscale.to_state_dict(opt_state))`."
            )


def _is_compact(node: object) -> bool:
    return isinstance(node, CompactState)


def explain_difference(state: OptState, expected: TreeTypes) -> str:
    """Returns what `init` makes and what a state has instead, empty if they are alike.

    A state may hold None in place of an array. It was made for a part of the parameters then, such
    as those that `eqx.filter` leaves of a module with a dropout rate.
    """
    entries = _entries_at(expected.structure, state)
    if entries is None:
        return f"makes {expected.structure}, got {jax.tree.structure(state)}"
    paths = iter(jax.tree_util.tree_leaves_with_path(state))
    for entry, (expected_shape, _) in zip(entries, expected.leaves, strict=True):
        if entry is None:
            continue
        path, _ = next(paths)
        shape = getattr(entry, "shape", None)
        # A scalar may have been replaced by numbers of the user's own, such as learning rates.
        if expected_shape and shape != expected_shape:
            place = jax.tree_util.keystr(path)
            return f"makes an array of shape {expected_shape} at {place}, got one of shape {shape}"
    return ""


def _entries_at(structure: Any, tree: PyTree) -> list[Any] | None:
    """Returns what a tree has at each leaf of a structure: a leaf, or None.

    It is `None` as a whole if the tree has another structure.
    """
    try:
        entries = structure.flatten_up_to(tree)
    except (TypeError, ValueError):
        return None
    for entry in entries:
        is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(entry))
        if entry is not None and not is_leaf:
            return None
    return entries

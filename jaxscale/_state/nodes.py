"""Nodes of a training state: a search for them, their paths, and which are of jaxscale."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.tree_util import KeyPath

from .._trees.pytrees import PyTree


def states_in(
    tree: PyTree, matches: Callable[[Any], bool]
) -> list[tuple[KeyPath, Any]]:
    """Lists the nodes of a tree that match, the outermost ones, each with its path."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=matches)
    return [(path, node) for path, node in pairs if matches(node)]


# The names of the fields, keys and indices that lead to a node.
Path = tuple[str, ...]
Nodes = dict[Path, Any]


def children_of(node: object) -> dict[str, Any] | None:
    """Returns the children of a node by name, `None` for a leaf."""
    if jax.tree_util.all_leaves([node]):
        return None
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    return {jax.tree_util.keystr(path, simple=True): child for path, child in pairs}


def nodes_of(node: object, path: Path = ()) -> Nodes:
    """Returns a node and those below it by path, without those that hold no leaf."""
    nodes = {path: node}
    for name, child in (children_of(node) or {}).items():
        if jax.tree.leaves(child):
            nodes |= nodes_of(child, (*path, name))
    return nodes


def names_in(node: object) -> set[str]:
    """Returns the names of the children of a node."""
    return set(children_of(node) or ())


def is_own_state(node: object) -> bool:
    """True for a state of jaxscale."""
    # Only named tuples: a `TrainState` is also jaxscale's own, but its fields have no defaults.
    if hasattr(node, "_fields"):
        package = type(node).__module__.partition(".")[0]
        return package == __name__.partition(".")[0]
    # `nnx.state` makes a mapping of a named tuple.
    return isinstance(node, Mapping) and set(node) >= {"scaling", "total_steps"}

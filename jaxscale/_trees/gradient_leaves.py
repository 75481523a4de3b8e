"""The leaves of a tree that are gradients, and operations on these alone.

Only floating-point and complex leaves are gradients; `None`, `float0`, integers, bools, typed PRNG
keys and leaves that are not arrays pass through.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.tree_util import KeyPath

from .._jax import varying
from .leaves import is_inexact_leaf
from .pytrees import PyTree

# The collection of state that travels as a gradient, where Flax and Transformer Engine keep the
# statistics of FP8. What a backward pass returns for such a leaf is not a slope but its next value,
# which is to replace it. It is not scaled, unscaled or checked, and no optimizer may see it.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def is_overwrite(path: KeyPath) -> bool:
    """Returns whether the path of a leaf says that its gradient replaces it."""
    for key in path:
        name = getattr(key, "key", getattr(key, "name", None))
        if name == OVERWRITE_WITH_GRADIENT:
            return True
    return False


def _is_gradient(path: KeyPath, leaf: object) -> bool:
    return is_inexact_leaf(leaf) and not is_overwrite(path)


def leaf_name(path: KeyPath) -> str:
    """Returns the path of a leaf as `params/Dense_0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the root"


def map_gradients(fun: Callable[[Any], Any], tree: PyTree) -> Any:
    """Applies `fun` to the leaves of a tree that are gradients."""

    def apply(path: KeyPath, leaf: object) -> Any:
        if _is_gradient(path, leaf):
            return fun(leaf)
        return leaf

    return jax.tree_util.tree_map_with_path(apply, tree)


def only_gradients(tree: PyTree) -> Any:
    """Returns `tree` with `None` for every leaf that is not a gradient."""

    def keep_gradient(path: KeyPath, leaf: object) -> Any:
        return leaf if _is_gradient(path, leaf) else None

    return jax.tree_util.tree_map_with_path(keep_gradient, tree)


def list_gradients(tree: PyTree) -> list[tuple[KeyPath, Any]]:
    """Returns the gradients in a tree, each with its path."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [(path, leaf) for path, leaf in pairs if _is_gradient(path, leaf)]


def replace_gradients(tree: PyTree, values: Iterable[Any]) -> Any:
    """Returns `tree` with other values in the place of its gradients, and `None` elsewhere.

    A class may look at its children, and refuse what is not an array of the shape that it knows.
    Then the values come in a dict, by the paths of the gradients.
    """
    values = list(values)
    remaining = iter(values)

    def replace(path: KeyPath, leaf: object) -> Any:
        return next(remaining) if _is_gradient(path, leaf) else None

    try:
        return jax.tree_util.tree_map_with_path(replace, tree)
    except Exception:  # whatever the class raises
        names = [leaf_name(path) for path, _ in list_gradients(tree)]
        return dict(zip(names, values, strict=True))


def varying_axes(tree: PyTree) -> set[Any]:
    """Returns the mesh axes along which gradients in a tree may differ, as `varying` does."""
    axes: set[Any] = set()
    for _, leaf in list_gradients(tree):
        axes.update(varying(jax.typeof(leaf)))
    return axes

"""The leaves of a tree that are gradients, and those that their gradients replace.

Only floating-point and complex leaves are gradients; `None`, `float0`, integers, bools, typed PRNG
keys and leaves that are not arrays pass through.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from .._jax import varying
from .leaves import cast, dtype_of, is_inexact_leaf, widen
from .pytrees import Leaf, PyTree

# The collection of state that travels as a gradient, where Flax and Transformer Engine keep the
# statistics of FP8. What a backward pass returns for such a leaf is not a slope but its next value,
# which is to replace it. It is not scaled, unscaled or checked, and no optimizer may see it.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def is_overwrite(path: KeyPath) -> bool:
    """True if the path of a leaf says that its gradient replaces it."""
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


# Leaves that their gradients replace: state that travels as a gradient.


def holds_overwrites(tree: PyTree) -> bool:
    """True if a tree has leaves that their gradients replace."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return any(is_overwrite(path) for path, _ in pairs)


def without_overwrites(tree: PyTree) -> Any:
    """Returns a tree with an empty node in the place of each leaf that its gradient replaces."""
    return _map_overwrites(lambda leaf: optax.MaskedNode(), tree)


def zero_overwrites(grads: optax.Updates) -> optax.Updates:
    """Returns gradients with zeros in the place of values that replace a leaf."""

    def zero(grad: Leaf) -> Any:
        return jnp.zeros_like(grad) if is_inexact_leaf(grad) else grad

    return _map_overwrites(zero, grads)


def overwrite(
    outcome: optax.Params, grads: optax.Updates, params: optax.Params | None
) -> optax.Params:
    """Replaces those leaves in the outcome of a step by their gradients that are finite."""

    def replace(_: object, new: Leaf, old: Leaf) -> Any:
        return replace_finite(new, old)

    return _map_overwrites(replace, outcome, grads, params)


def overwriting_updates(
    updates: optax.Updates, grads: optax.Updates, params: optax.Params | None
) -> optax.Updates:
    """Returns updates which, added to the parameters, replace those leaves by their gradients.

    A sum p + u cannot always be exact. It is rounded as the larger of the old and the new value
    is, and never 0 if the new value is not 0.
    """

    def find_difference(_: object, new: Leaf, old: Leaf) -> Any:
        if not is_inexact_leaf(old) or not is_inexact_leaf(new):
            return new
        wide_new = widen(replace_finite(new, old))
        wide_old = widen(old)
        update = wide_new - wide_old
        vanishes = (wide_old + update == 0) & (wide_new != 0)
        # The least update whose sum is not 0, but has the sign of the new value.
        smallest = jnp.nextafter(-wide_old, jnp.sign(wide_new) * jnp.inf)
        return jnp.where(vanishes, smallest, update)

    return _map_overwrites(find_difference, updates, grads, params)


def _map_overwrites(fun: Callable[..., Any], tree: PyTree, *others: Any) -> Any:
    """Applies `fun` to those leaves of a tree, and to what is in their places in others."""

    def apply(path: KeyPath, leaf: object, *beside: Any) -> Any:
        return fun(leaf, *beside) if is_overwrite(path) else leaf

    return jax.tree_util.tree_map_with_path(
        apply, tree, *others, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )


def replace_finite(new: Leaf, old: Leaf) -> Any:
    """Returns the next value of a leaf: the new one where it is finite, otherwise the old one."""
    if not is_inexact_leaf(old) or not is_inexact_leaf(new):
        return old  # integers and keys, with `float0` gradients
    return jnp.where(jnp.isfinite(new), cast(new, dtype_of(old)), old)

"""Leaves that their gradients replace: state that travels as a gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from .casts import cast, widen
from .gradient_leaves import is_overwrite
from .leaves import dtype_of, is_inexact_leaf
from .pytrees import Leaf, PyTree


def holds_overwrites(tree: PyTree) -> bool:
    """Returns whether a tree has leaves that their gradients replace."""
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

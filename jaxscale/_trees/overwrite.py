"""State that travels as a gradient: leaves under a key `_overwrite_with_gradient`.

Flax and Transformer Engine keep the statistics of FP8 there. What a backward pass returns for such
a leaf is not a slope but its next value, which is to replace it. No optimizer may see it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .leaf import dtype_of, is_inexact
from .tree import cast, is_overwrite, widen


def holds_overwrites(tree: Any) -> bool:
    """Returns whether a tree has leaves that their gradients replace."""
    return any(is_overwrite(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def without_overwrites(tree: Any) -> Any:
    """Returns a tree with an empty node in the place of each leaf that its gradient replaces."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if is_overwrite(path) else leaf, tree
    )


def zero_overwrites(grads: Any) -> Any:
    """Returns gradients with zeros in the place of values that replace a leaf."""

    def zero(path: Any, leaf: Any) -> Any:
        return jnp.zeros_like(leaf) if is_overwrite(path) and is_inexact(leaf) else leaf

    return jax.tree_util.tree_map_with_path(zero, grads)


def overwrite(outcome: Any, new: Any, old: Any) -> Any:
    """Returns the outcome of a step, with the leaves that are replaced in their new values.

    These are gradients; where one is not finite, the leaf stays as in `old`, before the step.
    """
    return _map_overwrites(replace_finite, outcome, new, old)


def overwriting_updates(updates: Any, new: Any, old: Any) -> Any:
    """Returns updates which, added to the parameters, replace those leaves by their new values.

    A sum p + u cannot always be exact: it is to the rounding of the larger of both values, and
    never 0 if the new value is not 0.
    """

    def difference(new: Any, old: Any) -> Any:
        if not is_inexact(old) or not is_inexact(new):
            return new
        new, old = widen(replace_finite(new, old)), widen(old)
        update = new - old
        vanishes = (old + update == 0) & (new != 0)
        return jnp.where(vanishes, jnp.nextafter(-old, jnp.sign(new) * jnp.inf), update)

    return _map_overwrites(difference, updates, new, old)


def _map_overwrites(fun: Any, outcome: Any, new: Any, old: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, *pair: fun(*pair) if is_overwrite(path) else leaf,
        outcome,
        new,
        old,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )


def replace_finite(new: Any, old: Any) -> Any:
    """Returns the next value of a leaf: the new one where it is finite, otherwise the old one."""
    if not is_inexact(old) or not is_inexact(new):
        return old  # integers and keys, with `float0` gradients
    return jnp.where(jnp.isfinite(new), cast(new, dtype_of(old)), old)

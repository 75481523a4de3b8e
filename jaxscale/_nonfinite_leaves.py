"""Which leaves an overflow was in: a bool a leaf, from the same pass that gives the verdict."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._tree import leaf_name, only_gradients


def flags_by_leaf(tree: Any, finite: Sequence[jax.Array] | None = None) -> Any:
    """Returns a tree like ``tree``: a ``bool[]`` for each gradient, ``None`` elsewhere.

    Set where a leaf is not ``finite``; without that, nowhere. So it carries the paths of
    the leaves, and has the avals of any other such tree of these parameters.
    """
    gradients, structure = jax.tree.flatten(only_gradients(tree))
    if not gradients:
        # One flag that is never set. `optax.tree_map_params` takes what has the structure of
        # the parameters for parameters, and tells it by calling `init` with such a tree.
        return jnp.array(False)
    if finite is None:  # each in a buffer of its own: no state is donated that holds one twice
        return jax.tree.unflatten(structure, [jnp.array(False) for _ in gradients])
    return jax.tree.unflatten(structure, [~each for each in finite])


def last_flags(flags: Any, new: Any, grads_finite: jax.Array) -> Any:
    """Returns the new flags if the gradients overflowed, else those that were there."""

    def choose(flag: Any, new: Any) -> Any:
        if flag is None:
            return None
        # A parameter without a gradient has none that is bad.
        return jnp.where(grads_finite, flag, jnp.array(False) if new is None else new)

    return jax.tree.map(choose, flags, new, is_leaf=lambda flag: flag is None)


def named_flags(flags: Any) -> dict[str, Any]:
    """Returns the flags under the paths of their leaves: ``params/Dense_0/kernel``."""
    return {leaf_name(path): flag for path, flag in jax.tree_util.tree_leaves_with_path(flags)}


def flagged_paths(flags: Any) -> list[str]:
    """Returns the paths of the leaves that are set, on the host.

    Of a population, whose flags have leading axes, those that are set in any member.
    """
    named = named_flags(jax.device_get(flags))
    return [name for name, flag in named.items() if np.any(flag)]

"""Which leaves an overflow was in: a bool a leaf, from the same pass that gives the verdict."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._tree import only_gradients


def finite_by_leaf(tree: Any) -> jax.Array:
    """Returns whether each gradient in a tree is finite, a ``bool[leaves]``.

    Their conjunction is :func:`jaxscale.all_finite`, and the order that of the leaves.
    """
    leaves = jax.tree.leaves(only_gradients(tree))
    verdicts = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
    return jnp.stack(verdicts) if verdicts else jnp.ones(0, jnp.bool_)


def flags_by_leaf(tree: Any, flags: jax.Array) -> Any:
    """Returns a ``bool[leaves]`` as a tree with the structure of ``tree``.

    A ``bool[]`` for each gradient, ``None`` elsewhere. So it carries the leaves' paths,
    and has the avals of any other such tree of these parameters.
    """
    gradients, structure = jax.tree.flatten(only_gradients(tree))
    return jax.tree.unflatten(structure, [flags[i] for i in range(len(gradients))])


def flagged_paths(flags: Any) -> list[str]:
    """Returns the paths of the leaves that are set, on the host.

    Of a population, whose flags have leading axes, those that are set in any member.
    """
    return [
        jax.tree_util.keystr(path) or "the root"
        for path, flag in jax.tree_util.tree_leaves_with_path(jax.device_get(flags))
        if np.any(flag)
    ]

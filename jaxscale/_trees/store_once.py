"""Arrays that a CPU computes once, however many read them."""

from typing import Any

import jax
from jax.core import Tracer

from .._jax import varying
from .pytrees import PyTree


def store_once(tree: PyTree) -> Any:
    """Makes a CPU compute the arrays of a tree once, and store them.

    XLA takes casts and additions for cheap, and would fuse those at the end of a step into each
    reader. On a CPU they cost more than to read float32.
    """
    leaves, structure = jax.tree.flatten(tree)
    # JAX gives all arrays that share a barrier the mesh axes of all of them. So one barrier serves
    # those that vary along the same axes, which usually are all.
    groups: dict[frozenset[Any], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tracer):
            groups.setdefault(varying(jax.typeof(leaf)), []).append(index)
    for indices in groups.values():
        stored = jax.lax.platform_dependent(
            [leaves[index] for index in indices],
            cpu=jax.lax.optimization_barrier,
            default=lambda arrays: arrays,
        )
        for index, array in zip(indices, stored, strict=True):
            leaves[index] = array
    return structure.unflatten(leaves)

"""Arrays that a CPU computes once, however many read them."""

from typing import Any

import jax
from jax.core import Tracer

from .._jax import VIEWS_ARE_FREE, varying
from .pytrees import PyTree


def store_once(tree: PyTree) -> Any:
    """Makes a CPU compute the arrays of a tree once, and store them.

    XLA takes casts and additions for cheap, and would fuse those at the end of a half-precision
    backward pass, or of a step, into each reader. On a CPU they cost more than to read float32.
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
            cpu=_store_by_rows,
            default=lambda arrays: arrays,
        )
        for index, array in zip(indices, stored, strict=True):
            leaves[index] = array
    return structure.unflatten(leaves)


def _store_by_rows(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns arrays that XLA stores, each in the order of its elements.

    JAX transposes the product that is the gradient of a matrix. XLA puts that into the product, but
    not if a cast stands between: it would store the matrix by columns, and the step reads by rows.
    A flat view can only be had of rows. Arrays that may be divided among devices have none.
    """
    has_views = VIEWS_ARE_FREE and jax.device_count() == 1
    views = []
    for array in arrays:
        if has_views and jax.typeof(array).sharding.mesh.empty:
            array = jax.lax.reshape(array, (array.size,))
        views.append(array)
    views = jax.lax.optimization_barrier(views)
    stored = []
    for array, view in zip(arrays, views, strict=True):
        stored.append(jax.lax.reshape(view, array.shape))
    return stored

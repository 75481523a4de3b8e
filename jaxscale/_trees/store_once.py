"""Arrays that a CPU computes once, however many read them."""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType

from .._jax import varying


def store_once(tree: Any) -> Any:
    """Makes a CPU compute the arrays of a tree once, and store them.

    XLA takes casts and additions for cheap, and would fuse those at the end of a half-precision
    backward pass, or of a step, into each reader. On a CPU they cost more than to read float32. On
    other machines the products may reduce what they write, and one kernel serves several readers.
    """
    leaves, structure = jax.tree.flatten(tree)
    # JAX 0.10 gives all arrays that share a barrier the mesh axes of all of them. So one barrier
    # serves those that vary along the same axes, which usually are all.
    groups: dict[frozenset[Any], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tracer):
            groups.setdefault(varying(jax.typeof(leaf)), []).append(index)
    for indices in groups.values():
        arrays = [leaves[index] for index in indices]
        stored = jax.lax.platform_dependent(
            arrays, cpu=_store_by_rows, default=lambda arrays: arrays
        )
        for index, array in zip(indices, stored, strict=True):
            leaves[index] = array
    return structure.unflatten(leaves)


def _store_by_rows(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns arrays that XLA stores, each in the order of its elements.

    JAX transposes the product that is the gradient of a matrix. XLA puts that into the product, but
    not if a cast stands between: it would store the matrix by columns, and the step reads by rows.
    A flat view can only be had of rows. (`with_layout_constraint` asks for the same, but
    `jax.export` cannot serialize it, and JAX 0.6 cannot batch it.)
    """
    flat = []
    for array in arrays:
        if _is_whole(array):
            array = jax.lax.reshape(array, (array.size,))
        flat.append(array)
    # The arrays are stored, too. With their views alone XLA would fuse a view into the division
    # before it, which could then no longer be done in place.
    _, stored = jax.lax.optimization_barrier((arrays, flat))
    restored = []
    for array, view in zip(arrays, stored, strict=True):
        restored.append(jax.lax.reshape(view, array.shape))
    return restored


def _is_whole(array: jax.Array) -> bool:
    """Returns whether an array is known to lie on one device, or is its part in `shard_map`."""
    mesh = jax.typeof(array).sharding.mesh
    if mesh.empty:
        return jax.device_count() == 1
    return all(kind == AxisType.Manual for kind in mesh.axis_types)

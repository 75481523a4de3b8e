"""Leaves of a tree: an array, a number or neither; casts, zeros of a type, and their storage."""

import enum
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType
from jax.typing import DTypeLike

from .._jax import VIEWS_ARE_FREE, ShapedArray, is_inexact, vary, varying
from .pytrees import Leaf, PyTree

_Tree = TypeVar("_Tree")


class NumberKind(enum.IntEnum):
    """The kind of numbers that a dtype holds, from the lowest to the highest as JAX promotes."""

    NONE = -1
    BOOL = 0
    INTEGER = 1
    FLOATING = 2
    COMPLEX = 3


_KINDS = {
    jnp.bool_: NumberKind.BOOL,
    jnp.integer: NumberKind.INTEGER,
    jnp.floating: NumberKind.FLOATING,
    jnp.complexfloating: NumberKind.COMPLEX,
}


def kind_of(dtype: DTypeLike) -> NumberKind:
    """Returns the kind of numbers that a dtype holds, `NONE` for that of keys, text and so on."""
    for scalar_type, kind in _KINDS.items():
        if jnp.issubdtype(dtype, scalar_type):
            return kind
    return NumberKind.NONE


def is_array_like(leaf: object) -> bool:
    """True for an array of JAX or NumPy, and for a number.

    The type decides, as modules and abstract values also have a `dtype`. A NumPy array of numbers
    counts even if JAX does not support its dtype, so that JAX itself refuses it.
    """
    if isinstance(leaf, jax.Array):
        return True
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return is_python_number(leaf)
    if leaf.dtype == jax.dtypes.float0:
        return True
    is_time = leaf.dtype.kind == "m"  # NumPy counts time differences among the integers
    return kind_of(leaf.dtype) is not NumberKind.NONE and not is_time


def is_python_number(leaf: object) -> bool:
    """True for a number without a dtype."""
    if not isinstance(leaf, (bool, int, float, complex)):
        return False
    # A member of an enumeration is a choice, even where it is an int to Python. NumPy's float64
    # is a Python float, but it has a dtype.
    return not isinstance(leaf, (enum.Enum, np.generic))


def is_none(leaf: object) -> bool:
    """True for `None`, which JAX takes for a node without leaves unless it is asked."""
    return leaf is None


def is_weak(leaf: object) -> bool:
    """True for a weakly typed array."""
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).weak_type


def is_inexact_leaf(leaf: object) -> bool:
    """True for a floating-point or complex array or number."""
    if isinstance(leaf, jax.Array):
        return is_inexact(leaf.dtype)
    return is_array_like(leaf) and is_inexact(dtype_of(leaf))


def dtype_of(leaf: object) -> Any:
    """Returns the dtype that an array or number has in JAX."""
    if isinstance(leaf, jax.Array):
        return leaf.dtype
    return jnp.result_type(leaf)


def is_equal(a: Leaf, b: Leaf) -> bool:
    """True if two leaves that are not arrays are the same, or of one type and equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        if isinstance(a, np.ndarray):  # of text or objects
            return a.dtype == b.dtype and np.array_equal(a, b)
        return bool(a == b)
    except Exception:  # a comparison by element, or an error of its own
        return False


def parts_in_reach(leaf: object) -> list[Any]:
    """Returns the parts of an array that this process has."""
    if not isinstance(leaf, jax.Array):
        return [leaf]
    return [shard.data for shard in leaf.addressable_shards]


def check_in_reach(argument: str, leaf: object) -> None:
    """Raises a `ValueError` if this process has only a part of an array, which others share."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return
    raise ValueError(
        f"{argument} is split over several processes, and this one has only a part of it. Gather "
        "all parts first, in all processes: "
        "`jax.experimental.multihost_utils.process_allgather(tree, tiled=True)`."
    )


# Casts, placement and zeros.


def widen(leaf: Leaf) -> jax.Array:
    """Casts an inexact leaf to float32, unless its own dtype is as wide or wider."""
    return cast(leaf, widened(leaf))


def widened(leaf: object) -> Any:
    """Returns the dtype that `widen` gives an inexact leaf."""
    dtype = jnp.result_type(leaf)
    if jnp.finfo(dtype).bits >= 32:
        return dtype
    return jnp.dtype(jnp.float32)


def cast(leaf: Leaf, dtype: DTypeLike) -> Any:
    """Casts a leaf to a strongly typed array of a dtype.

    Typed keys and `float0`, whose dtypes do not hold numbers, stay as they are.
    """
    # Most leaves have it already, and a conversion takes longer to trace than a product.
    if isinstance(leaf, jax.Array) and leaf.dtype == dtype and not is_weak(leaf):
        return leaf
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return leaf
    return jax.lax.convert_element_type(leaf, dtype)


def cast_like(tree: _Tree, like: Leaf) -> _Tree:
    """Casts the leaves of a tree to the dtypes of another tree of the same structure."""

    def cast_leaf(leaf: object, other: Leaf) -> Any:
        if not is_array_like(other):
            return leaf
        return cast(leaf, dtype_of(other))

    return jax.tree.map(cast_leaf, tree, like)


def blank(aval: Any) -> jax.Array:
    """Returns zeros of a type, with its sharding and the mesh axes along which it varies."""
    return filled(aval, 0)


def filled(aval: ShapedArray, number: Any) -> jax.Array:
    """Returns an array of a type, as `blank` does, with one number in all places."""
    if aval.sharding.mesh.empty:
        return jax.lax.full(aval.shape, number, aval.dtype)
    sharding = _explicit_sharding(aval)
    array = jax.lax.full(aval.shape, number, aval.dtype, sharding=sharding)
    return vary(array, varying(aval))


def uninitialized(aval: ShapedArray) -> jax.Array:
    """Returns an array of a type that nobody reads before it is written."""
    sharding = _explicit_sharding(aval)
    array = jax.lax.empty(aval.shape, aval.dtype, out_sharding=sharding)
    return vary(array, varying(aval))


def aval_of(leaf: object) -> Any:
    """Returns the type of an array or number. A type is returned as it is."""
    return jax.typeof(leaf) if is_array_like(leaf) else leaf


def is_on_mesh(leaf: object) -> bool:
    """True if the type of an array names a mesh, explicit or that of `shard_map`."""
    return not jax.typeof(leaf).sharding.mesh.empty


def in_common_type(leaf: Any, old: Leaf, new: Leaf) -> jax.Array:
    """Returns one of two arrays, as both can be returned in one place.

    On a mesh with explicit axes it lies as the old one, if its type says how, and it varies along
    the axes along which either does.
    """
    types = [aval_of(old), aval_of(new)]
    for aval in types:
        sharding = _explicit_sharding(aval)
        if sharding is not None:
            if jax.typeof(leaf).sharding != sharding:
                leaf = jax.sharding.reshard(leaf, sharding)
            break
    return vary(leaf, varying(types[0]) | varying(types[1]))


def _explicit_sharding(aval: ShapedArray) -> Any:
    """Returns the sharding of a type, or `None` if the type does not say it."""
    # `full` takes no sharding for keys.
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    if not is_key and AxisType.Explicit in aval.sharding.mesh.axis_types:
        return aval.sharding
    return None


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
            axes = varying(jax.typeof(leaf)) if is_on_mesh(leaf) else frozenset()
            groups.setdefault(axes, []).append(index)
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
        if has_views and not is_on_mesh(array):
            array = jax.lax.reshape(array, (array.size,))
        views.append(array)
    views = jax.lax.optimization_barrier(views)
    stored = []
    for array, view in zip(arrays, views, strict=True):
        stored.append(jax.lax.reshape(view, array.shape))
    return stored

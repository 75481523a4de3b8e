"""Leaves and trees in other dtypes, and zeros of a type."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import DTypeLike

from .._jax import ShapedArray, vary, varying
from .leaves import dtype_of, is_array_like, is_weak
from .pytrees import Leaf, PyTree

_Tree = TypeVar("_Tree")


def widen(leaf: Leaf) -> jax.Array:
    """Casts an inexact leaf to float32, unless its own dtype is as wide or wider."""
    if _has_dtype(leaf, jnp.float32):
        return leaf
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
    if _has_dtype(leaf, dtype):
        return leaf
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return leaf
    return jax.lax.convert_element_type(leaf, dtype)


def _has_dtype(leaf: object, dtype: DTypeLike) -> bool:
    # Most leaves have it already, and a conversion takes longer to trace than a product.
    return isinstance(leaf, jax.Array) and leaf.dtype == dtype and not is_weak(leaf)


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


def common_sharding(old: PyTree, new: PyTree) -> Any:
    """Returns how two arrays or types lie on a mesh with explicit axes: as the old one, if it does.

    `None` where neither type says it.
    """
    for leaf in (old, new):
        sharding = _explicit_sharding(aval_of(leaf))
        if sharding is not None:
            return sharding
    return None


def placed(leaf: object, sharding: Any) -> Any:
    """Returns an array that lies on a mesh as the sharding of a type says, if there is one."""
    if sharding is None or jax.typeof(leaf).sharding == sharding:
        return leaf
    return jax.sharding.reshard(leaf, sharding)


def _explicit_sharding(aval: ShapedArray) -> Any:
    """Returns the sharding of a type, or `None` if the type does not say it."""
    # `full` takes no sharding for keys.
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    if not is_key and AxisType.Explicit in aval.sharding.mesh.axis_types:
        return aval.sharding
    return None

"""Leaves of a tree: an array, a number or neither, and the dtype that holds it."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from .._jax import is_inexact
from .pytrees import Leaf


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
    """Returns whether a leaf is an array to JAX, or a number.

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
    """Returns whether a leaf is a number without a dtype."""
    if not isinstance(leaf, (bool, int, float, complex)):
        return False
    # A member of an enumeration is a choice, even where it is an int to Python. NumPy's float64
    # is a Python float, but it has a dtype.
    return not isinstance(leaf, (enum.Enum, np.generic))


def is_weak(leaf: object) -> bool:
    """Returns whether a leaf is a weakly typed array."""
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).weak_type


def is_inexact_leaf(leaf: object) -> bool:
    """Returns whether a leaf is a floating-point or complex array or number."""
    return is_array_like(leaf) and is_inexact(dtype_of(leaf))


def dtype_of(leaf: object) -> Any:
    """Returns the dtype that an array or number has in JAX."""
    if isinstance(leaf, jax.Array):
        return leaf.dtype
    return jnp.result_type(leaf)


def is_equal(a: Leaf, b: Leaf) -> bool:
    """Returns whether two leaves that are not arrays are the same, or of one type and equal."""
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

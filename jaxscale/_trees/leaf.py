"""Whether a leaf of a tree is an array, a number or neither, and which dtype holds it."""

import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# From the lowest to the highest, as JAX promotes them.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def is_array_like(leaf: Any) -> bool:
    """Returns whether a leaf is an array to JAX, or a number.

    The type decides, as modules and abstract values have a `dtype`, too. A NumPy array of numbers
    counts even if JAX does not support its dtype, so that JAX refuses it.
    """
    if isinstance(leaf, jax.Array):
        return True
    if isinstance(leaf, (np.ndarray, np.generic)):
        dtype = leaf.dtype
        # NumPy counts time differences among the integers.
        return dtype == jax.dtypes.float0 or (kind_of(dtype) >= 0 and dtype.kind != "m")
    return is_python_number(leaf)


def is_python_number(leaf: Any) -> bool:
    """Returns whether a leaf is a number without a dtype."""
    # A member of an enumeration is a choice, even where it is an int to Python. NumPy's float64
    # is a Python float, but it has a dtype.
    number = isinstance(leaf, (bool, int, float, complex))
    return number and not isinstance(leaf, (enum.Enum, np.generic))


def is_weak(leaf: Any) -> bool:
    """Returns whether a leaf is a weakly typed array."""
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).weak_type


def kind_of(dtype: Any) -> int:
    """Returns the rank of a dtype's kind of numbers, or -1 if it does not hold numbers."""
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), -1)


def is_inexact(leaf: Any) -> bool:
    """Returns whether a leaf is a floating-point or complex array or number."""
    return is_array_like(leaf) and jnp.issubdtype(dtype_of(leaf), jnp.inexact)


def dtype_of(leaf: Any) -> Any:
    """Returns the dtype that an array or number has in JAX."""
    return leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)


def is_equal(a: Any, b: Any) -> bool:
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


def holds(dtype: Any, number: Any) -> bool:
    """Returns whether a dtype holds a Python number: exactly, or rounded if it is inexact."""
    kind = kind_of(dtype)
    if kind < 0 or (kind < 3 and number.imag != 0):
        return False
    if kind < 2:
        least, most = (0, 1) if kind == 0 else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        return least <= number.real <= most and number.real == int(number.real)
    most, eps = float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).eps)
    overflow = most + eps / 2 * 2.0 ** (math.frexp(most)[1] - 1)  # from here on it rounds to inf
    return not any(overflow <= abs(part) < math.inf for part in (number.real, number.imag))


def as_array(number: Any, dtype: Any) -> np.ndarray:
    """Returns a Python number as an array of a dtype that holds it."""
    # With NumPy, as JAX makes a Python number an int32 or a float32 first.
    kind = kind_of(dtype)
    number = (bool, int, float, complex)[kind](number if kind == 3 else number.real)
    return np.asarray(number, dtype)

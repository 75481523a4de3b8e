"""One of two trees, selected leaf by leaf, and the errors where they do not match."""

import warnings
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from .._jax import is_inexact
from .casts import cast, common_sharding, placed
from .checks import scalar_bool
from .leaf import dtype_of, is_array_like, is_equal, is_python_number, is_weak

_Tree = TypeVar("_Tree")


def tree_where(pred: Any, on_true: _Tree, on_false: _Tree) -> _Tree:
    """Returns `on_true` if `pred` holds, otherwise `on_false`, leaf by leaf.

    Use it to skip a step: a selection drops an inf, whereas `0 * inf` is NaN.

    Args:
      pred: a `bool[]`.
      on_true: a pytree. Besides arrays of any dtype it may hold typed PRNG keys, `None`,
        `float0` arrays, and leaves that are not arrays, such as text, functions, types and
        members of an enumeration, if they are equal in both trees.
      on_false: a pytree of the same structure, with leaves of the same shapes and dtypes.

    Returns:
      A pytree of that structure, with the shapes and dtypes of both trees. On a mesh with explicit
      axes it lies as `on_false`. A Python number
      takes the dtype of the array it meets, and so does a weakly typed array of the same or a
      lower kind (bool, integer, floating, complex) that meets a strongly typed one. Two
      Python numbers, or two weakly typed arrays, become what JAX promotes them to; two weakly
      typed arrays of one dtype stay weakly typed.

    Raises:
      TypeError: if `pred` is not a scalar bool, if the dtypes of two leaves differ, if a
        dtype cannot hold the Python number it meets (1.5 for an `int32`, 300 for an
        `int8`), or if two leaves that are not arrays differ.
      ValueError: if the structures, or the shapes of two leaves, differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> new, old = {"w": jnp.array([jnp.nan]), "b": None}, {"w": jnp.array([1.0]), "b": None}
      >>> jaxscale.tree_where(jaxscale.all_finite(new), new, old)
      {'b': None, 'w': Array([1.], dtype=float32)}
    """
    return select("tree_where", pred, on_true, on_false)


def select(call: str, pred: Any, on_true: Any, on_false: Any) -> Any:
    """Selects as `tree_where` does, with errors in the name of `call`."""
    pred = scalar_bool(call, "pred", pred)
    _check_same_structure(call, on_true, on_false)

    def select_leaf(path: KeyPath, a: Any, b: Any) -> Any:
        if _are_arrays_of_one_type(a, b):  # the usual case, first because it is fast
            return _select_array(pred, a, b)
        if not is_array_like(a) or not is_array_like(b):
            if not is_equal(a, b):
                raise TypeError(
                    _unequal(call, path, "values, as they are not arrays", a, b)
                )
            return a
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(_unequal(call, path, "shapes", jnp.shape(a), jnp.shape(b)))
        dtype = _common_dtype(call, path, a, b)
        if dtype == jax.dtypes.float0:  # holds no values, and XLA knows no such type
            return a
        return _select_array(pred, _as_array(a, dtype), _as_array(b, dtype))

    return jax.tree_util.tree_map_with_path(select_leaf, on_true, on_false)


def _select_array(pred: Any, new: Any, old: Any) -> jax.Array:
    """Selects one of two arrays of one shape and dtype, which may lie on a mesh in two ways."""
    sharding = common_sharding(old, new)
    return jax.lax.select(pred, placed(new, sharding), placed(old, sharding))


def _are_arrays_of_one_type(a: Any, b: Any) -> bool:
    if not isinstance(a, jax.Array) or not isinstance(b, jax.Array):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and is_weak(a) == is_weak(b)


def select_like(call: str, pred: Any, new: Any, old: Any) -> Any:
    """Selects as `select` does, with the types of `old`. Another dtype is an error."""

    def keep_type(path: KeyPath, leaf: Any, old_leaf: Any) -> Any:
        if not is_array_like(leaf) or not is_array_like(old_leaf):
            return leaf
        dtype = dtype_of(leaf)
        old_dtype = dtype_of(old_leaf)
        if dtype != old_dtype:
            raise TypeError(_unequal_dtypes(call, path, dtype, old_dtype))
        if isinstance(old_leaf, jax.Array) and is_weak(old_leaf) and not is_weak(leaf):
            # A step whose state came back strongly typed would compile anew. No cast makes a weak
            # type, but what is written into a weakly typed array takes it.
            return old_leaf.at[...].set(leaf)
        return leaf

    selected = select(call, pred, new, old)
    return jax.tree_util.tree_map_with_path(keep_type, selected, old)


def _common_dtype(call: str, path: KeyPath, a: Any, b: Any) -> Any:
    """Returns the dtype of a selection from two leaves: that of the more strongly typed one."""
    numbers = [leaf for leaf in (a, b) if is_python_number(leaf)]
    arrays = [leaf for leaf in (a, b) if not is_python_number(leaf)]
    dtypes = [dtype_of(leaf) for leaf in arrays or numbers]
    dtype = dtypes[0]
    if dtypes.count(dtype) < len(dtypes):
        try:
            with jax.numpy_dtype_promotion("standard"):
                dtype = jnp.result_type(*(arrays or numbers))
        except ValueError:  # JAX promotes no floating-point numbers of 8 bits
            raise TypeError(_unequal_dtypes(call, path, *dtypes)) from None
    for leaf in arrays:
        if not is_weak(leaf) and dtype_of(leaf) != dtype:
            raise TypeError(_unequal_dtypes(call, path, *dtypes))
    for number in numbers:
        if not _holds(dtype, number):
            raise TypeError(
                f"`{call}` needs leaves of equal dtypes: that at {_place(path)} is {number!r} in "
                f"one tree and {dtype} in the other, which does not hold that number. Pass a "
                f"number that {dtype} holds, or arrays of one dtype."
            )
    return dtype


def _holds(dtype: Any, number: Any) -> bool:
    """Returns whether a dtype holds a Python number: exactly, or rounded if it is inexact."""
    try:
        array = _as_array(number, dtype)
        if is_inexact(dtype) and (array.imag == number.imag or array.imag):
            return np.isfinite(array) == np.isfinite(number)
        return bool(array == number)
    except (OverflowError, TypeError, ValueError):
        return False


def _as_array(leaf: Any, dtype: Any) -> Any:
    """Casts an array or a Python number."""
    if not is_python_number(leaf):
        return cast(leaf, dtype)
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        return np.asarray(leaf).astype(dtype)


def _unequal(call: str, path: KeyPath, what: str, a: Any, b: Any) -> str:
    return f"`{call}` needs leaves of equal {what}: those at {_place(path)} have {a} and {b}."


def _unequal_dtypes(call: str, path: KeyPath, a: Any, b: Any) -> str:
    message = _unequal(call, path, "dtypes", a, b)
    return f"{message} Cast one to the other's dtype, or the step would compile anew."


def _place(path: KeyPath) -> str:
    return jax.tree_util.keystr(path) or "the root"


def _check_same_structure(call: str, first: Any, second: Any) -> None:
    """Raises a `ValueError` that says where two trees differ, if they do."""
    first_structure = jax.tree.structure(first)
    second_structure = jax.tree.structure(second)
    if first_structure == second_structure:
        return
    if first is None or second is None:
        raise ValueError(
            f"`{call}` needs two trees of one structure, got None for one of them. If a function "
            "makes it, does that end without `return`?"
        )
    raise ValueError(
        f"`{call}` needs two trees of one structure. They are {first_structure} and "
        f"{second_structure}."
    )

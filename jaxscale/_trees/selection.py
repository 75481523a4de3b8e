"""One of two trees, selected leaf by leaf, and the errors where they do not match."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jax.typing import ArrayLike, DTypeLike

from .arguments import describe_value
from .leaves import (
    cast,
    dtype_of,
    in_common_type,
    is_array_like,
    is_equal,
    is_on_mesh,
    is_python_number,
    is_weak,
)
from .pytrees import Leaf, PyTree

_Tree = TypeVar("_Tree")

_WAY_OUT = "Cast one to the other's dtype, or the step would compile anew."


def tree_where(pred: ArrayLike, on_true: _Tree, on_false: _Tree) -> _Tree:
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
      axes it lies as `on_false`. A Python number or a weakly typed array of the same or a lower
      kind (bool, integer, floating, complex) takes the dtype of the strongly typed array it meets.
      Two of these become what JAX promotes them to; two weakly typed arrays of one dtype stay
      weakly typed.

    Raises:
      TypeError: if `pred` is not a scalar bool, if the dtypes of two leaves differ, or if two
        leaves that are not arrays differ.
      OverflowError: if an integer is beyond the range of the dtype it meets, as 300 for an `int8`.
      ValueError: if the structures, or the shapes of two leaves, differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> new, old = {"w": jnp.array([jnp.nan]), "b": None}, {"w": jnp.array([1.0]), "b": None}
      >>> jaxscale.tree_where(jaxscale.all_finite(new), new, old)
      {'b': None, 'w': Array([1.], dtype=float32)}
    """
    return select("tree_where", pred, on_true, on_false)


def select(call: str, pred: ArrayLike, on_true: PyTree, on_false: PyTree) -> Any:
    """Selects as `tree_where` does, with errors in the name of `call`."""
    pred = scalar_bool(call, "pred", pred)
    _check_same_structure(call, on_true, on_false)

    def select_leaf(path: KeyPath, a: Leaf, b: Leaf) -> Any:
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


def where(pred: jax.Array, new: _Tree, old: _Tree) -> _Tree:
    """Selects as `tree_where` does, which looks closely only at trees that do not match."""
    leaves, structure = jax.tree.flatten(old)
    new_leaves, new_structure = jax.tree.flatten(new)
    if new_structure != structure or not all(
        map(_are_arrays_of_one_type, new_leaves, leaves)
    ):
        return tree_where(pred, new, old)
    chosen = [
        _select_array(pred, *both) for both in zip(new_leaves, leaves, strict=True)
    ]
    return structure.unflatten(chosen)


def _select_array(pred: ArrayLike, new: Leaf, old: Leaf) -> jax.Array:
    """Selects one of two arrays of one shape and dtype, which may lie on a mesh in two ways."""
    if is_on_mesh(old) or is_on_mesh(new):
        common = functools.partial(in_common_type, old=old, new=new)
        return jax.lax.select(pred, common(new), common(old))
    return jax.lax.select(pred, new, old)


def _are_arrays_of_one_type(a: Leaf, b: Leaf) -> bool:
    if not isinstance(a, jax.Array) or not isinstance(b, jax.Array):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and is_weak(a) == is_weak(b)


def select_new(call: str, pred: Any, new: _Tree, old: _Tree) -> _Tree:
    """Returns `new` if `pred` holds or is `None`, otherwise `old`, in the types of `old`.

    Another dtype is an error.
    """
    if pred is None:
        return new

    def keep_type(path: KeyPath, leaf: object, old_leaf: object) -> Any:
        if not is_array_like(leaf) or not is_array_like(old_leaf):
            return leaf
        dtype = dtype_of(leaf)
        old_dtype = dtype_of(old_leaf)
        if dtype != old_dtype:
            message = _unequal(call, path, "dtypes", dtype, old_dtype)
            raise TypeError(f"{message} {_WAY_OUT}")
        if isinstance(old_leaf, jax.Array) and is_weak(old_leaf) and not is_weak(leaf):
            # A step whose state came back strongly typed would compile anew. No cast makes a weak
            # type, but what is written into a weakly typed array takes it.
            return old_leaf.at[...].set(leaf)
        return leaf

    selected = select(call, pred, new, old)
    return jax.tree_util.tree_map_with_path(keep_type, selected, old)


def _common_dtype(call: str, path: KeyPath, a: Leaf, b: Leaf) -> Any:
    """Returns the dtype of a selection from two leaves: that of the more strongly typed one."""
    leaves = (a, b)
    try:
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(*leaves)
    except (
        TypeError,
        ValueError,
    ):  # keys, `float0`, and floats of 8 bits promote to nothing
        dtype = None
    for leaf in leaves:
        is_strong = not is_python_number(leaf) and not is_weak(leaf)
        if dtype is None or (is_strong and dtype_of(leaf) != dtype):
            message = _unequal(call, path, "dtypes", dtype_of(a), dtype_of(b))
            raise TypeError(f"{message} {_WAY_OUT}")
    return dtype


def _as_array(leaf: object, dtype: DTypeLike) -> Any:
    """Casts an array or a Python number."""
    if is_python_number(leaf):
        return jnp.asarray(leaf, dtype)
    return cast(leaf, dtype)


def _unequal(call: str, path: KeyPath, what: str, a: Leaf, b: Leaf) -> str:
    place = jax.tree_util.keystr(path) or "the root"
    return f"`{call}` needs leaves of equal {what}: those at {place} have {a} and {b}."


def _check_same_structure(call: str, first: PyTree, second: PyTree) -> None:
    """Raises a `ValueError` that says where two trees differ, if they do."""
    first_structure = jax.tree.structure(first)
    second_structure = jax.tree.structure(second)
    if first_structure != second_structure:
        raise ValueError(
            f"`{call}` needs two trees of one structure. They are {first_structure} and "
            f"{second_structure}."
        )


def scalar_bool(call: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as a `bool[]` array, or raises a `TypeError`."""
    dtype = getattr(value, "dtype", type(value))
    is_bool = dtype in (bool, jnp.bool_)
    if isinstance(value, type) or not is_bool or jnp.shape(value):
        raise TypeError(
            f"`{call}({name}=...)` must be a scalar bool, got {describe_value(value)}. "
            "To reduce a tree of gradients to one, use `jaxscale.all_finite(grads)`."
        )
    return jnp.asarray(value, jnp.bool_)

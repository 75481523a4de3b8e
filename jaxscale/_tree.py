"""Which leaves of a tree are gradients, their dtypes, and which of two trees to keep.

Nothing here knows of loss scales. The leaf rules stand here once: only inexact leaves
(floating and complex) are gradients; ``None``, ``float0``, integers, bools, typed PRNG
keys and whatever is no array at all pass through.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._checks import scalar_bool

# The collection in which Flax keeps FP8 statistics. Its "gradients" are new values that
# replace the old ones: scaled by nothing, so never to be unscaled, and checked by no one.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))


def _is_inexact(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(_dtype(leaf), jnp.inexact)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)


def _has_dtype(leaf: Any, dtype: Any) -> bool:
    """Returns whether a leaf is a strongly typed array of a dtype already.

    Most are, and to convert them to what they are takes longer than to trace a product.
    """
    return isinstance(leaf, jax.Array) and leaf.dtype == dtype and not jax.typeof(leaf).weak_type


def _is_gradient(path: tuple[Any, ...], leaf: Any) -> bool:
    names = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    return _is_inexact(leaf) and OVERWRITE_WITH_GRADIENT not in names


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf as ``params/Dense_0/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the root"


def map_gradients(fun: Callable[[Any], Any], tree: Any) -> Any:
    """Returns ``tree`` with ``fun`` applied to the leaves that are gradients."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fun(leaf) if _is_gradient(path, leaf) else leaf, tree
    )


def only_gradients(tree: Any) -> Any:
    """Returns ``tree`` with ``None`` for every leaf that is no gradient."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if _is_gradient(path, leaf) else None, tree
    )


def widen(leaf: Any) -> jax.Array:
    """Returns an inexact leaf in float32, or in its own dtype where that is as wide."""
    if _has_dtype(leaf, jnp.float32):
        return leaf
    dtype = jnp.result_type(leaf)
    return cast(leaf, dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)


def cast(leaf: Any, dtype: Any) -> Any:
    """Returns a leaf as a strongly typed array of a dtype.

    Leaves of dtypes that hold no numbers, typed keys and ``float0``, stay as they are.
    """
    if _has_dtype(leaf, dtype):
        return leaf
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return leaf
    return jax.lax.convert_element_type(leaf, dtype)


def cast_like(tree: Any, like: Any) -> Any:
    """Returns a tree with the dtypes of another tree of the same structure."""

    def cast_leaf(leaf: Any, other: Any) -> Any:
        return cast(leaf, _dtype(other)) if _is_array(other) else leaf

    return jax.tree.map(cast_leaf, tree, like)


def apply_updates(params: Any, updates: Any) -> Any:
    """Returns ``optax.apply_updates(params, updates)``, for every kind of leaf.

    The sum is taken in float32 or wider and rounded once. What has no gradient, and so a
    ``float0`` as its update, stays as it is: integers, bools, typed keys.
    """

    def add(param: Any, update: Any) -> Any:
        if param is None or _dtype(update) == jax.dtypes.float0:
            return param
        total = (widen(param) if _is_inexact(param) else param) + update
        return cast(total, _dtype(param))

    return jax.tree.map(add, params, updates, is_leaf=lambda leaf: leaf is None)


def addable(updates: Any, params: Any) -> Any:
    """Returns updates in dtypes that ``optax.apply_updates`` can add to the parameters.

    Numbers of 8 bits and less promote to nothing else: their updates take their dtype.
    """

    def addable_leaf(update: Any, param: Any) -> Any:
        if update is None or not _is_inexact(param) or jnp.finfo(_dtype(param)).bits > 8:
            return update
        return cast(update, _dtype(param))

    if jax.tree.structure(updates) != jax.tree.structure(params):
        return updates
    return jax.tree.map(addable_leaf, updates, params)


def varying_axes(tree: Any) -> set[Any]:
    """Returns the mesh axes along which gradients in a tree may differ, inside ``shard_map``.

    Nothing where JAX does not know: in ``pmap``, and with ``check_vma=False``.
    """
    axes: set[Any] = set()
    for leaf in jax.tree.leaves(only_gradients(tree)):
        aval = jax.typeof(leaf)
        manual = getattr(aval, "manual_axis_type", None)  # of JAX 0.10, before it `vma`
        axes |= getattr(aval, "vma", None) or getattr(manual, "varying", frozenset())
    return axes


def largest(tree: Any, axis_name: Any) -> jax.Array:
    """Returns the largest magnitude among the gradients in a tree, an ``f32[]``."""
    largest = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(only_gradients(tree)):
        if jnp.size(leaf):
            largest = jnp.maximum(largest, cast(jnp.max(jnp.abs(leaf)), jnp.float32))
    return largest if axis_name is None else jax.lax.pmax(largest, axis_name)


def tree_where(pred: Any, on_true: Any, on_false: Any) -> Any:
    """Returns ``on_true`` if ``pred`` holds, else ``on_false``, leaf by leaf.

    This is how a step is skipped: by selection, as ``0 * inf`` would be NaN.

    Args:
      pred: a ``bool[]``.
      on_true: a pytree. Besides arrays of any dtype it may hold typed PRNG keys,
        ``None``, ``float0`` arrays, and leaves that are no arrays, if they are equal in
        both trees.
      on_false: a pytree of the same structure, with leaves of the same shapes and dtypes.

    Returns:
      A pytree of that structure. Shapes and dtypes are those of both trees; a Python
      scalar takes the dtype of the array it meets.

    Raises:
      TypeError: if ``pred`` is not a scalar bool, if the dtypes of two leaves differ, or
        if two leaves that are no arrays do.
      ValueError: if the structures, or the shapes of two leaves, differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> new, old = {"w": jnp.array(jnp.nan), "b": None}, {"w": jnp.array(1.0), "b": None}
      >>> jaxscale.tree_where(jaxscale.all_finite(new), new, old)
      {'b': None, 'w': Array(1., dtype=float32)}
    """
    return select("tree_where", pred, on_true, on_false)


def select(call: str, pred: Any, on_true: Any, on_false: Any) -> Any:
    """Returns what :func:`tree_where` does, with errors in the name of ``call``."""
    pred = scalar_bool(call, "pred", pred)
    check_same_structure(f"`{call}`", on_true, on_false)

    def select_leaf(path: tuple[Any, ...], a: Any, b: Any) -> Any:
        if not (_is_array(a) and _is_array(b)):
            if a is b or (type(a) is type(b) and a == b):
                return a
            raise TypeError(_unequal(call, path, "values, as they are no arrays", a, b))
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(_unequal(call, path, "shapes", jnp.shape(a), jnp.shape(b)))
        dtypes = _dtype(a), _dtype(b)
        if dtypes[0] == jax.dtypes.float0:  # holds no values, and XLA knows no such type
            return a
        if dtypes[0] == dtypes[1]:
            return jax.lax.select(pred, cast(a, dtypes[0]), cast(b, dtypes[0]))
        if not (jax.typeof(a).weak_type or jax.typeof(b).weak_type):
            raise TypeError(_unequal(call, path, "dtypes, or it compiles anew", *dtypes))
        dtype = jnp.result_type(a, b)
        return jax.lax.select(pred, cast(a, dtype), cast(b, dtype))

    return jax.tree_util.tree_map_with_path(select_leaf, on_true, on_false)


def _unequal(call: str, path: tuple[Any, ...], what: str, a: Any, b: Any) -> str:
    where = jax.tree_util.keystr(path) or "the root"
    return f"`{call}` needs leaves of equal {what}: those at {where} have {a} and {b}."


def check_same_structure(call: str, first: Any, second: Any) -> None:
    """Raises a ``ValueError`` that says where two trees differ, if they do."""
    structures = jax.tree.structure(first), jax.tree.structure(second)
    if structures[0] == structures[1]:
        return
    paths = [
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (first, second)
    ]
    only_first = ", ".join(path for path in paths[0] if path not in paths[1]) or "none"
    only_second = ", ".join(path for path in paths[1] if path not in paths[0]) or "none"
    raise ValueError(
        f"{call} needs two trees of one structure. Leaves only in the first: {only_first}; "
        f"only in the second: {only_second}. They are {structures[0]} and {structures[1]}."
    )

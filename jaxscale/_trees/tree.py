"""Operations on trees: on their gradients, on parameters and updates, and a selection.

Only floating-point and complex leaves are gradients; `None`, `float0`, integers, bools, typed PRNG
keys and leaves that are not arrays pass through.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.tree_util import KeyPath

from .._jax import vary, varying
from .checks import scalar_bool
from .leaf import (
    dtype_holds,
    dtype_of,
    is_array_like,
    is_equal,
    is_inexact_leaf,
    is_python_number,
    is_weak,
    kind_of,
    make_array,
)

# The collection of state that travels as a gradient, where Flax and Transformer Engine keep the
# statistics of FP8. What a backward pass returns for such a leaf is not a slope but its next value,
# which is to replace it. It is not scaled, unscaled or checked, and no optimizer may see it.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

_Tree = TypeVar("_Tree")


# Gradients.


def is_overwrite(path: KeyPath) -> bool:
    """Returns whether the path of a leaf says that its gradient replaces it."""
    for key in path:
        name = getattr(key, "key", getattr(key, "name", None))
        if name == OVERWRITE_WITH_GRADIENT:
            return True
    return False


def _is_gradient(path: KeyPath, leaf: Any) -> bool:
    return is_inexact_leaf(leaf) and not is_overwrite(path)


def leaf_name(path: KeyPath) -> str:
    """Returns the path of a leaf as `params/Dense_0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the root"


def map_gradients(fun: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fun` to the leaves of a tree that are gradients."""

    def apply(path: KeyPath, leaf: Any) -> Any:
        if _is_gradient(path, leaf):
            return fun(leaf)
        return leaf

    return jax.tree_util.tree_map_with_path(apply, tree)


def only_gradients(tree: Any) -> Any:
    """Returns `tree` with `None` for every leaf that is not a gradient."""

    def keep_gradient(path: KeyPath, leaf: Any) -> Any:
        return leaf if _is_gradient(path, leaf) else None

    return jax.tree_util.tree_map_with_path(keep_gradient, tree)


def list_gradients(tree: Any) -> list[tuple[KeyPath, Any]]:
    """Returns the gradients in a tree, each with its path."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [(path, leaf) for path, leaf in pairs if _is_gradient(path, leaf)]


def replace_gradients(tree: Any, values: Iterable[Any]) -> Any:
    """Returns `tree` with other values in the place of its gradients, and `None` elsewhere.

    A class may look at its children, and refuse what is not an array of the shape that it knows.
    Then the values come in a dict, by the paths of the gradients.
    """
    values = list(values)
    remaining = iter(values)

    def replace(path: KeyPath, leaf: Any) -> Any:
        return next(remaining) if _is_gradient(path, leaf) else None

    try:
        return jax.tree_util.tree_map_with_path(replace, tree)
    except Exception:  # whatever the class raises
        names = [leaf_name(path) for path, _ in list_gradients(tree)]
        return dict(zip(names, values, strict=True))


# Dtypes.


def widen(leaf: Any) -> jax.Array:
    """Casts an inexact leaf to float32, unless its own dtype is as wide or wider."""
    if _has_dtype(leaf, jnp.float32):
        return leaf
    return cast(leaf, widened(leaf))


def widened(leaf: Any) -> Any:
    """Returns the dtype that `widen` gives an inexact leaf."""
    dtype = jnp.result_type(leaf)
    if jnp.finfo(dtype).bits >= 32:
        return dtype
    return jnp.dtype(jnp.float32)


def cast(leaf: Any, dtype: Any) -> Any:
    """Casts a leaf to a strongly typed array of a dtype.

    Typed keys and `float0`, whose dtypes do not hold numbers, stay as they are.
    """
    if _has_dtype(leaf, dtype):
        return leaf
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return leaf
    return jax.lax.convert_element_type(leaf, dtype)


def _has_dtype(leaf: Any, dtype: Any) -> bool:
    # Most have theirs already, and a conversion takes longer to trace than a product.
    return isinstance(leaf, jax.Array) and leaf.dtype == dtype and not is_weak(leaf)


def cast_like(tree: _Tree, like: Any) -> _Tree:
    """Casts the leaves of a tree to the dtypes of another tree of the same structure."""

    def cast_leaf(leaf: Any, other: Any) -> Any:
        if not is_array_like(other):
            return leaf
        return cast(leaf, dtype_of(other))

    return jax.tree.map(cast_leaf, tree, like)


# Parameters and updates.


def trained_params(params: optax.Params, grads: optax.Updates) -> optax.Params:
    """Returns the parameters that have a gradient, with `None` in the place of the others.

    Those may be functions or text, which cannot be selected or compiled. Gradients of another
    structure, as `optax.lookahead` takes them, need parameters that are all arrays.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=_is_none)
    try:
        by_leaf = structure.flatten_up_to(grads)
    except ValueError as error:
        if all(map(is_array_like, jax.tree.leaves(params))):
            return params
        raise ValueError(
            "`apply_gradients(grads=...)` must have the structure of `params`, with `None` where "
            "there is no gradient. The order of arguments is (tx, grads, opt_state, params). JAX "
            f"says, and calls `params` the prefix: {error}"
        ) from error
    trained = []
    is_all = True
    for leaf, grad in zip(leaves, by_leaf, strict=True):
        if grad is None and leaf is not None:
            is_all = False
            leaf = None
        trained.append(leaf)
    if is_all:
        return params  # not rebuilt, as its classes may look at their children
    return structure.unflatten(trained)


def combine(trained: optax.Params, params: optax.Params) -> optax.Params:
    """Merges what `trained_params` returned with the parameters that it left out."""
    if not any(map(_is_none, jax.tree.leaves(trained, is_leaf=_is_none))):
        return trained

    def fill(leaf: Any, other: Any) -> Any:
        return other if leaf is None else leaf

    return jax.tree.map(fill, trained, params, is_leaf=_is_none)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def apply_updates(params: Any, updates: optax.Updates) -> Any:
    """Adds updates to parameters as `optax.apply_updates` does, for every kind of leaf.

    The sum is taken in float32 or wider and rounded once. A leaf without a gradient stays as it is:
    its update is `None`, or a `float0`, as for integers and typed keys.
    """

    def add(param: Any, update: Any) -> Any:
        if update is None or not is_array_like(param) or dtype_of(update) == jax.dtypes.float0:
            return param
        wide_param = widen(param) if is_inexact_leaf(param) else param
        return cast(wide_param + update, dtype_of(param))

    return jax.tree.map(add, params, updates, is_leaf=_is_none)


def cast_updates(params: Any, updates: optax.Updates) -> optax.Updates:
    """Casts updates to dtypes that `optax.apply_updates` can add to the parameters.

    JAX does not promote floating-point numbers of 8 bits or less: these need their own dtype.
    """
    if jax.tree.structure(updates) != jax.tree.structure(params):
        return updates

    def make_addable(update: Any, param: Any) -> Any:
        if update is None or not is_inexact_leaf(param) or jnp.finfo(dtype_of(param)).bits > 8:
            return update
        return cast(update, dtype_of(param))

    return jax.tree.map(make_addable, updates, params)


def varying_axes(tree: Any) -> set[Any]:
    """Returns the mesh axes along which gradients in a tree may differ, as `varying` does."""
    axes: set[Any] = set()
    for _, leaf in list_gradients(tree):
        axes.update(varying(jax.typeof(leaf)))
    return axes


def blank(aval: Any) -> jax.Array:
    """Returns zeros of a type, with its sharding and the mesh axes along which it varies."""
    sharding = None
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)  # `full` of keys takes no sharding
    if not is_key and AxisType.Explicit in aval.sharding.mesh.axis_types:
        sharding = aval.sharding
    return vary(jax.lax.full(aval.shape, 0, aval.dtype, sharding=sharding), varying(aval))


# Selection.


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
      A pytree of that structure, with the shapes and dtypes of both trees. A Python number
      takes the dtype of the array it meets, and so does a weakly typed array of the same or a
      lower kind (bool, integer, floating, complex) that meets a strongly typed one. Two
      Python numbers, or two weakly typed arrays, become what JAX promotes them to; of one dtype,
      weakly typed arrays stay so.

    Raises:
      TypeError: if `pred` is not a scalar bool, if the dtypes of two leaves differ, if a
        dtype does not hold the Python number it meets (1.5 for an `int32`, 300 for an
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
            return jax.lax.select(pred, a, b)
        if not is_array_like(a) or not is_array_like(b):
            if not is_equal(a, b):
                raise TypeError(_unequal(call, path, "values, as they are not arrays", a, b))
            return a
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(_unequal(call, path, "shapes", jnp.shape(a), jnp.shape(b)))
        dtype = _common_dtype(call, path, a, b)
        if dtype == jax.dtypes.float0:  # holds no values, and XLA knows no such type
            return a
        return jax.lax.select(pred, _cast_number(a, dtype), _cast_number(b, dtype))

    return jax.tree_util.tree_map_with_path(select_leaf, on_true, on_false)


def _are_arrays_of_one_type(a: Any, b: Any) -> bool:
    if not isinstance(a, jax.Array) or not isinstance(b, jax.Array):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and is_weak(a) == is_weak(b)


def _cast_number(leaf: Any, dtype: Any) -> Any:
    """Casts an array, or a Python number that the dtype holds."""
    if is_python_number(leaf):
        leaf = make_array(leaf, dtype)
    return cast(leaf, dtype)


def select_like(call: str, pred: Any, new: Any, old: Any) -> Any:
    """Selects as `select` does, in the types of `old`; another dtype is an error."""

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

    return jax.tree_util.tree_map_with_path(keep_type, select(call, pred, new, old), old)


def _common_dtype(call: str, path: KeyPath, a: Any, b: Any) -> Any:
    """Returns the dtype of a selection from two leaves: that of the more strongly typed one."""
    numbers = []
    weak = []
    strong = []
    for leaf in (a, b):
        if is_python_number(leaf):
            numbers.append(leaf)
        elif is_weak(leaf):
            weak.append(leaf)
        else:
            strong.append(leaf)

    dtype = dtype_of(strong[0]) if strong else jnp.result_type(*(weak or numbers))
    is_same = all(dtype_of(leaf) == dtype for leaf in strong)
    is_lowered = any(kind_of(dtype) < kind_of(dtype_of(leaf)) for leaf in weak)
    if not is_same or is_lowered:
        raise TypeError(_unequal_dtypes(call, path, dtype_of(a), dtype_of(b)))
    for number in numbers:
        if not dtype_holds(dtype, number):
            raise TypeError(
                f"`{call}` needs leaves of equal dtypes: that at {_place(path)} is {number!r} in "
                f"one tree and {dtype} in the other, which does not hold that number. Pass a "
                f"number that {dtype} holds, or arrays of one dtype."
            )
    return dtype


def _unequal(call: str, path: KeyPath, what: str, a: Any, b: Any) -> str:
    return f"`{call}` needs leaves of equal {what}: those at {_place(path)} have {a} and {b}."


def _unequal_dtypes(call: str, path: KeyPath, a: Any, b: Any) -> str:
    message = _unequal(call, path, "dtypes", a, b)
    return f"{message} Cast one to the dtype of the other, or the step would compile anew."


def _place(path: KeyPath) -> str:
    return jax.tree_util.keystr(path) or "the root"


def _check_same_structure(call: str, first: Any, second: Any) -> None:
    """Raises a `ValueError` that says where two trees differ, if they do."""
    first_structure = jax.tree.structure(first)
    second_structure = jax.tree.structure(second)
    if first_structure == second_structure:
        return
    first_paths = _leaf_paths(first)
    second_paths = _leaf_paths(second)
    only_first = [path for path in first_paths if path not in second_paths]
    only_second = [path for path in second_paths if path not in first_paths]
    raise ValueError(
        f"`{call}` needs two trees of one structure. Leaves only in the first: "
        f"{', '.join(only_first) or 'none'}; only in the second: "
        f"{', '.join(only_second) or 'none'}. They are {first_structure} and {second_structure}."
    )


def _leaf_paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


# Leaves that their gradients replace.


def holds_overwrites(tree: Any) -> bool:
    """Returns whether a tree has leaves that their gradients replace."""
    return any(is_overwrite(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def without_overwrites(tree: Any) -> Any:
    """Returns a tree with an empty node in the place of each leaf that its gradient replaces."""

    def mask(path: KeyPath, leaf: Any) -> Any:
        return optax.MaskedNode() if is_overwrite(path) else leaf

    return jax.tree_util.tree_map_with_path(mask, tree)


def zero_overwrites(grads: optax.Updates) -> optax.Updates:
    """Returns gradients with zeros in the place of values that replace a leaf."""

    def zero(path: KeyPath, grad: Any) -> Any:
        if is_overwrite(path) and is_inexact_leaf(grad):
            return jnp.zeros_like(grad)
        return grad

    return jax.tree_util.tree_map_with_path(zero, grads)


def overwrite(
    outcome: optax.Params, grads: optax.Updates, params: optax.Params | None
) -> optax.Params:
    """Replaces those leaves in the outcome of a step by their gradients, as `replace_finite`."""
    return _map_overwrites(replace_finite, outcome, grads, params)


def overwriting_updates(
    updates: optax.Updates, grads: optax.Updates, params: optax.Params | None
) -> optax.Updates:
    """Returns updates which, added to the parameters, replace those leaves by their gradients.

    A sum p + u cannot always be exact: it is to the rounding of the larger of both values, and
    never 0 if the new value is not 0.
    """

    def find_difference(new: Any, old: Any) -> Any:
        if not is_inexact_leaf(old) or not is_inexact_leaf(new):
            return new
        wide_new = widen(replace_finite(new, old))
        wide_old = widen(old)
        update = wide_new - wide_old
        vanishes = (wide_old + update == 0) & (wide_new != 0)
        next_to_old = jnp.nextafter(-wide_old, jnp.sign(wide_new) * jnp.inf)
        return jnp.where(vanishes, next_to_old, update)

    return _map_overwrites(find_difference, updates, grads, params)


def _map_overwrites(
    fun: Callable[[Any, Any], Any],
    tree: Any,
    grads: optax.Updates,
    params: optax.Params | None,
) -> Any:
    """Replaces the leaves of a tree that are overwritten by `fun(gradient, parameter)`."""

    def replace(path: KeyPath, leaf: Any, grad: Any, param: Any) -> Any:
        if is_overwrite(path):
            return fun(grad, param)
        return leaf

    return jax.tree_util.tree_map_with_path(replace, tree, grads, params, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def replace_finite(new: Any, old: Any) -> Any:
    """Returns the next value of a leaf: the new one where it is finite, otherwise the old one."""
    if not is_inexact_leaf(old) or not is_inexact_leaf(new):
        return old  # integers and keys, with `float0` gradients
    return jnp.where(jnp.isfinite(new), cast(new, dtype_of(old)), old)

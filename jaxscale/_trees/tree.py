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

from .._jax import vary, varying
from .checks import scalar_bool
from .leaf import (
    as_array,
    dtype_of,
    holds,
    is_array_like,
    is_equal,
    is_inexact,
    is_python_number,
    is_weak,
    kind_of,
)

# The collection of state that travels as a gradient, where Flax and Transformer Engine keep the
# statistics of FP8. What a backward pass returns for such a leaf is not a slope but its next value,
# which is to replace it. It is not scaled, unscaled or checked, and no optimizer may see it.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

_Tree = TypeVar("_Tree")


def _has_dtype(leaf: Any, dtype: Any) -> bool:
    # Most have theirs already, and a conversion takes longer to trace than a product.
    return isinstance(leaf, jax.Array) and leaf.dtype == dtype and not is_weak(leaf)


def is_overwrite(path: tuple[Any, ...]) -> bool:
    """Returns whether the path of a leaf says that its gradient replaces it."""
    names = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    return OVERWRITE_WITH_GRADIENT in names


def _is_gradient(path: tuple[Any, ...], leaf: Any) -> bool:
    return is_inexact(leaf) and not is_overwrite(path)


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf as `params/Dense_0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the root"


def map_gradients(fun: Callable[[Any], Any], tree: Any) -> Any:
    """Returns `tree` with `fun` applied to the leaves that are gradients."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fun(leaf) if _is_gradient(path, leaf) else leaf, tree
    )


def only_gradients(tree: Any) -> Any:
    """Returns `tree` with `None` for every leaf that is not a gradient."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if _is_gradient(path, leaf) else None, tree
    )


def list_gradients(tree: Any) -> list[tuple[Any, Any]]:
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

    def replace(path: tuple[Any, ...], leaf: Any) -> Any:
        return next(remaining) if _is_gradient(path, leaf) else None

    try:
        return jax.tree_util.tree_map_with_path(replace, tree)
    except Exception:  # whatever the class raises
        names = [leaf_name(path) for path, _ in list_gradients(tree)]
        return dict(zip(names, values, strict=True))


def widen(leaf: Any) -> jax.Array:
    """Returns an inexact leaf in float32, or in its own dtype if that is as wide or wider."""
    return leaf if _has_dtype(leaf, jnp.float32) else cast(leaf, widened(leaf))


def widened(leaf: Any) -> Any:
    """Returns the dtype that `widen` gives an inexact leaf."""
    dtype = jnp.result_type(leaf)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def cast(leaf: Any, dtype: Any) -> Any:
    """Returns a leaf as a strongly typed array of a dtype.

    Typed keys and `float0`, whose dtypes do not hold numbers, stay as they are.
    """
    if _has_dtype(leaf, dtype):
        return leaf
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return leaf
    return jax.lax.convert_element_type(leaf, dtype)


def cast_like(tree: Any, like: Any) -> Any:
    """Returns a tree with the dtypes of another tree of the same structure."""

    def cast_leaf(leaf: Any, other: Any) -> Any:
        return cast(leaf, dtype_of(other)) if is_array_like(other) else leaf

    return jax.tree.map(cast_leaf, tree, like)


def trained_params(params: Any, grads: Any) -> Any:
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
    pairs = list(zip(leaves, by_leaf, strict=True))
    if all(leaf is None or grad is not None for leaf, grad in pairs):
        return params  # not rebuilt, as its classes may look at their children
    return structure.unflatten([None if grad is None else leaf for leaf, grad in pairs])


def combine(trained: Any, params: Any) -> Any:
    """Returns what `trained_params` returned, with the others in the place of `None` again."""
    if not any(map(_is_none, jax.tree.leaves(trained, is_leaf=_is_none))):
        return trained
    return jax.tree.map(lambda a, b: b if a is None else a, trained, params, is_leaf=_is_none)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def apply_updates(params: Any, updates: Any) -> Any:
    """Returns `optax.apply_updates(params, updates)`, for every kind of leaf.

    The sum is taken in float32 or wider and rounded once. A leaf without a gradient stays as it is:
    its update is `None`, or a `float0`, as for integers and typed keys.
    """

    def add(param: Any, update: Any) -> Any:
        if update is None or not is_array_like(param) or dtype_of(update) == jax.dtypes.float0:
            return param
        total = (widen(param) if is_inexact(param) else param) + update
        return cast(total, dtype_of(param))

    return jax.tree.map(add, params, updates, is_leaf=_is_none)


def cast_updates(params: Any, updates: Any) -> Any:
    """Returns updates in dtypes that `optax.apply_updates` can add to the parameters.

    JAX does not promote floating-point numbers of 8 bits or less: these need their own dtype.
    """

    def addable(update: Any, param: Any) -> Any:
        is_narrow = is_inexact(param) and jnp.finfo(dtype_of(param)).bits <= 8
        return cast(update, dtype_of(param)) if is_narrow and update is not None else update

    if jax.tree.structure(updates) != jax.tree.structure(params):
        return updates
    return jax.tree.map(addable, updates, params)


def varying_axes(tree: Any) -> set[Any]:
    """Returns the mesh axes along which gradients in a tree may differ, as `varying` does."""
    return set().union(*(varying(jax.typeof(leaf)) for _, leaf in list_gradients(tree)))


def blank(aval: Any) -> jax.Array:
    """Returns zeros of a type, with its sharding and the mesh axes along which it varies."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)  # `full` of keys takes no sharding
    explicit = not is_key and AxisType.Explicit in aval.sharding.mesh.axis_types
    sharding = {"sharding": aval.sharding} if explicit else {}
    return vary(jax.lax.full(aval.shape, 0, aval.dtype, **sharding), varying(aval))


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
    """Returns what `tree_where` does, with errors in the name of `call`."""
    pred = scalar_bool(call, "pred", pred)
    _check_same_structure(call, on_true, on_false)

    def select_leaf(path: tuple[Any, ...], a: Any, b: Any) -> Any:
        are_arrays = isinstance(a, jax.Array) and isinstance(b, jax.Array)
        if are_arrays and (a.shape, a.dtype, is_weak(a)) == (b.shape, b.dtype, is_weak(b)):
            return jax.lax.select(pred, a, b)  # the usual case, first because it is fast
        if not (is_array_like(a) and is_array_like(b)):
            if is_equal(a, b):
                return a
            raise TypeError(_unequal(call, path, "values, as they are not arrays", a, b))
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(_unequal(call, path, "shapes", jnp.shape(a), jnp.shape(b)))
        dtype = _common_dtype(call, path, a, b)
        if dtype == jax.dtypes.float0:  # holds no values, and XLA knows no such type
            return a
        numbers = (as_array(leaf, dtype) if is_python_number(leaf) else leaf for leaf in (a, b))
        return jax.lax.select(pred, *(cast(leaf, dtype) for leaf in numbers))

    return jax.tree_util.tree_map_with_path(select_leaf, on_true, on_false)


def select_like(call: str, pred: Any, new: Any, old: Any) -> Any:
    """Returns what `select` does, in the types of `old`; another dtype is an error."""

    def keep_type(path: tuple[Any, ...], leaf: Any, old: Any) -> Any:
        if not (is_array_like(leaf) and is_array_like(old)):
            return leaf
        if dtype_of(leaf) != dtype_of(old):
            raise TypeError(_unequal(call, path, "dtypes", dtype_of(leaf), dtype_of(old)))
        if isinstance(old, jax.Array) and is_weak(old) and not is_weak(leaf):
            # A step whose state came back strongly typed would compile anew. No cast makes a weak
            # type, but what is written into a weakly typed array takes it.
            return old.at[...].set(leaf)
        return leaf

    return jax.tree_util.tree_map_with_path(keep_type, select(call, pred, new, old), old)


def _common_dtype(call: str, path: tuple[Any, ...], a: Any, b: Any) -> Any:
    """Returns the dtype of a selection from two leaves: that of the more strongly typed one."""
    numbers = [leaf for leaf in (a, b) if is_python_number(leaf)]
    weak = [leaf for leaf in (a, b) if is_weak(leaf)]
    strong = [leaf for leaf in (a, b) if not (is_python_number(leaf) or is_weak(leaf))]
    dtype = dtype_of(strong[0]) if strong else jnp.result_type(*(weak or numbers))
    same = all(dtype_of(leaf) == dtype for leaf in strong)
    if not same or any(kind_of(dtype) < kind_of(dtype_of(leaf)) for leaf in weak):
        raise TypeError(_unequal(call, path, "dtypes", dtype_of(a), dtype_of(b)))
    for leaf in numbers:
        if not holds(dtype, leaf):
            where = jax.tree_util.keystr(path) or "the root"
            raise TypeError(
                f"`{call}` needs leaves of equal dtypes: that at {where} is {leaf!r} in one tree "
                f"and {dtype} in the other, which does not hold that number. Pass a number that "
                f"{dtype} holds, or arrays of one dtype."
            )
    return dtype


def _unequal(call: str, path: tuple[Any, ...], what: str, a: Any, b: Any) -> str:
    where = jax.tree_util.keystr(path) or "the root"
    hint = " Cast one to the dtype of the other, or the step would compile anew."
    hint *= what == "dtypes"
    return f"`{call}` needs leaves of equal {what}: those at {where} have {a} and {b}.{hint}"


def _check_same_structure(call: str, first: Any, second: Any) -> None:
    """Raises a `ValueError` that says where two trees differ, if they do."""
    structures = jax.tree.structure(first), jax.tree.structure(second)
    if structures[0] == structures[1]:
        return
    trees = map(jax.tree_util.tree_leaves_with_path, (first, second))
    paths = [[jax.tree_util.keystr(path) for path, _ in leaves] for leaves in trees]
    only_first = ", ".join(path for path in paths[0] if path not in paths[1]) or "none"
    only_second = ", ".join(path for path in paths[1] if path not in paths[0]) or "none"
    raise ValueError(
        f"`{call}` needs two trees of one structure. Leaves only in the first: {only_first}; "
        f"only in the second: {only_second}. They are {structures[0]} and {structures[1]}."
    )


def holds_overwrites(tree: Any) -> bool:
    """Returns whether a tree has leaves that their gradients replace."""
    return any(is_overwrite(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def without_overwrites(tree: Any) -> Any:
    """Returns a tree with an empty node in the place of each leaf that its gradient replaces."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if is_overwrite(path) else leaf, tree
    )


def zero_overwrites(grads: Any) -> Any:
    """Returns gradients with zeros in the place of values that replace a leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, g: jnp.zeros_like(g) if is_overwrite(path) and is_inexact(g) else g, grads
    )


def overwrite(outcome: Any, new: Any, old: Any) -> Any:
    """Returns the outcome of a step, with each leaf that is replaced as `replace_finite` says."""
    return _map_overwrites(replace_finite, outcome, new, old)


def overwriting_updates(updates: Any, new: Any, old: Any) -> Any:
    """Returns updates which, added to the parameters, replace those leaves by their new values.

    A sum p + u cannot always be exact: it is to the rounding of the larger of both values, and
    never 0 if the new value is not 0.
    """

    def difference(new: Any, old: Any) -> Any:
        if not is_inexact(old) or not is_inexact(new):
            return new
        new, old = widen(replace_finite(new, old)), widen(old)
        update = new - old
        vanishes = (old + update == 0) & (new != 0)
        return jnp.where(vanishes, jnp.nextafter(-old, jnp.sign(new) * jnp.inf), update)

    return _map_overwrites(difference, updates, new, old)


def _map_overwrites(fun: Any, outcome: Any, new: Any, old: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, *pair: fun(*pair) if is_overwrite(path) else leaf,
        outcome,
        new,
        old,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )


def replace_finite(new: Any, old: Any) -> Any:
    """Returns the next value of a leaf: the new one where it is finite, otherwise the old one."""
    if not is_inexact(old) or not is_inexact(new):
        return old  # integers and keys, with `float0` gradients
    return jnp.where(jnp.isfinite(new), cast(new, dtype_of(old)), old)

"""One leaf of a saved state: its numbers, with the type, dtype and sharding of a target's leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._trees.leaves import NumberKind, kind_of
from .._trees.pytrees import PyTree


def place_of(argument: str, path: str) -> str:
    call = "to_state_dict" if argument == "tree" else "from_state_dict"
    return f"`{call}({argument})` at {path or '/'}"


def fill(target: PyTree, number: ArrayLike) -> Any:
    """Returns an array that is filled with a number, if the target is only a type."""
    if not is_abstract(target):
        return target
    filled = np.broadcast_to(np.asarray(number, target.dtype), target.shape)
    return restore_leaf("", target, filled, rounds=False)


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def is_abstract(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _find_key_impl(target: PyTree) -> Any:
    if not is_abstract(target):
        return jax.random.key_impl(target)
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.random.key(0, impl=impl).dtype == target.dtype:
            return impl
    raise TypeError(
        f"`from_state_dict(target)` has only the type of a key, {target.dtype}, which is not "
        "one of JAX's own. Pass a key itself in its place."
    )


def check_number(place: str, leaf: object) -> Any:
    """Returns a leaf that is an array or a number; for a typed key its data."""
    accepted = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    if not isinstance(leaf, accepted) or isinstance(leaf, Tracer):
        raise TypeError(
            f"{place} must be an array or a number, outside of `jit`, got {leaf!r}. If a model "
            "holds functions, pass only its arrays."
        )
    if isinstance(leaf, jax.Array) and _is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf


def _check_target(place: str, target: PyTree) -> Any:
    """Returns what has the shape and the dtype of the numbers of a target's leaf."""
    if not is_abstract(target):
        return check_number(place, target)
    if _is_key(target):
        return jax.eval_shape(jax.random.key_data, target)
    return target


def restore_leaf(path: str, target: PyTree, leaf: object, rounds: bool) -> Any:
    """Returns the numbers of a leaf with the type, shape, dtype and sharding of `target`."""
    place = place_of("state_dict", path)
    like = _check_target(place_of("target", path), target)
    values = np.array(check_number(place, leaf))
    if values.shape != np.shape(like):
        raise ValueError(
            f"{place} must be of shape {np.shape(like)}, got {values.shape}."
        )
    dtype = np.dtype(getattr(like, "dtype", type(like)))
    if rounds and values.dtype == np.float32 and dtype == jnp.bfloat16:
        values = values.astype(dtype)
    values = _cast_exactly(place, values, dtype)
    if isinstance(target, np.ndarray):
        return values
    if not isinstance(target, jax.Array | jax.ShapeDtypeStruct):
        return type(target)(values[()])
    array = values
    if _is_key(target):
        impl = _find_key_impl(target)
        array = jax.random.wrap_key_data(jnp.asarray(values), impl=impl)
    elif jax.typeof(target).weak_type:
        array = _weak_like(target).at[...].set(values)
    sharding = target.sharding
    if isinstance(target, jax.Array) and not target.committed:
        sharding = None
    return jax.device_put(array, sharding)


def _weak_like(target: PyTree) -> jax.Array:
    """Returns an array of a weak type, which a copy would not keep."""
    if not is_abstract(target):
        return target
    number = np.zeros((), target.dtype).item()  # one of Python's, which is weak
    return jnp.broadcast_to(jnp.asarray(number), target.shape)


def _cast_exactly(place: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts numbers to a dtype of their kind, in which each of them must have an equal."""
    if values.dtype == dtype:
        return values
    kind = kind_of(dtype)
    if kind is NumberKind.NONE or kind_of(values.dtype) is not kind:
        raise TypeError(
            f"{place} must be {dtype}, got {values.dtype}: {values.ravel()[:1]}."
        )
    with np.errstate(all="ignore"):
        cast = values.astype(dtype)
        is_equal = cast.astype(values.dtype) == values
    is_nan = values != values
    is_exact = is_equal | is_nan
    if kind is NumberKind.INTEGER:
        # An integer that was wrapped becomes equal again, but has the other sign in between.
        is_exact &= (cast < 0) == (values < 0)
    if not is_exact.all():
        raise ValueError(
            f"{place} must be {dtype}, got {values.dtype}: {values[~is_exact][0]} would become "
            f"{cast[~is_exact][0]}. Cast it in the dictionary, if that is meant."
        )
    return cast

"""One leaf of a saved state: its numbers, with the type, dtype and sharding of a target's leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._trees.leaves import NumberKind, kind_of
from .._trees.pytrees import PyTree
from .nodes import Path


def place_of(argument: str, path: Path) -> str:
    return f"`{argument}` at /{'/'.join(path)}"


def is_abstract(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


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


def restore_leaf(path: Path, target: PyTree, leaf: object, rounds: bool) -> Any:
    """Returns the numbers of a leaf with the type, shape, dtype and sharding of `target`.

    `rounds` says that float32 numbers are rounded to nearest where that is bfloat16.
    """
    place = place_of("from_state_dict(state_dict)", path)
    like = target
    if _is_key(target):
        like = jax.eval_shape(jax.random.key_data, target)
    elif not is_abstract(target):
        check_number(place_of("from_state_dict(target)", path), target)
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
        array = jax.random.wrap_key_data(jnp.asarray(values), impl=_key_impl(target))
    elif jax.typeof(target).weak_type:
        zero = np.zeros((), dtype).item()  # a number of Python, which is weak
        array = jnp.broadcast_to(jnp.asarray(zero), values.shape).at[...].set(values)
    sharding = target.sharding
    if isinstance(target, jax.Array) and not target.committed:
        sharding = None
    return jax.device_put(array, sharding)


def _key_impl(target: PyTree) -> Any:
    """Returns the implementation of a typed key, of which only the type may be known."""
    impls = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), target)
    return impls[0]


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
        # An integer that was wrapped becomes equal again, but has the other sign in between.
        is_equal &= (cast < 0) == (values < 0)
    is_exact = is_equal | (values != values)
    if not is_exact.all():
        raise ValueError(
            f"{place} must be {dtype}, got {values.dtype}: {values[~is_exact][0]} would become "
            f"{cast[~is_exact][0]}. Cast it in the dictionary, if that is meant."
        )
    return cast

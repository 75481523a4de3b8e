"""`autocast` and `full_precision`: what users call."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from .objects import call_with_objects, holds_objects
from .structure import FULL_PRECISION, RULES, noted
from .transform import Autocast

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@functools.cache
def _autocast(dtype: Any) -> Autocast:
    return Autocast(dtype, RULES, noted)


def autocast(
    fun: Callable[_Args, _Result], *, dtype: Any = jnp.float16
) -> Callable[_Args, _Result]:
    """Returns the function, with its matrix products and convolutions in half precision."""
    if not callable(fun):
        raise TypeError(
            f"`autocast(fun)` must be a function, got {type(fun).__name__}. Pass the loss function "
            "or the model itself, not what it returns."
        )
    known = [jnp.dtype(name) for name in ("float16", "bfloat16", "float32")]
    try:
        checked = jnp.dtype(dtype)
    except TypeError:
        checked = None
    if checked not in known:
        raise ValueError(
            "`autocast(dtype)` must be float16 or bfloat16, or float32 to switch it off, got "
            f"{dtype!r}."
        )
    if checked == known[2]:
        return fun
    call = _autocast(checked).call

    @functools.wraps(fun)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        if holds_objects((args, kwargs)):
            return call_with_objects(call, fun, args, kwargs)
        return call(fun, args, kwargs)

    return autocast_fun


def full_precision(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Returns the function, marked so that `autocast` leaves it as it is written."""
    if not callable(fun):
        raise TypeError(f"`full_precision(fun)` must be a function, got {type(fun).__name__}.")

    @functools.wraps(fun)
    def full_precision_fun(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
        static, out_tree = [], tree

        def flat(*arrays: Any) -> list[Any]:
            nonlocal static, out_tree
            given = iter(arrays)
            merged = [
                next(given) if traced else leaf
                for leaf, traced in zip(leaves, is_array, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(tree, merged)
            outputs, out_tree = jax.tree.flatten(fun(*args, **kwargs))
            static = [None if isinstance(out, jax.Array) else (out,) for out in outputs]
            return [out for out in outputs if isinstance(out, jax.Array)]

        flat.__name__ = flat.__qualname__ = FULL_PRECISION
        arrays = [leaf for leaf, traced in zip(leaves, is_array, strict=True) if traced]
        outputs = iter(jax.jit(flat)(*arrays))
        return jax.tree.unflatten(out_tree, [next(outputs) if s is None else s[0] for s in static])

    return full_precision_fun

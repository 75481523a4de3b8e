"""`autocast` and `full_precision`: what users call."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from .arguments import Flat
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
    return _transformed(_autocast(checked).call, fun)


def full_precision(fun: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Returns the function, marked so that `autocast` leaves it as it is written."""
    if not callable(fun):
        raise TypeError(f"`full_precision(fun)` must be a function, got {type(fun).__name__}.")

    return _transformed(_marked, fun)


def _marked(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # A call of `jit` stays one equation through `grad` and `vmap`, and keeps its name.
    flat = Flat(fun, args, kwargs, FULL_PRECISION)
    return flat.restored(jax.jit(flat)(*flat.arrays))


def _transformed(call: Callable[..., Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs in `call`, which takes a function and its arguments."""
    bound, unbound = getattr(fun, "__self__", None), getattr(fun, "__func__", None)
    if not holds_objects(bound) and holds_objects(fun):
        bound, unbound = fun, lambda module, *args, **kwargs: module(*args, **kwargs)

    @functools.wraps(fun)
    def transformed_fun(*args: Any, **kwargs: Any) -> Any:
        # A module of NNX is an argument of its own methods: they may change it.
        if unbound is not None and holds_objects(bound):
            return call_with_objects(call, unbound, (bound, *args), kwargs)
        if holds_objects((args, kwargs)):
            return call_with_objects(call, fun, args, kwargs)
        return call(fun, args, kwargs)

    return transformed_fun

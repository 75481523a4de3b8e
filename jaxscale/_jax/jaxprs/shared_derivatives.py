"""Operations that JAX differentiates once, however often they are in a jaxpr.

Differentiating an equation takes JAX several times as long as copying it. What a jitted function
does, JAX differentiates once for inputs of equal types, and remembers. Such a function may be
inlined: then the jaxpr, and its derivative, are the same as without it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive, jaxpr_as_fun

# Inlines a function while the jaxpr around it is traced. Since JAX 0.12 `True` means later.
_AT_ONCE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True


def is_differentiated(args: Sequence[Any]) -> bool:
    """Returns whether a function of some arguments is being differentiated in reverse."""
    return _tracer_of_vjp() in map(type, args)


@functools.cache
def _tracer_of_vjp() -> type:
    """Returns the class of what a function is given by `jax.vjp`."""
    found: list[type] = []

    def note(x: jax.Array) -> Any:
        found.append(type(x))
        return x

    with jax.ensure_compile_time_eval():
        jax.vjp(note, np.float32(1))
    return found[0]


def bind_once(primitive: Primitive, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Binds a primitive whose inputs are differentiated, with a derivative that equal ones share.

    It must hold no jaxpr, and have no effects.
    """
    return call_once(primitive.bind, args, params)


def call_once(
    fun: Callable[..., Any], args: Sequence[Any], params: dict[str, Any]
) -> Any:
    """Calls a function of arrays, which is traced and differentiated once for equal parameters."""
    if not all(map(_is_plain, args)):
        return fun(*args, **params)
    try:
        jitted = _jitted(fun, tuple(params.items()))
    except TypeError:  # a parameter that has no hash
        return fun(*args, **params)
    return jitted(*args)


def run_traced(jitted: jax.stages.Wrapped, args: Sequence[Any]) -> Any:
    """Runs a jitted function by its equations, without a call.

    JAX traces it once for arguments of equal types. So what the result holds besides arrays, such
    as a jaxpr, is the same each time.
    """
    traced = jitted.trace(*args)
    outputs = jaxpr_as_fun(traced.jaxpr)(*args)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), outputs)


def _is_plain(array: jax.Array) -> bool:
    """Returns whether the type of an array says nothing of a mesh with Explicit axes.

    A jitted function is traced with the mesh around it, which need not be that of its arguments.
    """
    aval = jax.typeof(array)
    return type(aval) is ShapedArray and aval.sharding.mesh.empty


@functools.lru_cache(maxsize=1024)
def _jitted(
    fun: Callable[..., Any], params: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    return jax.jit(functools.partial(fun, **dict(params)), inline=_AT_ONCE)

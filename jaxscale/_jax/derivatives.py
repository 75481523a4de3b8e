"""Tangents and cotangents, and arrays that are marked for reverse mode."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def tangent_type(aval: Any) -> Any:
    """Returns the type of the derivatives of arrays of a type."""
    return aval.to_tangent_aval()


def zero_cotangent(aval: Any) -> Any:
    """Returns what says to a function of `jax.vjp` that nothing depends on an output.

    It is `None` if this version of JAX takes only arrays there. A derivative rule sees the
    difference: that of `vmap` raises an error for zeros that are one array for the whole batch.
    """
    if not _takes_zeros():
        return None
    if hasattr(aval, "to_ct_aval"):
        return ad.Zero(aval.to_ct_aval())
    return ad.Zero(tangent_type(aval))


@functools.cache
def _takes_zeros() -> bool:
    with jax.ensure_compile_time_eval():
        _, pull = jax.vjp(lambda x: (x, x), np.float32(1))
        try:
            pull((np.float32(1), ad.Zero(jax.typeof(np.float32(1)))))
        except Exception:  # nobody knows what a JAX that does not take it raises
            return False
    return True


def refuse_transposing(array: Any, reason: str) -> Any:
    """Returns an array as it is, of which a reverse-mode derivative is a `TypeError`."""
    return _REFUSING.bind(array, reason=reason)


def note_transposing(array: Any, note: Callable[[], None]) -> Any:
    """Returns an array as it is. Tracing a reverse-mode derivative of it calls `note`."""
    return _NOTING.bind(array, note=note)


def _identity(name: str, transpose: Callable[..., Any]) -> Primitive:
    """Returns a primitive that does nothing, with a rule of its own for reverse mode."""
    primitive = Primitive(name)
    primitive.def_impl(lambda array, **_: array)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    ad.deflinear2(primitive, transpose)
    batching.defvectorized(primitive)
    lowering = mlir.lower_fun(lambda array, **_: array, multiple_results=False)
    mlir.register_lowering(primitive, lowering)
    return primitive


def _raise_reason(*_: Any, reason: str) -> Any:
    raise TypeError(reason)


def _call_note(cotangent: Any, *_: Any, note: Callable[[], None]) -> list[Any]:
    note()
    return [cotangent]


_REFUSING = _identity("jaxscale_refuse_transposing", _raise_reason)
_NOTING = _identity("jaxscale_note_transposing", _call_note)

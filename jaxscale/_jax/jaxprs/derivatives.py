"""Tangents and cotangents, and arrays that are marked for reverse mode."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..jaxpr_types import AbstractValue, Tangent


@jax.tree_util.register_static
class StaticFlags(tuple[bool, ...]):
    """Bools that a tree keeps in its structure: elsewhere JAX would make arrays of them."""


def tangent_type(aval: AbstractValue) -> Any:
    """Returns the type of the derivatives of arrays of a type."""
    return aval.to_tangent_aval()


def zero_cotangent(aval: AbstractValue) -> Any:
    """Returns a cotangent that tells a function of `jax.vjp` that nothing depends on an output.

    Zeros would be another thing to a derivative rule. That of `vmap` raises an error for zeros that
    are one array for the whole batch.
    """
    return ad.Zero(aval.to_ct_aval())


def refuse_transposing(array: jax.Array, reason: str) -> Any:
    """Returns an array as it is, of which a reverse-mode derivative is a `TypeError`."""
    return _REFUSING.bind(array, reason=reason)


def note_transposing(array: jax.Array, note: Callable[[], None]) -> Any:
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


def _raise_reason(*_: object, reason: str) -> Any:
    raise TypeError(reason)


def _call_note(cotangent: Tangent, *_: object, note: Callable[[], None]) -> list[Any]:
    note()
    return [cotangent]


_REFUSING = _identity("jaxscale_refuse_transposing", _raise_reason)
_NOTING = _identity("jaxscale_note_transposing", _call_note)

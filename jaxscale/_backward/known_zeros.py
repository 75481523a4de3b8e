"""Derivatives that JAX knows to be zero, carried from one part of a jaxpr to the other.

JAX knows of some derivatives that they are zero, and a function's own derivative rule may ask. But
`jax.vjp` takes and returns arrays: what crosses from the head to the tail, or back, would look as
if it had a derivative, and rules in the other part would fail, or compute with zeros. So values
that cross go through one of two functions here, whose rules write down what JAX knows.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from .._jax.jaxprs import Arrays, SymbolicTangents

# Where the rules of `note_tangents` and `note_zeros` write what they see.
_notes: ContextVar[list[bool]] = ContextVar("notes")


@contextlib.contextmanager
def noting() -> Iterator[list[bool]]:
    """Yields a list, which `note_tangents` or `note_zeros` fills inside of this context."""
    notes: list[bool] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def is_noting() -> bool:
    """Returns whether the code around this call is inside of `noting`."""
    return _notes.get(None) is not None


def _write(flags: list[bool]) -> None:
    notes = _notes.get(None)
    # Without a list, a jaxpr around this one is differentiated, and nobody asks.
    if notes is not None:
        notes[:] = flags


@jax.custom_jvp
def note_tangents(*values: jax.Array) -> tuple[Any, ...]:
    """Returns values as they are, and notes which of them have a tangent."""
    return values


def _note_tangents_jvp(values: Arrays, tangents: SymbolicTangents) -> Any:
    _write([not isinstance(tangent, SymbolicZero) for tangent in tangents])
    return tuple(values), tuple(tangents)


note_tangents.defjvp(_note_tangents_jvp, symbolic_zeros=True)


@jax.custom_vjp
def note_zeros(*values: jax.Array) -> tuple[Any, ...]:
    """Returns values as they are, and notes which of their cotangents are zero."""
    return values


def _note_zeros_forward(*values: Any) -> tuple[Any, None]:
    return tuple(value.value for value in values), None


def _note_zeros_backward(_: None, cotangents: SymbolicTangents) -> Any:
    are_zeros = []
    pulled = []
    for cotangent in cotangents:
        is_zero = isinstance(cotangent, SymbolicZero)
        are_zeros.append(is_zero)
        pulled.append(None if is_zero else cotangent)
    _write(are_zeros)
    return tuple(pulled)


note_zeros.defvjp(_note_zeros_forward, _note_zeros_backward, symbolic_zeros=True)

"""Refs, which are mutable arrays, and traces."""

from typing import Any

import jax
import jax.core

from .jaxpr_types import Atom

# What a function may be given that is traced. A ref is not a `jax.Array`.
TRACED: Any = (jax.Array, jax.Ref)


def is_ref(atom: Atom) -> bool:
    """Returns whether a variable is a ref, a mutable array such as `jax.new_ref` makes."""
    return hasattr(atom.aval, "inner_aval")


def trace_of(value: object) -> Any:
    """Returns the trace in which a value was computed, or `None` if its number is known."""
    if not isinstance(value, jax.core.Tracer):
        return None
    return value._trace

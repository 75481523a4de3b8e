"""Whose a product is: the model's, or a step of an algorithm that was written for float32.

It depends on who called JAX's product function, not on what the product looks like: a convolution
may be a layer, or the product of two polynomials.
"""

import enum
import functools
from typing import Any, NamedTuple

from .. import _jax
from .._jax import JaxprEqn
from . import table


class Owner(enum.Enum):
    """Who called JAX's product function."""

    MODEL = "the user, or a library of layers"
    LIBRARY = "JAX or Optax, for an algorithm of their own"
    ATTENTION = "JAX's attention, which asks for its logits in float32"


class Place(NamedTuple):
    """What is known of a program from where it is called."""

    in_loop: bool = False  # part of a body: XLA compiles its backward pass apart
    owner: Owner = Owner.MODEL  # of what is in it, if that does not say itself


def owner_of(eqn: JaxprEqn, around: Owner) -> Owner:
    """Returns who called the function that an equation is from.

    A cached program, such as that of `jax.numpy.einsum`, does not know who calls it. So what is
    in it belongs to the owner of the equation `around` it.
    """
    owner = _find_owner(_jax.traceback_of(eqn))
    if owner is None:
        return around
    return owner


@functools.lru_cache(maxsize=4096)
def _find_owner(traceback: Any) -> Owner | None:
    for caller in _jax.callers(traceback):
        if caller.package not in table.LIBRARIES:
            return Owner.MODEL
        if caller.package != "jax":
            return Owner.LIBRARY
        if caller.file == table.ATTENTION_FILE:
            if table.ATTENTION in caller.functions:
                return Owner.ATTENTION
            return Owner.MODEL
        if not _passes_on(caller.file, caller.functions):
            return Owner.LIBRARY
    return None


def _passes_on(file: str, functions: list[str]) -> bool:
    """Returns whether a function of JAX is a product, or computes what it was given."""
    if file in table.ALGORITHMS:
        return False
    is_inside = "/" not in file  # how JAX traces, transforms and calls
    return (
        is_inside
        or file.startswith(table.PASSING_ON)
        or not table.PASSING_ON_BY_NAME.isdisjoint(functions)
    )

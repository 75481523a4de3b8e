"""Which unscaled gradients are quotients of which scaled ones, while a program is traced.

On a CPU a step is skipped by a branch, and the unscaled gradients, which are float32, would be
stored before it: eight bytes for each parameter, written and read. Dividing again inside of the
branch is cheaper, as it fuses into the step. For this the branch has to know what was divided by
what. The numbers stay the same.
"""

import weakref
from typing import Any, NamedTuple

from jax.core import Tracer


class Quotient(NamedTuple):
    """A scaled gradient, before it was widened, and the number that it was divided by."""

    dividend: Any
    divisor: Any


# By identity, as `==` compares tracers like arrays. All references are weak, so that tracers live
# no longer than their trace.
_QUOTIENTS: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], weakref.ref[Any]]] = {}


def remember(leaf: Any, dividend: Any, divisor: Any) -> None:
    """Notes that `leaf` is `dividend` divided by `divisor`, if all are traced."""
    if all(isinstance(each, Tracer) for each in (leaf, dividend, divisor)):
        key = id(leaf)
        own = weakref.ref(leaf, lambda _: _QUOTIENTS.pop(key, None))
        _QUOTIENTS[key] = own, weakref.ref(dividend), weakref.ref(divisor)


def recall(leaf: Any) -> Quotient | None:
    """Returns the division that `leaf` is the result of, or `None` if that is not known."""
    found = [each() for each in _QUOTIENTS.get(id(leaf), ())]
    if not found or found[0] is not leaf or any(each is None for each in found):
        return None
    return Quotient(*found[1:])

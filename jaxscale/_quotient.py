"""Of which scaled gradients the unscaled ones are quotients, while a program is traced.

Unscaled gradients are float32 and, on a CPU, where a step is skipped by a branch, would
be stored before it: eight bytes a parameter, written and read. But to divide again is
cheaper, inside of the branch, where it costs nothing. For that the branch has to know
what was divided by what. It makes no difference to the numbers.
"""

import weakref
from typing import Any, NamedTuple

from jax.core import Tracer


class Quotient(NamedTuple):
    """A scaled gradient, as it came, and the number that it was divided by."""

    dividend: Any
    divisor: Any


# By identity, as tracers are compared like arrays. Weak on all sides: what is traced lives
# as long as its trace and no longer.
_QUOTIENTS: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], weakref.ref[Any]]] = {}


def remember(leaf: Any, dividend: Any, divisor: Any) -> None:
    """Notes that `leaf` is `dividend` divided by `divisor`, if all are traced."""
    if all(isinstance(each, Tracer) for each in (leaf, dividend, divisor)):
        key = id(leaf)
        own = weakref.ref(leaf, lambda _: _QUOTIENTS.pop(key, None))
        _QUOTIENTS[key] = own, weakref.ref(dividend), weakref.ref(divisor)


def recall(leaf: Any) -> Quotient | None:
    """Returns what `leaf` is a quotient of, or `None` if that is not known."""
    found = [each() for each in _QUOTIENTS.get(id(leaf), ())]
    if not found or found[0] is not leaf or any(each is None for each in found):
        return None
    return Quotient(*found[1:])

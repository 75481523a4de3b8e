"""Product ownership: a product is the model's, or a step of an algorithm written for float32.

It depends on who called JAX's product function, not on what the product looks like: a convolution
may be a layer, or the product of two polynomials. The algorithms are known, and all else is the
model: what is new in JAX is cast, and named in a warning (see `uncast_warnings.py`).
"""

import enum
import functools
from typing import NamedTuple

from .._jax import jaxprs
from .._jax.jaxprs import Caller, ClosedJaxpr, Jaxpr, JaxprEqn, Traceback
from . import table
from .exact_products import NOTHING_EXACT, Exact, find_exact


class Owner(enum.Enum):
    """The caller of JAX's product function."""

    MODEL = "the user, or a library of layers"
    LIBRARY = "JAX or Optax, for an algorithm of their own"
    ATTENTION = "JAX's attention, which asks for its logits in float32"
    # of a jaxpr in which nothing is cast, whoever called
    UNCAST = "nobody"


class CallSite(NamedTuple):
    """The facts of a jaxpr that follow from its call."""

    in_loop: bool = False  # part of a body: XLA compiles its backward pass apart
    owner: Owner = Owner.MODEL  # of what is in it, if that does not say itself
    exact: Exact = NOTHING_EXACT

    def inside(
        self, eqn: JaxprEqn, program: Jaxpr | ClosedJaxpr, in_loop: bool = False
    ) -> "CallSite":
        """Returns the call site of a jaxpr that an equation of this one holds."""
        return CallSite(
            in_loop=in_loop or self.in_loop,
            owner=owner_of(eqn, self.owner),
            exact=self.exact.inside_of(eqn, program),
        )


def outermost(program: Jaxpr | ClosedJaxpr) -> CallSite:
    """Returns the call site of a jaxpr that no other one calls."""
    return CallSite(exact=find_exact(program))


class Origin(NamedTuple):
    """The caller of the function that an equation is from.

    Attributes:
      owner: whose it is, or `None` if only the caller of the jaxpr knows that.
      unknown: what of JAX or Optax is on the way, of which is not known whose it is, as text.
    """

    owner: Owner | None
    unknown: str = ""


OF_MODEL = Origin(Owner.MODEL)


def owner_of(eqn: JaxprEqn, around: Owner) -> Owner:
    """Returns the caller of the function that an equation is from.

    A cached jaxpr, such as that of `jax.numpy.einsum`, does not know who calls it. So what is
    in it belongs to the owner of the equation `around` it.
    """
    if around is Owner.UNCAST:
        return around
    owner = _find_origin(jaxprs.traceback_of(eqn)).owner
    if owner is None:
        return around
    return owner


def origin_of(eqn: JaxprEqn, around: Origin) -> Origin:
    """Returns the owner, as `owner_of`, and the unknown caller on the way to it, if any."""
    origin = _find_origin(jaxprs.traceback_of(eqn))
    if origin.owner is None:
        return Origin(around.owner, origin.unknown or around.unknown)
    return origin


@functools.lru_cache(maxsize=4096)
def _find_origin(traceback: Traceback | None) -> Origin:
    unknown = ""
    for caller in jaxprs.callers(traceback):
        if caller.package not in table.ALGORITHMS:
            return Origin(Owner.MODEL, unknown)
        if _is_attention(caller):
            return Origin(Owner.ATTENTION, unknown)
        if _is_algorithm(caller):
            return Origin(Owner.LIBRARY)
        if not unknown and not _passes_on(caller):
            unknown = f"`{caller.functions[-1]}` in {caller.package}/{caller.file}"
    return Origin(None, unknown)


def _is_attention(caller: Caller) -> bool:
    is_file = caller.package == "jax" and caller.file == table.ATTENTION_FILE
    return is_file and table.ATTENTION in caller.functions


def _is_algorithm(caller: Caller) -> bool:
    """Returns whether a function of a library is written for float32."""
    if caller.file.startswith(table.ALGORITHMS[caller.package]):
        return True
    names = table.ALGORITHMS_BY_NAME.get(caller.file, set())
    return not names.isdisjoint(caller.functions)


def _passes_on(caller: Caller) -> bool:
    """Returns whether a function of JAX is a product, or computes what it was given."""
    if caller.package != "jax":
        return False
    is_inside = "/" not in caller.file  # how JAX traces, transforms and calls
    # The function around it says whose it is.
    is_anonymous = caller.functions[-1] == "<lambda>"
    return (
        is_inside
        or is_anonymous
        or caller.file.startswith(table.PASSING_ON)
        or not table.PASSING_ON_BY_NAME.isdisjoint(caller.functions)
    )

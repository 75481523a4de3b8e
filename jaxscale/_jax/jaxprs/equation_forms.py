"""Forms in which primitives hold jaxprs, and the error for a form that is not known.

An equation whose parameters have no form that is known here raises an `UnknownFormError`. Whoever
reads it runs it as it is written, and says so.
"""

import enum
import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from jax.extend.core import JaxprEqn

# The versions of JAX that the tests were run with.
TESTED = "0.10.2 to 0.12.0"

RECOMPUTED = "jaxscale_recomputed"
KEPT_RULE = "jaxscale_kept_rule"
OBJECT = "call_hi_primitive"


class Form(enum.Enum):
    """The way in which an equation runs the jaxprs that it holds."""

    JIT = enum.auto()  # a call, compiled by itself
    INLINED = enum.auto()  # a call that does nothing else
    REMAT = enum.auto()  # a call that the backward pass computes again
    RECOMPUTED = enum.auto()  # the same, as a primitive of our own
    CUSTOM_JVP = enum.auto()  # a call with a derivative rule for both modes
    CUSTOM_VJP = enum.auto()  # a call with a rule for reverse mode
    OBJECT = enum.auto()  # an operation that is an object: see `hijax.py`
    SCAN = enum.auto()
    WHILE = enum.auto()
    BRANCHES = enum.auto()
    SHARD_MAP = enum.auto()
    NONE = enum.auto()  # it holds none, or no form of it is known


# The form of each primitive that holds jaxprs.
FORMS = {
    "jit": Form.JIT,
    "closed_call": Form.INLINED,  # before JAX 0.12
    "call": Form.INLINED,  # before JAX 0.12
    "eval_jaxpr": Form.INLINED,  # since: what a traced function leaves where it is called
    "remat2": Form.REMAT,
    RECOMPUTED: Form.RECOMPUTED,
    "custom_jvp_call": Form.CUSTOM_JVP,
    "custom_vjp_call": Form.CUSTOM_VJP,
    KEPT_RULE: Form.CUSTOM_VJP,
    OBJECT: Form.OBJECT,
    "scan": Form.SCAN,
    "while": Form.WHILE,
    "cond": Form.BRANCHES,
    "shard_map": Form.SHARD_MAP,
}
# Calls: they run one jaxpr, of their own inputs. The first do nothing but run it; a `custom_vjp`
# also has a backward rule, outside of it.
PLAIN_CALLS = {
    *(Form.JIT, Form.INLINED, Form.REMAT, Form.RECOMPUTED),
    Form.CUSTOM_JVP,
}
LOOPS_AND_BRANCHES = {Form.SCAN, Form.WHILE, Form.BRANCHES}


def primitives_of(*forms: Form) -> frozenset[str]:
    """Returns the names of the primitives of some forms."""
    return frozenset(name for name, form in FORMS.items() if form in forms)


_Read = TypeVar("_Read")
_More = ParamSpec("_More")


class UnknownFormError(Exception):
    """Raised for an equation whose parameters have no form that is known here."""


def reads_form(
    read: Callable[Concatenate[JaxprEqn, _More], _Read],
) -> Callable[Concatenate[JaxprEqn, _More], _Read]:
    """Makes a function that reads an equation raise an `UnknownFormError` where it cannot."""

    @functools.wraps(read)
    def read_or_raise(
        eqn: JaxprEqn, *args: _More.args, **kwargs: _More.kwargs
    ) -> _Read:
        try:
            return read(eqn, *args, **kwargs)
        # nobody knows what a form that is not known yet raises
        except Exception as error:
            raise UnknownFormError(eqn.primitive.name) from error

    return read_or_raise

"""The forms of equations that are known here, and what is raised for others.

An equation whose parameters have no form that is known here raises an `UnknownFormError`. Whoever
reads it runs it as it is written, and says so.
"""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from jax.extend.core import JaxprEqn

# The versions of JAX that the tests were run with.
TESTED = "0.6.2 to 0.12.0"
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

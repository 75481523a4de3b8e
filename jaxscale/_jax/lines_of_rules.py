"""How the equations of a user's backward rule keep their own source lines."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import source_info_util


@contextlib.contextmanager
def keep_lines_of_rules(is_users_file: Callable[[str], bool]) -> Iterator[None]:
    """Inside of this context, the equations of a user's backward rule keep their own lines.

    JAX gives everything that the rule of a `custom_vjp` function computes the line that calls the
    function. Only what is traced inside of this context changes, and only in its source lines.
    """
    custom_vjp: Any = jax.custom_vjp
    call = custom_vjp.__call__

    @functools.wraps(call)
    def call_with_lines(function: Any, *args: Any, **kwargs: Any) -> Any:
        # A library's rule has no line of the user's, so the line of the call says more.
        if _is_written_in(getattr(function, "bwd", None), is_users_file):
            function = _copy(function)
            function.bwd = _with_own_lines(function.bwd)
        return call(function, *args, **kwargs)

    custom_vjp.__call__ = call_with_lines
    try:
        yield
    finally:
        custom_vjp.__call__ = call


def _copy(function: Any) -> Any:
    """Returns another `custom_vjp` function like this one. In JAX 0.10 `copy.copy` cannot."""
    other = object.__new__(type(function))
    other.__dict__.update(function.__dict__)
    return other


def _with_own_lines(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def rule_with_own_lines(*args: Any, **kwargs: Any) -> Any:
        scopes = source_info_util.current_name_stack()
        with source_info_util.user_context(_NoTraceback(), name_stack=scopes):
            return rule(*args, **kwargs)

    return rule_with_own_lines


class _NoTraceback:
    """Makes JAX take the present traceback, as it is false.

    `None` would not do: it leaves the traceback that was set before.
    """

    def __bool__(self) -> bool:
        return False

    def as_python_traceback(self) -> None:
        """Returns nothing to add to an error's traceback, which has the lines itself."""


def _is_written_in(rule: Any, is_users_file: Callable[[str], bool]) -> bool:
    """Returns whether a rule, or what a library wraps into one, is a function of a user's file."""
    while True:
        if isinstance(rule, functools.partial):
            rule = rule.func
        elif hasattr(rule, "__wrapped__"):
            rule = rule.__wrapped__
        else:
            break
    code = getattr(rule, "__code__", None)
    if code is None:
        return False
    if is_users_file(code.co_filename):
        return True
    for value in _closed_over(rule):
        code = getattr(value, "__code__", None)
        if code is not None and is_users_file(code.co_filename):
            return True
    return False


def _closed_over(function: Any) -> Iterator[Any]:
    """Yields the values of the variables that a function closes over."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the variable has no value yet
            yield cell.cell_contents

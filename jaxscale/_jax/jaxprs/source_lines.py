"""The origin of an equation: its context, its scopes, its source line and its callers."""

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from ..jaxpr_types import NameStack, Traceback
from ..python_frames import is_of_jax

_SOURCES = os.path.join(os.path.dirname(jax.__file__), "_src", "")
_PACKAGES = os.path.join(os.path.dirname(os.path.dirname(jax.__file__)), "")
_OWN = os.path.join(pathlib.Path(__file__).parents[2], "")  # of jaxscale
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")

# The functions in which JAX begins to trace a function. JAX caches the result for later calls,
# so the frames outside of these are those of the first call, wherever that was.
_TRACING = {"trace_to_jaxpr_dynamic", "trace_to_jaxpr"}


def context(eqn: JaxprEqn) -> Any:
    """Returns the context in which an equation was made, such as a mesh, to make another in."""
    return eqn.ctx.manager


def source(eqn: JaxprEqn, scopes: NameStack, outer: int = 0) -> Any:
    """Returns a context in which what is bound has the line and the scopes of an equation.

    Before its own scopes stand `scopes`, in place of its `outer` ones.
    """
    info: Any = eqn.source_info
    return at_line(eqn, scopes + info.name_stack[outer:])


def at_line(eqn: JaxprEqn, scopes: NameStack) -> Any:
    """Returns a context in which what is bound has the line of an equation, and these scopes."""
    info: Any = eqn.source_info
    return source_info_util.user_context(info.traceback, name_stack=scopes)


def common_scopes(eqns: Sequence[JaxprEqn]) -> Any:
    """Returns the scopes that are around all of some equations."""
    stacks: list[Any] = [eqn.source_info.name_stack for eqn in eqns]
    length = 0
    for scopes in zip(*(stack.stack for stack in stacks), strict=False):
        if any(scope != scopes[0] for scope in scopes):
            break
        length += 1
    return stacks[0][:length]


def no_scopes() -> Any:
    """Returns the scopes of what stands in none."""
    return source_info_util.new_name_stack()


def current_scopes() -> Any:
    """Returns the named scopes around what is traced now."""
    return source_info_util.current_name_stack()


def scope_names(eqn: JaxprEqn) -> list[str]:
    """Returns the named scopes of an equation, without the transformations around them."""
    stack: Any = eqn.source_info.name_stack
    return [getattr(scope, "name", "") for scope in stack.stack]


def is_computed_again(eqn: JaxprEqn) -> bool:
    """Says whether `jax.checkpoint` computes an equation again, for a derivative.

    Since JAX 0.12 this may also be said of the equation around it.
    """
    return "rematted_computation" in scope_names(eqn)


def scope_path(eqn: JaxprEqn) -> str:
    """Returns the named scopes of an equation and the transformations around them, as text."""
    return str(eqn.source_info.name_stack)


class SourceFrame(NamedTuple):
    """A frame of the traceback of an equation."""

    file: str
    line: int
    function: str  # without those around it


def frames(eqn: JaxprEqn) -> Iterator[SourceFrame]:
    """Yields the frames of an equation, innermost first."""
    traceback = eqn.source_info.traceback
    if not traceback:
        return
    for frame in traceback.frames:
        function = frame.function_name.split(".")[-1]
        if function in _TRACING:
            return
        yield SourceFrame(frame.file_name, frame.line_num, function)


def is_own(file: str) -> bool:
    """Returns whether a file is one of this package."""
    return file.startswith(_OWN)


def users_line(eqn: JaxprEqn) -> str:
    """Returns the file, the line and the function that an equation is from, for messages.

    It is the user's line, or where only libraries are known, the innermost one of these. Where
    only JAX is known, it is `""`.
    """
    lines = []
    for frame in frames(eqn):
        file = frame.file
        if is_own(file) or is_of_jax(file) or file.startswith("<frozen"):
            continue
        text = f"{file}:{frame.line} (in `{frame.function}`)"
        if not file.startswith((_PACKAGES, _STANDARD)):
            return text
        lines.append(text)
    if not lines:
        return ""
    return lines[0]


def traceback_of(eqn: JaxprEqn) -> Any:
    """Returns the traceback of an equation. Those of the same calls are equal."""
    return eqn.source_info.traceback


class Caller(NamedTuple):
    """A frame of the traceback of an equation, by the package that it is in.

    The package and the file are empty for files that are not installed beside JAX.
    """

    package: str  # such as `jax`
    file: str  # in the package, such as `numpy/linalg.py`
    functions: list[str]  # the function, after those around it


def callers(traceback: Traceback | None) -> Iterator[Caller]:
    """Yields the callers of the function that an equation is from, innermost first.

    Frames of Python's own library and of this one are left out.
    """
    if not traceback:
        return
    for frame in traceback.frames:
        functions = frame.function_name.split(".")
        if functions[-1] in _TRACING:
            return
        path = frame.file_name
        if path.startswith(_OWN):
            continue
        if path.startswith(_SOURCES):
            yield Caller("jax", _file_below(_SOURCES, path), functions)
        elif path.startswith(_PACKAGES):
            package, _, file = _file_below(_PACKAGES, path).partition("/")
            yield Caller(package, file, functions)
        elif not path.startswith(_STANDARD):
            yield Caller("", "", functions)


def _file_below(folder: str, path: str) -> str:
    """Returns a path in a folder as it is seen from there, with slashes."""
    return path.removeprefix(folder).replace(os.sep, "/")

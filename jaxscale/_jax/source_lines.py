"""Where an equation is from: its context, its scopes, its source line and who called it."""

import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")
_SOURCES = os.path.join(_FOLDER, "_src", "")
_PACKAGES = os.path.join(os.path.dirname(os.path.dirname(jax.__file__)), "")
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")

# The functions in which JAX begins to trace a function. JAX caches the result for later calls,
# so the frames outside of these are those of the first call, wherever that was.
_TRACING = {"trace_to_jaxpr_dynamic", "trace_to_jaxpr"}


def context(eqn: JaxprEqn) -> Any:
    """Returns the context in which an equation was made, such as a mesh, to make another in."""
    return eqn.ctx.manager


def context_key(eqn: JaxprEqn) -> Any:
    """Returns what is equal for equations that were made in equal contexts."""
    return eqn.ctx


def source(eqn: JaxprEqn, scopes: Any, *, own: bool = True) -> Any:
    """Returns a context in which what is bound has the line and the scopes of an equation.

    Around its `own` scopes are those around the program, from `current_scopes`.
    """
    info: Any = eqn.source_info
    if own:
        scopes = scopes + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=scopes)


def current_scopes() -> Any:
    """Returns the named scopes around what is traced now."""
    return source_info_util.current_name_stack()


def scope_names(eqn: JaxprEqn) -> list[str]:
    """Returns the named scopes of an equation, without the transformations around them."""
    stack: Any = eqn.source_info.name_stack
    return [getattr(scope, "name", "") for scope in stack.stack]


def scope_path(eqn: JaxprEqn) -> str:
    """Returns the named scopes of an equation and the transformations around them, as text."""
    return str(eqn.source_info.name_stack)


def frames(eqn: JaxprEqn) -> Iterator[tuple[str, int, str]]:
    """Yields the file, the line and the function of each frame of an equation, innermost first."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        name = frame.function_name.split(".")[-1]
        if name in _TRACING:
            return
        yield frame.file_name, frame.line_num, name


def is_own(file: str) -> bool:
    """Returns whether a file is one of this package."""
    return file.startswith(_OWN)


def is_of_jax(file: str) -> bool:
    """Returns whether a file is one of JAX."""
    return file.startswith(_FOLDER)


def users_line(eqn: JaxprEqn) -> str:
    """Returns the file, the line and the function that an equation is from, for messages.

    It is the user's line, or where only libraries are known, the innermost one of these. Where
    only JAX is known, it is `""`.
    """
    lines = []
    for file, line, function in frames(eqn):
        if is_own(file) or is_of_jax(file) or file.startswith("<frozen"):
            continue
        text = f"{file}:{line} (in `{function}`)"
        if not file.startswith((_PACKAGES, _STANDARD)):
            return text
        lines.append(text)
    if not lines:
        return ""
    return lines[0]


def traceback_of(eqn: JaxprEqn) -> Any:
    """Returns the traceback of an equation. Those of the same calls are equal."""
    return eqn.source_info.traceback


def callers(traceback: Any) -> Iterator[tuple[str, str, list[str]]]:
    """Yields who called the function that an equation with a traceback is from, innermost first.

    For each frame the package, such as `jax`, and the file in it, such as `numpy/linalg.py`, both
    empty for files that are not installed beside JAX; and the function, after those around it.
    Frames of Python's own library and of this one are left out.
    """
    for frame in traceback.frames if traceback else ():
        functions = frame.function_name.split(".")
        if functions[-1] in _TRACING:
            return
        path = frame.file_name
        if path.startswith(_SOURCES):
            yield "jax", path.removeprefix(_SOURCES).replace(os.sep, "/"), functions
        elif path.startswith(_PACKAGES):
            package, _, file = path.removeprefix(_PACKAGES).partition(os.sep)
            if not path.startswith(_OWN):
                yield package, file.replace(os.sep, "/"), functions
        elif not path.startswith((_OWN, _STANDARD)):
            yield "", "", functions


def frames_of_jax(eqn: JaxprEqn) -> Iterator[tuple[str, str]]:
    """Yields the file, such as `numpy/linalg.py`, and the function of each frame of JAX's own."""
    for file, _, name in frames(eqn):
        if file.startswith(_SOURCES):
            yield file.removeprefix(_SOURCES).replace(os.sep, "/"), name

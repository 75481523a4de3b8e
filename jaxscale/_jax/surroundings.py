"""What surrounds an equation: refs, mesh axes, source lines, scopes and the frames of JAX."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import jax
import jax.core
import jax.experimental
import numpy as np
from jax.extend import source_info_util

from .equations import ClosedJaxpr, Jaxpr, JaxprEqn

# --- Refs: mutable arrays. `Ref` and `new_ref` are public since JAX 0.8, and were called
# `mutable_array` before (https://github.com/jax-ml/jax/pull/32107).

# What a function may be given that is traced. A ref is not a `jax.Array`.
TRACED: Any = (jax.Array, *([jax.Ref] if hasattr(jax, "Ref") else []))
new_ref: Any = getattr(jax, "new_ref", None) or getattr(jax.experimental, "mutable_array", None)


def is_ref(atom: Any) -> bool:
    """Returns whether a variable is a ref, a mutable array such as `jax.new_ref` makes."""
    return hasattr(atom.aval, "inner_aval")


def varying(aval: Any) -> frozenset[Any]:
    """Returns the mesh axes along which arrays of a type may differ, inside `shard_map`.

    The set is empty where JAX does not know: in `pmap`, and with `check_vma=False`.
    """
    manual = getattr(aval, "manual_axis_type", None)  # since JAX 0.10, before it `vma`
    return getattr(aval, "vma", None) or getattr(manual, "varying", frozenset())


def vary(array: jax.Array, axes: Iterable[Any]) -> jax.Array:
    """Returns an array as one that may differ along axes, too."""
    more = tuple(sorted(frozenset(axes) - varying(jax.typeof(array)), key=repr))
    if not more:
        return array
    lax: Any = jax.lax  # JAX 0.6 calls it `pvary`
    return lax.pcast(array, more, to="varying") if hasattr(lax, "pcast") else lax.pvary(array, more)


def axes_of_devices() -> tuple[Any, ...]:
    """Returns the named axes along which this code runs on several devices, each for itself.

    These are the manual axes of `shard_map`, and the axis of `pmap`. Before JAX 0.8 those of
    `vmap(axis_name=...)` are among them: there the index along an axis is batched.
    """
    if jax.__version_info__ < (0, 8):  # since then a `pmap` is a `shard_map`
        core: Any = jax.core
        return tuple(core.unsafe_get_axis_names_DO_NOT_USE())
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def collective_axes(jaxpr: Jaxpr | ClosedJaxpr) -> list[Any]:
    """Returns the named axes along which the devices that run a program exchange numbers."""
    found: Any = jaxpr.effects  # one for each such axis
    effects = [each for each in found if type(each).__name__ == "NamedAxisEffect"]
    # Sorted, as all hosts must trace one program, and the order of a set is up to the process.
    return sorted((effect.name for effect in effects), key=repr)


def is_told_apart(axis: Any) -> bool:
    """Returns whether types say what differs along a named axis, as in a checked `shard_map`."""
    return bool(varying(jax.make_jaxpr(lambda: jax.lax.axis_index(axis))().out_avals[0]))


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
    stack = scopes + info.name_stack if own else scopes
    return source_info_util.user_context(info.traceback, name_stack=stack)


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


# The functions in which JAX begins to trace a function. JAX caches the result for later calls,
# so the frames outside of these are those of the first call, wherever that was.
_TRACING = {"trace_to_jaxpr_dynamic", "trace_to_jaxpr"}


def frames(eqn: JaxprEqn) -> Iterator[tuple[str, int, str]]:
    """Returns the file, the line and the function of each frame of an equation, innermost first."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        name = frame.function_name.split(".")[-1]
        if name in _TRACING:
            return
        yield frame.file_name, frame.line_num, name


@contextlib.contextmanager
def keep_lines_of_rules(is_users_file: Callable[[str], bool]) -> Iterator[None]:
    """Inside of this context, the equations of a user's backward rule keep their own lines.

    JAX gives all that a rule of a `custom_vjp` function computes the line that calls the function.
    Only functions that are traced in here are affected, and only in their source lines.
    """
    custom_vjp: Any = jax.custom_vjp
    call = custom_vjp.__call__

    @functools.wraps(call)
    def call_with_lines(function: Any, *args: Any, **kwargs: Any) -> Any:
        # Of a library's rule no line is the user's, so the line of the call says more.
        if _is_written_in(function.bwd, is_users_file):
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
    """In place of a traceback that is given it makes JAX take the present one: it is false.

    `None` would not do: it leaves the one that was given before.
    """

    def __bool__(self) -> bool:
        return False

    def as_python_traceback(self) -> None:
        """Returns nothing to add to an error's traceback, which has the lines itself."""


def _is_written_in(rule: Any, is_users_file: Callable[[str], bool]) -> bool:
    """Returns whether a rule, or what a library wraps into one, is a function of a user's file."""
    while hasattr(rule, "__wrapped__") or isinstance(rule, functools.partial):
        rule = rule.func if isinstance(rule, functools.partial) else rule.__wrapped__
    code = getattr(rule, "__code__", None)
    if code is None:
        return False
    if is_users_file(code.co_filename):
        return True
    cells = filter(_is_set, getattr(rule, "__closure__", None) or ())
    codes = [getattr(cell.cell_contents, "__code__", None) for cell in cells]
    return any(is_users_file(each.co_filename) for each in codes if each is not None)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable has no value yet
        return False


_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")
_SOURCES = os.path.join(_FOLDER, "_src", "")


_PACKAGES = os.path.join(os.path.dirname(os.path.dirname(jax.__file__)), "")
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")


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
    return lines[0] if lines else ""


def traceback_of(eqn: JaxprEqn) -> Any:
    """Returns the traceback of an equation. Those of the same calls are equal."""
    return eqn.source_info.traceback


def callers(traceback: Any) -> Iterator[tuple[str, str, list[str]]]:
    """Returns who called the function that an equation with a traceback is from, innermost first.

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
    """Returns the file, such as `numpy/linalg.py`, and the function of each frame of JAX's own."""
    for file, _, name in frames(eqn):
        if file.startswith(_SOURCES):
            yield file.removeprefix(_SOURCES).replace(os.sep, "/"), name


_INNERMOST = 3  # frames of JAX in which a number is looked for


def is_called_by_jax() -> bool:
    """Returns whether a function of JAX called the function that calls this."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] == "jax"


def numbers_being_converted() -> tuple[list[float], FrameType | None]:
    """Returns the numbers that JAX is casting, and its innermost frame, or `None` outside of JAX.

    NumPy calls whoever asks. The numbers are local variables of frames, which JAX may yet hide.
    """
    innermost = sys._getframe(2)
    if not innermost.f_code.co_filename.startswith(_FOLDER):
        return [], None
    numbers, frame, left = [], innermost, _INNERMOST
    while frame and left:
        numbers += [float(v) for v in frame.f_locals.values() if _is_number(v)]
        frame, left = frame.f_back, left - 1
    return numbers, innermost


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == () and value.dtype.kind in "fiu"
    return isinstance(value, (float, int, np.number)) and not isinstance(value, bool)

"""Python's frames: the caller, and the expression of the call."""

import itertools
import linecache
import os
import sys
from collections import ChainMap
from collections.abc import Mapping
from types import FrameType
from typing import Any

import jax

_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")


def is_called_by_jax() -> bool:
    """Returns whether a function of JAX called the function that calls this."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] == "jax"


def caller_of_jax() -> FrameType | None:
    """Returns the frame that called JAX, for a function that NumPy calls inside of JAX.

    It is `None` where NumPy was called by anything else.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame is None or not is_of_jax(frame.f_code.co_filename):
        return None
    while frame is not None and is_of_jax(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def users_stacklevel() -> int:
    """Finds the `stacklevel` with which a warning of the caller is shown at the user's line."""
    # The last passes on `jax.jit(function)`.
    libraries = {"flax", "jax", "optax", "jaxscale", "contextlib"}
    level = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] not in libraries:
            break
        frame = frame.f_back
    return level


def expression_of(frame: FrameType) -> tuple[str, Mapping[str, Any]]:
    """Returns the source of the expression that a frame evaluates, and the frame's variables.

    The source is `""` where it is not known. It is one line, as brackets around it are left out.
    """
    variables = ChainMap(frame.f_locals, frame.f_globals)
    positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    first, last, start, end = next(positions)
    if first is None or last is None or start is None:
        return "", variables
    source = linecache.getlines(frame.f_code.co_filename)[first - 1 : last]
    if source:
        # Columns are counted in bytes. The file may have changed since it was imported.
        source[-1] = source[-1].encode()[:end].decode(errors="replace")
        source[0] = source[0].encode()[start:].decode(errors="replace")
    return " ".join(map(str.strip, source)), variables


def is_of_jax(file: str) -> bool:
    """Returns whether a file is one of JAX."""
    return file.startswith(_FOLDER)

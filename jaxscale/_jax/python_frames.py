"""What Python's frames tell: who calls, and which numbers JAX is casting."""

import sys
from types import FrameType
from typing import Any

import numpy as np

from .source_lines import is_of_jax

_INNERMOST = 3  # frames of JAX in which a number is looked for


def is_called_by_jax() -> bool:
    """Returns whether a function of JAX called the function that calls this."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] == "jax"


def numbers_being_converted() -> tuple[list[float], FrameType | None]:
    """Returns the numbers that JAX is casting, and its innermost frame, or `None` outside of JAX.

    It is for a function that NumPy calls. The numbers are local variables of JAX's frames, which a
    new version may rename or hide.
    """
    innermost = sys._getframe(2)
    if not is_of_jax(innermost.f_code.co_filename):
        return [], None
    numbers: list[float] = []
    frame: FrameType | None = innermost
    for _ in range(_INNERMOST):
        if frame is None:
            break
        numbers += map(float, filter(_is_number, frame.f_locals.values()))
        frame = frame.f_back
    return numbers, innermost


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == () and value.dtype.kind in "fiu"
    return isinstance(value, (float, int, np.number)) and not isinstance(value, bool)

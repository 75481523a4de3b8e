"""The lines of the user's source that an equation comes from, the layer it is in, its numbers.

JAX rounds a Python number while it traces: in float16 `x + 1e-9` is `x + 0`, and no equation
shows that. NumPy does the rounding, and can call a function when it underflows or overflows. So
the number and its line are known if a function is traced inside of `Constants.notice`.
"""

import contextlib
import functools
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..._jax import (
    JaxprEqn,
    Literal,
    frames,
    keep_lines_of_rules,
    numbers_being_converted,
    scope_path,
)

# Packages whose frames are left out: the user's model called them.
_LIBRARIES = (
    *("jax", "jaxlib", "jaxscale", "flax", "optax", "equinox", "haiku", "keras", "penzai"),
    *("chex", "jmp", "einops", "jaxtyping", "beartype", "typeguard", "numpy"),
)
_ARITHMETIC = {"add", "sub", "mul", "div", "max", "min", "pow", "rem"}


class Line(NamedTuple):
    """A line of a source file."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The text of the line, or `""` if there is no such file."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        inside = os.path.abspath(self.file).startswith(os.getcwd() + os.sep)
        return f"{os.path.relpath(self.file) if inside else self.file}:{self.number}"


def lines(eqn: JaxprEqn, around: tuple[JaxprEqn, ...]) -> list[Line]:
    """Returns the user's lines for an equation and the calls around it, innermost first."""
    equations = (eqn, *reversed(around))
    return [Line(*frame) for each in equations for frame in frames(each) if is_users_file(frame[0])]


def layer(eqn: JaxprEqn, around: tuple[JaxprEqn, ...]) -> str:
    """Returns the names of the scopes that an equation is in, as modules of Flax set them."""
    stacks = [scope_path(outer) for outer in (*around, eqn)]
    # Transformations wrap a name: `transpose(jvp(Net))/Dense_0`.
    names = re.sub(r"\w+\(|\)", "", "/".join(stacks)).split("/")
    return "/".join(name for name in names if name and name != "rematted_computation")


@functools.cache
def is_users_file(file: str) -> bool:
    """Returns whether a file is neither Python's own nor that of JAX or a library of layers."""
    # Only of imported packages: others have no frames.
    modules = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = [os.path.join(path, "") for module in modules for path in module.__path__]
    if file.startswith(("<frozen ", *folders)):
        return False
    is_installed = "site-packages" in file or "dist-packages" in file
    return is_installed or not file.startswith(os.path.join(sysconfig.get_path("stdlib"), ""))


class Constants:
    """The numbers that were rounded to 0 or inf, by the lines that they stand in."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], list[float]] = {}

    @contextlib.contextmanager
    def notice(self) -> Iterator[None]:
        """Inside of this context, numbers that are rounded to 0 or inf are noted.

        The backward rules of the user's functions keep their lines, where such numbers may stand.
        """
        noting = np.errstate(over="call", under="call", call=self._note)
        with noting, keep_lines_of_rules(is_users_file):
            yield

    def exact(self, eqn: JaxprEqn, around: tuple[JaxprEqn, ...], literal: Literal) -> float | None:
        """Returns the number that a 0 or inf in an equation was made of, if it is known."""
        value = np.asarray(literal.val)
        if value.shape or value.dtype.kind not in "fV" or not self._numbers:
            return None
        # Derivatives compare with 0 and choose it, as that of `abs` does.
        if eqn.primitive.name not in _ARITHMETIC or (value != 0 and not np.isinf(value)):
            return None
        line = next(iter(lines(eqn, around)), None)
        for number in self._numbers.get((line.file, line.number), ()) if line else ():
            with np.errstate(all="ignore"):
                if np.asarray(number).astype(value.dtype) == value:
                    return number
        return None

    def _note(self, kind: str, flag: int) -> None:
        del kind, flag
        numbers, frame = numbers_being_converted()
        while frame is not None and not is_users_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            place = frame.f_code.co_filename, frame.f_lineno
            self._numbers.setdefault(place, []).extend(n for n in numbers if 0 < abs(n) < np.inf)

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
    "jax", "jaxlib", "jaxscale", "flax", "optax", "equinox", "haiku", "keras", "penzai",
    "chex", "jmp", "einops", "jaxtyping", "beartype", "typeguard", "numpy",
)  # fmt: skip
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

    @property
    def where(self) -> str:
        """File and line, the file relative to the working directory, or `""` for `NO_LINE`."""
        if not self.file:
            return ""
        file = self.file
        if os.path.abspath(file).startswith(os.getcwd() + os.sep):
            file = os.path.relpath(file)
        return f"{file}:{self.number}"

    def __str__(self) -> str:
        return self.where


NO_LINE = Line("", 0, "")


def lines(eqn: JaxprEqn, around: tuple[JaxprEqn, ...]) -> list[Line]:
    """Returns the user's lines for an equation and the calls around it, innermost first."""
    users_lines = []
    for outer in (eqn, *reversed(around)):
        for frame in frames(outer):
            if is_users_file(frame.file):
                users_lines.append(Line(frame.file, frame.line, frame.function))
    return users_lines


def find_line(eqn: JaxprEqn, around: tuple[JaxprEqn, ...]) -> Line:
    """Returns the innermost line of the user for an equation, or `NO_LINE`."""
    for line in lines(eqn, around):
        return line
    return NO_LINE


def find_layer(eqn: JaxprEqn, around: tuple[JaxprEqn, ...]) -> str:
    """Returns the names of the scopes that an equation is in, as modules of Flax set them."""
    path = "/".join(map(scope_path, (*around, eqn)))
    # Transformations wrap a name: `transpose(jvp(Net))/Dense_0`.
    names = re.sub(r"\w+\(|\)", "", path).split("/")
    return "/".join(name for name in names if name and name != "rematted_computation")


@functools.cache
def is_users_file(file: str) -> bool:
    """Returns whether a file is neither Python's own nor that of JAX or a library of layers."""
    if file.startswith("<frozen "):
        return False
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        if module is None:  # a package that is not imported has no frames
            continue
        for folder in module.__path__:
            if file.startswith(os.path.join(folder, "")):
                return False
    is_installed = "site-packages" in file or "dist-packages" in file
    return is_installed or not file.startswith(
        os.path.join(sysconfig.get_path("stdlib"), "")
    )


class Constants:
    """The numbers that were rounded to 0 or inf, by the lines that they stand in."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], list[float]] = {}

    @contextlib.contextmanager
    def notice(self) -> Iterator[None]:
        """Notes the numbers that are rounded to 0 or inf inside of this context.

        The backward rules of the user's functions keep their lines, where such numbers may stand.
        """
        noting = np.errstate(over="call", under="call", call=self._note)
        with noting, keep_lines_of_rules(is_users_file):
            yield

    def exact(
        self, eqn: JaxprEqn, around: tuple[JaxprEqn, ...], literal: Literal
    ) -> float | None:
        """Returns the number that a 0 or inf in an equation was made of, if it is known."""
        value = np.asarray(literal.val)
        is_floating_number = not value.shape and value.dtype.kind in "fV"
        if not is_floating_number or not self._numbers:
            return None
        # Derivatives compare with 0 and choose it, as that of `abs` does.
        if eqn.primitive.name not in _ARITHMETIC:
            return None
        if value != 0 and not np.isinf(value):
            return None
        line = find_line(eqn, around)
        for number in self._numbers.get((line.file, line.number), ()):
            with np.errstate(all="ignore"):
                if np.asarray(number).astype(value.dtype) == value:
                    return number
        return None

    def _note(self, kind: str, flag: int) -> None:
        """Notes the numbers that NumPy rounds now, and the user's line that it is called from."""
        del kind, flag
        numbers, frame = numbers_being_converted()
        while frame is not None and not is_users_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return
        place = (frame.f_code.co_filename, frame.f_lineno)
        numbers_of_line = self._numbers.setdefault(place, [])
        for number in numbers:
            if 0 < abs(number) < np.inf:
                numbers_of_line.append(number)

"""The lines of the user's source that an equation comes from, the layer it is in, its numbers.

JAX rounds a Python number while it traces: in float16 `x + 1e-9` is `x + 0`, and no equation
shows that. NumPy does the rounding, and can call a function when it underflows or overflows. So
the number and its line are known if a function is traced inside of `Constants.notice`. Nothing is
called for a number that becomes 1, as the bound `1 - 1e-7` does: it is read in the line.
"""

import ast
import contextlib
import functools
import linecache
import operator
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._jax import (
    JaxprEqn,
    Literal,
    Op,
    frames,
    keep_lines_of_rules,
    numbers_being_converted,
    primitives_that,
    scope_path,
)
from .needs import Around

# Packages whose frames are left out: the user's model called them.
_LIBRARIES = (
    "jax", "jaxlib", "jaxscale", "flax", "optax", "equinox", "haiku", "keras", "penzai",
    "chex", "jmp", "einops", "jaxtyping", "beartype", "typeguard", "numpy",
)  # fmt: skip
_ARITHMETIC = primitives_that(Op.ARITHMETIC)
_COMPARISONS = primitives_that(Op.COMPARES)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


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

    def fields(self) -> dict[str, Any]:
        """Returns the line as the fields of a report."""
        return {
            "where": self.where,
            "file": self.file,
            "line": self.number,
            "source": self.text,
        }


NO_LINE = Line("", 0, "")


def lines(eqn: JaxprEqn, around: Around) -> list[Line]:
    """Returns the user's lines for an equation and the calls around it, innermost first.

    Lines of other installed packages are left out, unless there are no others.
    """
    users_lines = []
    lines_of_packages = []
    for outer in (eqn, *reversed(around)):
        for frame in frames(outer):
            line = Line(frame.file, frame.line, frame.function)
            if not is_users_file(frame.file):
                continue
            if _is_installed(frame.file):
                lines_of_packages.append(line)
            else:
                users_lines.append(line)
    return users_lines or lines_of_packages


def find_line(eqn: JaxprEqn, around: Around) -> Line:
    """Returns the innermost line of the user for an equation, or `NO_LINE`."""
    for line in lines(eqn, around):
        return line
    return NO_LINE


def find_layer(eqn: JaxprEqn, around: Around) -> str:
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
    return _is_installed(file) or not file.startswith(
        os.path.join(sysconfig.get_path("stdlib"), "")
    )


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


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

    def exact(self, eqn: JaxprEqn, around: Around, literal: Literal) -> float | None:
        """Returns the number that a 0, 1 or inf in an equation was made of, if it is known."""
        value = np.asarray(literal.val)
        is_floating_number = not value.shape and value.dtype.kind in "fV"
        if not is_floating_number:
            return None
        name = eqn.primitive.name
        line = find_line(eqn, around)
        if np.abs(value) == 1 and name in _ARITHMETIC | _COMPARISONS:
            return _find_rounded(_numbers_in(line.text), value)
        # Derivatives compare with 0 and choose it, as that of `abs` does.
        if name in _ARITHMETIC and (value == 0 or np.isinf(value)):
            noted = self._numbers.get((line.file, line.number), ())
            return _find_rounded(tuple(noted), value)
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


def _find_rounded(numbers: Sequence[float], value: np.ndarray) -> float | None:
    """Returns the first number that is another one, `value`, in a dtype."""
    for number in numbers:
        with np.errstate(all="ignore"):
            is_of_number = np.asarray(number).astype(value.dtype) == value
        # As Python numbers: NumPy would round the one before it compares.
        if is_of_number and float(value) != number:
            return number
    return None


@functools.cache
def _numbers_in(text: str) -> tuple[float, ...]:
    """Returns the numbers in a line of source, `1 - 1e-7` as one, if the line can be read."""
    try:
        waiting: list[ast.AST] = [ast.parse(text)]
    except SyntaxError:  # a part of a statement
        return ()
    numbers = []
    while waiting:
        node = waiting.pop()
        number = _read_number(node)
        if number is None:
            waiting += ast.iter_child_nodes(node)
        else:
            numbers.append(number)
    # What stands there as it is was not rounded.
    if {1, -1} & set(numbers):
        return ()
    return tuple(numbers)


def _read_number(node: ast.AST) -> float | None:
    """Returns the number that an expression of numbers alone is, or `None` for any other."""
    match node:
        case ast.Constant(value=float() | int() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _read_number(operand)
            return None if number is None else -number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            numbers = _read_number(left), _read_number(right)
            if None not in numbers and numbers[1] != 0:
                return _OPERATORS[type(op)](*numbers)
    return None

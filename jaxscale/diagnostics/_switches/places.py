"""The lines of the user's source that an equation comes from, the layer it is in, its numbers.

JAX rounds a Python number while it traces: in float16 `x + 1e-9` is `x + 0`, and no equation
shows that. NumPy does the rounding, and can call a function when it underflows or overflows. So
the line is known if a function is traced inside of `Constants.notice`, and the number is read in
the expression that called JAX. Nothing is called for a number that becomes 1, as the bound
`1 - 1e-7` does: it is read in the line of the equation.
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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._jax.jaxprs import (
    JaxprEqn,
    Literal,
    Op,
    caller_of_jax,
    expression_of,
    frames,
    primitives_that,
    scope_path,
)
from .equations import Around

# Packages whose frames are left out: the user's model called them.
_LIBRARIES = (
    "jax", "jaxlib", "jaxscale", "flax", "optax", "equinox", "haiku", "keras", "penzai",
    "chex", "jmp", "einops", "jaxtyping", "beartype", "typeguard", "numpy",
)  # fmt: skip
_ARITHMETIC = primitives_that(Op.ARITHMETIC)
_COMPARISONS = primitives_that(Op.COMPARES)
_OPERATORS: dict[type, Any] = {
    ast.USub: operator.neg,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_PRIMITIVES = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


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


def find_line(eqn: JaxprEqn, around: Around) -> Line:
    """Returns the innermost line of the user for an equation and the calls around it.

    Lines of other installed packages count if there are no others. Without any it is `NO_LINE`.
    """
    line_of_package = NO_LINE
    for outer in (eqn, *reversed(around)):
        for frame in frames(outer):
            line = Line(frame.file, frame.line, frame.function)
            if not is_users_file(frame.file):
                continue
            if not _is_installed(frame.file):
                return line
            if line_of_package == NO_LINE:
                line_of_package = line
    return line_of_package


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

    def notice(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context inside of which numbers that are rounded to 0 or inf are noted."""
        return np.errstate(over="call", under="call", call=self._note)

    def exact(self, eqn: JaxprEqn, line: Line, position: int) -> float | None:
        """Returns the number that an input was rounded from, if it is 0, 1 or inf now.

        `line` is the line that the equation is from.
        """
        atom = eqn.invars[position]
        if not isinstance(atom, Literal):
            return None
        value = np.asarray(atom.val)
        is_floating_number = not value.shape and value.dtype.kind in "fV"
        if not is_floating_number:
            return None
        name = eqn.primitive.name
        if np.abs(value) == 1 and name in _ARITHMETIC | _COMPARISONS:
            numbers = _read_operands(line, name, position)
            # What stands there as it is was not rounded.
            return None if {1, -1} & set(numbers) else _find_rounded(numbers, value)
        # Derivatives compare with 0 and choose it, as that of `abs` does.
        if name in _ARITHMETIC and (value == 0 or np.isinf(value)):
            return _find_rounded(self._numbers.get((line.file, line.number), ()), value)
        return None

    def _note(self, kind: str, flag: int) -> None:
        """Notes the numbers in the expression that called JAX, for the user's line around it."""
        del kind, flag
        frame = caller_of_jax()
        numbers = []
        if frame is not None:
            text, variables = expression_of(frame)
            numbers = _list_numbers(_parse(text), variables)
        while frame is not None and not is_users_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            place = (frame.f_code.co_filename, frame.f_lineno)
            self._numbers.setdefault(place, []).extend(numbers)


def _find_rounded(numbers: Sequence[float], value: np.ndarray) -> float | None:
    """Returns the first number that is another one, `value`, in a dtype."""
    for number in numbers:
        with np.errstate(all="ignore"):
            is_of_number = np.asarray(number).astype(value.dtype) == value
        # As Python numbers: NumPy would round the one before it compares.
        if is_of_number and float(value) != number:
            return number
    return None


def _list_numbers(tree: ast.AST, variables: Mapping[str, Any]) -> list[float]:
    """Returns the numbers in some source, as far as they can be read.

    A sum such as `1 - 1e-7` is one number, and so is a variable that has one.
    """
    numbers = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        number = _read_number(node, variables)
        if number is None:
            waiting += ast.iter_child_nodes(node)
        else:
            numbers.append(number)
    return numbers


def _read_operands(line: Line, name: str, position: int) -> list[float]:
    """Returns the numbers that may be an operand of an operation in a line.

    Of an operator they are those on its side, of a function all in the line.
    """
    variables = _read_variables(line)
    tree = _parse(line.text)
    operands = [
        (node.left, node.right)[position]
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and _PRIMITIVES.get(type(node.op)) == name
    ]
    if not operands:
        return _list_numbers(tree, variables)
    numbers = [_read_number(operand, variables) for operand in operands]
    return [number for number in numbers if number is not None]


@functools.cache
def _read_variables(line: Line) -> dict[str, float]:
    """Returns the numbers of the variables that a line can read, as its source assigns them.

    An array of one number, as `jnp.asarray(0.9999, dtype)` makes, counts as well.
    """
    variables = {}
    waiting: list[ast.AST] = [_parse("".join(linecache.getlines(line.file)))]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, _SCOPES) and not _holds(node, line.number):
            continue
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if isinstance(value, ast.Call) and value.args:
                    value = value.args[0]
                number = _read_number(value, variables)
                variables.pop(name, None)
                if number is not None:
                    variables[name] = number
        waiting += ast.iter_child_nodes(node)
    return variables


def _holds(scope: Any, number: int) -> bool:
    return scope.lineno <= number <= scope.end_lineno


@functools.cache
def _parse(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except SyntaxError:  # a part of a statement
        return ast.Pass()


def _read_number(node: ast.AST, variables: Mapping[str, Any]) -> float | None:
    """Returns the number that an expression is, or `None` for what is no number or not known."""
    try:
        value = _read_value(node, variables)
        is_number = isinstance(value, (float, int, np.floating, np.integer))
        return float(value) if is_number and not isinstance(value, bool) else None
    except Exception:  # whatever the user's classes raise, and arithmetic
        return None


def _read_value(node: ast.AST, variables: Mapping[str, Any]) -> Any:
    """Returns what a literal, a variable or a part of one is, or numbers are together.

    No function is called.
    """
    value = None
    match node:
        case ast.Constant(value=value):
            pass
        case ast.Name(id=name):
            value = variables.get(name)
        case ast.Attribute(value=owner, attr=name):
            value = getattr(_read_value(owner, variables), name)
        case ast.Subscript(value=owner, slice=index):
            value = _read_value(owner, variables)[_read_value(index, variables)]
        case ast.UnaryOp(op=op, operand=operand):
            value = _OPERATORS[type(op)](_read_number(operand, variables))
        case ast.BinOp(left=left, op=op, right=right):
            numbers = _read_number(left, variables), _read_number(right, variables)
            value = _OPERATORS[type(op)](*numbers)
    # Of an array only what its type says, such as its size: the rest would be traced again.
    return jax.typeof(value) if isinstance(value, jax.Array) else value

"""The lines of the user's source that an equation comes from, and the layer it is in.

JAX keeps a traceback with each equation. Frames of JAX, of libraries of layers and of the
standard library are left out, so that the innermost one left is a line of the model.
"""

import linecache
import os
import re
import sys
import sysconfig
from typing import NamedTuple

from ..._jax import JaxprEqn, frames, scope_path

# Packages whose frames are left out: the user's model called them.
_LIBRARIES = (
    *("jax", "jaxlib", "jaxscale", "flax", "optax", "equinox", "haiku", "keras", "penzai"),
    *("chex", "jmp", "einops", "jaxtyping", "beartype", "typeguard", "numpy"),
)


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
    return [line for inner in (eqn, *reversed(around)) for line in _lines(inner)]


def layer(eqn: JaxprEqn, around: tuple[JaxprEqn, ...]) -> str:
    """Returns the names of the scopes that an equation is in, as modules of Flax set them."""
    stacks = [scope_path(outer) for outer in (*around, eqn)]
    # Transformations wrap a name: `transpose(jvp(Net))/Dense_0`.
    names = re.sub(r"\w+\(|\)", "", "/".join(stacks)).split("/")
    return "/".join(name for name in names if name and name != "rematted_computation")


def _lines(eqn: JaxprEqn) -> list[Line]:
    libraries = _library_folders()
    return [Line(*frame) for frame in frames(eqn) if _is_users(frame[0], libraries)]


def is_users_file(file: str) -> bool:
    """Returns whether a file is neither Python's own nor that of JAX or a library of layers."""
    return _is_users(file, _library_folders())


def _is_users(file: str, libraries: tuple[str, ...]) -> bool:
    if file.startswith(("<frozen ", *libraries)):
        return False
    is_installed = "site-packages" in file or "dist-packages" in file
    return is_installed or not file.startswith(os.path.join(sysconfig.get_path("stdlib"), ""))


def _library_folders() -> tuple[str, ...]:
    # Only of imported packages: others have no frames.
    modules = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    return tuple(os.path.join(path, "") for module in modules for path in module.__path__)

"""Names for the types of what a jaxpr consists of, and of what rules of primitives are given."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import jax
from jax.core import AbstractValue as AbstractValue
from jax.core import ShapedArray as ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.source_info_util import NameStack as NameStack
from jax.interpreters import ad
from jax.typing import ArrayLike as ArrayLike
from jax.typing import DTypeLike as DTypeLike


class Atom(Protocol):
    """A variable or a literal."""

    @property
    def aval(self) -> Any:
        """The type of its values: most are arrays, but not refs, tokens and keys."""


Arrays = Sequence[jax.Array]
Flags = tuple[bool, ...]

# Tangents and cotangents. The rules of JAX know `ad.Zero`, and those of users `SymbolicZero`.
Tangent = jax.Array | ad.Zero
Tangents = Sequence[Tangent]
SymbolicTangent = jax.Array | SymbolicZero
SymbolicTangents = Sequence[SymbolicTangent]

AxisName = Hashable
AxisNames = AxisName | Sequence[AxisName] | None


class BatchAxis(Protocol):
    """The axis of a `vmap`, as JAX tells it to a batching rule."""

    name: AxisName
    size: int
    spmd_name: AxisName


# For each array in a batch: along which of its dimensions it lies, `None` if it has no such one.
BatchDims = Sequence[int | None]


class Traceback(Protocol):
    """The Python frames in which an equation was traced, innermost first."""

    frames: Sequence[Any]

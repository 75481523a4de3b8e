"""The values of a program while it runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._jax import Jaxpr, JaxprEqn, Literal, cast, current_scopes
from .readers import only_float32, readers, rounded_reads
from .recompute import LONGEST, Link, Narrow, compute_chain
from .values import FLOAT32, Kind, has_dtype, is_float32, literal_kind


class Frame:
    """The values of one jaxpr while it runs."""

    def __init__(self, autocast: Any, jaxpr: Jaxpr, in_loop: bool, wanted: Sequence[bool]) -> None:
        self.autocast, self.dtype = autocast, autocast.dtype
        self.in_loop = in_loop  # part of a body: XLA compiles its backward pass apart
        self.scopes = current_scopes()
        self.only_float32 = only_float32(jaxpr)
        # read to be rounded; for nothing else
        self.rounded, self.only_half = rounded_reads(jaxpr, wanted)
        self.readers = readers(jaxpr)
        self.links: dict[Any, Link] = {}  # float32 values that are not computed yet
        self.grown: dict[Any, Link] = {}  # how arrays were broadcast, for chains to keep less
        self.repeats = 2 * len(jaxpr.eqns) + LONGEST  # how often their equations may be computed
        self.values: dict[Any, Any] = {}
        self.narrow: set[Any] = set()  # declared as float32, and computed in half precision
        self.kinds: dict[Any, Kind] = {}
        self.halves: dict[Any, Any] = {}  # casts of values that are not narrow
        self.wides: dict[Any, Any] = {}  # casts of values that are

    def is_narrow(self, atom: Any) -> bool:
        """Returns whether a value is declared as float32 and computed in half precision."""
        return not isinstance(atom, Literal) and atom in self.narrow

    def kind(self, atom: Any) -> Kind:
        """Returns what else is known of a value."""
        if isinstance(atom, Literal):
            return literal_kind(atom, self.dtype) if is_float32(atom) else None
        return self.kinds.get(atom)

    def link(self, atom: Any) -> Link | None:
        """Returns the link of a value that is not computed yet."""
        return None if isinstance(atom, Literal) else self.links.get(atom)

    def read(self, atom: Any) -> Any:
        """Returns a value in the precision it was computed in."""
        return self.values[atom] if self.is_narrow(atom) else self.wide(atom)

    def wide(self, atom: Any) -> Any:
        """Returns a value in the dtype that the program declares."""
        if isinstance(atom, Literal):
            return atom.val
        if atom in self.narrow or atom in self.links:
            return self._in(FLOAT32, atom, self.wides)
        return self.values[atom]

    def half(self, atom: Any) -> Any:
        """Returns a value in half precision if it is declared as float32."""
        if not is_float32(atom):
            return self.wide(atom)
        if isinstance(atom, Literal):
            is_scalar = np.ndim(atom.val) == 0
            return self.dtype.type(atom.val) if is_scalar else cast(atom.val, self.dtype)
        return self.values[atom] if atom in self.narrow else self._in(self.dtype, atom, self.halves)

    def _in(self, dtype: Any, atom: Any, known: dict[Any, Any]) -> Any:
        if atom not in known:
            if atom in self.links:
                chain = self.links[atom]
                known[atom], count = compute_chain(chain, dtype, self.scopes, self.in_loop)
                self.repeats -= count
            else:
                known[atom] = cast(self.values[atom], dtype, atom.aval.weak_type)
        return known[atom]

    def linked(self, eqn: JaxprEqn, index: int = 0) -> Link:
        """Returns an equation with what it reads, to be computed later."""
        return Link(eqn, [*map(self._held, eqn.invars)], index)

    def _held(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return None
        if atom in self.narrow:
            return Narrow(self.values[atom], self.wide(atom))
        link = self.links.get(atom, self.grown.get(atom))
        return self.values[atom] if link is None else link

    def defer(self, var: Any, link: Link) -> None:
        """Leaves a value to be computed when it is read, or as it will be read, if that is known.

        Rounded at once, it is narrow. So is then what follows, such as a ReLU.
        """
        self.links[var] = link
        if var in self.only_half:
            half = self.half(var)
            del self.links[var]
            self.write(var, half)

    def write(self, var: Any, value: Any) -> None:
        self.values[var] = value
        if has_dtype(value, self.dtype) and is_float32(var):
            self.narrow.add(var)

    def forget(self, var: Any) -> None:
        """Lets go of the arrays of a variable that is not read again."""
        for held in (self.values, self.halves, self.wides, self.links, self.grown):
            held.pop(var, None)

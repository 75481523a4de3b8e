"""The values of a program while it runs.

A narrow value has two views: an array in half precision, and its cast to float32. Where cotangents
come back to it from several readers, they meet in float32. So all of them read the second; or they
read the first in a form whose gradient goes to the second. One such form is for all products that
read the value: what they add to each other is rounded to half precision anyway.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._jax import Jaxpr, JaxprEqn, Literal, cast, current_scopes, stand_in
from .callers import Place
from .readers import find_half_readers, meeting, only_float32, readers, rounded_reads
from .recompute import LONGEST, Link, Narrow, Recomputed, Single, compute_chain
from .values import FLOAT32, Kind, ToRound, has_dtype, is_float32, literal_kind


class Frame:
    """The values of one jaxpr while it runs."""

    def __init__(self, autocast: Any, jaxpr: Jaxpr, place: Place, wanted: Sequence[bool]) -> None:
        self.autocast = autocast
        self.dtype = autocast.dtype
        self.place = place
        self.scopes = current_scopes()
        self.only_float32 = only_float32(jaxpr)
        self.half_readers = find_half_readers(jaxpr, place.owner)
        # read to be rounded; for nothing else
        self.rounded, self.only_half = rounded_reads(jaxpr, wanted, place.owner, self.half_readers)
        self.readers = readers(jaxpr)
        self.links: dict[Any, Link] = {}  # float32 values that are not computed yet
        self.grown: dict[Any, Link] = {}  # how arrays were broadcast, for chains to keep less
        self.repeats = 2 * len(jaxpr.eqns) + LONGEST  # how often their equations may be computed
        self.recomputed = Recomputed(place.in_loop)
        self.values: dict[Any, Any] = {}
        self.narrow: set[Any] = set()  # declared as float32, and computed in half precision
        # Cotangents meet in float32, here or further back.
        self.meeting = meeting(jaxpr, self.half_readers)
        self.kinds: dict[Any, Kind] = {}
        self.singles: dict[Any, Single] = {}  # narrow values from which chains start
        self.halves: dict[Any, Any] = {}  # what products read
        self.wides: dict[Any, Any] = {}  # narrow values and links in float32
        self.written: dict[Any, Any] = {}  # what the program itself cast to float32, before that

    def is_narrow(self, atom: Any) -> bool:
        """Returns whether a value is declared as float32 and computed in half precision."""
        return not isinstance(atom, Literal) and atom in self.narrow

    def meets(self, atom: Any) -> bool:
        """Returns whether a value is narrow and its cotangents are to meet in float32."""
        return self.is_narrow(atom) and atom in self.meeting

    def kind(self, atom: Any) -> Kind:
        """Returns what else is known of a value."""
        if isinstance(atom, Literal):
            return literal_kind(atom, self.dtype) if is_float32(atom) else None
        return self.kinds.get(atom)

    def link(self, atom: Any) -> Link | None:
        """Returns the link of a value that is not computed yet."""
        return None if isinstance(atom, Literal) else self.links.get(atom)

    def wide(self, atom: Any) -> Any:
        """Returns a value in the dtype that the program declares."""
        if isinstance(atom, Literal):
            return atom.val
        if atom in self.wides:
            return self.wides[atom]
        if atom in self.links:
            self.wides[atom] = self._computed(atom, FLOAT32)
        elif atom in self.narrow:
            self.wides[atom] = cast(self.values[atom], FLOAT32, atom.aval.weak_type)
        else:
            return self.values[atom]
        return self.wides[atom]

    def in_half(self, atom: Any) -> Any:
        """Returns the half-precision array of a narrow value, for what has no gradient."""
        if atom not in self.values:
            self.values[atom] = cast(self.wides[atom], self.dtype)
        return self.values[atom]

    def half(self, atom: Any) -> Any:
        """Returns what products read of a value: half precision if it is declared as float32."""
        if not is_float32(atom):
            return self.wide(atom)
        if isinstance(atom, Literal):
            if np.ndim(atom.val) == 0:
                return self.dtype.type(atom.val)
            return cast(atom.val, self.dtype)
        if atom in self.narrow and atom not in self.meeting:
            return self.values[atom]
        if atom not in self.halves:
            self.halves[atom] = self._half(atom)
        return self.halves[atom]

    def own_half(self, atom: Any) -> Any:
        """Returns a value as `half` does, for one reader that is not a product."""
        if self.meets(atom):
            return stand_in(self.in_half(atom), self.wide(atom), self.dtype)
        if self._is_shared_wide(atom):
            return stand_in(self.half(atom), self.wide(atom), self.dtype)
        return self.half(atom)

    def _is_shared_wide(self, atom: Any) -> bool:
        """Returns whether a float32 value is rounded for one of several readers."""
        if isinstance(atom, Literal) or atom not in self.rounded or self.readers[atom] <= 1:
            return False
        return is_float32(atom) and atom not in self.narrow

    def _half(self, atom: Any) -> Any:
        if atom in self.links:
            return self._computed(atom, self.dtype)
        if atom in self.narrow:
            return stand_in(self.in_half(atom), self.wide(atom), self.dtype)
        if atom in self.written:
            return stand_in(self.written[atom], self.values[atom], self.dtype)
        return cast(self.values[atom], self.dtype, atom.aval.weak_type)

    def _computed(self, atom: Any, dtype: Any) -> Any:
        chain = self.links[atom]
        computed = compute_chain(chain, dtype, self.scopes, self.recomputed)
        self.repeats -= computed.equations
        return computed.value

    def identity(self, atom: Any) -> int:
        """Returns what tells the array of a value from others."""
        if isinstance(atom, Literal):
            return id(atom)
        if atom in self.values:
            return id(self.values[atom])
        return id(self.wides[atom])

    def passed(self, atom: Any) -> Any:
        """Returns a value as a call takes it: both views of it, where its cotangents meet."""
        if self.meets(atom):
            return self.both(atom)
        if self.is_narrow(atom):
            return self.values[atom]
        return self.wide(atom)

    def without_gradient(self, atom: Any) -> Any:
        """Returns a value as a call takes it whose cotangents JAX cannot compute."""
        if self.is_narrow(atom):
            return self.in_half(atom)
        return self.wide(atom)

    def half_without_gradient(self, atom: Any) -> Any:
        """Returns a value in half precision for what has no gradient."""
        if self.is_narrow(atom):
            return self.in_half(atom)
        return self.half(atom)

    def both(self, atom: Any) -> Narrow:
        """Returns both views of a narrow value."""
        return Narrow(self.in_half(atom), self.wide(atom))

    def returned(self, atom: Any) -> Any:
        """Returns a value as a program gives it back."""
        if self.meets(atom):
            return ToRound(self.wide(atom))
        return self.passed(atom)

    def linked(self, eqn: JaxprEqn, index: int = 0) -> Link:
        """Returns an equation with what it reads, to be computed later."""
        return Link(eqn, [self._linked_input(atom, self._single) for atom in eqn.invars], index)

    def linked_besides(self, eqn: JaxprEqn) -> Link:
        """Returns an equation with what it reads, to be computed later as well as now."""
        link = Link(eqn, [self._linked_input(atom, self.both) for atom in eqn.invars])
        link.is_shared = True
        return link

    def _linked_input(self, atom: Any, view_narrow: Callable[[Any], Any]) -> Any:
        """Returns what a link holds of a value that its equation reads."""
        if isinstance(atom, Literal):
            return None
        if self.meets(atom):
            return self.both(atom)
        if atom in self.narrow:
            return view_narrow(atom)
        link = self.links.get(atom, self.grown.get(atom))
        if link is None:
            return self.values[atom]
        return link

    def _single(self, atom: Any) -> Single:
        if atom not in self.singles:
            self.singles[atom] = Single(self.values[atom])
        return self.singles[atom]

    def defer(self, var: Any, link: Link) -> None:
        """Leaves a value to be computed when it is read, or as it will be read, if that is known.

        Rounded at once, it is narrow. So is then what follows, such as a ReLU.
        """
        self.links[var] = link
        link.is_shared |= self.readers[var] > 1
        if var in self.only_half:
            half = self._computed(var, self.dtype)
            del self.links[var]
            self.write(var, half)

    def write(self, var: Any, value: Any) -> None:
        """Keeps the value of a variable, in one view or in both."""
        if isinstance(value, Narrow | ToRound):
            self.narrow.add(var)
            self.meeting.add(var)
            self.wides[var] = value.wide
            if isinstance(value, Narrow):
                self.values[var] = value.half
            return
        self.values[var] = value
        if has_dtype(value, self.dtype) and is_float32(var):
            self.narrow.add(var)

    def forget(self, var: Any) -> None:
        """Lets go of the arrays of a variable that is not read again."""
        for arrays in (self.values, self.halves, self.wides, self.written, self.singles):
            arrays.pop(var, None)
        for links in (self.links, self.grown):
            links.pop(var, None)

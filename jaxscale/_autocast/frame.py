"""The values of a program while it runs.

A narrow value has two views: an array in half precision, and its cast to float32. Where cotangents
come back to it from several readers, they meet in float32. So readers take the second view, or a
form of the first whose gradient goes to the second. All products that read the value share one such
form: what they send back is rounded to half precision anyway.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._jax import Jaxpr, JaxprEqn, Literal, cast, current_scopes, stand_in
from .callers import Place
from .readers import find_readers
from .recompute import LONGEST, Link, Narrow, Recomputed, Single, compute_chain
from .values import FLOAT32, Kind, ToRound, has_dtype, is_float32, kind_of_literal


class Frame:
    """The values of one jaxpr while it runs.

    Attributes:
      autocast: the `Autocast` that runs it.
      precision: that of `autocast`.
      place: what is known of the jaxpr from where it is called.
      scopes: the named scopes around the jaxpr.
      readers: who reads its variables.
      kinds: what else is known of its variables.
      values: the arrays of its variables, half-precision ones of those in `narrow`.
      narrow: the variables that are declared as float32 and may be read in half precision.
      meeting: the variables whose cotangents meet in float32, here or further back.
      wides: narrow values and links in float32.
      halves: what products read.
      written: of what the program itself cast to float32, the half-precision array before the cast.
      links: how float32 values are computed that are not computed yet.
      grown: how arrays were broadcast: chains that read them start from what was broadcast.
      singles: narrow values from which chains start.
      recomputed: what the chains run as.
      repeats_left: how many more equations of chains may be computed before chains end at once.
    """

    def __init__(
        self, autocast: Any, jaxpr: Jaxpr, place: Place, rounded_outputs: Sequence[bool]
    ) -> None:
        self.autocast = autocast
        self.precision = autocast.precision
        self.place = place
        self.scopes = current_scopes()
        self.readers = find_readers(jaxpr, rounded_outputs, place.owner)
        self.kinds: dict[Any, Kind] = {}

        self.values: dict[Any, Any] = {}
        self.narrow: set[Any] = set()
        self.meeting = set(self.readers.meeting)
        self.wides: dict[Any, Any] = {}
        self.halves: dict[Any, Any] = {}
        self.written: dict[Any, Any] = {}

        self.links: dict[Any, Link] = {}
        self.grown: dict[Any, Link] = {}
        self.singles: dict[Any, Single] = {}
        self.recomputed = Recomputed(place.in_loop)
        self.repeats_left = 2 * len(jaxpr.eqns) + LONGEST

    # What is known of a value, and of what an equation reads.

    def is_narrow(self, atom: Any) -> bool:
        """Returns whether a value is declared as float32 and may be read in half precision."""
        return not isinstance(atom, Literal) and atom in self.narrow

    def meets(self, atom: Any) -> bool:
        """Returns whether a value is narrow and its cotangents are to meet in float32."""
        return self.is_narrow(atom) and atom in self.meeting

    def kind_of(self, atom: Any) -> Kind:
        """Returns what else is known of a value."""
        if not isinstance(atom, Literal):
            return self.kinds.get(atom)
        if is_float32(atom):
            return kind_of_literal(atom, self.precision.narrow)
        return None

    def link_of(self, atom: Any) -> Link | None:
        """Returns the link of a value that is not computed yet, and `None` for others."""
        if isinstance(atom, Literal):
            return None
        return self.links.get(atom)

    def identity_of(self, atom: Any) -> int:
        """Returns a key of the array that a value is."""
        if isinstance(atom, Literal):
            return id(atom)
        if atom in self.values:
            return id(self.values[atom])
        return id(self.wides[atom])

    def reads_narrow(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation reads a narrow value."""
        return any(map(self.is_narrow, eqn.invars))

    def reads_link(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation reads a value that is not computed yet."""
        return any(map(self.link_of, eqn.invars))

    def reads_meeting(self, eqn: JaxprEqn) -> bool:
        """Returns whether an equation reads a narrow value whose cotangents are to meet."""
        return any(map(self.meets, eqn.invars))

    def is_only_rounded(self, var: Any) -> bool:
        """Returns whether a value is only read to be rounded, as by a product."""
        return var in self.readers.only_rounded

    # A value, as its reader takes it.

    def read_wide(self, atom: Any) -> Any:
        """Returns a value in the dtype that the program declares."""
        if isinstance(atom, Literal):
            return atom.val
        if atom in self.wides:
            return self.wides[atom]
        if atom in self.links:
            self.wides[atom] = self._compute(atom, FLOAT32)
        elif atom in self.narrow:
            self.wides[atom] = cast(self.values[atom], FLOAT32, atom.aval.weak_type)
        else:
            return self.values[atom]
        return self.wides[atom]

    def read_inputs_wide(self, eqn: JaxprEqn) -> list[Any]:
        """Returns what an equation reads, in the dtypes that the program declares."""
        return list(map(self.read_wide, eqn.invars))

    def read_half(self, atom: Any) -> Any:
        """Returns what products read of a value: half precision if it is declared as float32."""
        if not is_float32(atom):
            return self.read_wide(atom)
        if isinstance(atom, Literal):
            return self._round_literal(atom)
        if atom in self.narrow and atom not in self.meeting:
            return self.values[atom]
        if atom not in self.halves:
            self.halves[atom] = self._round(atom)
        return self.halves[atom]

    def _round_literal(self, literal: Literal) -> Any:
        if np.ndim(literal.val) == 0:
            return self.precision.narrow.type(literal.val)
        return cast(literal.val, self.precision.narrow)

    def _round(self, var: Any) -> jax.Array:
        """Returns a float32 value in half precision, for all products that read it."""
        narrow_dtype = self.precision.narrow
        if var in self.links:
            return self._compute(var, narrow_dtype)
        if var in self.narrow:
            return self._stand_in(half=self.read_narrow(var), wide=self.read_wide(var))
        value = self.values[var]
        if var in self.written:
            return self._stand_in(half=self.written[var], wide=value)
        return cast(value, narrow_dtype, var.aval.weak_type)

    def _stand_in(self, half: Any, wide: Any) -> jax.Array:
        """Returns a half-precision array whose gradient goes to its cast to float32."""
        return stand_in(half, wide, self.precision.narrow)

    def read_own_half(self, atom: Any) -> Any:
        """Returns a value as `read_half` does, for one reader that is not a product."""
        if self.meets(atom):
            return self._stand_in(
                half=self.read_narrow(atom), wide=self.read_wide(atom)
            )
        if self._is_shared_wide(atom):
            return self._stand_in(half=self.read_half(atom), wide=self.read_wide(atom))
        return self.read_half(atom)

    def _is_shared_wide(self, atom: Any) -> bool:
        """Returns whether a float32 value is rounded for one of several readers."""
        if isinstance(atom, Literal) or not is_float32(atom) or atom in self.narrow:
            return False
        return atom in self.readers.rounded and self.readers.numbers[atom] > 1

    def read_narrow(self, var: Any) -> jax.Array:
        """Returns the half-precision array of a narrow value, for what has no gradient."""
        if var not in self.values:
            self.values[var] = cast(self.wides[var], self.precision.narrow)
        return self.values[var]

    def read_half_without_gradient(self, atom: Any) -> Any:
        """Returns a value in half precision for what has no gradient."""
        if self.is_narrow(atom):
            return self.read_narrow(atom)
        return self.read_half(atom)

    def read_without_gradient(self, atom: Any) -> Any:
        """Returns a value as a call takes it whose cotangents JAX cannot compute."""
        if self.is_narrow(atom):
            return self.read_narrow(atom)
        return self.read_wide(atom)

    def read_views(self, var: Any) -> Narrow:
        """Returns both views of a narrow value."""
        return Narrow(self.read_narrow(var), self.read_wide(var))

    def read_for_call(self, atom: Any) -> Any:
        """Returns a value as a call takes it: both views of it, where its cotangents meet."""
        if self.meets(atom):
            return self.read_views(atom)
        if self.is_narrow(atom):
            return self.values[atom]
        return self.read_wide(atom)

    def read_output(self, atom: Any) -> Any:
        """Returns a value as a program gives it back."""
        if self.meets(atom):
            return ToRound(self.read_wide(atom))
        return self.read_for_call(atom)

    # Values that are not computed yet.

    def _compute(self, var: Any, dtype: np.dtype) -> jax.Array:
        """Computes a value that is not computed yet."""
        computed = compute_chain(self.links[var], dtype, self.scopes, self.recomputed)
        self.repeats_left -= computed.equations
        return computed.value

    def link(self, eqn: JaxprEqn, index: int = 0) -> Link:
        """Returns an equation with what it reads, to be computed later."""
        inputs = [self._read_for_link(atom, self._read_single) for atom in eqn.invars]
        return Link(eqn, inputs, index)

    def link_besides(self, eqn: JaxprEqn) -> Link:
        """Returns an equation with what it reads, to be computed later as well as now."""
        inputs = [self._read_for_link(atom, self.read_views) for atom in eqn.invars]
        link = Link(eqn, inputs)
        link.is_shared = True
        return link

    def _read_for_link(self, atom: Any, read_narrow: Callable[[Any], Any]) -> Any:
        """Returns what a link holds of a value that its equation reads."""
        if isinstance(atom, Literal):
            return None
        if self.meets(atom):
            return self.read_views(atom)
        if atom in self.narrow:
            return read_narrow(atom)
        if atom in self.links:
            return self.links[atom]
        if atom in self.grown:
            return self.grown[atom]
        return self.values[atom]

    def _read_single(self, var: Any) -> Single:
        if var not in self.singles:
            self.singles[var] = Single(self.values[var])
        return self.singles[var]

    def defer(self, var: Any, link: Link) -> None:
        """Leaves a value to be computed when it is read.

        If all of its readers round it, it is computed now, in half precision. It is narrow then,
        and so is what follows, such as a ReLU.
        """
        self.links[var] = link
        if self.readers.numbers[var] > 1:
            link.is_shared = True
        if self.is_only_rounded(var):
            half = self._compute(var, self.precision.narrow)
            del self.links[var]
            self.write(var, half)

    def compute_links(self, eqn: JaxprEqn) -> None:
        """Computes the links that an equation reads, so that their chains end here."""
        for atom in eqn.invars:
            if self.link_of(atom) is not None:
                self.values[atom] = self.read_wide(atom)
                del self.links[atom]

    # What equations return.

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
        if is_float32(var) and has_dtype(value, self.precision.narrow):
            self.narrow.add(var)

    def write_kinds(self, eqn: JaxprEqn, kinds: Sequence[Kind]) -> None:
        """Keeps what else is known of the values that an equation returns."""
        self.kinds.update(zip(eqn.outvars, kinds, strict=True))

    def forget(self, var: Any) -> None:
        """Lets go of the arrays of a variable that is not read again."""
        for arrays in (
            self.values,
            self.halves,
            self.wides,
            self.written,
            self.singles,
        ):
            arrays.pop(var, None)
        for links in (self.links, self.grown):
            links.pop(var, None)

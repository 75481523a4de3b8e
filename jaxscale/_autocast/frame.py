"""The values of a program while it runs, and which equations wait until their result is read."""

from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from .._jax import Jaxpr, JaxprEqn, Literal, bind, cast, current_scopes, programs
from .readers import only_float32, readers
from .recompute import LONGEST, Link, Narrow, compute_chain, inputs_of
from .table import CALLS, CHAINED, FLOAT32_ELEMENTWISE
from .values import FLOAT32, Constant, Kind, Parameter, is_float32, literal_kind

# Evaluates an equation: it returns the outputs, and which of these are narrow.
Outputs = tuple[Sequence[Any], Sequence[bool]]
Rule = Callable[["Frame", JaxprEqn], Outputs]


class Frame:
    """The values of one jaxpr while it runs."""

    __slots__ = (
        *("autocast", "dtype", "grown", "halves", "in_loop", "kinds", "links", "narrow"),
        *("only_float32", "only_half", "readers", "repeats", "rounded", "scopes", "values"),
        "wides",
    )

    def __init__(
        self, autocast: Any, jaxpr: Jaxpr, in_loop: bool, rounded: set[Any], only_half: set[Any]
    ) -> None:
        self.autocast, self.dtype = autocast, autocast.dtype
        self.in_loop = in_loop  # part of a body: XLA compiles its backward pass apart
        self.scopes = current_scopes()
        self.only_float32 = only_float32(jaxpr)
        self.rounded, self.only_half = rounded, only_half  # read to be rounded; for nothing else
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

    def read(self, atom: Any) -> Any:
        """Returns a value in the precision it was computed in."""
        if isinstance(atom, Literal):
            return atom.val
        return self.wide(atom) if atom in self.links else self.values[atom]

    def wide(self, atom: Any) -> Any:
        """Returns a value in the dtype that the program declares."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self.narrow and atom not in self.links:
            return self.values[atom]
        if atom not in self.wides:
            if atom in self.links:
                self.wides[atom] = self._compute(atom, FLOAT32)
            else:
                self.wides[atom] = cast(self.values[atom], FLOAT32, atom.aval.weak_type)
        return self.wides[atom]

    def half(self, atom: Any) -> Any:
        """Returns a value in half precision if it is declared as float32."""
        if isinstance(atom, Literal):
            scalar = is_float32(atom) and np.ndim(atom.val) == 0
            if scalar:
                return self.dtype.type(atom.val)
            return cast(atom.val, self.dtype) if is_float32(atom) else atom.val
        if atom in self.narrow or not is_float32(atom):
            return self.values[atom]
        if atom not in self.halves:
            if atom in self.links:
                self.halves[atom] = self._compute(atom, self.dtype)
            else:
                self.halves[atom] = cast(self.values[atom], self.dtype, atom.aval.weak_type)
        return self.halves[atom]

    def linked(self, eqn: JaxprEqn, index: int = 0) -> Link:
        """Returns an equation with what it reads, to be computed later."""
        return Link(eqn, [*map(self._held, eqn.invars)], index)

    def sources(self, atom: Any) -> set[Any]:
        """Returns what tells apart the arrays that a value is computed from."""
        return inputs_of(self.links[atom]) if atom_in(atom, self.links) else {id(self.read(atom))}

    def defer(self, var: Any, link: Link) -> None:
        """Leaves a value to be computed when it is read, or as it will be read, if that is known.

        Rounded at once, it is narrow. So is then what follows, such as a ReLU.
        """
        self.links[var] = link
        if var in self.only_half:
            half = self.half(var)
            del self.links[var]
            self.write(var, half, True)

    def settle(self, atom: Any) -> None:
        """Computes a value that was left to be computed, once for all that read it."""
        self.values[atom] = self.wide(atom)
        del self.links[atom]

    def _held(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return None
        if atom in self.narrow:
            return Narrow(self.values[atom], self.wide(atom))
        link = self.links.get(atom, self.grown.get(atom))
        return self.values[atom] if link is None else link

    def _compute(self, atom: Any, dtype: Any) -> Any:
        value, count = compute_chain(self.links[atom], dtype, self.scopes, self.in_loop)
        self.repeats -= count
        return value

    def write(self, var: Any, value: Any, narrow: bool, kind: Kind = None) -> None:
        """Stores the value of a variable."""
        self.values[var] = value
        if narrow:
            self.narrow.add(var)
        if kind is not None:
            self.kinds[var] = kind

    def forget(self, var: Any) -> None:
        """Lets go of the arrays of a variable that is not read again."""
        for held in (self.values, self.halves, self.wides, self.links, self.grown):
            held.pop(var, None)


def as_written(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in the dtypes that the program declares."""
    return bind(eqn, [frame.wide(atom) for atom in eqn.invars]), (False,) * len(eqn.outvars)


def in_float32(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Evaluates an equation in float32, or leaves it to be computed with what follows it."""
    return chained(frame, eqn) if _is_chained(frame, eqn) else as_written(frame, eqn)


def chained(frame: Frame, eqn: JaxprEqn) -> Outputs:
    """Leaves an equation to be computed with what follows it, unless there is too much of that."""
    inner = [frame.links[atom] for atom in eqn.invars if atom_in(atom, frame.links)]
    if 1 + sum(link.size for link in inner) > LONGEST or frame.repeats < 0:
        for atom in eqn.invars:
            if atom_in(atom, frame.links):
                frame.settle(atom)
        if not any(map(frame.is_narrow, eqn.invars)):
            return as_written(frame, eqn)
    for index, var in enumerate(eqn.outvars):
        frame.defer(var, frame.linked(eqn, index))
    return (), ()


def is_chained_call(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a call is of elementwise operations in float32, and may be in a chain."""
    linked = any(atom_in(atom, frame.links) for atom in eqn.invars)
    return (linked or _has_float32(eqn)) and _is_chained(frame, eqn)


def _has_float32(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    inner = (inner for each in programs(eqn) for inner in each.eqns)
    return name in FLOAT32_ELEMENTWISE or (name in CALLS and any(map(_has_float32, inner)))


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Returns whether an equation, or all that the call holds that it is, may be in a chain."""
    if eqn.primitive.name in CALLS:
        return all(is_elementwise(inner) for each in programs(eqn) for inner in each.eqns)
    return eqn.primitive.name in CHAINED


def atom_in(atom: Any, held: Container[Any]) -> bool:
    """Returns whether an atom is a variable that something holds. Literals have no hash."""
    return not isinstance(atom, Literal) and atom in held


def _is_chained(frame: Frame, eqn: JaxprEqn) -> bool:
    if not (all(map(is_float32, eqn.outvars)) and is_elementwise(eqn)):
        return False
    linked = [atom_in(atom, frame.links) for atom in eqn.invars]
    if eqn.primitive.name != "add":
        return any(linked) or any(map(frame.is_narrow, eqn.invars))
    return (
        any(linked)
        and not _is_residual(frame, eqn)
        and all(
            is_link or frame.is_narrow(atom) or isinstance(frame.kind(atom), Constant | Parameter)
            for is_link, atom in zip(linked, eqn.invars, strict=True)
        )
    )


def _is_residual(frame: Frame, eqn: JaxprEqn) -> bool:
    """Returns whether a sum is that of a residual connection, from which the next layer starts.

    What it adds to is read by others, too, and comes from other products.
    """
    one, other = (frame.sources(atom) for atom in eqn.invars)
    return one != other and any(
        frame.readers.get(atom, 1) > 1 for atom in eqn.invars if atom_in(atom, frame.links)
    )

"""The operations of a program: where each comes from, what made its numbers, what needs it.

One walk through the program notes what made the numbers of each equation. Whatever an output can
be traced back to is needed. What the loss needs is the forward pass. What only the gradients need
is the backward pass: it includes what `remat` computes again, and the derivatives that JAX computes
ahead of time. The rest does not run.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ..._jax import jaxprs
from ..._jax.jaxprs import Held, Jaxpr, JaxprEqn, Literal, is_half
from .backward import OF_GRADIENT, Backward
from .equations import Around, EquationKey, hides_equations, key_of, open_known
from .evaluate import dtype_of_atom
from .places import Line, find_layer, find_line


class Place(NamedTuple):
    """All operations of one kind that a line makes in one layer and one pass."""

    line: Line
    layer: str
    primitive: str
    is_backward: bool

    @property
    def direction(self) -> str:
        if self.is_backward:
            return "backward"
        return "forward"


Keys = frozenset[EquationKey]
_NOTHING: Keys = frozenset()


class Operation(NamedTuple):
    """An equation that holds no program.

    Attributes:
      eqn: the equation.
      place: where it comes from.
      makers: of each input, the operations that may have made it.
      around: the equations that hold it.
      exact: of each input, the number that JAX rounded to it before it traced the equation, or
        `None`.
    """

    eqn: JaxprEqn
    place: Place
    makers: tuple[Keys, ...]
    around: Around
    exact: tuple[float | None, ...]

    @property
    def is_scalar(self) -> bool:
        aval: Any = self.eqn.outvars[0].aval
        return not aval.shape


class Rounded(NamedTuple):
    """A number of the source that a narrow format rounded to 0, 1 or inf."""

    line: Line
    exact: float
    became: float
    dtype: str


class Operations:
    """The operations of a program, as its equations are opened and entered.

    Attributes:
      needed: the equations that an output needs, also those that hold others.
      opened: the programs of equations that hold some.
      by_key: the needed operations, in the order in which they run.
      places: their places, in the order in which they last run.
      dtypes: the half-precision format of the results at a place, if there is one.
      makers: the operations that may have made each output, by its name.
      constants: the numbers of the source that were rounded.
      not_entered: the names of what holds programs that cannot be opened.
    """

    def __init__(self, backward: Backward) -> None:
        self._needs: dict[EquationKey, Keys] = {}
        self._found: dict[EquationKey, tuple[JaxprEqn, Around, list[Keys]]] = {}
        self.opened: dict[EquationKey, list[Held]] = {}
        jaxpr = backward.jaxpr
        outputs = self._walk(jaxpr, (), [_NOTHING] * len(jaxpr.invars))
        made = dict(zip(backward.names, outputs, strict=False))
        of_loss = [keys for n, keys in made.items() if not n.startswith(OF_GRADIENT)]
        forward = self._trace_back(of_loss)
        self.needed = self._trace_back(made.values())
        self.makers = {n: self._leave_out_opened(keys) for n, keys in made.items()}
        self.by_key: dict[EquationKey, Operation] = {}
        self.dtypes: dict[Place, str] = {}
        self.constants: dict[Any, Rounded] = {}
        self.not_entered: set[str] = set()
        self._lines: dict[Any, Line] = {}
        for key in self._found:
            if key in self.needed:
                self._note(key, backward, is_backward=key not in forward)
        order: dict[Place, None] = {}
        for operation in self.by_key.values():
            order.pop(operation.place, None)
            order[operation.place] = None
        self.places = list(order)

    def _walk(self, jaxpr: Jaxpr, around: Around, inputs: Sequence[Keys]) -> list[Keys]:
        """Notes what the equations of a program need, and returns what made its outputs."""
        makers: dict[Any, Keys] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Keys:
            if isinstance(atom, Literal):
                return _NOTHING
            return makers.get(atom, _NOTHING)

        for eqn in jaxpr.eqns:
            key = key_of(eqn, around)
            made_of = list(map(read, eqn.invars))
            outputs = [frozenset([key])] * len(eqn.outvars)
            if key not in self.opened:
                self.opened[key] = open_known(eqn)
            if self.opened[key]:
                outputs = self._enter(eqn, around, made_of)
            else:
                self._needs[key] = _NOTHING.union(*made_of)
                self._found[key] = (eqn, around, made_of)
            makers.update(zip(eqn.outvars, outputs, strict=True))
        return list(map(read, jaxpr.outvars))

    def _enter(
        self, eqn: JaxprEqn, around: Around, made_of: Sequence[Keys]
    ) -> list[Keys]:
        """Walks through the programs of an equation, and returns what made its outputs."""
        key = key_of(eqn, around)
        outputs = [frozenset([key])] * len(eqn.outvars)
        makers = list(made_of)
        deciding = dict(enumerate(made_of))  # such as the index of a branch
        needs = _NOTHING
        # The body of a loop before its test, which reads what the body carries.
        for held in sorted(self.opened[key], key=lambda held: not held.fed_back):
            while True:
                before = list(makers)
                inputs = [makers[number] for number in held.inputs]
                made = self._walk(held.program.jaxpr, (*around, eqn), inputs)
                for output, number in held.fed_back:  # to the next turn
                    makers[held.inputs[number]] |= made[output]
                if makers == before:
                    break
            for number in held.inputs:
                deciding.pop(number, None)
            for number, keys in zip(held.outputs, made, strict=False):
                outputs[number] |= keys
            needs = needs.union(
                *made[len(held.outputs) :]
            )  # such as the test of a loop
        self._needs[key] = needs.union(*deciding.values())
        return outputs

    def _trace_back(self, groups: Iterable[Keys]) -> set[EquationKey]:
        """Returns all equations that some depend on, and these."""
        waiting = list(_NOTHING.union(*groups))
        reached: set[EquationKey] = set()
        while waiting:
            key = waiting.pop()
            if key not in reached:
                reached.add(key)
                waiting += self._needs[key]
        return reached

    def _leave_out_opened(self, keys: Keys) -> Keys:
        return frozenset(key for key in keys if key in self._found)

    def _note(self, key: EquationKey, backward: Backward, *, is_backward: bool) -> None:
        eqn, around, made_of = self._found[key]
        tracebacks = tuple(jaxprs.traceback_of(e) for e in (eqn, *around))
        if tracebacks not in self._lines:
            self._lines[tracebacks] = find_line(eqn, around)
        line = self._lines[tracebacks]
        place = Place(line, find_layer(eqn, around), eqn.primitive.name, is_backward)
        for var in eqn.outvars:
            if is_half(dtype_of_atom(var)):
                self.dtypes.setdefault(place, str(dtype_of_atom(var)))
        if hides_equations(eqn):
            self.not_entered.add(place.primitive)
        exact = []
        for position, atom in enumerate(eqn.invars):
            number = backward.constants.exact(eqn, line, position)
            exact.append(number)
            if number is not None:
                self._note_constant(atom, line, number)
        makers = map(self._leave_out_opened, made_of)
        self.by_key[key] = Operation(eqn, place, tuple(makers), around, tuple(exact))

    def _note_constant(self, literal: Any, line: Line, exact: float) -> None:
        dtype = str(dtype_of_atom(literal))
        rounded = Rounded(line, exact, float(literal.val), dtype)
        self.constants.setdefault((line[:2], exact, dtype), rounded)


def places_at(places: Iterable[Place], lines: Collection[Line]) -> list[Place]:
    """Returns those of some places that are at some lines."""
    chosen = set(lines)
    return [place for place in places if place.line in chosen]

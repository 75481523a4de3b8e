"""The operations of a program, the places that they come from, and which reads which."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import _jaxprs
from ..._jaxprs import (
    Held,
    Jaxpr,
    JaxprEqn,
    Literal,
    is_half,
    is_ref,
)
from .backward import Backward
from .evaluate import dtype_of_atom
from .needs import (
    FORWARD,
    Analysis,
    Around,
    EquationKey,
    Needs,
    hides_equations,
    key_of,
    results,
    unite,
)
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
    """

    eqn: JaxprEqn
    place: Place
    makers: tuple[Keys, ...]

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
    """What a program does, as its equations are opened and entered.

    Attributes:
      places: the places of all equations, in the order in which they last run.
      dtypes: the half-precision format of the results at a place, if there is one.
      by_key: the operations, in the order in which they run.
      loss: the operations that may have made the loss.
      constants: the numbers of the source that were rounded.
      not_entered: the names of what holds programs that cannot be opened.
    """

    def __init__(self, backward: Backward) -> None:
        self._analysis = Analysis()
        self._constants = backward.constants
        self._lines: dict[Any, Line] = {}
        self._order: dict[Place, None] = {}
        self.dtypes: dict[Place, str] = {}
        self.by_key: dict[EquationKey, Operation] = {}
        self.constants: dict[Any, Rounded] = {}
        self.not_entered: set[str] = set()
        jaxpr = backward.closed.jaxpr
        inputs = [_NOTHING] * len(jaxpr.invars)
        outputs = self._look_at(jaxpr, backward.needs, (), inputs)
        self.loss = outputs[backward.names.index("loss")]
        self.places = list(self._order)

    def needed(self, jaxpr: Jaxpr, needs: Needs) -> list[tuple[JaxprEqn, Needs]]:
        """Returns the equations that the results need, and what theirs are needed for."""
        usage = self._analysis.analyse(jaxpr, needs)
        return [
            pair
            for pair in zip(jaxpr.eqns, usage.equations, strict=True)
            if any(pair[1])
        ]

    def open(self, eqn: JaxprEqn, needs: Needs) -> list[tuple[Held, Needs]]:
        """Returns the programs of an equation, and what their results are needed for."""
        return self._analysis.open(eqn, needs)

    def place_of(self, eqn: JaxprEqn, needs: Needs, around: Around) -> Place:
        tracebacks = tuple(_jaxprs.traceback_of(e) for e in (eqn, *around))
        if tracebacks not in self._lines:
            self._lines[tracebacks] = find_line(eqn, around)
        is_backward = not unite(needs) & FORWARD
        layer = find_layer(eqn, around)
        return Place(self._lines[tracebacks], layer, eqn.primitive.name, is_backward)

    def exact(self, eqn: JaxprEqn, around: Around, position: int) -> float | None:
        """Returns the number that JAX rounded to an input before it traced the equation."""
        return self._constants.exact(eqn, around, position)

    def _look_at(
        self, jaxpr: Jaxpr, needs: Needs, around: Around, inputs: Sequence[Keys]
    ) -> list[Keys]:
        """Notes the equations of a program, and returns the makers of its outputs."""
        makers: dict[Any, Keys] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Keys:
            if isinstance(atom, Literal):
                return _NOTHING
            return makers.get(atom, _NOTHING)

        for eqn, eqn_needs in self.needed(jaxpr, needs):
            made_of = list(map(read, eqn.invars))
            opened = self.open(eqn, eqn_needs)
            if opened:
                outputs = self._enter(eqn, opened, around, made_of)
            else:
                outputs = self._note(eqn, eqn_needs, around, made_of)
            makers.update(zip(eqn.outvars, outputs, strict=True))
            for var in filter(is_ref, eqn.invars):
                makers[var] = read(var).union(*outputs)
        return list(map(read, jaxpr.outvars))

    def _note(
        self, eqn: JaxprEqn, needs: Needs, around: Around, made_of: Sequence[Keys]
    ) -> list[Keys]:
        place = self.place_of(eqn, needs, around)
        self._order.pop(place, None)
        self._order[place] = None
        for var in results(eqn):
            if is_half(dtype_of_atom(var)):
                self.dtypes.setdefault(place, str(dtype_of_atom(var)))
        if hides_equations(eqn):
            self.not_entered.add(place.primitive)
        for position in range(len(eqn.invars)):
            self._note_constant(eqn, around, position, place)
        key = key_of(eqn, around)
        self.by_key[key] = Operation(eqn, place, tuple(made_of))
        return [frozenset([key])] * len(eqn.outvars)

    def _note_constant(
        self, eqn: JaxprEqn, around: Around, position: int, place: Place
    ) -> None:
        exact = self.exact(eqn, around, position)
        if exact is not None:
            literal: Any = eqn.invars[position]
            dtype = str(dtype_of_atom(literal))
            rounded = Rounded(place.line, exact, float(literal.val), dtype)
            self.constants.setdefault((place.line[:2], exact, dtype), rounded)

    def _enter(
        self,
        eqn: JaxprEqn,
        opened: Sequence[tuple[Held, Needs]],
        around: Around,
        made_of: Sequence[Keys],
    ) -> list[Keys]:
        outputs = [_NOTHING] * len(eqn.outvars)
        for held, inner in opened:
            jaxpr = held.program.jaxpr
            inputs = [made_of[number] for number in held.inputs]
            made = self._look_at(jaxpr, inner, (*around, eqn), inputs)
            if held.fed_back:  # once more, with what a turn gets from the one before
                for output, number in held.fed_back:
                    inputs[number] |= made[output]
                made = self._look_at(jaxpr, inner, (*around, eqn), inputs)
            for number, keys in zip(held.outputs, made, strict=False):
                outputs[number] |= keys
        return outputs

"""The switches of a program: places, the limits of the format there, and what else it does."""

from typing import Any, NamedTuple

from .equations import EquationKey
from .operations import Place
from .places import Line


class Limits(NamedTuple):
    """The limits that hold where all of them are switches. Each is `bool[]`.

    Attributes:
      digits: numbers have as many digits as the format.
      smallest: numbers below those of the format are flushed.
      largest: numbers beyond those of the format are inf.
      bounded: numbers are bounded at 1e4.
      cleaned: inf and NaN are 0, where the switch of the place is on.
    """

    digits: Any = True
    smallest: Any = True
    largest: Any = True
    bounded: Any = False
    cleaned: Any = False


class Variant(NamedTuple):
    """A form of the program that does more than rounding, at the price of a compilation.

    Attributes:
      limited: the places at which each limit of the format has a switch of its own, and whose
        numbers are measured.
      notes_births: whether it notes where inf and NaN are made.
      dtype: another format in the place of half precision, if there is one.
      unrounded: the equations whose results are never rounded.
      native: the lines that compute in the format that they are written in, as the compiled model.
    """

    limited: frozenset[Place] = frozenset()
    notes_births: bool = False
    dtype: str = ""
    unrounded: frozenset[EquationKey | Place] = frozenset()
    native: frozenset[Line] = frozenset()

    def switch_of(self, place: Place) -> Place | Line:
        """Returns what has a switch: a place whose limits have their own, and else its line."""
        if place in self.limited:
            return place
        return place.line


ALL_LIMITS = Limits()
NO_LIMITS = Limits(digits=False, smallest=False, largest=False)
PLAIN = Variant()

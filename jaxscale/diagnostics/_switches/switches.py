"""The switches of a program: places, the limits of the format there, and what else it does."""

from collections.abc import Collection
from typing import Any, NamedTuple

from .needs import EquationKey
from .operations import Place
from .places import Line


class Limits(NamedTuple):
    """What holds at the places that have all of it as switches. Each is `bool[]`.

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
    """What a program can do besides rounding, at the price of a compilation.

    Attributes:
      limited: the places at which each limit of the format has a switch of its own.
      measured: the places whose numbers are measured.
      notes_births: whether it notes where inf and NaN are made.
      dtype: another format in the place of half precision, if there is one.
      unrounded: the equations whose results are never rounded.
      is_shaken: whether numbers change as little as float32 rounds, in the place of what half
        precision rounds.
      native: the lines that compute in the format that they are written in, as the compiled model.
    """

    limited: frozenset[Place] = frozenset()
    measured: frozenset[Place] = frozenset()
    notes_births: bool = False
    dtype: str = ""
    unrounded: frozenset[EquationKey | Place] = frozenset()
    is_shaken: bool = False
    native: frozenset[Line] = frozenset()


ALL_LIMITS = Limits()
NO_LIMITS = Limits(digits=False, smallest=False, largest=False)
PLAIN = Variant()


def switch_of(place: Place, variant: Variant) -> Place | Line:
    """Returns what has a switch of its own: a place whose limits have, and else a whole line."""
    if place in variant.limited:
        return place
    return place.line


def list_noted(places: Collection[Place], variant: Variant) -> list[Place]:
    """Returns the places at which a program notes something."""
    if variant.notes_births:
        return list(places)
    return [place for place in places if place in variant.measured]

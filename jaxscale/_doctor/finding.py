"""What a finding is, and how it names lines of the model."""

import linecache
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .._trees.grammar import and_more
from ..diagnostics._text import number
from ..diagnostics._trace.report import Place, TracedConstant
from .exam import Exam
from .pattern import Sum

_AROUND = 2  # lines of source shown before and after the line of a finding
_MOST_NAMES = 5  # in a list


class Finding(NamedTuple):
    is_problem: bool  # whether something is wrong, and not only worth knowing
    title: str  # a sentence that says what was found
    details: tuple[str, ...] = ()  # more sentences: why, and what to do
    where: str = ""  # file and line, or `""`
    source: tuple[tuple[int, str], ...] = ()  # lines of source around that line, with their numbers
    line: int = 0  # the number of that line, or 0


def note(
    title: str,
    *details: str,
    is_problem: bool = False,
    place: Place | TracedConstant | Sum | None = None,
) -> Finding:
    """Returns a finding; one at an equation also names its layer, its callers and the iteration."""
    if place is None:
        return Finding(is_problem, title, details)
    extra = []
    if isinstance(place, Place):
        if place.layer:
            extra.append(f"It is in {place.layer}.")
        if callers := [caller for caller in place.called_from if caller != place.where]:
            extra.append(f"Called from {list_names(callers)}.")
        if place.iteration:
            extra.append(f"In iteration {', '.join(map(str, place.iteration))}.")
    length = len(linecache.getlines(place.file)) if place.file else 0
    lines = range(max(place.line - _AROUND, 1), min(place.line + _AROUND, length) + 1)
    source = tuple((i, linecache.getline(place.file, i).rstrip("\n")) for i in lines)
    return Finding(is_problem, title, (*details, *extra), place.where, source, place.line)


def list_names(names: Sequence[str]) -> str:
    """Returns the first few names, and how many more there are."""
    return " ".join([", ".join(names[:_MOST_NAMES]), *and_more(names, _MOST_NAMES)])


def line_of(place: Place) -> str:
    return place.where or "no line of the model"


def lines_of(places: Iterable[Place]) -> str:
    return list_names(list(dict.fromkeys(map(line_of, places))))


def join_lines(lines: Sequence[str], where: str, here: str) -> str:
    """Returns files and lines in words, with the word `here` for the one just named, `where`."""
    names = [here if line == where else line for line in lines]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def say_rounded(constant: TracedConstant) -> str:
    """Returns what a number of the source became, as `1e-09 is 0 in float16`."""
    return f"{number(constant.value)} is {number(constant.became)} in {constant.dtype}"


def rounded_at(place: Place, exam: Exam) -> list[str]:
    return [
        f"{say_rounded(constant)}."
        for constant in exam.trace.constants
        if (constant.file, constant.line) == (place.file, place.line)
    ]


def rule_at(place: Place, exam: Exam) -> list[str]:
    """Returns that a backward rule may be at fault, if the line of an equation calls one.

    The lines of a rule itself are known, unless a library wrote it or it was traced before.
    """
    rule = exam.backward_rules.get(place.where)
    if rule is None or place.direction != "backward":
        return []
    words = f"This line calls a function with a backward rule of its own, `{rule}`: the fault may "
    return [f"{words}be there."]

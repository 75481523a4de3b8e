"""What a finding is, and how one is made."""

import linecache
from collections.abc import Sequence
from typing import NamedTuple

from ..diagnostics._trace.report import Place, TracedConstant
from .origins import Sum
from .remedy import SourcePlace
from .wording import list_names

_NUM_AROUND = 2  # lines of source shown before and after the line of a finding


class SourceLine(NamedTuple):
    """A line of a source file."""

    number: int
    text: str


class Finding(NamedTuple):
    """Something that is wrong or worth knowing."""

    is_problem: bool  # whether something is wrong, and not only worth knowing
    title: str  # a sentence that says what was found
    details: tuple[str, ...] = ()  # more sentences: why, and what to do
    where: str = ""  # file and line, or `""`
    source: tuple[SourceLine, ...] = ()  # that line, and the lines around it
    line: int = 0  # the number of that line, or 0


def make_finding(
    title: str,
    *details: str,
    is_problem: bool = False,
    place: Place | TracedConstant | Sum | SourcePlace | None = None,
) -> Finding:
    """Makes a finding; one at an equation also names its layer, its callers and the iteration."""
    if place is None:
        return Finding(is_problem, title, details)
    if isinstance(place, Place):
        details = (*details, *_describe_surroundings(place))
    return Finding(
        is_problem=is_problem,
        title=title,
        details=details,
        where=place.where,
        source=_read_source(place.file, place.line),
        line=place.line,
    )


def has_problem(findings: Sequence[Finding]) -> bool:
    return any(finding.is_problem for finding in findings)


def _describe_surroundings(place: Place) -> list[str]:
    sentences = []
    if place.layer:
        sentences.append(f"It is in {place.layer}.")
    callers = [caller for caller in place.called_from if caller != place.where]
    if callers:
        sentences.append(f"Called from {list_names(callers)}.")
    if place.iteration:
        sentences.append(f"In iteration {', '.join(map(str, place.iteration))}.")
    return sentences


def _read_source(file: str, line: int) -> tuple[SourceLine, ...]:
    """Returns a line and those around it, `()` if the file is not known."""
    if not file:
        return ()
    first = max(line - _NUM_AROUND, 1)
    last = min(line + _NUM_AROUND, len(linecache.getlines(file)))
    source = []
    for number in range(first, last + 1):
        text = linecache.getline(file, number).rstrip("\n")
        source.append(SourceLine(number, text))
    return tuple(source)

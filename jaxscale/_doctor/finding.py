"""Findings, and how one is made."""

import linecache
import os
from collections.abc import Sequence
from typing import NamedTuple

from .faults import Fault

_NUM_AROUND = 2  # lines of source shown before and after the line of a finding


class Finding(NamedTuple):
    """Something that is wrong or worth knowing."""

    is_problem: bool  # whether something is wrong, and not only worth knowing
    title: str  # a sentence that says what was found
    details: tuple[str, ...] = ()  # more sentences: why, and what to do
    where: str = ""  # file and line, or `""`
    # The numbers and texts of that line and the lines around it.
    source: tuple[tuple[int, str], ...] = ()
    line: int = 0  # the number of that line, or 0


def make_finding(
    title: str,
    *details: str,
    is_problem: bool = False,
    place: Fault | str | None = None,
) -> Finding:
    """Makes a finding at a line, which `""` and `None` say is not known.

    One at a fault also names its layer.
    """
    where = place or ""
    if isinstance(where, Fault):
        if where.layer:
            details = (*details, f"It is in {where.layer}.")
        where = where.where
    if not where:
        return Finding(is_problem, title, details)
    file, _, number = where.rpartition(":")
    line = int(number)
    source = _read_source(file, line)
    return Finding(is_problem, title, details, where, source, line)


def has_problem(findings: Sequence[Finding]) -> bool:
    return any(finding.is_problem for finding in findings)


def _read_source(file: str, line: int) -> tuple[tuple[int, str], ...]:
    """Returns a line and those around it, with their numbers."""
    lines = linecache.getlines(os.path.abspath(file))
    first = max(line - _NUM_AROUND, 1)
    texts = [text.rstrip("\n") for text in lines[first - 1 : line + _NUM_AROUND]]
    return tuple(enumerate(texts, first))

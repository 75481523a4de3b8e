"""Results as text: numbers in words, tables, histograms, and JSON."""

import math
from collections.abc import Sequence


def percent(share: float) -> str:
    """Returns a share in percent: `0%` only if it is 0, and `100%` only if it is 1."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 0.001:
        return "<0.1%"
    if share >= 0.9995:
        return ">99.9%"
    return f"{share:.1%}"


def number(value: float, digits: int = 6) -> str:
    """Returns a number with a few significant digits: `NaN`, where Python prints `nan`."""
    if math.isnan(value):
        return "NaN"
    return f"{value:.{digits}g}"


def power(loss_scale: float) -> str:
    """Returns a loss scale as `2**k`, or as a decimal if it is not a power of two."""
    mantissa, exponent = math.frexp(loss_scale)
    if mantissa == 0.5:
        return f"2**{exponent - 1}"
    return f"{loss_scale:g}"


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table for a terminal, its first column aligned left and the others right."""
    columns = zip(*rows, strict=True)
    first_width, *widths = [max(map(len, column)) for column in columns]
    lines = []
    for name, *cells in rows:
        line = name.ljust(first_width)
        for cell, width in zip(cells, widths, strict=True):
            line += cell.rjust(width + 2)
        lines.append(line.rstrip())
    return "\n".join(lines)

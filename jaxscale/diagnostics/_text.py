"""How results are written: numbers in words, tables, the histogram as text, and JSON."""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._trees.checks import power_of_two
from ._formats import FORMATS
from ._histogram import (
    EXPONENTS,
    Histogram,
    HostHistogram,
    fetch_histogram,
    find_all_shares,
    find_outcomes,
)

_SIGNS = "0s.!"  # what a format makes of most of a row, in the order of `Outcomes`
_WIDTH = 24  # of the longest bar
_ROWS = 32  # at most
_NONFINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}  # as JSON may write them


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


def join_ends(first: str, last: str, between: str = " to ") -> str:
    """Returns both ends of a range as text, or one of them if they are the same."""
    if first == last:
        return first
    return f"{first}{between}{last}"


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table for a terminal, its first column aligned left and the others right."""
    columns = zip(*rows, strict=True)
    first_width, *widths = [max(map(len, column)) for column in columns]
    lines = []
    for name, *cells in rows:
        aligned = [name.ljust(first_width)]
        for cell, width in zip(cells, widths, strict=True):
            aligned.append(cell.rjust(width))
        line = "  ".join(aligned)
        lines.append(line.rstrip())
    return "\n".join(lines)


def text_histogram(histogram: Histogram, *, loss_scale: float = 1.0) -> str:
    """Returns the exponent histogram as text, with what each format makes of each row.

    Call it on the host: it waits for the device. `plot_histogram` draws the same as a picture.

    Args:
      histogram: what `histogram` returned; leading axes are summed up.
      loss_scale: a power of two, at which the formats are judged.

    Returns:
      Lines of text. Each row is named by its least number, and shows its share of the finite
      nonzero gradients as a number and a bar. Then comes a sign for each format: `0` if it flushes
      most of the row to zero, `s` if it keeps most of it as subnormal, `.` if it keeps most in
      full, `!` if most overflows. The last lines give the totals.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> histogram = diagnostics.histogram(jnp.array([0.0, 2.0**-26, 2.0**-24, 2.0**-24]))
      >>> print(diagnostics.text_histogram(histogram))
      4 gradients: 25.0% are exactly 0, 0 inf, 0 NaN.
      The others, and what formats make of them if stored at loss scale 2**0:
      |gradient|    share                            float16  bfloat16  e4m3fn  e5m2
      2**-24        66.7%  ########################        s         .       0     0
      2**-25           0%
      2**-26        33.3%  ############                    0         .       0     0
      0 flushed                                        33.3%        0%    100%  100%
      s subnormal                                      66.7%        0%      0%    0%
      ! overflowed                                        0%        0%      0%    0%
    """
    exponent = power_of_two("text_histogram", "loss_scale", loss_scale)
    numbers = fetch_histogram("text_histogram", histogram)
    names = [name.removeprefix("float8_") for name in FORMATS]
    headings = ("|gradient|", "share", " " * _WIDTH, *names)
    table = [headings]
    table += _format_bars(numbers, exponent)
    table += _format_totals(numbers, exponent)
    lines = [
        summarize_counts(numbers),
        f"The others, and what formats make of them if stored at loss scale {power(loss_scale)}:",
        align_columns(table),
    ]
    return "\n".join(lines)


def summarize_counts(numbers: HostHistogram) -> str:
    """Returns how many gradients there are, and how many of them no bar shows."""
    zero = percent(numbers.zero / max(numbers.total, 1.0))
    return (
        f"{numbers.total:,.0f} gradients: {zero} are exactly 0, "
        f"{numbers.inf:,.0f} inf, {numbers.nan:,.0f} NaN."
    )


def find_filled_rows(numbers: HostHistogram) -> tuple[int, int]:
    """Returns the first and the last row that is not empty, or the row of 1.0 if all are."""
    filled = np.flatnonzero(numbers.counts.sum(axis=1))
    if not filled.size:
        row_of_one = -int(EXPONENTS[0])
        return row_of_one, row_of_one
    return int(filled[0]), int(filled[-1])


def _format_bars(numbers: HostHistogram, exponent: int) -> list[tuple[str, ...]]:
    """Returns a row of the text for every one or few powers of two, the largest first."""
    first, last = find_filled_rows(numbers)
    num_powers = last - first + 1
    powers_in_row = math.ceil(num_powers / _ROWS)
    starts = np.arange(first, last + 1, powers_in_row)
    counts_of_powers = numbers.counts.sum(axis=1)
    sums = np.add.reduceat(counts_of_powers, starts)
    total = max(sums.sum(), 1.0)
    signs_by_format = [
        _choose_signs(numbers, name, exponent, starts) for name in FORMATS
    ]
    lines = []
    for start, count, *signs in zip(starts, sums, *signs_by_format, strict=True):
        bar = ""
        if count:
            length = round(_WIDTH * count / sums.max())
            bar = "#" * max(length, 1)
        share = percent(count / total)
        lines.append((f"2**{EXPONENTS[start]}", share, bar.ljust(_WIDTH), *signs))
    lines.reverse()
    return lines


def _choose_signs(
    numbers: HostHistogram, name: str, exponent: int, starts: np.ndarray
) -> list[str]:
    """Returns for each row of the text a sign of what a format makes of most numbers in it.

    A row of the text begins at each of `starts`, which are rows of the histogram. A row without
    numbers has no sign.
    """
    outcomes = find_outcomes(numbers.counts, name, exponent)
    counts = np.add.reduceat(np.stack(outcomes), starts, axis=1)
    signs = np.array(list(_SIGNS))[np.argmax(counts, axis=0)]
    return np.where(counts.any(axis=0), signs, "").tolist()


def _format_totals(numbers: HostHistogram, exponent: int) -> list[tuple[str, ...]]:
    """Returns the last rows of the text: what each format loses of all numbers."""
    shares = find_all_shares(numbers.counts, exponent).values()
    rows = []
    for name in ("0 flushed", "s subnormal", "! overflowed"):
        get_share = operator.attrgetter(name[2:])
        rows.append((name, "", "", *map(percent, map(get_share, shares))))
    return rows


def to_json(result: Any) -> Any:
    """Returns a result of this module as what `json.dumps` accepts.

    Args:
      result: what any function of this module returned, outside of `jit`, or a container of such
        results. For a `History`, pass `history.columns()`.

    Returns:
      Named tuples and dataclasses as dictionaries, arrays and other sequences as lists.
      JSON has no NaN and no infinities: they become the strings `"NaN"`, `"Infinity"` and
      `"-Infinity"`, which `float` turns back into numbers. No number is rounded.

    Raises:
      TypeError: if it holds something that is not a number, a string or a container.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> diagnostics.to_json(jnp.array([1.0, -jnp.inf]))
      [1.0, '-Infinity']
    """
    if hasattr(result, "_asdict"):
        result = result._asdict()
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = vars(result)
    if isinstance(result, Mapping):
        return {str(key): to_json(value) for key, value in result.items()}
    if isinstance(result, (np.ndarray, np.generic, jax.Array)):
        result = np.asarray(result).tolist()
    if isinstance(result, (list, tuple)):
        return list(map(to_json, result))
    if isinstance(result, float) and not math.isfinite(result):
        return _NONFINITE.get(result, "NaN")
    if result is None or isinstance(result, (bool, int, float, str)):
        return result
    raise TypeError(
        f"`to_json(result=...)` got a {type(result).__name__}. Pass what `jaxscale.diagnostics` "
        "returns, or numbers, strings, lists and dictionaries."
    )

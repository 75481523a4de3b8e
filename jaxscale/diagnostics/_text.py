"""How results are written: numbers in words, tables, the histogram as text, and JSON."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._trees.checks import power_of_two
from ._formats import FORMATS
from ._histogram import EXPONENTS, Histogram, Numbers, outcomes, read, shares_of

_SIGNS = "0s.!"  # what a format makes of most of a row, in the order of `Shares`
_WIDTH = 24  # of the longest bar
_ROWS = 32  # at most


def percent(share: float) -> str:
    """Returns a share in percent: `0%` only if it is 0, and `100%` only if it is 1."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 0.001:
        return "<0.1%"
    return ">99.9%" if share >= 0.9995 else f"{share:.1%}"


def number(value: float, digits: int = 6) -> str:
    """Returns a number with a few significant digits: `NaN`, where Python prints `nan`."""
    return "NaN" if math.isnan(value) else f"{value:.{digits}g}"


def power(loss_scale: float) -> str:
    """Returns a loss scale as `2**k`, or as a decimal if it is not a power of two."""
    mantissa, exponent = math.frexp(loss_scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 else f"{loss_scale:g}"


def span(first: str, last: str, between: str = " to ") -> str:
    """Returns both ends of a range, or one if they are the same."""
    return first if first == last else f"{first}{between}{last}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table for a terminal, its first column aligned left and the others right."""
    columns = [
        [cell.rjust(max(map(len, each))) for cell in each] for each in zip(*rows, strict=True)
    ]
    columns[0] = [row[0].ljust(len(cell)) for row, cell in zip(rows, columns[0], strict=True)]
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def text_histogram(histogram: Histogram, *, loss_scale: float = 1.0) -> str:
    """Returns the exponent histogram as text, with what each format makes of each row.

    For the host: it waits for the device. `plot_histogram` draws the same as a picture.

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
    numbers = read("text_histogram", histogram)
    names = (name.removeprefix("float8_") for name in FORMATS)
    rows = [("|gradient|", "share", "".ljust(_WIDTH), *names), *_format_bars(numbers, exponent)]
    whole = shares_of(numbers.counts, exponent)
    for sign, outcome in (("0", "flushed"), ("s", "subnormal"), ("!", "overflowed")):
        cells = (percent(getattr(whole[name], outcome)) for name in FORMATS)
        rows.append((f"{sign} {outcome}", "", "", *cells))
    others = "The others, and what formats make of them if stored at loss scale"
    return f"{head(numbers)}\n{others} {power(loss_scale)}:\n{aligned(rows)}"


def head(numbers: Numbers) -> str:
    """Returns how many gradients there are, and how many of them no bar shows."""
    zero = percent(numbers.zero / max(numbers.everything, 1.0))
    rest = f"{numbers.inf:,.0f} inf, {numbers.nan:,.0f} NaN."
    return f"{numbers.everything:,.0f} gradients: {zero} are exactly 0, {rest}"


def filled_rows(numbers: Numbers) -> tuple[int, int]:
    """Returns the first and the last row that is not empty, or the row of 1.0 if all are."""
    filled = np.flatnonzero(numbers.counts.sum(axis=1)).tolist() or [-int(EXPONENTS[0])]
    return filled[0], filled[-1]


def _format_bars(numbers: Numbers, exponent: int) -> list[tuple[str, ...]]:
    first, last = filled_rows(numbers)
    step = -(-(last - first + 1) // _ROWS)
    starts = np.arange(first, last + 1, step)
    # How many numbers there are in each row of text, and what each format makes of them.
    parts = [outcomes(numbers.counts, name, exponent)[:, : last + 1] for name in FORMATS]
    parts = [np.add.reduceat(part, starts, axis=1) for part in parts]
    sums = parts[0].sum(axis=0)
    rows = []
    for i in reversed(range(len(starts))):
        share = percent(sums[i] / max(sums.sum(), 1.0))
        bar = "#" * max(round(_WIDTH * sums[i] / sums.max()), 1) if sums[i] else ""
        signs = [_SIGNS[np.argmax(part[:, i])] if sums[i] else "" for part in parts]
        rows.append((f"2**{EXPONENTS[starts[i]]}", share, bar.ljust(_WIDTH), *signs))
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
        result = {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
    if isinstance(result, Mapping):
        return {str(key): to_json(value) for key, value in result.items()}
    if isinstance(result, (np.ndarray, np.generic, jax.Array)):
        result = np.asarray(result).tolist()
    if isinstance(result, (list, tuple)):
        return [to_json(value) for value in result]
    if isinstance(result, float) and not math.isfinite(result):
        return "NaN" if math.isnan(result) else "Infinity" if result > 0 else "-Infinity"
    if result is None or isinstance(result, (bool, int, float, str)):
        return result
    raise TypeError(
        f"`to_json(result=...)` got a {type(result).__name__}. Pass what `jaxscale.diagnostics` "
        "returns, or numbers, strings, lists and dictionaries."
    )

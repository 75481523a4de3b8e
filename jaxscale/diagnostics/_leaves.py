"""Leaves of the gradients with inf, NaN or numbers too small for float16."""

from typing import Any, NamedTuple

import numpy as np

from .._trees.arguments import power_of_two
from .._trees.grammar import and_more
from ._histogram import EXPONENTS, Histogram, fetch_leaves, find_outcomes
from ._text import align_columns, percent, power

_PRINTED_ROWS = 24
_HEADINGS = (
    "leaf",
    "numbers",
    "NaN",
    "inf",
    "zero",
    "flushed",
    "subnormal",
    "overflow",
    "max |g|",
)


class LeafRow(NamedTuple):
    """The counts of one leaf, as Python numbers.

    Attributes:
      path: where it is, such as `params/Dense_0/kernel`.
      size: how many numbers it holds; a complex element holds two.
      nan: how many of them are NaN.
      inf: how many are inf or -inf.
      zero: how many are exactly 0.
      flushed: how many nonzero ones float16 would make 0, at the loss scale.
      subnormal: how many it would keep with fewer than 11 bits.
      overflowed: how many finite ones it would make inf.
      largest: the largest finite magnitude, not scaled, rounded down to a power of two, or 0.
    """

    path: str
    size: int
    nan: int
    inf: int
    zero: int
    flushed: int
    subnormal: int
    overflowed: int
    largest: float

    @property
    def is_finite(self) -> bool:
        return not self.nan + self.inf

    @property
    def nonzero(self) -> int:
        """The number of finite numbers that are not 0."""
        return self.size - self.nan - self.inf - self.zero

    @property
    def lost(self) -> float:
        """The share of the nonzero finite numbers that float16 would make 0 or inf."""
        return (self.flushed + self.overflowed) / max(self.nonzero, 1)


class LeafTable(NamedTuple):
    """The leaves of a tree of gradients, worst first; `print` it.

    Leaves with the largest share of inf and NaN come first, then those of which float16 loses the
    largest share. A long table prints only the worst leaves. A dash is a share of nothing.

    Attributes:
      rows: one `LeafRow` for each leaf.
      loss_scale: the loss scale that float16 is judged at.
    """

    rows: tuple[LeafRow, ...]
    loss_scale: float

    @property
    def nonfinite_rows(self) -> tuple[LeafRow, ...]:
        """The rows of leaves that hold inf or NaN."""
        return tuple(row for row in self.rows if not row.is_finite)

    def cells(self, most: int) -> list[tuple[str, ...]]:
        """Returns the cells as text: a row of headings, then a row for each of the worst leaves."""
        return [_HEADINGS, *map(_format_row, self.rows[:most])]

    def __str__(self) -> str:
        num_bad = len(self.nonfinite_rows)
        heading = (
            f"Leaves with inf or NaN: {num_bad} of {len(self.rows)}. "
            f"In float16 at loss scale {power(self.loss_scale)}:"
        )
        cells = align_columns(self.cells(_PRINTED_ROWS))
        return "\n".join([heading, cells, *and_more(self.rows, _PRINTED_ROWS)])


def _format_row(row: LeafRow) -> tuple[str, ...]:
    largest = "-"
    if row.size > row.nan + row.inf:
        largest = f"{row.largest:.3g}"
    return (
        row.path,
        *[f"{number:,}" for number in row[1:4]],
        _format_share(row.zero, row.size),
        *[_format_share(number, row.nonzero) for number in row[5:8]],
        largest,
    )


def _format_share(number: int, total: int) -> str:
    if not total:
        return "-"
    return percent(number / total)


def table(histograms: Any, *, loss_scale: float = 1.0) -> LeafTable:
    """Returns a table of what each gradient holds, and what float16 makes of it, worst first.

    Args:
      histograms: what `histogram` returned for `by_leaf=True`. Leading axes, of `vmap` or `scan`,
        are summed up.
      loss_scale: a power of two, at which float16 is judged.

    Raises:
      TypeError: if `histograms` is something else, or still traced.
      ValueError: if `loss_scale` is not a power of two in float32's normal range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> grads = {"w": jnp.array([1.0, jnp.inf, 0.0]), "b": jnp.array([1e-9, 2.0**-16])}
      >>> table = diagnostics.table(diagnostics.histogram(grads, by_leaf=True))
      >>> print(table)
      Leaves with inf or NaN: 1 of 2. In float16 at loss scale 2**0:
      leaf  numbers  NaN  inf   zero  flushed  subnormal  overflow   max |g|
      w           3    0    1  33.3%       0%         0%        0%         1
      b           2    0    0     0%    50.0%      50.0%        0%  1.53e-05
      >>> [row.path for row in table.nonfinite_rows]
      ['w']
    """
    exponent = power_of_two("table", "loss_scale", loss_scale)
    rows = []
    for path, histogram in fetch_leaves("table", histograms).items():
        rows.append(_make_row(path, histogram, exponent))
    rows.sort(key=_rank_badness, reverse=True)
    return LeafTable(tuple(rows), 2.0**exponent)


def _make_row(path: str, histogram: Histogram, exponent: int) -> LeafRow:
    counts = histogram.counts
    outcomes = find_outcomes(counts, "float16", exponent).sum(axis=1)
    flushed, subnormal, _, overflowed = map(int, outcomes)
    finite, zero, inf, nan = (int(np.sum(numbers)) for numbers in histogram)
    powers = np.exp2(EXPONENTS[counts.any(axis=1)])
    return LeafRow(
        path=path,
        size=finite + zero + inf + nan,
        nan=nan,
        inf=inf,
        zero=zero,
        flushed=flushed,
        subnormal=subnormal,
        overflowed=overflowed,
        largest=float(powers.max(initial=0)),
    )


def _rank_badness(row: LeafRow) -> tuple[float, ...]:
    """Returns a key to sort rows by: the worst row has the largest."""
    size = max(row.size, 1)
    return (row.nan + row.inf) / size, row.lost, row.subnormal / size, row.largest

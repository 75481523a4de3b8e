"""Leaves of the gradients with inf, NaN or numbers too small for a format."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._trees.arguments import normal_float32, power_of_two
from .._trees.gradient_leaves import leaf_name, list_gradients
from .._trees.grammar import and_more
from .._trees.pytrees import Leaf, PyTree
from ._formats import find_thresholds
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
      flushed: how many of the others, which are finite and not 0, the format would make 0 once
        they are multiplied by the loss scale.
      subnormal: how many of these it would keep with fewer bits than a normal number has.
      overflowed: how many of these it would make inf, or NaN if it has no inf.
      largest: the largest finite magnitude, not scaled, or 0. `table` rounds it down to a power of
        two.
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
        """The share of the nonzero finite numbers that would become 0, inf or NaN."""
        return (self.flushed + self.overflowed) / max(self.nonzero, 1)


class LeafTable(NamedTuple):
    """The leaves of a tree of gradients, worst first; `print` it.

    Leaves with the largest share of inf and NaN come first, then those of which the format loses
    the largest share, then those with the largest share of subnormal numbers, then those with the
    largest number. A long table prints only the first 24.

    The printed columns `numbers`, `NaN` and `inf` are counts. `zero` is a share of all numbers;
    `flushed`, `subnormal` and `overflow` are shares of those that are finite and not 0. `max |g|`
    is the largest finite magnitude, not scaled. A dash is a share of nothing, or the largest of
    none.

    Attributes:
      rows: one `LeafRow` for each leaf.
      loss_scale: the loss scale at which the format is judged.
      dtype: the name of the format.
    """

    rows: tuple[LeafRow, ...]
    loss_scale: float
    dtype: str = "float16"

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
            f"In {self.dtype} at loss scale {power(self.loss_scale)}:"
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


def sizes(
    grads: PyTree, dtype: DTypeLike = jnp.float16, loss_scale: ArrayLike = 1.0
) -> LeafTable:
    """Counts what a format would make of gradients at a loss scale, leaf by leaf, worst first.

    Each number is multiplied by the loss scale and then rounded to the format once, to nearest with
    ties to even. The gradients are copied to the host, which waits for the device: call it outside
    of `jit`.

    Args:
      grads: a pytree of gradients, unscaled, of any floating or complex dtypes. Other leaves,
        `None`, and everything under a key `_overwrite_with_gradient` are left out. Pass gradients
        computed in float32, or by `jaxscale.grad` at a high scale: a gradient that float16 flushed
        on the way counts as 0, like a true zero.
      dtype: the format, such as `jnp.float16`, `jnp.bfloat16`, `jnp.float8_e4m3fn` or
        `jnp.float8_e5m2`.
      loss_scale: a number in float32's normal range, such as `opt_state.scaling.loss_scale`.

    Returns:
      A `LeafTable`: `print` it. Its `rows` have exact counts, which `LeafRow` explains.

    Raises:
      TypeError: if `loss_scale` is not a number.
      ValueError: if `loss_scale` is not in that range, or if `dtype` is not a floating format.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> grads = {"w": jnp.array([1.0, jnp.inf, 0.0]), "b": jnp.array([1e-9, 2.0**-16])}
      >>> sizes = diagnostics.sizes(grads)
      >>> print(sizes)
      Leaves with inf or NaN: 1 of 2. In float16 at loss scale 2**0:
      leaf  numbers  NaN  inf   zero  flushed  subnormal  overflow   max |g|
      w           3    0    1  33.3%       0%         0%        0%         1
      b           2    0    0     0%    50.0%      50.0%        0%  1.53e-05
      >>> sizes.rows[1].path, sizes.rows[1].flushed, sizes.rows[1].lost
      ('b', 1, 0.5)
      >>> diagnostics.sizes(grads, loss_scale=2.0**15).rows[1].lost
      0.0
    """
    thresholds = find_thresholds(dtype, lambda x: math.nextafter(x, math.inf))
    scale = normal_float32("sizes", "loss_scale", np.asarray(loss_scale).item())
    rows = []
    for path, leaf in list_gradients(grads):
        rows.append(_count(leaf_name(path), leaf, thresholds, scale))
    rows.sort(key=_rank_badness, reverse=True)
    return LeafTable(tuple(rows), scale, str(jnp.dtype(dtype)))


def _count(path: str, leaf: Leaf, thresholds: np.ndarray, loss_scale: float) -> LeafRow:
    numbers = np.asarray(jax.device_get(leaf))
    if np.iscomplexobj(numbers):
        numbers = np.stack([numbers.real, numbers.imag])
    # Exact in float64, which holds the product of two numbers of float32. A NaN may signal, and a
    # number of float64 may leave its range.
    with np.errstate(all="ignore"):
        magnitudes = np.abs(numbers.astype(np.float64))
        nonzero = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
        outcomes = np.digitize(nonzero * loss_scale, thresholds)
    flushed, subnormal, _, overflowed = np.bincount(outcomes, minlength=4).tolist()
    return LeafRow(
        path=path,
        size=magnitudes.size,
        nan=int(np.isnan(magnitudes).sum()),
        inf=int(np.isinf(magnitudes).sum()),
        zero=int((magnitudes == 0).sum()),
        flushed=flushed,
        subnormal=subnormal,
        overflowed=overflowed,
        largest=float(nonzero.max(initial=0)),
    )


def table(histograms: Any, *, loss_scale: float = 1.0) -> LeafTable:
    """Returns a table of what each gradient holds, and what float16 makes of it, worst first.

    It goes in 0.7.0: see `jaxscale.diagnostics.sizes`.

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

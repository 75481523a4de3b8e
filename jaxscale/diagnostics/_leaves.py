"""Which leaves of the gradients hold inf, NaN or numbers too small for float16.

`leaf_counts` reads each leaf once: it compares the bits of float32 magnitudes with float16's
boundaries, divided by the loss scale. (From a histogram the counts would take 16 times as long.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._trees.checks import normal_float32
from .._trees.gradient_leaves import leaf_name, replace_gradients
from .._trees.grammar import and_more
from .._trees.numbers import INFINITY_BITS
from ._formats import (
    FORMAT_BY_NAME,
    check_result,
    gradient_leaves,
    is_array,
    magnitude_bits,
)
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


class LeafCounts(NamedTuple):
    """What `leaf_counts` counted, on the device; `table` reads it.

    Attributes:
      leaves: a tree with the structure of the gradients: an `f32[8]` for each of them, the
        numbers of a `LeafRow` from `size` to `largest`. Other leaves are `None`.
      loss_scale: `f32[]`, the loss scale that float16 is judged at.
    """

    leaves: Any
    loss_scale: jax.Array


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
      largest: the largest finite magnitude, not scaled.
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
    def lost(self) -> float:
        """The share of the nonzero finite numbers that float16 would make 0 or inf."""
        nonzero = self.size - self.nan - self.inf - self.zero
        return (self.flushed + self.overflowed) / max(nonzero, 1)


class LeafTable(NamedTuple):
    """The leaves of a tree of gradients, worst first; `print` it.

    Leaves with the largest share of inf and NaN come first, then those of which float16 loses the
    largest share. A long table prints only the leaves that matter: those with inf, NaN, only zeros,
    or numbers that float16 would not keep in full. A dash is a share of nothing.

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

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the cells of the table as text: a row of headings, then a row for each leaf."""
        return [_HEADINGS, *map(_format_row, self.rows)]

    def __str__(self) -> str:
        shown = self
        sentences = []
        if len(self.rows) > _PRINTED_ROWS:
            shown, sentences = partition_leaves(self, _PRINTED_ROWS)
            if not shown.rows:
                return sentences[0].capitalize()
        num_bad = len(self.nonfinite_rows)
        heading = (
            f"Leaves with inf or NaN: {num_bad} of {len(self.rows)}. "
            f"In float16 at loss scale {power(self.loss_scale)}:"
        )
        return "\n".join([heading, align_columns(shown.cells()), *sentences])


def partition_leaves(table: LeafTable, most: int) -> tuple[LeafTable, list[str]]:
    """Returns up to `most` rows that have something to tell, and sentences on the other rows."""
    telling = tuple(row for row in table.rows if _has_something_to_tell(row))
    sentences = and_more(telling, most)
    num_leaves = len(table.rows)
    num_fine = num_leaves - len(telling)
    if num_fine:
        scale = power(table.loss_scale)
        sentences.append(
            f"finite, and stored in full by float16 at loss scale {scale}: "
            f"{num_fine} of {num_leaves} leaves"
        )
    return LeafTable(telling[:most], table.loss_scale), sentences


def _has_something_to_tell(row: LeafRow) -> bool:
    is_zero = 0 < row.size == row.zero
    is_lossy = row.flushed or row.subnormal or row.overflowed
    return bool(is_zero or is_lossy or not row.is_finite)


def _format_row(row: LeafRow) -> tuple[str, ...]:
    num_finite = row.size - row.nan - row.inf
    num_nonzero = num_finite - row.zero
    largest = "-"
    if num_finite:
        largest = f"{row.largest:.3g}"
    return (
        row.path,
        f"{row.size:,}",
        f"{row.nan:,}",
        f"{row.inf:,}",
        _format_share(row.zero, row.size),
        _format_share(row.flushed, num_nonzero),
        _format_share(row.subnormal, num_nonzero),
        _format_share(row.overflowed, num_nonzero),
        largest,
    )


def _format_share(number: int, total: int) -> str:
    if not total:
        return "-"
    return percent(number / total)


def leaf_counts(
    grads: Any, *, loss_scale: Any = 1.0, axis_name: Any = None
) -> LeafCounts:
    """Returns how many numbers are inf, NaN or tiny in each leaf of a tree of gradients.

    Works inside `jit`, `vmap`, `scan` and `shard_map`, and never waits for the device.

    Args:
      grads: a pytree of gradients, as in `histogram`.
      loss_scale: a number or an `f32[]`, such as `jaxscale.metrics(opt_state)["loss_scale"]`, at
        which float16 is judged. The counts are exact if it is a power of two.
      axis_name: the axes along which to sum the counts, as in `histogram`.

    Returns:
      A `LeafCounts` for `table`. Counts are exact up to 2**24, and rounded to 24 bits beyond.

    Raises:
      ValueError: if `histogram` refuses `grads`, or `loss_scale` is a number that is not positive.
      TypeError: if `loss_scale` is not a scalar.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> counts = jax.jit(diagnostics.leaf_counts)({"w": jnp.array([1e-6, 1e-9, jnp.nan])})
      >>> row = diagnostics.table(counts).rows[0]
      >>> print(row.path, row.nan, row.flushed, row.subnormal)
      w 1 1 1
    """
    leaves = gradient_leaves("leaf_counts", "grads", grads)
    if not is_array(loss_scale):
        loss_scale = normal_float32("leaf_counts", "loss_scale", loss_scale)
    if jnp.shape(loss_scale):
        raise TypeError(
            f"`leaf_counts(loss_scale=...)` must be one number, got shape {jnp.shape(loss_scale)}."
        )
    loss_scale = jax.lax.convert_element_type(loss_scale, jnp.float32)
    rows_of_leaves = [_count(leaf, loss_scale) for leaf in leaves]
    rows = jnp.stack(rows_of_leaves)
    # one collective for the counts of all leaves, one for magnitudes
    if axis_name is not None:
        counts = jax.lax.psum(rows[:, :-1], axis_name)
        largest = jax.lax.pmax(rows[:, -1:], axis_name)
        rows = jnp.concatenate([counts, largest], axis=1)
    return LeafCounts(replace_gradients(grads, rows), loss_scale)


@jax.jit  # one program for each leaf, even if the caller does not compile
def _count(leaf: Any, loss_scale: jax.Array) -> jax.Array:
    """Counts the numbers of a leaf: `f32[8]`, a `LeafRow` from `size` to `largest`."""
    bits = magnitude_bits(leaf)
    nonzero, normal, overflow = [
        boundary.bits(loss_scale) for boundary in FORMAT_BY_NAME["float16"].boundaries
    ]
    is_finite = bits < INFINITY_BITS
    is_zero = bits == 0
    masks = (
        jnp.ones_like(is_zero),
        bits > INFINITY_BITS,  # NaN
        bits == INFINITY_BITS,
        is_zero,
        ~is_zero & (bits < nonzero),
        (bits >= nonzero) & (bits < normal),
        is_finite & (bits >= overflow),
    )

    # One reduction for all: with a loop for each, XLA on CPU takes a hundred times as long.
    zero = jnp.uint32(0)
    ones = [mask.astype(jnp.uint32) for mask in masks]
    magnitudes = jnp.where(is_finite, bits, zero)
    *counts, largest = jax.lax.reduce(
        operands=(*ones, magnitudes),
        init_values=(zero,) * (len(ones) + 1),
        computation=_add_and_max,
        dimensions=tuple(range(bits.ndim)),
    )
    largest = jax.lax.bitcast_convert_type(largest, jnp.float32)
    row = [count.astype(jnp.float32) for count in counts]
    row.append(largest)
    return jnp.stack(row)


def _add_and_max(
    first: Sequence[jax.Array], second: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Adds the counts of two parts, and keeps the larger magnitude, which is the last number."""
    *first_counts, first_largest = first
    *second_counts, second_largest = second
    sums = [a + b for a, b in zip(first_counts, second_counts, strict=True)]
    return *sums, jnp.maximum(first_largest, second_largest)


def table(counts: LeafCounts) -> LeafTable:
    """Returns what `leaf_counts` counted as a table, worst first. It waits for the device.

    Args:
      counts: what `leaf_counts` returned. Leading axes, of `vmap` or `scan`, are summed up, and
        the largest magnitude is the largest along them.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> grads = {"w": jnp.array([1.0, jnp.inf, 0.0]), "b": jnp.array([1e-9, 2e-5])}
      >>> table = diagnostics.table(diagnostics.leaf_counts(grads))
      >>> print(table)
      Leaves with inf or NaN: 1 of 2. In float16 at loss scale 2**0:
      leaf  numbers  NaN  inf   zero  flushed  subnormal  overflow  max |g|
      w           3    0    1  33.3%       0%         0%        0%        1
      b           2    0    0     0%    50.0%      50.0%        0%    2e-05
      >>> [row.path for row in table.nonfinite_rows]
      ['w']
    """
    check_result("table", "counts", counts, LeafCounts, "leaf_counts")
    counts = jax.device_get(counts)
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(counts.leaves):
        counts_of_leaf = np.asarray(leaf, np.float64)
        rows.append(_sum_up(leaf_name(path), counts_of_leaf))
    rows.sort(key=_rank_badness, reverse=True)
    loss_scale = float(np.max(counts.loss_scale))
    return LeafTable(tuple(rows), loss_scale)


def _sum_up(path: str, counts: np.ndarray) -> LeafRow:
    """Returns a row from what `_count` gave for a leaf, with any leading axes."""
    parts = counts.reshape(-1, counts.shape[-1])
    sums = parts[:, :-1].sum(axis=0)
    largest = parts[:, -1].max()
    return LeafRow(path, *map(int, sums), largest=float(largest))


def _rank_badness(row: LeafRow) -> tuple[float, ...]:
    """Returns a key to sort rows by: the worst row has the largest."""
    size = max(row.size, 1)
    return (row.nan + row.inf) / size, row.lost, row.subnormal / size, row.largest

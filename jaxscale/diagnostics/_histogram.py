"""Exponent histograms: how large gradients are, by powers of two, and what formats make of them.

Rows are powers of two. Columns split them at the few mantissas at which a format rounds differently
(`CUTS`). A loss scale that is a power of two only moves the rows, so that one histogram tells
exactly what each format loses at every such scale: see `find_outcomes`.
"""

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._trees.checks import power_of_two
from .._trees.gradient_leaves import replace_gradients
from .._trees.numbers import INFINITY_BITS
from ._formats import (
    CUTS,
    FORMAT_BY_NAME,
    FORMATS,
    Boundary,
    check_result,
    gradient_leaves,
    magnitude_bits,
)

EXPONENTS = np.arange(-149, 128)  # of float32's numbers
_LEAST_EXPONENT = -149
_COLUMNS = len(CUTS) + 1
_SHAPE = (len(EXPONENTS), _COLUMNS)
_CELLS = len(EXPONENTS) * _COLUMNS

# Counts on their way are one array: first those of the cells, then these three.
_ZERO = _CELLS
_INF = _CELLS + 1
_NAN = _CELLS + 2
_NUM_COUNTS = _CELLS + 3


class Histogram(NamedTuple):
    """How many gradients lie between one power of two and the next.

    A `NamedTuple` of arrays. Histograms can be added, even in `jit`: `first + second` is the
    histogram of both, so a run may carry their sum along.

    Attributes:
      counts: `f32[277, 9]`, the finite nonzero numbers `g`. The rows are `floor(log2(abs(g)))` from
        -149, float32's smallest subnormal, to 127. Columns tell mantissas apart where the formats
        round differently.
      zero: `f32[]`, how many numbers are exactly 0.
      inf: `f32[]`, how many are inf or -inf.
      nan: `f32[]`, how many are NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> first = diagnostics.histogram({"w": jnp.array([1.0, 0.0])})
      >>> (first + first).zero
      Array(2., dtype=float32)
    """

    counts: jax.Array
    zero: jax.Array
    inf: jax.Array
    nan: jax.Array

    def __add__(self, other: Any) -> Any:  # tuples alone would be concatenated
        if not isinstance(other, Histogram):
            return NotImplemented
        return Histogram(*map(operator.add, self, other))

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0:  # `sum` starts with 0
            return self
        return NotImplemented


class Shares(NamedTuple):
    """What a format makes of gradients, as shares of those that are finite and not 0.

    Attributes:
      flushed: the share that it makes 0.
      subnormal: the share that it keeps with fewer bits than a normal number has.
      normal: the share that it keeps with all its bits.
      overflowed: the share that it makes inf, or NaN where the format has no inf.
    """

    flushed: float
    subnormal: float
    normal: float
    overflowed: float

    @property
    def lost(self) -> float:
        """The share that becomes 0, inf or NaN."""
        return self.flushed + self.overflowed


def histogram(tree: Any, *, axis_name: Any = None) -> Histogram:
    """Returns the base-2 exponent histogram of all gradients in a tree.

    Works inside `jit`, `vmap`, `scan` and `shard_map`, and never waits for the device. `shares`,
    `suggest_scale`, `text_histogram` and `plot_histogram` read it.

    Args:
      tree: a pytree of gradients, unscaled, of any floating or complex dtypes. Other leaves,
        `None`, and everything under a key `_overwrite_with_gradient` are left out. Pass gradients
        computed in float32, or by `jaxscale.grad` at a high scale: a gradient that float16 flushed
        on the way counts as 0, like a true zero.
      axis_name: a mesh or `pmap` axis name, or a tuple of them, along which devices hold different
        parts of the gradients: counts are summed. If they hold equal gradients, leave it out, as
        under plain `jit`. In a mesh of explicit axes, wrap the call in JAX's auto_axes (from
        jax.sharding, in newer versions of JAX).

    Returns:
      A `Histogram`. Exponents are exact, even those of subnormal numbers. Counts are exact up to
      2**24 and rounded to 24 bits beyond. A complex element counts as two numbers. A float64 number
      outside float32's range counts as the nearest end of the range.

    Raises:
      ValueError: if no leaf is floating or complex, or a leaf has 2**31 elements or more.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> histogram = jax.jit(diagnostics.histogram)({"w": jnp.array([1.5, 1.0, 2.0**-149])})
      >>> print(histogram.counts.sum(axis=1)[149], histogram.counts.sum(axis=1)[0])
      2.0 1.0
    """
    leaves = gradient_leaves("histogram", "tree", tree)
    counts = jnp.zeros(_NUM_COUNTS, jnp.float32)
    for leaf in leaves:
        counts = counts + _count_cells(leaf)
    return _unpack(counts, axis_name)


def leaf_histograms(tree: Any, *, axis_name: Any = None) -> Any:
    """Returns the base-2 exponent histogram of each gradient in a tree.

    Args:
      tree: a pytree of gradients, as in `histogram`.
      axis_name: the axes along which to sum the counts, as in `histogram`.

    Returns:
      A tree of the same structure for `underflow`: a `Histogram` of 10 kB for each gradient, and
      `None` for other leaves.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> diagnostics.leaf_histograms({"w": jnp.zeros(3), "b": jnp.ones(2)})["w"].zero
      Array(3., dtype=float32)
    """
    leaves = gradient_leaves("leaf_histograms", "tree", tree)
    histograms = []
    for leaf in leaves:
        counts = _count_cells(leaf)
        histograms.append(_unpack(counts, axis_name))
    return replace_gradients(tree, histograms)


@jax.jit  # one program for each leaf, even if the caller does not compile
def _count_cells(leaf: Any) -> jax.Array:
    """Counts the numbers of a leaf: `f32[_NUM_COUNTS]`, the cells, then zeros, infs and NaNs."""
    bits = magnitude_bits(leaf).reshape(-1)
    # A subnormal number is an integer times 2**-149. Of that integer float32 knows the exponent.
    is_subnormal = bits < 2**23
    integers = bits.astype(jnp.float32)
    bits_of_integers = jax.lax.bitcast_convert_type(integers, jnp.uint32)
    normal = jnp.where(is_subnormal, bits_of_integers, bits)
    exponent_field = (normal >> 23).astype(jnp.int32)
    field_of_first_row = jnp.where(is_subnormal, 127, 127 + _LEAST_EXPONENT)
    row = exponent_field - field_of_first_row

    mantissa = normal & (2**23 - 1)
    column: Any = 0
    for cut in CUTS:
        is_above_cut = mantissa >= cut
        column = column + is_above_cut.astype(jnp.int32)

    cell = row * _COLUMNS + column
    cell = jnp.where(bits == 0, _ZERO, cell)
    cell = jnp.where(bits == INFINITY_BITS, _INF, cell)
    cell = jnp.where(bits > INFINITY_BITS, _NAN, cell)
    counts = jnp.zeros(_NUM_COUNTS, jnp.uint32)
    counts = counts.at[cell].add(jnp.uint32(1))
    return counts.astype(jnp.float32)


def _unpack(counts: jax.Array, axis_name: Any) -> Histogram:
    """Returns what `_count_cells` counted, summed along axes of devices, as a histogram."""
    if axis_name is not None:
        counts = jax.lax.psum(counts, axis_name)
    return Histogram(
        counts=counts[:_CELLS].reshape(_SHAPE),
        zero=counts[_ZERO],
        inf=counts[_INF],
        nan=counts[_NAN],
    )


class HostHistogram(NamedTuple):
    """A histogram on the host, with its leading axes summed up."""

    counts: np.ndarray  # f64[277, 9]
    zero: float
    inf: float
    nan: float

    @property
    def total(self) -> float:
        """How many numbers there are."""
        return float(self.counts.sum()) + self.zero + self.inf + self.nan


def fetch_histogram(call: str, histogram: Any) -> HostHistogram:
    """Fetches the numbers of a histogram, or raises a `TypeError` if it is something else."""
    check_result(call, "histogram", histogram, Histogram, "histogram")
    histogram = jax.device_get(histogram)
    counts, *others = [np.asarray(array, np.float64) for array in histogram]
    sums = [float(array.sum()) for array in others]
    return HostHistogram(counts.reshape(-1, *_SHAPE).sum(axis=0), *sums)


class Outcomes(NamedTuple):
    """How many numbers of each row a format flushes, keeps and loses: each `f64[277]`."""

    flushed: np.ndarray
    subnormal: np.ndarray
    normal: np.ndarray
    overflowed: np.ndarray


def find_outcomes(counts: np.ndarray, name: str, exponent: int) -> Outcomes:
    """Returns what a format makes of the numbers of a histogram, scaled by `2**exponent`."""
    beyond = [counts.sum(axis=1)]
    for boundary in FORMAT_BY_NAME[name].boundaries:
        beyond.append(_count_beyond(counts, boundary, exponent))
    # What is beyond one boundary and not beyond the next becomes the same.
    return Outcomes(*map(np.subtract, beyond, [*beyond[1:], 0]))


def _count_beyond(counts: np.ndarray, boundary: Boundary, exponent: int) -> np.ndarray:
    """Counts, row by row, the numbers that are beyond a boundary once they are scaled."""
    # The cells are in the order of their numbers: first the rows, then the columns.
    row = boundary.exponent - exponent - _LEAST_EXPONENT
    column = [0, *CUTS].index(boundary.mantissa)
    first_beyond = row * _COLUMNS + column
    is_beyond = np.arange(_CELLS).reshape(_SHAPE) >= first_beyond
    return np.where(is_beyond, counts, 0).sum(axis=1)


def shares(histogram: Histogram, *, loss_scale: float = 1.0) -> dict[str, Shares]:
    """Returns which shares of gradients each small format would lose at a loss scale.

    The shares are those of the gradients multiplied by the loss scale and then rounded to the
    format, to nearest with ties to even. Call it on the host: it waits for the device.

    Args:
      histogram: what `histogram` returned; leading axes are summed up.
      loss_scale: a power of two.

    Returns:
      A `Shares` for each of `"float16"`, `"bfloat16"`, `"float8_e4m3fn"` and
      `"float8_e5m2"`, exact where the counts are; all zero if no number is finite and nonzero.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> histogram = diagnostics.histogram({"w": jnp.array([2.0**-26, 2.0**-10, 1.0, 0.0])})
      >>> print(round(diagnostics.shares(histogram)["float16"].flushed, 3))
      0.333
      >>> diagnostics.shares(histogram, loss_scale=2.0**12)["float16"].normal
      1.0
    """
    exponent = power_of_two("shares", "loss_scale", loss_scale)
    return find_all_shares(fetch_histogram("shares", histogram).counts, exponent)


def find_all_shares(
    counts: np.ndarray, exponent: int, formats: Iterable[str] = FORMATS
) -> dict[str, Shares]:
    """Returns the shares of some counts that each format flushes, keeps and loses."""
    return {name: find_shares(counts, name, exponent) for name in formats}


def find_shares(counts: np.ndarray, name: str, exponent: int) -> Shares:
    """Returns the shares of some counts that one format flushes, keeps and loses."""
    outcomes = find_outcomes(counts, name, exponent)
    total = max(counts.sum(), 1.0)
    return Shares(*[float(numbers.sum() / total) for numbers in outcomes])

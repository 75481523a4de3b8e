"""Exponent histograms: how large gradients are, by powers of two, and what formats make of them.

Rows are powers of two. Columns split them at the few mantissas at which a format rounds differently
(`CUTS`). A loss scale that is a power of two only moves the rows, so that one histogram tells
exactly what each format loses at every such scale: see `find_outcomes`.
"""

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._trees.checks import power_of_two
from .._trees.gradient_leaves import leaf_name, replace_gradients
from .._trees.numbers import INFINITY_BITS
from ._formats import (
    CUTS,
    FORMAT_BY_NAME,
    FORMATS,
    Boundary,
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

    counts: Any
    zero: Any
    inf: Any
    nan: Any

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


def histogram(tree: Any, *, by_leaf: bool = False, axis_name: Any = None) -> Any:
    """Returns the base-2 exponent histogram of the gradients in a tree, of all or of each.

    Works inside `jit`, `vmap`, `scan` and `shard_map`, and never waits for the device. `shares`,
    `table` and `plot` read it.

    Args:
      tree: a pytree of gradients, unscaled, of any floating or complex dtypes. Other leaves,
        `None`, and everything under a key `_overwrite_with_gradient` are left out. Pass gradients
        computed in float32, or by `jaxscale.grad` at a high scale: a gradient that float16 flushed
        on the way counts as 0, like a true zero.
      by_leaf: whether each gradient has a histogram of its own.
      axis_name: a mesh or `pmap` axis name, or a tuple of them, along which devices hold different
        parts of the gradients: counts are summed. If they hold equal gradients, leave it out, as
        under plain `jit`. In a mesh of explicit axes, wrap the call in JAX's auto_axes (from
        jax.sharding, in newer versions of JAX).

    Returns:
      A `Histogram`, or with `by_leaf` a tree of the same structure with a `Histogram` of 10 kB for
      each gradient, and `None` for other leaves. Exponents are exact, even those of subnormal
      numbers. Counts are exact up to 2**24 and rounded to 24 bits beyond. A complex element counts
      as two numbers. A float64 number is rounded to float32 first.

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
    counts = list(map(_count_cells, leaves))
    if not by_leaf:
        return _unpack(functools.reduce(operator.add, counts), axis_name)
    histograms = [_unpack(of_leaf, axis_name) for of_leaf in counts]
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


def fetch(call: str, histogram: Any) -> Histogram:
    """Returns a histogram on the host in float64, with its leading axes summed up.

    Raises:
      TypeError: if it is something else, or still traced.
    """
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(histogram))
    if is_traced or not isinstance(histogram, Histogram):
        raise TypeError(
            f"`{call}` must get what `jaxscale.diagnostics.histogram` returned, outside of `jit`, "
            f"got {type(histogram).__name__}."
        )
    counts, *others = [np.asarray(x, np.float64) for x in jax.device_get(histogram)]
    return Histogram(
        counts.reshape(-1, *_SHAPE).sum(axis=0), *[array.sum() for array in others]
    )


def fetch_leaves(call: str, histograms: Any) -> dict[str, Histogram]:
    """Returns the histograms of a tree on the host, by the paths of their leaves."""
    nodes = jax.tree_util.tree_leaves_with_path(
        histograms, is_leaf=lambda node: isinstance(node, Histogram)
    )
    return {leaf_name(path): fetch(call, node) for path, node in nodes}


def find_outcomes(counts: np.ndarray, name: str, exponent: int) -> list[np.ndarray]:
    """Returns what a format makes of the numbers of a histogram, scaled by `2**exponent`.

    That is how many of each row it flushes, keeps as subnormal, keeps in full, and overflows.
    """
    beyond = [counts.sum(axis=1)]
    for boundary in FORMAT_BY_NAME[name]:
        beyond.append(_count_beyond(counts, boundary, exponent))
    # What is beyond one boundary and not beyond the next becomes the same.
    return list(map(np.subtract, beyond, [*beyond[1:], 0]))


def _count_beyond(counts: np.ndarray, boundary: Boundary, exponent: int) -> np.ndarray:
    """Counts, row by row, the numbers that are beyond a boundary once they are scaled."""
    # The cells are in the order of their numbers: first the rows, then the columns.
    row = boundary.exponent - exponent - _LEAST_EXPONENT
    column = [0, *CUTS].index(boundary.mantissa)
    first_beyond = row * _COLUMNS + column
    is_beyond = np.arange(_CELLS).reshape(_SHAPE) >= first_beyond
    return np.where(is_beyond, counts, 0).sum(axis=1)


def shares(histogram: Any, *, loss_scale: float = 1.0) -> dict[str, Any]:
    """Returns which shares of gradients each small format would lose at a loss scale.

    The shares are those of the gradients multiplied by the loss scale and then rounded to the
    format, to nearest with ties to even. Call it on the host: it waits for the device.

    Args:
      histogram: what `histogram` returned; leading axes are summed up.
      loss_scale: a power of two.

    Returns:
      A `Shares` for each of `"float16"`, `"bfloat16"`, `"float8_e4m3fn"` and
      `"float8_e5m2"`, exact where the counts are; all zero if no number is finite and nonzero.
      For histograms by leaf, such a dictionary for each leaf, under its path.

    Raises:
      TypeError: if `histogram` is something else, or still traced.
      ValueError: if `loss_scale` is not a power of two in float32's normal range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxscale import diagnostics
      >>> grads = {"w": jnp.array([2.0**-26, 2.0**-10, 1.0, 0.0]), "b": jnp.ones(2)}
      >>> counted = diagnostics.histogram(grads)
      >>> diagnostics.shares(counted)["float16"].flushed
      0.2
      >>> diagnostics.shares(counted, loss_scale=2.0**12)["float16"].normal
      1.0
      >>> by_leaf = diagnostics.histogram(grads, by_leaf=True)
      >>> print(round(diagnostics.shares(by_leaf)["w"]["float16"].lost, 3))
      0.333
    """
    exponent = power_of_two("shares", "loss_scale", loss_scale)
    if isinstance(histogram, Histogram):
        return find_all_shares(fetch("shares", histogram).counts, exponent)
    return find_shares_by_leaf(histogram, exponent)


def find_shares_by_leaf(histograms: Any, exponent: int) -> dict[str, dict[str, Shares]]:
    """Returns the shares of each leaf of a tree, which may be one leaf by itself."""
    by_leaf = {}
    for path, histogram in fetch_leaves("shares", histograms).items():
        by_leaf[path] = find_all_shares(histogram.counts, exponent)
    return by_leaf


def find_all_shares(
    counts: np.ndarray, exponent: int, formats: Iterable[str] = FORMATS
) -> dict[str, Shares]:
    """Returns the shares of some counts that each format flushes, keeps and loses."""
    total = max(counts.sum(), 1.0)
    shares_by_format = {}
    for name in formats:
        outcomes = find_outcomes(counts, name, exponent)
        shares = [float(numbers.sum() / total) for numbers in outcomes]
        shares_by_format[name] = Shares(*shares)
    return shares_by_format

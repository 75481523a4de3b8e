"""Exponent histograms: how large gradients are, by powers of two, and what formats make of them.

Rows are powers of two. Columns split them at the few mantissas at which a format rounds differently
(`CUTS`). A loss scale that is a power of two only moves the rows, so that one histogram tells
exactly what each format loses at every such scale: see `outcomes`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._trees.checks import power_of_two
from .._trees.tree import replace_gradients
from ._formats import CUTS, FORMAT, FORMATS, INFINITY, check_result, gradient_leaves, magnitude_bits

EXPONENTS = np.arange(-149, 128)  # of float32's numbers
_SHAPE = (len(EXPONENTS), len(CUTS) + 1)
_CELLS = _SHAPE[0] * _SHAPE[1]


class Histogram(NamedTuple):
    """How many gradients lie between one power of two and the next.

    A `NamedTuple` of arrays. Histograms add up, in `jit` too: `first + second` is the
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
        return Histogram(*(a + b for a, b in zip(self, other, strict=True)))

    def __radd__(self, other: Any) -> Any:  # `sum` starts with 0
        return self if isinstance(other, int) and other == 0 else NotImplemented


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
        on the way counts as 0, as a true zero does.
      axis_name: a mesh or `pmap` axis name, or a tuple of them, along which devices hold different
        parts of the gradients: counts are summed. If they hold equal gradients, leave it out, as
        under plain `jit`. In a mesh of explicit axes, wrap the call in JAX's auto_axes (from
        jax.sharding, in newer versions of JAX).

    Returns:
      A `Histogram`. Exponents are exact, those of subnormal numbers too. Counts are exact up to
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
    cells = sum((_count_cells(leaf) for leaf in leaves), jnp.zeros(_CELLS + 3, jnp.float32))
    return _histogram(cells, axis_name)


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
    return replace_gradients(tree, [_histogram(_count_cells(leaf), axis_name) for leaf in leaves])


@jax.jit  # one program for each leaf, even if the caller does not compile
def _count_cells(leaf: Any) -> jax.Array:
    """Returns the counts of a leaf: the cells of the histogram, then zeros, infs and NaNs."""
    bits = magnitude_bits(leaf).reshape(-1)
    # A subnormal number is an integer times 2**-149. Of that integer float32 knows the exponent.
    is_subnormal = bits < 2**23
    integers = jax.lax.bitcast_convert_type(bits.astype(jnp.float32), jnp.uint32)
    normal = jnp.where(is_subnormal, integers, bits)
    row = (normal >> 23).astype(jnp.int32) - jnp.where(is_subnormal, 127, 127 - 149)
    column = sum((normal & (2**23 - 1) >= cut).astype(jnp.int32) for cut in CUTS)
    cell = row * _SHAPE[1] + column
    cell = jnp.where(bits == 0, _CELLS, cell)
    cell = jnp.where(bits == INFINITY, _CELLS + 1, cell)
    cell = jnp.where(bits > INFINITY, _CELLS + 2, cell)
    counts = jnp.zeros(_CELLS + 3, jnp.uint32).at[cell].add(jnp.uint32(1))
    return counts.astype(jnp.float32)


def _histogram(cells: jax.Array, axis_name: Any) -> Histogram:
    if axis_name is not None:
        cells = jax.lax.psum(cells, axis_name)
    special = (cells[_CELLS + i] for i in range(3))
    return Histogram(cells[:_CELLS].reshape(_SHAPE), *special)


class Numbers(NamedTuple):
    """A histogram on the host, with its leading axes summed up."""

    counts: np.ndarray
    zero: float
    inf: float
    nan: float

    @property
    def everything(self) -> float:
        """How many numbers there are."""
        return float(self.counts.sum()) + self.zero + self.inf + self.nan


def read(call: str, histogram: Any) -> Numbers:
    """Returns the numbers of a histogram, or raises a `TypeError`."""
    check_result(call, "histogram", histogram, Histogram, "histogram")
    arrays = [np.asarray(array, np.float64) for array in jax.device_get(histogram)]
    zero, inf, nan = (float(array.sum()) for array in arrays[1:])
    return Numbers(arrays[0].reshape(-1, *_SHAPE).sum(axis=0), zero, inf, nan)


def outcomes(counts: np.ndarray, name: str, exponent: int) -> np.ndarray:
    """Returns, in the order of `Shares`, what a format makes of each row: `f64[4, 277]`."""
    beyond = [counts.sum(axis=1)]
    for boundary in FORMAT[name][:3]:
        # The cells are in the order of their numbers: first the rows, then the columns.
        row = boundary.exponent - exponent - EXPONENTS[0]
        cell = row * _SHAPE[1] + [0, *CUTS].index(boundary.mantissa)
        is_beyond = np.arange(_CELLS).reshape(_SHAPE) >= cell
        beyond.append(np.where(is_beyond, counts, 0).sum(axis=1))
    return np.array([*-np.diff(beyond, axis=0), beyond[-1]])


def shares(histogram: Histogram, *, loss_scale: float = 1.0) -> dict[str, Shares]:
    """Returns which shares of gradients each small format would lose at a loss scale.

    Each gradient is taken as multiplied by the loss scale and then rounded to the format, to
    nearest with ties to even. For the host: it waits for the device.

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
    return shares_of(read("shares", histogram).counts, exponent)


def shares_of(counts: np.ndarray, exponent: int) -> dict[str, Shares]:
    """Returns the shares of some counts that each format flushes, keeps and loses."""
    total = max(counts.sum(), 1.0)
    return {
        name: Shares(*(outcomes(counts, name, exponent).sum(axis=1) / total).tolist())
        for name in FORMATS
    }

"""Exponent histograms: how large gradients are, by powers of two, and what formats make of them.

Rows are powers of two. Columns split them at the few mantissas at which a format rounds
differently, so that one histogram tells exactly what each format loses at every loss scale that is
a power of two, which only moves the rows.
"""

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._trees.arguments import power_of_two
from .._trees.gradient_leaves import leaf_name, replace_gradients
from .._trees.pytrees import Leaf, PyTree
from ._formats import FORMATS, THRESHOLDS, gradient_leaves, magnitude_bits

EXPONENTS = np.arange(-149, 128)  # of float32's numbers
# From which mantissas on a format rounds to something else. One is just above a power of two.
_MANTISSAS = 2 * np.union1d(0.5, np.frexp([*THRESHOLDS.values()])[0])
_CUTS = (2**23 * (_MANTISSAS - 1)).astype(np.uint32)
# The least numbers of the cells, in the order of their size.
_LEAST = np.ldexp(_MANTISSAS, EXPONENTS[:, None])


class Histogram(NamedTuple):
    """The number of gradients between each power of two and the next.

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
        return Histogram(*map(operator.add, self, other))

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0:  # `sum` starts with 0
            return self
        return NotImplemented


class Shares(NamedTuple):
    """The effects of a format on gradients, as shares of those that are finite and not 0.

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


def histogram(tree: PyTree, *, by_leaf: bool = False, axis_name: Any = None) -> Any:
    """Returns the base-2 exponent histogram of the gradients in a tree, of all or of each.

    It goes in 0.7.0: `jaxscale.diagnostics.sizes` counts on the host, leaf by leaf, and
    `jaxscale.diagnostics.plot` draws gradients.

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
    of_leaves = list(map(_count_numbers, leaves))
    counted: Any = sum(of_leaves)
    if by_leaf:
        counted = replace_gradients(tree, of_leaves)
    if axis_name is not None:
        counted = jax.lax.psum(counted, axis_name)
    return counted


def count_together(call: str, name: str, tree: PyTree) -> Any:
    """Returns the histogram of all gradients in a tree, with errors in the name of `call`."""
    return sum(map(_count_numbers, gradient_leaves(call, name, tree)))


@jax.jit  # one program for each leaf, even if the caller does not compile
def _count_numbers(leaf: Leaf) -> Histogram:
    bits = magnitude_bits(leaf).reshape(-1)
    # A subnormal number is an integer times 2**-149. Of that integer float32 knows the exponent.
    integers = jax.lax.bitcast_convert_type(bits.astype(jnp.float32), jnp.uint32)
    bits = jnp.where(bits < 2**23, integers, bits + np.uint32(149 << 23))
    # The first row is for 0. The last is for inf, and for NaN, whose mantissa is not 0.
    row = (jnp.maximum(bits >> 23, 126) - 126).astype(jnp.int32)
    mantissa = bits & (2**23 - 1)
    column = jnp.searchsorted(_CUTS, mantissa, side="right", method="compare_all") - 1
    # by one index: two would be stored as an array of pairs
    cell = row * len(_CUTS) + column
    counts = jnp.zeros((len(EXPONENTS) + 2) * len(_CUTS), jnp.uint32)
    counts = counts.at[cell].add(jnp.uint32(1)).reshape(-1, len(_CUTS))
    totals = Histogram(
        counts=counts[1:-1],
        zero=counts[0, 0],
        inf=counts[-1, 0],
        nan=counts[-1, 1:].sum(dtype=jnp.uint32),
    )
    return jax.tree.map(lambda count: count.astype(jnp.float32), totals)


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
        counts.reshape(-1, *_LEAST.shape).sum(axis=0), *map(np.sum, others)
    )


def fetch_leaves(call: str, histograms: Any) -> dict[str, Histogram]:
    """Returns the histograms of a tree on the host, by the paths of their leaves."""
    nodes = jax.tree_util.tree_leaves_with_path(
        histograms, is_leaf=lambda node: isinstance(node, Histogram)
    )
    return {leaf_name(path): fetch(call, node) for path, node in nodes}


def find_outcomes(counts: np.ndarray, name: str, exponent: int) -> np.ndarray:
    """Returns what a format makes of the numbers of a histogram, scaled by `2**exponent`.

    That is how many of each row it flushes, keeps as subnormal, keeps in full, and overflows.
    """
    outcomes = np.digitize(_LEAST, np.ldexp(THRESHOLDS[name], -exponent))
    return np.stack([np.where(outcomes == k, counts, 0).sum(axis=1) for k in range(4)])


def shares(histogram: Any, *, loss_scale: float = 1.0) -> dict[str, Any]:
    """Returns which shares of gradients each small format would lose at a loss scale.

    It goes in 0.7.0: see `jaxscale.diagnostics.sizes`.

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
    by_leaf = find_shares_by_leaf(histogram, exponent)
    if isinstance(histogram, Histogram):
        (whole,) = by_leaf.values()
        return whole
    return by_leaf


def find_shares_by_leaf(histograms: Any, exponent: int) -> dict[str, dict[str, Shares]]:
    """Returns the shares of each leaf of a tree, which may be one leaf by itself."""
    leaves = fetch_leaves("shares", histograms).items()
    return {path: find_all_shares(leaf.counts, exponent) for path, leaf in leaves}


def find_all_shares(
    counts: np.ndarray, exponent: int, formats: Iterable[str] = FORMATS
) -> dict[str, Shares]:
    """Returns the shares of some counts that each format flushes, keeps and loses."""
    total = max(counts.sum(), 1.0)
    shares_by_format = {}
    for name in formats:
        outcomes = find_outcomes(counts, name, exponent).sum(axis=1)
        shares_by_format[name] = Shares(*(outcomes / total).tolist())
    return shares_by_format

"""The gradients counted: leaf by leaf, and by powers of two.

`leaf_counts` and `leaf_histograms` compile a program for each shape. A model has many shapes, and
compiling takes longer than counting, so each leaf is counted in rows of one length, the last
filled up with zeros, which are taken off again.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..diagnostics._histogram import Histogram, histogram
from ..diagnostics._leaves import LeafCounts, leaf_counts

_ROW = 2**15


class Counted(NamedTuple):
    """What was counted."""

    counts: LeafCounts  # what `leaf_counts` returns
    histograms: Any  # what `leaf_histograms` returns


def count_numbers(grads: Any, loss_scale: float) -> Counted:
    """Returns the counts of gradients at a loss scale, on the host."""
    leaves, structure = jax.tree.flatten(grads)
    pairs = [_of_leaf(np.asarray(leaf), loss_scale) for leaf in leaves]
    counts, histograms = (structure.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
    return Counted(LeafCounts(counts, jnp.float32(loss_scale)), histograms)


@jax.jit
def _of_row(row: jax.Array, loss_scale: Any) -> tuple[jax.Array, Histogram]:
    return leaf_counts(row, loss_scale=loss_scale).leaves, histogram(row)


def _of_leaf(leaf: np.ndarray, loss_scale: float) -> tuple[np.ndarray, Histogram]:
    if np.iscomplexobj(leaf):  # two numbers each, as both functions count them
        leaf = np.stack([np.real(leaf), np.imag(leaf)])
    numbers = leaf.ravel()
    rows = np.zeros((max(-(-numbers.size // _ROW), 1), _ROW), leaf.dtype)
    rows.ravel()[: numbers.size] = numbers
    results = jax.device_get([_of_row(row, jnp.float32(loss_scale)) for row in rows])
    counts = np.sum([counts for counts, _ in results], axis=0)
    counts[-1] = max(counts[-1] for counts, _ in results)
    filled = rows.size - numbers.size
    counts[0] -= filled
    counts[3] -= filled
    summed = functools.reduce(operator.add, (found for _, found in results))
    return counts, summed._replace(zero=summed.zero - filled)

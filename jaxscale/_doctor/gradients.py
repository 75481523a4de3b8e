"""Gradients on the host: by their names, compared with others, and counted."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._trees.tree import leaf_name, replace_gradients
from ..diagnostics._histogram import Histogram, histogram
from ..diagnostics._leaves import LeafCounts, leaf_counts

CLOSE = 0.1  # gradients are fine if the error of each leaf is at most this
_ROW_LENGTH = 2**15

# Places in the counts of a leaf, as `LeafRow` names them.
_SIZE = 0
_ZERO = 3
_LARGEST = -1


class Gradients(NamedTuple):
    """The gradients of one pass."""

    tree: optax.Updates  # as the pass returned them
    by_name: dict[str, np.ndarray]  # its leaves, on the host

    @classmethod
    def from_tree(cls, tree: optax.Updates) -> Self:
        pairs = jax.tree_util.tree_leaves_with_path(tree)
        return cls(tree, {leaf_name(path): np.asarray(leaf) for path, leaf in pairs})

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(_find_largest(leaf) for leaf in self.by_name.values())


class LeafError(NamedTuple):
    """What one leaf of the gradients lost."""

    path: str  # where it is, such as `params/Dense_0/kernel`
    flushed: float  # the share of the nonzero numbers that became 0
    error: float  # the norm of the difference, divided by the norm of what the leaf should be


class Comparison(NamedTuple):
    """What gradients lost, compared with the same gradients with less or nothing lost."""

    flushed: float  # the share of the nonzero numbers that became 0
    error: float  # the norm of the difference, divided by the norm of what the gradients should be
    worst: str  # the leaf with the largest share flushed, or `""` if nothing was
    worst_flushed: float  # the share flushed in that leaf
    leaves: tuple[LeafError, ...]  # each leaf, the largest error first


class CountedGradients(NamedTuple):
    """How many numbers of which size the gradients hold."""

    counts: LeafCounts  # what `leaf_counts` returns
    histograms: Any  # what `leaf_histograms` returns: a tree with a `Histogram` for each leaf

    @property
    def whole(self) -> Histogram:
        """The histogram of all leaves together."""
        leaves = jax.tree.leaves(self.histograms, is_leaf=lambda node: isinstance(node, Histogram))
        return _add_histograms(leaves)


def are_finite(grads: Mapping[str, np.ndarray]) -> bool:
    return all(np.isfinite(leaf).all() for leaf in grads.values())


def compare_gradients(grads: Mapping[str, Any], exact: Mapping[str, Any]) -> Comparison:
    """Returns what `grads` lost, compared with `exact`, both by the names of leaves."""
    leaves = []
    counts = []  # of each leaf: how many numbers became 0, and how many should not be 0
    norms = []  # of each leaf: that of the difference, and that of what it should be
    for name, exact_leaf in exact.items():
        leaf = np.asarray(grads[name])
        exact_leaf = np.asarray(exact_leaf)
        count = np.sum((leaf == 0) & (exact_leaf != 0)), np.count_nonzero(exact_leaf)
        norm = _norm(leaf, exact_leaf), _norm(exact_leaf)
        leaves.append(LeafError(name, flushed=_ratio(*count), error=_ratio(*norm)))
        counts.append(count)
        norms.append(norm)
    worst = max(leaves, key=lambda leaf: leaf.flushed)
    return Comparison(
        flushed=_ratio(*np.sum(counts, axis=0)),
        error=_ratio(*np.linalg.norm(norms, axis=0)),
        worst=worst.path if worst.flushed else "",
        worst_flushed=worst.flushed,
        leaves=tuple(sorted(leaves, key=lambda leaf: -leaf.error)),
    )


def count_numbers(grads: optax.Updates, loss_scale: float) -> CountedGradients:
    """Returns what `leaf_counts` and `leaf_histograms` do, on the host.

    These compile a program for each shape, which takes longer than counting. So each leaf is
    counted in rows of one length, the last filled up with zeros, which are taken off again.
    """
    all_counts = []
    all_histograms = []
    for leaf in jax.tree.leaves(grads):
        rows = _count_rows(np.asarray(leaf), jnp.float32(loss_scale))
        all_counts.append(rows.counts)
        all_histograms.append(rows.histogram)
    counts = LeafCounts(replace_gradients(grads, all_counts), jnp.float32(loss_scale))
    return CountedGradients(counts, replace_gradients(grads, all_histograms))


class _CountedNumbers(NamedTuple):
    """How many numbers of which size a row or a leaf holds."""

    counts: Any  # f32[8], as `LeafRow` names them
    histogram: Histogram


@jax.jit
def _count_row(row: jax.Array, loss_scale: jax.Array) -> _CountedNumbers:
    return _CountedNumbers(leaf_counts(row, loss_scale=loss_scale).leaves, histogram(row))


def _count_rows(leaf: np.ndarray, loss_scale: jax.Array) -> _CountedNumbers:
    if np.iscomplexobj(leaf):  # two numbers each, as both functions count them
        leaf = np.stack([np.real(leaf), np.imag(leaf)])
    num_filled = -leaf.size % _ROW_LENGTH
    if not leaf.size:
        num_filled = _ROW_LENGTH
    filled = np.append(leaf.ravel(), np.zeros(num_filled, leaf.dtype))
    rows = [_count_row(row, loss_scale) for row in filled.reshape(-1, _ROW_LENGTH)]
    rows = jax.device_get(rows)

    counts = np.sum([row.counts for row in rows], axis=0)
    counts[_LARGEST] = max(row.counts[_LARGEST] for row in rows)
    counts[_SIZE] -= num_filled
    counts[_ZERO] -= num_filled
    summed = _add_histograms([row.histogram for row in rows])
    return _CountedNumbers(counts, summed._replace(zero=summed.zero - num_filled))


def _add_histograms(histograms: list[Histogram]) -> Histogram:
    total: Any = sum(histograms)
    return total


def _find_largest(leaf: np.ndarray) -> float:
    return float(np.abs(leaf).max(initial=0))


def _norm(leaf: np.ndarray, subtracted: np.ndarray | float = 0.0) -> float:
    # The parts of complex numbers one by one: NumPy has no wider complex type for all of them.
    wide = np.complex128 if np.iscomplexobj(leaf) else np.float64
    return float(np.linalg.norm((leaf.astype(wide) - subtracted).ravel()))


def _ratio(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else 0.0

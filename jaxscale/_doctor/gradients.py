"""Gradients on the host: by their names, compared with others, and counted."""

import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import optax

from .._trees.gradient_leaves import leaf_name, replace_gradients
from ..diagnostics._histogram import Histogram, histogram

CLOSE = 0.1  # gradients are fine if the error of each leaf is at most this
_ROW_LENGTH = 2**15


class Gradients(NamedTuple):
    """The gradients of one pass."""

    tree: optax.Updates  # as the pass returned them
    by_name: dict[str, np.ndarray]  # its leaves, on the host

    @classmethod
    def from_tree(cls, tree: optax.Updates) -> Self:
        by_name = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            by_name[leaf_name(path)] = np.asarray(leaf)
        return cls(tree, by_name)

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        leaves = self.by_name.values()
        return max(float(np.abs(leaf).max(initial=0)) for leaf in leaves)


class LeafError(NamedTuple):
    """What one leaf of the gradients lost.

    Attributes:
      path: where it is, such as `params/Dense_0/kernel`.
      flushed: the share of the nonzero numbers that became 0.
      error: the norm of the difference, divided by the norm of what the leaf should be.
    """

    path: str
    flushed: float
    error: float


class Comparison(NamedTuple):
    """What gradients lost, compared with the same gradients with less or nothing lost.

    Attributes:
      flushed: the share of the nonzero numbers that became 0.
      error: the norm of the difference, divided by the norm of what the gradients should be.
      worst: the leaf with the largest share flushed, or `""` if nothing was.
      worst_flushed: the share flushed in that leaf.
      leaves: what each leaf lost, the largest error first.
    """

    flushed: float
    error: float
    worst: str
    worst_flushed: float
    leaves: tuple[LeafError, ...]


def are_finite(grads: Mapping[str, np.ndarray]) -> bool:
    return all(np.isfinite(leaf).all() for leaf in grads.values())


def compare_gradients(grads: Mapping[str, Any], exact: Mapping[str, Any]) -> Comparison:
    """Returns what `grads` lost, compared with `exact`, both by the names of leaves."""
    leaves = []
    # Of each leaf: how many numbers became 0, and how many should not be 0.
    counts = []
    # Of each leaf: the norm of the difference, and that of what it should be.
    norms = []
    for name, exact_numbers in exact.items():
        exact_leaf = np.asarray(exact_numbers)
        leaf = np.asarray(grads[name])
        is_flushed = (leaf == 0) & (exact_leaf != 0)
        count = (np.count_nonzero(is_flushed), np.count_nonzero(exact_leaf))
        norm = (_norm(leaf, exact_leaf), _norm(exact_leaf))
        counts.append(count)
        norms.append(norm)
        leaves.append(LeafError(name, flushed=_ratio(*count), error=_ratio(*norm)))
    leaf_most_flushed = max(leaves, key=lambda leaf: leaf.flushed)
    worst = ""
    if leaf_most_flushed.flushed:
        worst = leaf_most_flushed.path
    leaves.sort(key=lambda leaf: -leaf.error)
    return Comparison(
        flushed=_ratio(*np.sum(counts, axis=0)),
        error=_ratio(*np.linalg.norm(norms, axis=0)),
        worst=worst,
        worst_flushed=leaf_most_flushed.flushed,
        leaves=tuple(leaves),
    )


def count_leaves(grads: optax.Updates) -> Any:
    """Returns what `histogram` does with `by_leaf`, on the host.

    That compiles a program for each shape, which takes longer than counting. So each leaf is
    counted in rows of one length, the last filled up with zeros, which are taken off again.
    """
    leaves = map(np.asarray, jax.tree.leaves(grads))
    return replace_gradients(grads, list(map(_count_rows, leaves)))


def add_histograms(histograms: Any) -> Histogram:
    """Returns the histogram of all leaves together."""
    leaves = jax.tree.leaves(
        histograms, is_leaf=lambda node: isinstance(node, Histogram)
    )
    return functools.reduce(operator.add, leaves)


_count_row = jax.jit(histogram)


def _count_rows(leaf: np.ndarray) -> Histogram:
    if np.iscomplexobj(leaf):  # two numbers each
        leaf = np.stack([np.real(leaf), np.imag(leaf)])
    num_filled = -leaf.size % _ROW_LENGTH
    if not leaf.size:
        num_filled = _ROW_LENGTH
    filled = np.append(leaf.ravel(), np.zeros(num_filled, leaf.dtype))
    rows = list(map(_count_row, filled.reshape(-1, _ROW_LENGTH)))
    summed = functools.reduce(operator.add, jax.device_get(rows))
    return summed._replace(zero=summed.zero - num_filled)


def _norm(leaf: np.ndarray, subtracted: np.ndarray | float = 0.0) -> float:
    # The parts of complex numbers one by one: NumPy has no wider complex type for all of them.
    wide_dtype = np.float64
    if np.iscomplexobj(leaf):
        wide_dtype = np.complex128
    difference = leaf.astype(wide_dtype) - subtracted
    return float(np.linalg.norm(difference.ravel()))


def _ratio(part: Any, whole: Any) -> float:
    if not whole:
        return 0.0
    return float(part / whole)

"""Gradients on the host: by their names, compared with others, and counted."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._trees.tree import leaf_name, replace_gradients
from ..diagnostics._histogram import Histogram, histogram
from ..diagnostics._leaves import LeafCounts, leaf_counts

CLOSE = 0.1  # gradients are fine if the error of each leaf is at most this
_ROW = 2**15


class LeafError(NamedTuple):
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


def by_name(grads: Any) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree on the host, by their names."""
    pairs = jax.tree_util.tree_leaves_with_path(grads)
    return {leaf_name(path): np.asarray(leaf) for path, leaf in pairs}


def are_finite(grads: Mapping[str, np.ndarray]) -> bool:
    return all(np.isfinite(leaf).all() for leaf in grads.values())


def compare_gradients(grads: Mapping[str, Any], exact: Mapping[str, Any]) -> Comparison:
    """Returns what `grads` lost, compared with `exact`, both by the names of leaves."""
    pairs = {name: (np.asarray(grads[name]), np.asarray(leaf)) for name, leaf in exact.items()}
    counts = [(np.sum((a == 0) & (b != 0)), np.count_nonzero(b)) for a, b in pairs.values()]
    norms = [(_norm(a, b), _norm(b)) for a, b in pairs.values()]
    leaves = [
        LeafError(name, _ratio(*count), _ratio(*norm))
        for name, count, norm in zip(pairs, counts, norms, strict=True)
    ]
    worst = max(leaves, key=lambda leaf: leaf.flushed)
    return Comparison(
        flushed=_ratio(*np.sum(counts, axis=0)),
        error=_ratio(*np.linalg.norm(norms, axis=0)),
        worst=worst.path if worst.flushed else "",
        worst_flushed=worst.flushed,
        leaves=tuple(sorted(leaves, key=lambda leaf: -leaf.error)),
    )


def _norm(a: np.ndarray, b: Any = 0.0) -> float:
    # The parts of complex numbers one by one: NumPy has no wider complex type for all of them.
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    return float(np.linalg.norm((a.astype(wide) - b).ravel()))


def _ratio(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else 0.0


def count_numbers(grads: Any, loss_scale: float) -> tuple[LeafCounts, Any]:
    """Returns what `leaf_counts` and `leaf_histograms` do, on the host.

    These compile a program for each shape, which takes longer than counting. So each leaf is
    counted in rows of one length, the last filled up with zeros, which are taken off again.
    """
    leaves = jax.tree.leaves(grads)
    pairs = [_count_leaf(np.asarray(leaf), jnp.float32(loss_scale)) for leaf in leaves]
    counts = replace_gradients(grads, [counts for counts, _ in pairs])
    histograms = replace_gradients(grads, [histogram for _, histogram in pairs])
    return LeafCounts(counts, jnp.float32(loss_scale)), histograms


@jax.jit
def _count_row(row: jax.Array, loss_scale: jax.Array) -> tuple[jax.Array, Histogram]:
    return leaf_counts(row, loss_scale=loss_scale).leaves, histogram(row)


def _count_leaf(leaf: np.ndarray, loss_scale: jax.Array) -> tuple[np.ndarray, Histogram]:
    if np.iscomplexobj(leaf):  # two numbers each, as both functions count them
        leaf = np.stack([np.real(leaf), np.imag(leaf)])
    filled = -leaf.size % _ROW if leaf.size else _ROW
    rows = np.append(leaf.ravel(), np.zeros(filled, leaf.dtype)).reshape(-1, _ROW)
    results = jax.device_get([_count_row(row, loss_scale) for row in rows])
    counts = np.sum([counts for counts, _ in results], axis=0)
    counts[-1] = max(counts[-1] for counts, _ in results)
    counts[[0, 3]] -= filled  # all numbers, and zeros
    summed: Any = sum(found for _, found in results)
    return counts, summed._replace(zero=summed.zero - filled)

"""Gradients on the host: by their names, compared with others, and counted."""

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from .._trees.gradient_leaves import replace_gradients
from .._trees.pytrees import Leaf
from ..diagnostics._histogram import Histogram, histogram
from ..diagnostics._switches.search import find_error

_ROW_LENGTH = 2**15


def find_largest(grads: Mapping[str, np.ndarray]) -> float:
    """Returns the largest magnitude of a gradient."""
    return max(float(np.abs(leaf).max(initial=0)) for leaf in grads.values())


class LeafError(NamedTuple):
    """The error of one leaf of the gradients.

    Attributes:
      path: where it is, such as `params/Dense_0/kernel`.
      flushed: the share of the nonzero numbers that became 0.
      error: the norm of the difference, divided by the norm of what the leaf should be.
    """

    path: str
    flushed: float
    error: float


class Comparison(NamedTuple):
    """A comparison of gradients with the same ones of higher precision.

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


def compare_gradients(grads: Mapping[str, Any], exact: Mapping[str, Any]) -> Comparison:
    """Returns what `grads` lost, compared with `exact`, both by the names of leaves."""
    leaves = [
        LeafError(name, find_flushed(grads[name], leaf), find_error(grads[name], leaf))
        for name, leaf in exact.items()
    ]
    leaves.sort(key=lambda leaf: -leaf.error)
    most_flushed = max(leaves, key=lambda leaf: leaf.flushed)
    together = _join([grads[name] for name in exact])
    exact_together = _join(exact.values())
    return Comparison(
        flushed=find_flushed(together, exact_together),
        error=find_error(together, exact_together),
        worst=most_flushed.path if most_flushed.flushed else "",
        worst_flushed=most_flushed.flushed,
        leaves=tuple(leaves),
    )


def find_flushed(leaf: Leaf, exact: Any) -> float:
    """Returns the share of the nonzero numbers that became 0."""
    is_nonzero = np.asarray(exact) != 0
    is_flushed = is_nonzero & (np.asarray(leaf) == 0)
    return float(is_flushed.sum() / max(is_nonzero.sum(), 1))


def _join(leaves: Iterable[Any]) -> np.ndarray:
    """Returns the numbers of all leaves, as wide as none of them overflows."""
    wide = [np.asarray(leaf).ravel() for leaf in leaves]
    return np.concatenate(
        [leaf.astype(np.result_type(leaf.dtype, np.float32)) for leaf in wide]
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

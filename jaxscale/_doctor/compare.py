"""What gradients lost, compared with the same gradients with less or nothing lost."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .._trees.tree import leaf_name

CLOSE = 0.1  # gradients are fine if the error of each leaf is at most this


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
      leaves: each leaf, the largest error first.
    """

    flushed: float
    error: float
    worst: str
    worst_flushed: float
    leaves: tuple[LeafError, ...]


def compare_gradients(grads: Mapping[str, Any], exact: Mapping[str, Any]) -> Comparison:
    """Returns what `grads` lost, compared with `exact`, both by the names of leaves."""
    pairs = {name: (np.asarray(grads[name]), np.asarray(leaf)) for name, leaf in exact.items()}
    lost = {name: int(np.sum((a == 0) & (b != 0))) for name, (a, b) in pairs.items()}
    nonzero = {name: int(np.count_nonzero(b)) for name, (_, b) in pairs.items()}
    flushed = {name: lost[name] / max(nonzero[name], 1) for name in pairs}
    worst = max(flushed, key=lambda name: flushed[name])
    errors = {name: (_norm(a, b), _norm(b)) for name, (a, b) in pairs.items()}
    leaves = [LeafError(name, flushed[name], _ratio(*errors[name])) for name in pairs]
    error, norm = (float(np.linalg.norm([both[i] for both in errors.values()])) for i in (0, 1))
    return Comparison(
        flushed=sum(lost.values()) / max(sum(nonzero.values()), 1),
        error=_ratio(error, norm),
        worst=worst if flushed[worst] else "",
        worst_flushed=flushed[worst],
        leaves=tuple(sorted(leaves, key=lambda leaf: -leaf.error)),
    )


def _norm(a: np.ndarray, b: Any = 0.0) -> float:
    # The parts of complex numbers one by one: NumPy has no wider complex type for all of them.
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    return float(np.linalg.norm((a.astype(wide) - b).ravel()))


def _ratio(error: float, norm: float) -> float:
    return error / norm if norm else 0.0


def by_name(tree: Any) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree on the host, by their names."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_name(path): np.asarray(leaf) for path, leaf in pairs}

"""What gradients lost, compared with the same gradients with less or nothing lost."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

CLOSE = 0.1  # gradients are fine if the error of each leaf is at most this


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

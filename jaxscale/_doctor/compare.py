"""What gradients lost, compared with the same gradients with less or nothing lost."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .._tree import leaf_name

CLOSE = 0.1  # gradients are fine if the error of each leaf is at most this
_EPSILON = 2.0**-23  # of float32
_CHANGE = 2.0**-20  # a few times what float32 rounds by


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


def compared(grads: Mapping[str, Any], exact: Mapping[str, Any]) -> Comparison:
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


def least_told_apart(exact: Mapping[str, Any]) -> set[str]:
    """Returns the leaves so small beside the largest that float32's rounding may be all they are.

    So is the gradient of logits whose softmax does not matter: it is a difference of equal numbers.
    """
    sizes = {name: _norm(leaf) / max(np.size(leaf), 1) ** 0.5 for name, leaf in exact.items()}
    return {name for name, size in sizes.items() if size < _EPSILON * max(sizes.values())}


def by_name(tree: Any) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree on the host, by their names."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_name(path): np.asarray(leaf) for path, leaf in pairs}


def shaken(params: Any) -> Callable[[Any], Any]:
    """Returns what puts slightly other numbers in place of the leaves of `params`.

    A gradient that changes by a large share then is itself a rounding error of float32, as that of
    a bias before a normalization is, and says nothing about float16.
    """
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(params)}

    def shake(const: Any) -> Any:
        if id(const) not in leaves:
            return const
        rng = np.random.default_rng(0)
        array = np.asarray(const)
        factor = 1 + _CHANGE * rng.uniform(-1, 1, array.shape)
        return jax.numpy.asarray((array * factor).astype(array.dtype))

    return shake

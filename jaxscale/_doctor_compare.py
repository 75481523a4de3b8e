"""How far gradients are from what they should be: from those of a larger scale, or of float32."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ._diagnose_interpret import Interpreter, Value
from ._diagnose_jaxpr import BACKWARD
from ._diagnose_numbers import IncomparableError, in_float32
from ._tree import leaf_name


class Comparison(NamedTuple):
    """What was lost of gradients, by the same gradients with less or nothing lost.

    Attributes:
      flushed: the share of those that should not be 0, and are.
      error: the norm of the difference as a share of the norm of what they should be.
      worst: the leaf with the largest share flushed, or ``""``.
      worst_flushed: that share.
    """

    flushed: float
    error: float
    worst: str
    worst_flushed: float


def compared(grads: Any, exact: Any) -> Comparison:
    """Returns what gradients have lost."""
    pairs = {
        leaf_name(path): (np.asarray(grad, np.float64), np.asarray(leaf, np.float64))
        for (path, leaf), grad in zip(
            jax.tree_util.tree_leaves_with_path(exact), jax.tree.leaves(grads), strict=True
        )
    }
    lost = {name: int(np.sum((a == 0) & (b != 0))) for name, (a, b) in pairs.items()}
    nonzero = {name: int(np.sum(b != 0)) for name, (_, b) in pairs.items()}
    flushed = {name: lost[name] / max(nonzero[name], 1) for name in pairs}
    worst = max(flushed, key=lambda name: flushed[name])
    difference, norm = (
        float(np.sqrt(sum(np.sum(np.square(each)) for each in leaves)))
        for leaves in ([a - b for a, b in pairs.values()], [b for _, b in pairs.values()])
    )
    return Comparison(
        flushed=sum(lost.values()) / max(sum(nonzero.values()), 1),
        error=difference / norm if norm else 0.0,
        worst=worst if flushed[worst] else "",
        worst_flushed=flushed[worst],
    )


def float32_gradients(
    loss_of: Callable[[Any, Any], Any], params: Any, arrays: list[Any]
) -> Any | None:
    """Returns the gradients with all that is narrower computed in float32, if that can be."""
    closed, shapes = jax.make_jaxpr(jax.grad(loss_of), return_shape=True)(params, arrays)
    structure = jax.tree.structure(shapes)
    interpreter = Interpreter(lambda visit: [frozenset()] * len(visit.outputs), in_float32)
    inputs = [Value(leaf) for leaf in jax.tree.leaves((params, arrays))]
    try:
        outputs = interpreter.run(closed, inputs, (BACKWARD,) * structure.num_leaves)
    except IncomparableError:
        return None
    return structure.unflatten(value.array for value in outputs)

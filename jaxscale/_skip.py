"""How a step is skipped: one selection, in the form that suits the machine."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ._tree import map_gradients, tree_where


def step_if(
    pred: jax.Array,
    step: Callable[[Any], Any],
    operand: Any,
    skipped: Callable[[Any], Any],
) -> Any:
    """Returns `step(operand)` where `pred` holds, and what `skipped` says elsewhere.

    Args:
      pred: a `bool[]`.
      step: the computation to select; it is traced once.
      operand: a tree of arrays that may be non-finite where `pred` does not hold.
      skipped: called with a tree of the shapes and dtypes of `step(operand)`, returns
        the values to take instead.

    Returns:
      A tree of arrays with the avals of `step(operand)`.
    """

    def select(branches: jax.Array, step: Callable[[Any], Any]) -> Any:
        # `step` runs in any case, as a selection evaluates both sides. Zeros go in where
        # it will not count, so that no inf or NaN reaches its arithmetic.
        choose = pred | branches
        finite = tree_where(choose, operand, _zeros(operand))
        taken = step(finite)
        return tree_where(choose, taken, skipped(taken))

    # On a GPU or TPU a selection fuses into the step's own kernels and reads nothing
    # twice. On a CPU it keeps XLA from updating buffers in place and takes minutes to
    # compile over hundreds of leaves; a branch does neither. Both are written down, and
    # which one it is, is a constant once the platform is known: XLA folds the other away.
    branches = jax.lax.platform_dependent(
        cpu=lambda: jnp.array(True), default=lambda: jnp.array(False)
    )
    if not isinstance(branches, Tracer):
        # No program is being made: each operation runs by itself, under a `vmap`, too. So
        # `step` rounds as it does when called alone, and nothing is compiled for one call.
        return select(jnp.array(False), step)
    step = jax.jit(step)  # traced once, for its avals and for the branch
    kept = skipped(jax.eval_shape(step, operand))

    def branch(operand: Any) -> Any:
        return jax.lax.cond(pred | ~branches, lambda: step(operand), lambda: kept)

    return select(branches, branch)


def _zeros(tree: Any) -> Any:
    """Returns a tree with zeros for gradients, one array for all that are of one type."""
    zeros: dict[Any, jax.Array] = {}

    def zeros_like(leaf: Any) -> jax.Array:
        aval = jax.typeof(leaf)
        if aval not in zeros:
            zeros[aval] = jnp.zeros_like(leaf)
        return zeros[aval]

    return map_gradients(zeros_like, tree)

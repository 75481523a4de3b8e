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
    """Returns ``step(operand)`` where ``pred`` holds, and what ``skipped`` says elsewhere.

    Args:
      pred: a ``bool[]``.
      step: the computation to select; it is traced once.
      operand: a tree of arrays that may be non-finite where ``pred`` does not hold.
      skipped: called with a tree of the shapes and dtypes of ``step(operand)``, returns
        the values to take instead.

    Returns:
      A tree of arrays with the avals of ``step(operand)``.
    """

    def select(step: Callable[[Any], Any]) -> Any:
        # `step` runs in any case, as a selection evaluates both sides. Zeros go in where
        # it will not count, so that no inf or NaN reaches its arithmetic.
        finite = tree_where(pred, operand, map_gradients(jnp.zeros_like, operand))
        taken = step(finite)
        return tree_where(pred, taken, skipped(taken))

    if not isinstance(pred, Tracer):
        # Op by op, `step` rounds as it does when called alone. A `cond` would compile it.
        return select(step)

    step = jax.jit(step)  # traced once for the two forms
    kept = skipped(jax.eval_shape(step, operand))
    # On a GPU or TPU a selection fuses into the step's own kernels and reads nothing
    # twice. On a CPU it keeps XLA from updating buffers in place and takes minutes to
    # compile over hundreds of leaves; a branch does neither.
    return jax.lax.platform_dependent(
        cpu=lambda: jax.lax.cond(pred, lambda: step(operand), lambda: kept),
        default=lambda: select(step),
    )

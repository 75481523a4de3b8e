"""Skips of a step: by a branch on a CPU, by a selection elsewhere and without `jit`.

On a GPU or TPU a selection fuses into the step's own kernels and reads nothing twice. On a CPU it
would keep XLA from updating buffers in place and take minutes to compile over hundreds of leaves;
a branch does neither. The program holds both, as one program may be lowered for any platform.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._jax import vary, varying
from .._trees.casts import aval_of, common_sharding, filled, placed
from .._trees.flat_functions import Traced
from .._trees.gradient_leaves import map_gradients
from .._trees.pytrees import Leaf, PyTree
from .._trees.selection import tree_where

# Returns the leaves that are kept in the place of those of a result. These are arrays or types.
Keep = Callable[[list[Any]], list[Any]]


def make_or_keep(
    due: jax.Array, make: Callable[[Any], Any], operand: PyTree, keep: Keep
) -> Any:
    """Returns `make(operand)` if a step is due, and otherwise what is kept in its place.

    The operand holds gradients, which may be non-finite if no step is due. `make` is traced once.
    """
    # A constant that is known once the platform is: XLA folds the other form away. Two arms of a
    # `platform_dependent` compile to the same, but would hold the step twice.
    branches = jax.lax.platform_dependent(
        cpu=lambda: jnp.array(True), default=lambda: jnp.array(False)
    )
    if not isinstance(branches, Tracer):
        # Nothing is traced: each operation runs by itself, even under `vmap`. So the step rounds
        # as it does when called alone, and nothing is compiled for a single call.
        return choose(due, make(_zeros_unless(due, operand)), keep)

    # The step runs on zeros where its result is not used, so that no inf or NaN enters arithmetic.
    is_used = due | branches
    operand = _zeros_unless(is_used, operand)
    program = Traced(make, operand)
    kept = keep(program.output_leaves)
    pairs = list(zip(kept, program.output_leaves, strict=True))
    axes = [varying(aval_of(old)) | varying(aval_of(new)) for old, new in pairs]
    shardings = [common_sharding(old, new) for old, new in pairs]

    def in_one_type(leaves: list[Any]) -> list[Any]:
        # Both sides of a branch must vary along the same axes of a mesh, and lie on it alike.
        leaves = list(map(placed, leaves, shardings))
        return list(map(_vary, leaves, axes))

    made = jax.lax.cond(
        due | ~branches,
        lambda: in_one_type(jax.tree.leaves(program(operand))),
        lambda: in_one_type(kept),
    )
    # If the program branches, nothing is left to select.
    return program.rebuilt(tree_where(is_used, made, kept))


def choose(pred: jax.Array, made: Any, keep: Keep) -> Any:
    """Returns a result if `pred` holds, and otherwise what is kept in its place."""
    leaves, structure = jax.tree.flatten(made)
    return structure.unflatten(tree_where(pred, leaves, keep(leaves)))


def minus_zeros(like: list[Any]) -> list[Any]:
    """Returns updates that change nothing: minus zero, in both parts of a complex number.

    Adding it keeps the bits of every number, whereas -0.0 + 0.0 is 0.0.
    """
    by_type: dict[Any, jax.Array] = {}  # one array serves all leaves of one type
    updates = []
    for leaf in like:
        aval = aval_of(leaf)
        if aval not in by_type:
            minus_zero: Any = -0.0
            if jnp.issubdtype(aval.dtype, jnp.complexfloating):
                minus_zero = complex(-0.0, -0.0)
            by_type[aval] = filled(aval, minus_zero)
        updates.append(by_type[aval])
    return updates


def _zeros_unless(due: jax.Array, operand: PyTree) -> Any:
    """Returns an operand, or zeros in the place of its gradients if no step is due."""
    return tree_where(due, operand, map_gradients(jnp.zeros_like, operand))


def _vary(leaf: Leaf, axes: frozenset[Any]) -> Any:
    if axes:
        return vary(leaf, axes)
    return leaf

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

from .._jax import ShapedArray
from .._trees.gradient_leaves import map_gradients
from .._trees.leaves import filled, in_common_type, is_on_mesh
from .._trees.pytrees import PyTree
from .._trees.selection import where

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
    structures = []

    @jax.jit
    def make_leaves(operand: PyTree) -> list[Any]:
        leaves, structure = jax.tree.flatten(make(operand))
        structures.append(structure)
        return leaves

    types = jax.make_jaxpr(make_leaves)(operand).out_avals  # traced here, and only here
    kept = keep(types)

    def in_one_type(leaves: list[Any]) -> list[Any]:
        # Both sides of a branch must vary along the same axes of a mesh, and lie on it alike.
        if not any(is_on_mesh(leaf) for leaf in leaves):
            return leaves
        return list(map(in_common_type, leaves, kept, types))

    made = jax.lax.cond(
        due | ~branches,
        lambda: in_one_type(make_leaves(operand)),
        lambda: in_one_type(kept),
    )
    # If the program branches, nothing is left to select.
    made = where(is_used, made, in_one_type(kept))
    return structures[0].unflatten(made)


def choose(pred: jax.Array, made: Any, keep: Keep) -> Any:
    """Returns a result if `pred` holds, and otherwise what is kept in its place."""
    leaves, structure = jax.tree.flatten(made)
    return structure.unflatten(where(pred, leaves, keep(leaves)))


def minus_zeros(like: list[Any]) -> list[Any]:
    """Returns updates that change nothing: minus zero, in both parts of a complex number.

    Adding it keeps the bits of every number, whereas -0.0 + 0.0 is 0.0.
    """
    by_type: dict[Any, jax.Array] = {}  # one array serves all leaves of one type
    updates = []
    for leaf in like:
        aval = leaf if isinstance(leaf, ShapedArray) else jax.typeof(leaf)
        if aval not in by_type:
            minus_zero: Any = -0.0
            if jnp.issubdtype(aval.dtype, jnp.complexfloating):
                minus_zero = complex(-0.0, -0.0)
            by_type[aval] = filled(aval, minus_zero)
        updates.append(by_type[aval])
    return updates


def _zeros_unless(due: jax.Array, operand: PyTree) -> Any:
    """Returns an operand, or zeros in the place of its gradients if no step is due."""
    return where(due, operand, map_gradients(jnp.zeros_like, operand))

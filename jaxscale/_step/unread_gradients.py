"""Gradients that an optimizer never reads: those of parameters that it keeps frozen.

A `partition` with `set_to_zero` in it does not move some of the parameters, whatever their
gradients are. Such a gradient says nothing of the step: an inf in it is no reason to skip, and
its size none to clip the others. So zeros take its place before anything looks at it. As the
optimizer never reads it, the step is the same, and the compiler drops what computed it.

Only an optimizer with masks may do so, and it is looked into once for each kind of call.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.scaled import Scaled
from .._jax import without_unused
from .._trees.casts import widen
from .._trees.flat_functions import Flat
from .._trees.gradient_leaves import map_gradients
from .._trees.leaves import is_inexact_leaf
from .._trees.overwrites import holds_overwrites
from .._trees.pytrees import OptState
from .backward_pass import Pass
from .call_update import call_update
from .matching_trees import types_of
from .options import Options


def leave_out_unread(
    own: Options,
    run: Pass,
    state: OptState,
    params: optax.Params | None,
    extra_args: Mapping[str, Any],
) -> Pass:
    """Returns a backward pass with zeros for the gradients that the optimizer never reads."""
    opt_state = state.inner_state
    if own.window.averages:
        opt_state = getattr(opt_state, "inner_opt_state", None)
    if not _may_leave_unread(opt_state):
        return run
    grads = run.grads.grads
    names = tuple(sorted(extra_args))
    call = (types_of((grads, params)), run.loss is None, names)
    if call not in own.known_unread:
        own.known_unread[call] = _find_unread(own, run, opt_state, params, extra_args)
    leaves, structure = jax.tree.flatten(grads)
    kept = []
    for leaf, is_unread in zip(leaves, own.known_unread[call], strict=True):
        if is_unread and is_inexact_leaf(leaf):
            leaf = jnp.zeros_like(leaf)
        kept.append(leaf)
    left = Scaled(structure.unflatten(kept), run.grads.divisor)
    return run._replace(grads=left)


def _may_leave_unread(opt_state: OptState) -> bool:
    """Returns whether an optimizer may leave gradients unread, as far as its state shows.

    The states in it stand in the order in which its parts see the gradients.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=_is_masked):
        if _is_masked(node):
            return True
        if jnp.ndim(node) > 0:
            # Moments, as of an Adam with a mask for its decay: all gradients are in them.
            return False
    return False


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedState)


def _find_unread(
    own: Options,
    run: Pass,
    opt_state: OptState,
    params: optax.Params | None,
    extra_args: Mapping[str, Any],
) -> list[bool]:
    """Returns for each leaf of the gradients whether the optimizer never reads it."""
    grads = run.grads.grads
    leaves = jax.tree.leaves(grads)
    nothing = [False] * len(leaves)
    are_arrays = all(isinstance(leaf, jax.Array) for leaf in leaves)
    if holds_overwrites(grads) or not are_arrays:
        return nothing
    wide_params = map_gradients(widen, params)

    def update(grads: optax.Updates) -> Any:
        wide_grads = map_gradients(widen, grads)
        return call_update(
            own.inner, wide_grads, opt_state, wide_params, run.loss, extra_args
        )

    flat = Flat(update, (grads,), {}, "update")
    try:
        program = jax.make_jaxpr(flat)(*flat.arrays)
    except Exception:  # the step itself will say what is wrong
        return nothing
    return [not is_used for is_used in without_unused(program).used]

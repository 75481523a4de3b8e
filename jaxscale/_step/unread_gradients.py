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
from .._gradients.value_and_grad import BackwardPass
from .._jax import without_unused
from .._trees.flat_functions import Flat
from .._trees.gradient_leaves import holds_overwrites, map_gradients
from .._trees.leaves import is_inexact_leaf, widen
from .._trees.pytrees import OptState
from .checks import types_of
from .options import Options


def leave_out_unread(
    optimizer: Options,
    backward_pass: BackwardPass,
    state: OptState,
    params: optax.Params | None,
    extra_args: Mapping[str, Any],
) -> BackwardPass:
    """Puts zeros in the place of the gradients that the optimizer never reads."""
    opt_state = state.inner_state
    if optimizer.window is not None:
        opt_state = getattr(opt_state, "inner_opt_state", None)
    if not _may_leave_unread(opt_state):
        return backward_pass
    grads = backward_pass.grads.grads
    names = tuple(sorted(extra_args))
    call = (types_of((grads, params)), backward_pass.loss is None, names)
    if call not in optimizer.known_unread:
        optimizer.known_unread[call] = _find_unread(
            optimizer, backward_pass, opt_state, params, extra_args
        )
    leaves, structure = jax.tree.flatten(grads)
    kept = []
    for leaf, is_unread in zip(leaves, optimizer.known_unread[call], strict=True):
        if is_unread and is_inexact_leaf(leaf):
            leaf = jnp.zeros_like(leaf)
        kept.append(leaf)
    left = Scaled(structure.unflatten(kept), backward_pass.grads.divisor)
    return backward_pass._replace(grads=left)


def _may_leave_unread(opt_state: OptState) -> bool:
    """True if an optimizer may leave gradients unread, as far as its state shows.

    The states in it stand in the order in which its parts see the gradients.
    """
    nodes = jax.tree.leaves(
        opt_state, is_leaf=lambda node: isinstance(node, optax.MaskedState)
    )
    for node in nodes:
        if isinstance(node, optax.MaskedState):
            return True
        if getattr(node, "ndim", 0) > 0:
            # Moments, as of an Adam with a mask for its decay: all gradients are in them.
            return False
    return False


def _find_unread(
    optimizer: Options,
    backward_pass: BackwardPass,
    opt_state: OptState,
    params: optax.Params | None,
    extra_args: Mapping[str, Any],
) -> list[bool]:
    """Lists a flag for each leaf of the gradients: set if the optimizer never reads it."""
    grads = backward_pass.grads.grads
    leaves = jax.tree.leaves(grads)
    nothing = [False] * len(leaves)
    are_arrays = all(isinstance(leaf, jax.Array) for leaf in leaves)
    if holds_overwrites(grads) or not are_arrays:
        return nothing
    wide_params = map_gradients(widen, params)

    def update(grads: optax.Updates) -> Any:
        wide_grads = map_gradients(widen, grads)
        return optimizer.inner.update(
            wide_grads, opt_state, wide_params, value=backward_pass.loss, **extra_args
        )

    flat = Flat(update, (grads,), {}, "update")
    try:
        program = jax.make_jaxpr(flat)(*flat.arrays)
    except Exception:  # the step itself will say what is wrong
        return nothing
    return [not is_used for is_used in without_unused(program).used]

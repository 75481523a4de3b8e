"""Which gradients an optimizer never reads: those of parameters that it keeps frozen.

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
from .._jax import variables, vary, varying
from .._trees.casts import widen
from .._trees.flat import Flat
from .._trees.gradient_leaves import map_gradients
from .._trees.leaf import is_inexact_leaf
from .._trees.overwrites import holds_overwrites
from .call_update import call_update


def may_leave_unread(opt_state: Any) -> bool:
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


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedState)


def find_unread(
    tx: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    opt_state: Any,
    params: optax.Params | None,
    value: Any,
    extra_args: Mapping[str, Any],
) -> list[bool]:
    """Returns for each leaf of the gradients whether `tx.update` never reads it."""
    leaves = jax.tree.leaves(grads)
    nothing = [False] * len(leaves)
    if holds_overwrites(grads) or not all(
        isinstance(leaf, jax.Array) for leaf in leaves
    ):
        return nothing
    wide_params = map_gradients(widen, params)

    def update(grads: optax.Updates) -> Any:
        wide_grads = map_gradients(widen, grads)
        return call_update(tx, wide_grads, opt_state, wide_params, value, extra_args)

    flat = Flat(update, (grads,), {}, "update")
    try:
        program = jax.make_jaxpr(flat)(*flat.arrays).jaxpr
    except Exception:  # the step itself will say what is wrong
        return nothing
    read = _find_read(program)
    return [variable not in read for variable in program.invars]


def _find_read(program: Any) -> set[Any]:
    """Returns the variables of a program that its results may depend on."""
    read = set(variables(program.outvars))
    for eqn in reversed(program.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            read.update(variables(eqn.invars))
    return read


def without_leaves(grads: Scaled, are_unread: list[bool]) -> Scaled:
    """Returns gradients with zeros in the place of some leaves."""
    leaves, structure = jax.tree.flatten(grads.grads)
    kept = []
    for leaf, is_unread in zip(leaves, are_unread, strict=True):
        if is_unread and is_inexact_leaf(leaf):
            # In JAX 0.6 zeros vary along no axis of a mesh, and so would look like copies.
            leaf = vary(jnp.zeros_like(leaf), varying(jax.typeof(leaf)))
        kept.append(leaf)
    return Scaled(structure.unflatten(kept), grads.divisor)

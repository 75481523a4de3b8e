"""Parameters, of which some are trained, and the updates that are added to them."""

from typing import Any

import jax
import optax

from .leaves import cast, dtype_of, is_array_like, is_inexact_leaf, is_none, widen
from .pytrees import Leaf, Params


def trained_params(params: optax.Params, grads: optax.Updates) -> optax.Params:
    """Returns the parameters that have a gradient, with `None` in the place of the others.

    Those may be functions or text, which cannot be selected or compiled. Gradients of another
    structure, as `optax.lookahead` takes them, need parameters that are all arrays.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=is_none)
    try:
        by_leaf = structure.flatten_up_to(grads)
    except ValueError:
        if all(map(is_array_like, jax.tree.leaves(params))):
            return params
        raise
    trained = []
    is_all = True
    for leaf, grad in zip(leaves, by_leaf, strict=True):
        if grad is None and leaf is not None:
            is_all = False
            leaf = None
        trained.append(leaf)
    if is_all:
        return params  # not rebuilt, as its classes may look at their children
    return structure.unflatten(trained)


def combine(trained: optax.Params, params: optax.Params) -> optax.Params:
    """Merges what `trained_params` returned with the parameters that it left out."""
    if not any(map(is_none, jax.tree.leaves(trained, is_leaf=is_none))):
        return trained

    def fill(leaf: object, other: Leaf) -> Any:
        return other if leaf is None else leaf

    return jax.tree.map(fill, trained, params, is_leaf=is_none)


def apply_updates(params: Params, updates: optax.Updates) -> Any:
    """Adds updates to parameters as `optax.apply_updates` does, for every kind of leaf.

    The sum is taken in float32 or wider and rounded once. A leaf without a gradient stays as it is:
    its update is `None`, or a `float0`, as for integers and typed keys.
    """

    def add(param: Leaf, update: Leaf) -> Any:
        if update is None or not is_array_like(param):
            return param
        if dtype_of(update) == jax.dtypes.float0:
            return param
        wide_param = widen(param) if is_inexact_leaf(param) else param
        return cast(wide_param + update, dtype_of(param))

    return jax.tree.map(add, params, updates, is_leaf=is_none)

"""What a user's function makes of the gradients, in each pass of a training step."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._gradients.scaled import Scaled
from .._trees.leaf import dtype_of, is_array_like, is_inexact
from .._trees.tree import cast, leaf_name, map_gradients, partition, widen
from .retry import BackwardResult


def apply_hook(
    call: str, hook: Callable[[Any], Any] | None, made: BackwardResult, params: Any
) -> BackwardResult:
    """Returns a pass with the gradients that a hook made of its own, unscaled.

    Args:
      call: the public function and the argument that is the hook, for messages.
      hook: the function, if there is one.
      made: the pass.
      params: the parameters, of the structure of the gradients.
    """
    if hook is None:
        return made
    old, structure = jax.tree.flatten(map_gradients(widen, made.grads.divided))
    grads = hook(structure.unflatten(old))
    new = jax.tree.leaves(grads)
    if jax.tree.structure(grads) == structure and all(map(operator.is_, new, old)):
        return made  # it only looked at them
    grads = _like(call, grads, structure.unflatten(old), params)
    return made._replace(grads=Scaled(grads), seen=made.grads)


def _like(call: str, grads: Any, old: Any, params: Any) -> Any:
    """Returns the gradients of a hook in the dtypes of those that it got, or raises an error.

    Their shapes may also be those of the parameters, where it got gradients by example.
    """
    got = f"`{call}` must return gradients like those that it got"
    structures = jax.tree.structure(old), jax.tree.structure(grads)
    if structures[0] != structures[1]:
        raise ValueError(
            f"{got}, {structures[0]}, and returned {structures[1]}. Return all of them, those "
            "that it does not change, too."
        )

    def check(path: Any, grad: Any, new: Any, param: Any) -> Any:
        if not is_inexact(grad):
            return new
        at, shapes = f"{got}: at {leaf_name(path)} it", (jnp.shape(grad), jnp.shape(param))
        if not is_inexact(new) or dtype_of(new) != dtype_of(grad):
            kind = dtype_of(new) if is_array_like(new) else type(new).__name__
            raise TypeError(f"{at} got {dtype_of(grad)} and returned {kind}. Cast the result.")
        if jnp.shape(new) not in shapes:
            raise ValueError(
                f"{at} got the shape {shapes[0]}, and the parameter has {shapes[1]}, but it "
                f"returned {jnp.shape(new)}."
            )
        return cast(new, dtype_of(grad))

    params = partition(params, old)[0]
    params = params if jax.tree.structure(params) == structures[0] else old
    return jax.tree_util.tree_map_with_path(check, old, grads, params)

"""Calls of what the user wrote, the loss and a hook, and what is said if they do not fit."""

import functools
import inspect
import operator
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from .._gradients.scaled import Scaled
from .._gradients.value_and_grad import BackwardPass
from .._trees.gradient_leaves import leaf_name, map_gradients
from .._trees.leaves import cast, dtype_of, is_array_like, is_inexact_leaf, widen
from .._trees.params import trained_params
from .._trees.pytrees import Leaf
from .checks import is_pair


def explain_mistakes(
    call: str,
    loss_fn: Callable[..., Any],
    has_state: bool = False,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Wraps a loss function so that errors say what does not fit: its arguments, or its output."""

    @functools.wraps(loss_fn)
    def call_loss(*args: Any, **kwargs: Any) -> Any:
        try:
            output = loss_fn(*args, **kwargs)
        except TypeError as error:
            reason = _explain_misfit(loss_fn, args, kwargs, error)
            if not reason:
                raise
            arguments = [_describe(arg) for arg in args]
            arguments += [f"{name}=..." for name in kwargs]
            parts = "what is trained, and whatever else the step was given."
            if has_state:
                parts = (
                    "what is trained, the state, and whatever else the step was given."
                )
            elif not call.startswith("nnx"):
                parts += " Pass has_state=True if one of them is state that the step carries."
            raise TypeError(
                f"`{call}(loss_fn)`: `loss_fn` {reason}. The step called it with "
                f"({', '.join(arguments)}): {parts}"
            ) from error
        _check_output(call, has_state, has_aux, output)
        return output

    return call_loss


def _check_output(call: str, has_state: bool, has_aux: bool, output: Any) -> None:
    """Raises a `TypeError` if the loss function returned another number of things."""
    flags = ""
    expected = "a loss"
    fits = not isinstance(output, tuple)
    if has_state and has_aux:
        flags = "has_state=True, has_aux=True"
        expected = "(loss, (state, aux))"
        fits = is_pair(output) and is_pair(output[1])
    elif has_state or has_aux:
        name = "state" if has_state else "aux"
        flags = f"has_{name}=True"
        expected = f"(loss, {name})"
        fits = is_pair(output)
    if fits:
        return
    called = f"{call}(loss_fn)"
    way_out = "Pass has_aux=True if it returns anything beside the loss"
    if flags:
        called = f"{call}(loss_fn, {flags})"
        way_out = f"Return it so, or leave {flags} out"
    elif not call.startswith("nnx"):
        way_out += ", and has_state=True if that is state that a skipped step keeps"
    raise TypeError(
        f"`{called}`: `loss_fn` must return {expected}, got {_describe(output)}. {way_out}."
    )


def call_hook(
    call: str,
    on_grads: Callable[[Any], Any],
    backward_pass: BackwardPass,
    params: optax.Params,
) -> BackwardPass:
    """Gives the gradients of a pass to `on_grads`, and goes on with those that it returns."""
    old_leaves, structure = jax.tree.flatten(
        map_gradients(widen, backward_pass.grads.divided)
    )
    new = on_grads(structure.unflatten(old_leaves))
    new_leaves = jax.tree.leaves(new)
    same_structure = jax.tree.structure(new) == structure
    if same_structure and all(map(operator.is_, new_leaves, old_leaves)):
        return backward_pass  # it only looked at them
    grads = _check_hooked(
        f"{call}(on_grads=...)", new, structure.unflatten(old_leaves), params
    )
    return backward_pass._replace(grads=Scaled(grads), before_hook=backward_pass.grads)


def _check_hooked(
    call: str, new: optax.Updates, old: optax.Updates, params: optax.Params
) -> optax.Updates:
    """Returns the gradients of a hook in the dtypes of those that it got, or raises an error.

    Their shapes may also be those of the parameters, where it got gradients by example.
    """
    start = f"`{call}` must return gradients like those that it got"
    structure = jax.tree.structure(old)
    new_structure = jax.tree.structure(new)
    if new_structure != structure:
        raise ValueError(
            f"{start}, {structure}, and returned {new_structure}. Return all of them, those that "
            "it does not change included."
        )

    def check_leaf(path: KeyPath, old: Leaf, new: Leaf, param: Leaf) -> Any:
        if not is_inexact_leaf(old):
            return new
        place = f"{start}: at {leaf_name(path)} it"
        dtype = dtype_of(old)
        if not is_inexact_leaf(new) or dtype_of(new) != dtype:
            returned = type(new).__name__
            if is_array_like(new):
                returned = dtype_of(new)
            raise TypeError(
                f"{place} got {dtype} and returned {returned}. Cast the result."
            )
        if jnp.shape(new) not in (jnp.shape(old), jnp.shape(param)):
            raise ValueError(
                f"{place} got the shape {jnp.shape(old)}, and the parameter has "
                f"{jnp.shape(param)}, but it returned {jnp.shape(new)}."
            )
        return cast(new, dtype)

    params = trained_params(params, old)
    if jax.tree.structure(params) != structure:
        params = old
    return jax.tree_util.tree_map_with_path(check_leaf, old, new, params)


def _explain_misfit(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: TypeError,
) -> str:
    """Explains a call that failed before the function ran; empty if it did run."""
    # a decorator, such as `autocast`, may say nothing of what it takes
    fun = inspect.unwrap(fun)
    entered = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if getattr(fun, "__code__", None) in entered:
        return ""
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except TypeError as reason:
        return f"takes {inspect.signature(fun)}: {reason}"
    except ValueError:  # a function that does not say what it takes
        return ""
    return ""


def _describe(output: object) -> str:
    """Returns the types in an output, as deep as tuples go."""
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        return f"({', '.join(map(_describe, output))})"
    if is_array_like(output):
        return "an array"
    return type(output).__name__

"""Checks of what a step is given, with the way out in each message."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.verdict import axis_names
from .._policies.base import LossScale
from .._state.find import check_alone, is_loss_scaled
from .._state.optimizer import LossScaledState
from .._state.scale import is_wrapped, unwrap
from .._trees.gradient_leaves import leaf_name, varying_axes
from .._trees.grammar import with_article
from .._trees.leaf import is_array_like
from .call_update import takes_any


def is_pair(value: Any) -> bool:
    """Returns whether a value is a tuple of two."""
    return isinstance(value, tuple) and len(value) == 2


def as_transformation(argument: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes extra arguments, or raises a `TypeError` if it is not one."""
    # has `init` and `update`, but is not one itself
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"`{argument}` must be an `optax.GradientTransformation`, got {tx!r}. Call the "
            "function that makes it, as in `optax.adamw(1e-3)`."
        )
    is_told = isinstance(tx, optax.GradientTransformationExtraArgs)
    if not is_told and takes_any(tx.update):
        # That of an `optax.MultiSteps` takes extra arguments, though its type does not say so.
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    return optax.with_extra_args_support(tx)


def check_state(
    argument: str, state: Any, policy: LossScale, order: str
) -> LossScaledState:
    """Returns the state that a step was given, as arrays, or raises an error.

    `order` is that of the arguments of the call, empty if it has only one.
    """
    if not isinstance(state, LossScaledState):
        raise TypeError(
            f"`{argument}` must be the `LossScaledState` that `init` or the last step returned, "
            f"got {type(state).__name__}. {_way_to_state(state, order)}"
        )
    # An `nnx.Optimizer` wraps every array in a variable, so it is enough to look at one field. In
    # any other state, the only variables are those of the parameters: they stay wrapped.
    if is_wrapped(state.step_applied):
        state = unwrap(state)
    check_alone(argument, state.scaling)
    expected = type(jax.eval_shape(policy.init))
    if type(state.scaling) is not expected:
        raise TypeError(
            f"`{argument}` got the state of another optimizer: its scaling "
            f"is {with_article(type(state.scaling).__name__)}, and that of "
            f"{with_article(type(policy).__name__)} is {with_article(expected.__name__)}. Pass the "
            "state that `init` of this optimizer returned. To go on from another one, pass "
            "`tx.init(params)._replace(inner_state=state.inner_state)`."
        )
    return state


def _way_to_state(state: Any, order: str) -> str:
    """Returns what to pass instead of something that is not a `LossScaledState`."""
    if hasattr(state, "opt_state"):
        return "Pass its `opt_state`, or use the step of `jaxscale.flax` or `jaxscale.nnx`."
    way = (
        "To go on with the state of an optimizer that was not wrapped, pass "
        "`tx.init(params)._replace(inner_state=state)`."
    )
    if order:
        way = f"The order of arguments is {order}. {way}"
    return way


def check_loss(value: Any) -> None:
    """Raises a `TypeError` if the loss that a step was given is not one real number, or `None`."""
    if value is None:
        return
    start = "`loss_scaled(...).update(value=...)` must be the loss, one number, got"
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise TypeError(f"{start} the function {name}. Pass what it returned.")
    if not all(map(is_array_like, jax.tree.leaves(value))):
        raise TypeError(f"{start} {value!r}.")
    shapes = jax.tree.map(jnp.shape, value)
    if shapes != ():
        raise TypeError(f"{start} {shapes}. With has_aux=True, pass only the loss.")
    if jnp.iscomplexobj(value):
        raise TypeError(
            f"{start} a complex one, {value}. A loss is real: pass `value=loss.real`, or leave it "
            "out."
        )


def check_outcome(updates: optax.Updates, params: optax.Params) -> None:
    """Raises a `ValueError` if updates would change the shape of a parameter."""
    if jax.tree.structure(updates) != jax.tree.structure(params):
        return
    with_paths = jax.tree_util.tree_leaves_with_path(updates)
    for (path, update), param in zip(with_paths, jax.tree.leaves(params), strict=True):
        if not (is_array_like(update) and is_array_like(param)):
            continue
        if jnp.shape(update) != jnp.shape(param):
            raise ValueError(
                f"The optimizer made an update of shape {jnp.shape(update)} for the parameter at "
                f"{leaf_name(path)}, which has {jnp.shape(param)}. Is its gradient that of this "
                "parameter? Gradients by example need an optimizer that takes their mean."
            )


def check_devices_agree(grads: optax.Updates, value: Any, axis_name: Any) -> None:
    """Raises a `ValueError` if the loss differs among devices whose gradients are the same."""
    disputed = varying_axes(value) - set(axis_names(axis_name))
    if not disputed:
        return
    disputed -= varying_axes(grads)
    if not disputed:
        return
    axes = ", ".join(map(repr, sorted(disputed)))
    raise ValueError(
        f"`loss_scaled(...).update(value=...)` varies along {axes}, where the gradients do "
        "not. A loss that is bad on one device alone would make the loss scales of the "
        f"devices differ: pass `axis_name={axes}` to `loss_scaled`, or the mean loss."
    )


def check_state_kept(new_state: Any, opt_state: Any) -> None:
    """Raises a `ValueError` if a step changed the structure of the state inside."""
    before = jax.tree.structure(opt_state)
    after = jax.tree.structure(new_state)
    if before != after:
        raise ValueError(
            "`loss_scaled(inner)`: `inner.update` must keep the structure of its state, or a "
            "skipped step could not keep the state. If a part fills its state at the first update, "
            "as `optax.monitor` does, put it outside: `optax.chain(loss_scaled(...), "
            f"optax.monitor(...))`. The structures are {before} and then {after}."
        )


def check_not_nested(inner_state: Any) -> None:
    """Raises a `ValueError` if an optimizer is wrapped that is already wrapped further inside."""
    for path, node in jax.tree_util.tree_leaves_with_path(
        inner_state, is_leaf=is_loss_scaled
    ):
        if is_loss_scaled(node):
            raise ValueError(
                "`loss_scaled(inner).init`: `inner` already holds a `LossScaledState`, at "
                f"{jax.tree_util.keystr(path)} of its state. Two skips of one step cannot agree: "
                "wrap once, outermost, with `inner` as it was before."
            )

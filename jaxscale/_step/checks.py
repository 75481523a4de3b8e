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
from .._trees.grammar import and_more, with_article
from .._trees.leaf import is_array_like
from .._trees.tree import leaf_name, varying_axes


def as_transformation(given: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes extra arguments, or raises a `TypeError` if it is not one."""
    if isinstance(tx, optax.MultiSteps):  # has `init` and `update`, but is not one itself
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"`{given}` must be an `optax.GradientTransformation`, got {tx!r}. Call the function "
            "that makes it, as in `optax.adamw(1e-3)`."
        )
    return optax.with_extra_args_support(tx)


def check_state(call: str, state: Any, policy: LossScale, order: str) -> LossScaledState:
    """Returns the state that a step was given, as arrays, or raises an error."""
    if not isinstance(state, LossScaledState):
        hint = f"The order of arguments is {order}. " * bool(order) + (
            "To go on with the state of an optimizer that was not wrapped, pass "
            "`tx.init(params)._replace(inner_state=state)`."
        )
        if hasattr(state, "opt_state"):
            hint = "Pass its `opt_state`, or use the step of `jaxscale.flax` or `jaxscale.nnx`."
        raise TypeError(
            f"`{call}` must be the `LossScaledState` that `init` or the last step returned, got "
            f"{type(state).__name__}. {hint}"
        )
    # An `nnx.Optimizer` wraps every array in a variable, so it is enough to look at one field. In
    # any other state, the only variables are those of the parameters: they stay wrapped.
    state = unwrap(state) if is_wrapped(state.step_applied) else state
    check_alone(call, state.scaling)
    expected = type(jax.eval_shape(policy.init))
    if type(state.scaling) is not expected:
        raise TypeError(
            f"`{call}` got the state of another optimizer: its scaling "
            f"is {with_article(type(state.scaling).__name__)}, and that of "
            f"{with_article(type(policy).__name__)} is {with_article(expected.__name__)}. Pass the "
            "state that `init` of this optimizer returned. To go on from another one, pass "
            "`tx.init(params)._replace(inner_state=state.inner_state)`."
        )
    return state


def check_loss(value: Any) -> None:
    if value is None:
        return
    given = "`loss_scaled(...).update(value=...)` must be the loss, one number, got "
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise TypeError(f"{given}the function {name}. Pass what it returned.")
    if not all(map(is_array_like, jax.tree.leaves(value))):
        raise TypeError(f"{given}{value!r}.")
    shapes = jax.tree.map(jnp.shape, value)
    if shapes != ():
        raise TypeError(f"{given}{shapes}. With has_aux=True, pass only the loss.")
    if jnp.iscomplexobj(value):
        raise TypeError(
            f"{given}a complex one, {value}. A loss is real: pass `value=loss.real`, or leave it "
            "out."
        )


def check_grads(given: str, grads: Any, params: Any) -> None:
    """Raises a `ValueError` if a gradient has another shape than its parameter.

    Gradients by example, as differential privacy takes them, have axes of their own in front.
    Trees of two structures are left to the optimizer: a few take gradients of a part.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=_is_none)
    if jax.tree.structure(grads, is_leaf=_is_none) != structure:
        return
    with_paths = jax.tree_util.tree_leaves_with_path(grads, is_leaf=_is_none)
    for (path, grad), param in zip(with_paths, leaves, strict=True):
        if not (is_array_like(grad) and is_array_like(param)):
            continue
        shape, expected = jnp.shape(grad), jnp.shape(param)
        by_example = shape[len(shape) - len(expected) :]
        if len(shape) < len(expected) or by_example != expected:
            raise ValueError(
                f"`{given}`: the gradient at {leaf_name(path)} has the shape {shape}, and its "
                f"parameter {expected}. Pass the gradients with respect to these parameters; "
                "nothing is broadcast."
            )


def explain_structures(given: str, grads: Any, params: Any) -> str:
    """Returns how the structure of gradients differs from that of the parameters, if it does.

    Trees of two types, as `optax.lookahead` takes them, are meant to differ.
    """
    if type(grads) is not type(params):
        return ""
    if jax.tree.structure(grads, is_leaf=_is_none) == jax.tree.structure(params, is_leaf=_is_none):
        return ""
    of_grads, of_params = (
        [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (grads, params)
    )
    only_grads = [name for name in of_grads if name not in of_params]
    only_params = [name for name in of_params if name not in of_grads]
    return (
        f"`{given}` must have the structure of the parameters. Only among the gradients: "
        f"{_join(only_grads)}; only among the parameters: {_join(only_params)}. Pass the gradients "
        "with respect to these parameters, with None or zeros for those that have none."
    )


def _join(names: list[str], most: int = 5) -> str:
    return " ".join([", ".join(names[:most]), *and_more(names, most)]) or "none"


def _is_none(leaf: Any) -> bool:
    return leaf is None


def check_outcome(updates: Any, params: Any) -> None:
    """Raises a `ValueError` if updates would change the shape of a parameter."""
    if jax.tree.structure(updates) != jax.tree.structure(params):
        return
    with_paths = jax.tree_util.tree_leaves_with_path(updates)
    for (path, update), param in zip(with_paths, jax.tree.leaves(params), strict=True):
        if is_array_like(update) and is_array_like(param) and jnp.shape(update) != jnp.shape(param):
            raise ValueError(
                f"The optimizer made an update of shape {jnp.shape(update)} for the parameter at "
                f"{leaf_name(path)}, which has {jnp.shape(param)}. Is its gradient that of this "
                "parameter? Gradients by example need an optimizer that takes their mean."
            )


def check_devices_agree(grads: Any, value: Any, axis_name: Any) -> None:
    """Raises an error if the loss differs among devices whose gradients are the same."""
    apart = varying_axes(value) - set(axis_names(axis_name))
    if apart and (apart := apart - varying_axes(grads)):
        axes = ", ".join(map(repr, sorted(apart)))
        raise ValueError(
            f"`loss_scaled(...).update(value=...)` varies along {axes}, where the gradients do "
            "not. A loss that is bad on one device alone would make the loss scales of the "
            f"devices differ: pass `axis_name={axes}` to `loss_scaled`, or the mean loss."
        )


def check_state_kept(new_state: Any, opt_state: Any) -> None:
    before, after = jax.tree.structure(opt_state), jax.tree.structure(new_state)
    if before != after:
        raise ValueError(
            "`loss_scaled(inner)`: `inner.update` must keep the structure of its state, or a "
            "skipped step could not keep the state. If a part fills its state at the first update, "
            "as `optax.monitor` does, put it outside: `optax.chain(loss_scaled(...), "
            f"optax.monitor(...))`. The structures are {before} and then {after}."
        )


def check_not_nested(inner_state: Any) -> None:
    for path, node in jax.tree_util.tree_leaves_with_path(inner_state, is_leaf=is_loss_scaled):
        if is_loss_scaled(node):
            raise ValueError(
                "`loss_scaled(inner).init`: `inner` already holds a `LossScaledState`, at "
                f"{jax.tree_util.keystr(path)} of its state. Two skips of one step cannot agree: "
                "wrap once, outermost, with `inner` as it was before."
            )

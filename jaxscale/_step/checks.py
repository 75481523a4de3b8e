"""Checks of what a step is given, with the way out in each message."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.verdict import axis_names
from .._jax import AxisNames, varying
from .._policies.base import LossScale
from .._state.find import check_alone, is_loss_scaled
from .._state.optimizer import LossScaledState
from .._state.scale import is_wrapped, unwrap
from .._trees.arguments import describe_value
from .._trees.gradient_leaves import leaf_name, list_gradients, varying_axes
from .._trees.grammar import with_article
from .._trees.leaves import is_array_like
from .._trees.pytrees import OptState, PyTree
from .call_update import takes_any


def is_pair(value: object) -> bool:
    """Returns whether a value is a tuple of two."""
    return isinstance(value, tuple) and len(value) == 2


def as_transformation(
    argument: str, tx: object
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes extra arguments, or raises a `TypeError` if it is not one."""
    # has `init` and `update`, but is not one itself
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        given = repr(tx)
        if len(given) > 100:  # such as an `nnx.Optimizer` with all parameters
            given = with_article(type(tx).__name__)
        raise TypeError(
            f"`{argument}` must be an `optax.GradientTransformation`, got {given}. Call the "
            "function that makes it, as in `optax.adamw(1e-3)`, or pass the `tx` that an object "
            "such as a `TrainState` holds."
        )
    is_told = isinstance(tx, optax.GradientTransformationExtraArgs)
    if not is_told and takes_any(tx.update):
        # That of an `optax.MultiSteps` takes extra arguments, though its type does not say so.
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    return optax.with_extra_args_support(tx)


def check_state(
    argument: str, state: OptState, policy: LossScale, order: str
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


def _way_to_state(state: OptState, order: str) -> str:
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


def check_loss(call: str, value: Any) -> None:
    """Raises a `TypeError` if the loss that a step was given is not one real number, or `None`."""
    if value is None:
        return
    is_number = is_array_like(value) and jnp.shape(value) == ()
    if not is_number or jnp.iscomplexobj(value):
        raise TypeError(
            f"`{call}(...).update(value=...)` must be the loss, one number, got "
            f"{describe_value(value)}. With has_aux=True, pass only the loss; of a complex one, "
            "pass `loss.real`."
        )


def check_devices_agree(
    call: str, grads: optax.Updates, value: object, axis_name: AxisNames
) -> None:
    """Raises a `ValueError` if devices with copies of one parameter may skip by themselves.

    Types say so: along an axis that is not in `axis_name`, the loss or a gradient varies, and
    another gradient does not. Where all gradients vary, each device has a run of its own.
    """
    gradients = list_gradients(grads)
    of_gradients = varying_axes(grads)
    disputed = (varying_axes(value) | of_gradients) - set(axis_names(axis_name))
    copied = ""
    for axis in disputed.copy():
        copies = [
            path for path, leaf in gradients if axis not in varying(jax.typeof(leaf))
        ]
        if copies:
            copied = leaf_name(copies[0])
        elif gradients:
            disputed.remove(axis)
    if not disputed:
        return
    axes = ", ".join(map(repr, sorted(disputed)))
    if disputed & of_gradients:
        raise ValueError(
            f"`{call}(...).update(updates=...)`: some gradients vary along {axes}, and that "
            f"at {copied} does not. What is bad, or clipped, on one device alone would make its "
            f"copy of that parameter differ: pass `axis_name={axes}` to `loss_scaled` or "
            "`skip_nonfinite`."
        )
    raise ValueError(
        f"`{call}(...).update(value=...)` varies along {axes}, where the gradients do "
        "not. A loss that is bad on one device alone would make the loss scales of the "
        f"devices differ: pass `axis_name={axes}` to `loss_scaled` or `skip_nonfinite`, or the "
        "mean loss."
    )


def check_copies_stay_equal(
    call: str, what: str, new: PyTree, old: PyTree, axis_name: AxisNames
) -> None:
    """Raises a `ValueError` if a step makes copies differ among the devices that make it together.

    `what` is what the optimizer made, `new` in place of `old`. Types tell, where they do at all.
    """
    axes = set(axis_names(axis_name))
    if not axes or jax.tree.structure(new) != jax.tree.structure(old):
        return
    new_leaves = jax.tree_util.tree_leaves_with_path(new)
    for (path, leaf), old_leaf in zip(new_leaves, jax.tree.leaves(old), strict=True):
        if not (is_array_like(leaf) and is_array_like(old_leaf)):
            continue
        parting = varying(jax.typeof(leaf)) - varying(jax.typeof(old_leaf))
        parting &= axes
        if parting:
            names = ", ".join(map(repr, sorted(parting)))
            raise ValueError(
                f"`{call}(inner)`: {what} at {leaf_name(path)} differs among the devices "
                f"along {names}, which hold copies of it. `inner` computes something from all "
                "parameters, such as a norm, and sees the parts of one device alone. To clip to a "
                "global norm, pass `max_norm` to `loss_scaled`; otherwise use `jit` in place of "
                "`shard_map`, where arrays are whole."
            )


def check_state_kept(call: str, new_state: OptState, opt_state: OptState) -> None:
    """Raises a `ValueError` if a step changed the structure of the state inside."""
    before = jax.tree.structure(opt_state)
    after = jax.tree.structure(new_state)
    if before != after:
        raise ValueError(
            f"`{call}(inner)`: `inner.update` must keep the structure of its state, or a "
            "skipped step could not keep the state. If a part fills its state at the first update, "
            "as `optax.monitor` does, put it outside: `optax.chain(loss_scaled(...), "
            f"optax.monitor(...))`. The structures are {before} and then {after}."
        )


def check_clips_the_mean(call: str, inner_state: OptState) -> None:
    """Raises a `ValueError` if each micro-batch would be clipped, and not their mean."""
    for node in jax.tree.leaves(inner_state, is_leaf=_accumulates):
        if _accumulates(node):
            raise ValueError(
                f"`{call}(inner, max_norm=...)`: `inner` accumulates gradients itself "
                f"(`{type(node).__name__}`), so each micro-batch would be clipped, and not their "
                "mean. Accumulate by `jaxscale.multi_steps(jaxscale.loss_scaled(optax.adamw(1e-3), "
                "max_norm=1.0), 4)`, or leave `max_norm` out and put `optax.clip_by_global_norm` "
                "inside of the `optax.MultiSteps`."
            )


def _accumulates(node: object) -> bool:
    return isinstance(node, optax.MultiStepsState | optax.ApplyEvery)


def check_not_nested(call: str, inner_state: OptState) -> None:
    """Raises a `ValueError` if an optimizer is wrapped that is already wrapped further inside."""
    for path, node in jax.tree_util.tree_leaves_with_path(
        inner_state, is_leaf=is_loss_scaled
    ):
        if is_loss_scaled(node):
            raise ValueError(
                f"`{call}(inner).init`: `inner` already holds a `LossScaledState`, at "
                f"{jax.tree_util.keystr(path)} of its state. Two skips of one step cannot agree: "
                "wrap once, outermost, with `inner` as it was before."
            )

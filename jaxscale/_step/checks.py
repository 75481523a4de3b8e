"""Checks of what a step is given, with the way out in each message."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._gradients.verdict import axis_names
from .._jax import is_for_people
from .._policies.base import LossScale
from .._state.find import check_alone, is_loss_scaled
from .._state.optimizer import LossScaledState
from .._state.scale import is_wrapped, unwrap
from .._trees.checks import and_more, with_article
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
    reason = _explain_structures(given, grads, params) if grads is None else ""
    if reason:  # not every optimizer would notice that there are none
        raise ValueError(reason)
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


_OF_GRADIENTS = (
    "Pass the gradients with respect to the parameters that `init` was given, or the state that it "
    "returned for these. Without `params` the gradients were taken for them."
)


@contextlib.contextmanager
def explaining_trees(
    given: str, state_given: str, optimizer: Any, grads: Any, opt_state: Any, params: Any
) -> Iterator[None]:
    """Inside of this context, an error of a step says which trees do not belong together.

    An error that explains itself is left alone, and so is any if the trees belong together. Without
    parameters, as `update` may be called, the gradients stand for them.

    Args:
      given: the call and its argument for the gradients.
      state_given: the call and its argument for the state.
      optimizer: that takes the step, bare or wrapped.
      grads: the gradients.
      opt_state: the state of the optimizer.
      params: the parameters, or `None`.

    Raises:
      ValueError: in place of the error, if the gradients have another structure than the
        parameters, or if the state is that of other parameters.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if is_for_people(error):
            raise
        reason = "" if params is None else _explain_structures(given, grads, params)
        if reason:
            raise ValueError(reason) from error
        try:
            if params is None:
                check_same_optimizer(state_given, optimizer, opt_state, grads, _OF_GRADIENTS)
            else:
                check_same_optimizer(state_given, optimizer, opt_state, params)
        except ValueError as other:
            raise other from error
        raise


def _explain_structures(given: str, grads: Any, params: Any) -> str:
    """Returns how the structure of gradients differs from that of the parameters, if it does.

    Trees of two types of one's own, as `optax.lookahead` takes them, are meant to differ.
    """
    if type(grads) is not type(params):
        kinds = _name_kind(params), _name_kind(grads)
        if None in kinds or len(set(kinds)) == 1:
            return ""
        return (
            f"`{given}` must have the structure of the parameters, {kinds[0]}, got {kinds[1]}. "
            "Pass the gradients with respect to these parameters."
        )
    of_grads, of_params = (jax.tree.structure(tree, is_leaf=_is_none) for tree in (grads, params))
    if of_grads == of_params:
        return ""
    names_of_grads, names_of_params = (
        [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (grads, params)
    )
    only_grads = [name for name in names_of_grads if name not in names_of_params]
    only_params = [name for name in names_of_params if name not in names_of_grads]
    differ = (
        f"Only among the gradients: {_join(only_grads)}; only among the parameters: "
        f"{_join(only_params)}."
    )
    if not only_grads and not only_params:
        differ = f"That of the gradients is {of_grads}, and that of the parameters {of_params}."
    return (
        f"`{given}` must have the structure of the parameters. {differ} Pass the gradients "
        "with respect to these parameters, with None or zeros for those that have none."
    )


def types_of(tree: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Returns the structure of a tree, and the shape and the dtype of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]


def check_same_optimizer(
    given: str,
    optimizer: Any,
    opt_state: Any,
    params: Any,
    way: str = "Pass the state that `init` of this optimizer returned for these parameters.",
) -> None:
    """Raises a `ValueError` if a state is not like the one that `tx.init(params)` makes."""
    if not all(map(is_array_like, jax.tree.leaves(params))):
        return  # for such parameters `init` saw only a part of them, and which is not known
    try:
        makes, types = optimizer.expected_types(params)
    except Exception:  # an `init` that needs values cannot be asked here
        return
    state = opt_state.inner_state if is_loss_scaled(opt_state) else opt_state
    got, got_types = types_of(state)
    if got == makes:
        leaves = zip(jax.tree_util.tree_leaves_with_path(state), types, got_types, strict=True)
        # A scalar may have been replaced by numbers of the user's own, such as learning rates.
        others = [(path, a, b) for (path, _), (a, _), (b, _) in leaves if a and a != b]
        if not others:
            return
        path, expected, shape = others[0]
        makes = f"an array of shape {expected} at {jax.tree_util.keystr(path)}"
        got = f"one of shape {shape}"
    raise ValueError(
        f"`{given}` is the state of another optimizer or of other parameters. `tx.init(params)` "
        f"makes {makes}, got {got}. {way}"
    )


def _name_kind(tree: Any) -> str | None:
    """Returns what a tree is, `None` if that is a class of somebody's own."""
    if is_array_like(tree):
        return "an array"
    known = tree is None or type(tree) in (dict, list, tuple)
    return with_article(type(tree).__name__) if known else None


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

"""Checks of what a step is given, alone and together, with the way out in each message."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._gradients.verdict import axis_names
from .._jax import AxisNames, varying
from .._policies.base import LossScale
from .._state.find import is_loss_scaled
from .._state.nodes import states_in
from .._state.optimizer import LossScaledState
from .._state.scale import check_alone, is_wrapped, unwrap
from .._state.storage import CompactState
from .._storage.rounding import HALF_DTYPES
from .._trees.arguments import describe_value
from .._trees.gradient_leaves import leaf_name, list_gradients, varying_axes
from .._trees.grammar import list_some, with_article
from .._trees.leaves import is_array_like, is_none
from .._trees.pytrees import OptState, Params, PyTree


def is_pair(value: object) -> bool:
    """True for a tuple of two."""
    return isinstance(value, tuple) and len(value) == 2


_WRITE_THE_STEP = (
    "The optimizer was given the gradients, the parameters and the loss as `value`, which is all "
    "that a `train_step` gives. If it needs more, write the step yourself: `loss, grads = "
    "jaxscale.value_and_grad(loss_fn, opt_state)(params, ...)`, or that of JAX for a bare "
    "optimizer, then `tx.update(grads, opt_state, params, ...)` with what it needs, such as "
    "`value=loss, grad=grads, value_fn=...` for a line search, or `grad_fn=...`. "
    "`jaxscale.apply_gradients` takes the same."
)


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
    takes = inspect.signature(tx.update).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    # That of an `optax.MultiSteps` takes extra arguments, though its type does not say so.
    is_told = takes_any or isinstance(tx, optax.GradientTransformationExtraArgs)

    def update(
        updates: optax.Updates,
        state: OptState,
        params: optax.Params | None = None,
        *,
        value: object = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        """Calls `tx.update`, with the loss under each name that it takes: `value` or `loss`."""
        if not is_told:
            return tx.update(updates, state, params)
        if value is not None:
            names_loss = "loss" in extra_args
            extra_args.pop("loss", None)
            if "value" in takes or takes_any:
                extra_args["value"] = value
            if "loss" in takes or (names_loss and takes_any):
                extra_args["loss"] = value
        try:
            return tx.update(updates, state, params, **extra_args)
        except (KeyError, TypeError, ValueError) as error:
            if value is not None and extra_args.keys() <= {"value", "loss"}:
                error.add_note(_WRITE_THE_STEP)
            raise

    return optax.GradientTransformationExtraArgs(tx.init, update)


def check_state(
    argument: str, state: OptState, policy: LossScale, expected: type, order: str
) -> LossScaledState:
    """Returns the state that a step was given, as arrays, or raises an error.

    `expected` is the type of the policy's state, and `order` that of the arguments of the call,
    empty if it has only one.
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
    """The hint of what to pass instead of something that is not a `LossScaledState`."""
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
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return  # not in `shard_map`: no type says that anything varies
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
    call: str, axis_name: AxisNames, what: str, new: PyTree, old: PyTree
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


def lost_structure(call: str, new_state: OptState, opt_state: OptState) -> ValueError:
    """Returns the error for a step that changed the structure of the state inside."""
    return ValueError(
        f"`{call}(inner)`: `inner.update` must keep the structure of its state, or a "
        "skipped step could not keep the state. If a part fills its state at the first update, "
        "as `optax.monitor` does, put it outside: `optax.chain(loss_scaled(...), "
        f"optax.monitor(...))`. The structures are {jax.tree.structure(opt_state)} and then "
        f"{jax.tree.structure(new_state)}."
    )


def check_clips_the_mean(call: str, inner_state: OptState) -> None:
    """Raises a `ValueError` if each micro-batch would be clipped, and not their mean."""
    for _, node in states_in(inner_state, _accumulates):
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
    for path, _ in states_in(inner_state, is_loss_scaled):
        raise ValueError(
            f"`{call}(inner).init`: `inner` already holds a `LossScaledState`, at "
            f"{jax.tree_util.keystr(path)} of its state. Two skips of one step cannot agree: "
            "wrap once, outermost, with `inner` as it was before."
        )


# Trees that belong together: gradients, parameters, optimizer state.


class TreeTypes(NamedTuple):
    """Structure and types of a tree: equal for two that may take each other's place. Hashable."""

    structure: Any
    leaves: tuple[tuple[Any, Any], ...]  # shape and dtype, `None` for what has none


def types_of(tree: PyTree) -> TreeTypes:
    """Returns the structure of a tree, and the shape and the dtype of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    types = [
        (getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves
    ]
    return TreeTypes(structure, tuple(types))


def check_gradients(argument: str, grads: optax.Updates, params: Params) -> None:
    """Raises a `ValueError` if gradients are not like the parameters.

    Gradients by example, as differential privacy takes them, have axes of their own in front.
    Trees of two different types, as `optax.lookahead` takes them, are meant to differ.
    """
    with_paths, of_grads = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_none)
    leaves, of_params = jax.tree.flatten(params, is_leaf=is_none)
    if grads is None and params is not None:
        of_grads = jax.tree.structure(grads)  # not every optimizer would notice
    if of_grads != of_params:
        both_plain = _is_plain(grads) and _is_plain(params)
        if type(grads) is not type(params) and not both_plain:
            return
        raise ValueError(
            f"`{argument}` must have the structure of the parameters. "
            f"{_explain_structures(grads, params)} Pass the gradients with respect to these "
            "parameters, with None or zeros for those that have none."
        )
    for (path, grad), param in zip(with_paths, leaves, strict=True):
        if not (is_array_like(grad) and is_array_like(param)):
            continue
        shape = jnp.shape(grad)
        expected = jnp.shape(param)
        own_axes = shape[len(shape) - len(expected) :]
        if len(shape) < len(expected) or own_axes != expected:
            raise ValueError(
                f"`{argument}`: the gradient at {leaf_name(path)} has the shape {shape}, and its "
                f"parameter {expected}. Pass the gradients with respect to these parameters; "
                "nothing is broadcast."
            )


def _explain_structures(grads: optax.Updates, params: Params) -> str:
    """Names the leaves that only the gradients have, or only the parameters."""
    grad_names = _leaf_names(grads)
    param_names = _leaf_names(params)
    if set(grad_names) == set(param_names):
        return (
            f"That of the gradients is {jax.tree.structure(grads)}, and that of the parameters "
            f"{jax.tree.structure(params)}."
        )
    return (
        f"Only among the gradients: {_list_missing(grad_names, param_names)}; only among the "
        f"parameters: {_list_missing(param_names, grad_names)}."
    )


def _is_plain(tree: PyTree) -> bool:
    """True for an array, None, or a built-in container: not for a class of somebody's own."""
    return is_array_like(tree) or tree is None or type(tree) in (dict, list, tuple)


def _leaf_names(tree: PyTree) -> list[str]:
    return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _list_missing(names: list[str], others: list[str]) -> str:
    """Lists the names that are not among the others, as text."""
    return list_some([name for name in names if name not in others], 5) or "none"


def check_not_narrower(inner_state: OptState, expected: TreeTypes) -> None:
    """Raises a `ValueError` if a state is half precision where its optimizer made float32.

    Plain Optax makes such moments for half-precision parameters. They would stay as they are, and
    take in next to nothing.
    """
    types = types_of(inner_state)
    # In a part of it, the size of an array does not say whether `compact_state` means it.
    is_compact = states_in(inner_state, lambda node: isinstance(node, CompactState))
    if types.structure != expected.structure or is_compact:
        return
    for (_, dtype), (_, made) in zip(types.leaves, expected.leaves, strict=True):
        if dtype in HALF_DTYPES and made == jnp.float32:
            raise ValueError(
                f"`opt_state.inner_state` has {dtype} where this optimizer keeps float32, as plain "
                "Optax makes it for half-precision parameters. Take it over once: `opt_state "
                "= jaxscale.from_state_dict(tx.init(params), jaxscale.to_state_dict(opt_state))`."
            )


def explain_difference(state: OptState, expected: TreeTypes) -> str:
    """Names what `init` makes and what a state has instead; empty if they are alike.

    A state may hold None in place of an array. It was made for a part of the parameters then, such
    as those that `eqx.filter` leaves of a module with a dropout rate.
    """
    entries = _entries_at(expected.structure, state)
    if entries is None:
        return f"makes {expected.structure}, got {jax.tree.structure(state)}"
    paths = iter(jax.tree_util.tree_leaves_with_path(state))
    for entry, (expected_shape, _) in zip(entries, expected.leaves, strict=True):
        if entry is None:
            continue
        path, _ = next(paths)
        shape = getattr(entry, "shape", None)
        # A scalar may have been replaced by numbers of the user's own, such as learning rates.
        if expected_shape and shape != expected_shape:
            place = jax.tree_util.keystr(path)
            return f"makes an array of shape {expected_shape} at {place}, got one of shape {shape}"
    return ""


def _entries_at(structure: Any, tree: PyTree) -> list[Any] | None:
    """Lists the entry of a tree at each leaf of a structure: a leaf, or None.

    It is `None` as a whole if the tree has another structure.
    """
    try:
        entries = structure.flatten_up_to(tree)
    except (TypeError, ValueError):
        return None
    for entry in entries:
        is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(entry))
        if entry is not None and not is_leaf:
            return None
    return entries

"""Whether the trees of a step belong together: gradients, parameters and the optimizer's state."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._state.optimizer import LossScaledState, MultiStepsState
from .._state.storage import CompactState
from .._storage.rounding import HALF_DTYPES
from .._trees.gradient_leaves import leaf_name
from .._trees.grammar import list_some, with_article
from .._trees.leaf import is_array_like

if TYPE_CHECKING:
    from .wrapped_optimizer import WrappedOptimizer


class TreeTypes(NamedTuple):
    """What two trees have in common if one may take the place of the other."""

    structure: Any
    leaves: list[tuple[Any, Any]]  # shape and dtype of each, `None` for what has none


def types_of(tree: Any) -> TreeTypes:
    """Returns the structure of a tree, and the shape and the dtype of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    types = [
        (getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves
    ]
    return TreeTypes(structure, types)


def hashable_types(tree: Any) -> Any:
    types = types_of(tree)
    return types.structure, tuple(types.leaves)


def check_gradients(
    argument: str, grads: optax.Updates, params: optax.Params | None
) -> None:
    """Raises a `ValueError` if gradients are not like the parameters, which may be unknown.

    Gradients by example, as differential privacy takes them, have axes of their own in front.
    Trees of two types of one's own, as `optax.lookahead` takes them, are meant to differ.
    """
    if params is None:
        return
    reason = _explain_structures(argument, grads, params)
    if reason:
        raise ValueError(reason)
    leaves, structure = jax.tree.flatten(params, is_leaf=_is_none)
    if jax.tree.structure(grads, is_leaf=_is_none) != structure:
        return
    with_paths = jax.tree_util.tree_leaves_with_path(grads, is_leaf=_is_none)
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


def _explain_structures(
    argument: str, grads: optax.Updates, params: optax.Params
) -> str:
    """Returns how the structure of gradients differs from that of the parameters, if it does."""
    if type(grads) is not type(params):
        kind = _name_kind(grads)
        expected = _name_kind(params)
        if kind is None or expected is None or kind == expected:
            return ""
        return (
            f"`{argument}` must have the structure of the parameters, {expected}, got {kind}. Pass "
            "the gradients with respect to these parameters."
        )
    of_grads = jax.tree.structure(grads, is_leaf=_is_none)
    of_params = jax.tree.structure(params, is_leaf=_is_none)
    if of_grads == of_params:
        return ""
    grad_names = _leaf_names(grads)
    param_names = _leaf_names(params)
    only_grads = [name for name in grad_names if name not in param_names]
    only_params = [name for name in param_names if name not in grad_names]
    difference = (
        f"That of the gradients is {of_grads}, and that of the parameters {of_params}."
    )
    if only_grads or only_params:
        difference = (
            f"Only among the gradients: {_list_names(only_grads)}; only among the parameters: "
            f"{_list_names(only_params)}."
        )
    return (
        f"`{argument}` must have the structure of the parameters. {difference} Pass the gradients "
        "with respect to these parameters, with None or zeros for those that have none."
    )


def _name_kind(tree: Any) -> str | None:
    """Returns what a tree is, `None` if that is a class of somebody's own."""
    if is_array_like(tree):
        return "an array"
    if tree is None or type(tree) in (dict, list, tuple):
        return with_article(type(tree).__name__)
    return None


def _leaf_names(tree: Any) -> list[str]:
    return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _list_names(names: list[str]) -> str:
    return list_some(names, 5) or "none"


def _is_none(leaf: Any) -> bool:
    return leaf is None


def are_half(params: Any) -> bool:
    """Returns whether any parameters are in half precision."""
    return any(dtype in HALF_DTYPES for _, dtype in types_of(params).leaves)


def check_not_narrower(inner_state: Any, expected: TreeTypes) -> None:
    """Raises a `ValueError` if a state is half precision where its optimizer made float32.

    Plain Optax makes such moments for half-precision parameters. They would stay as they are, and
    take in next to nothing.
    """
    types = types_of(inner_state)
    # In a part of it, the size of an array does not say whether `compact_state` means it.
    nodes = jax.tree.leaves(inner_state, is_leaf=_is_compact)
    if types.structure != expected.structure or any(map(_is_compact, nodes)):
        return
    for (_, dtype), (_, made) in zip(types.leaves, expected.leaves, strict=True):
        if dtype in HALF_DTYPES and made == jnp.float32:
            raise ValueError(
                f"`opt_state.inner_state` has {dtype} where this optimizer keeps float32, as plain "
                "Optax makes it for half-precision parameters. Take it over once: `opt_state "
                "= jaxscale.from_state_dict(tx.init(params), jaxscale.to_state_dict(opt_state))`."
            )


def _is_compact(node: Any) -> bool:
    return isinstance(node, CompactState)


def check_has_parts(
    argument: str, state: LossScaledState, own: "WrappedOptimizer"
) -> None:
    """Raises a `ValueError` if a state lacks what the optimizer around it was built with.

    It comes from a run with other options. What it lacks would be off, and nobody would notice.
    """
    if own.window.averages and not isinstance(state.inner_state, MultiStepsState):
        raise TypeError(
            "`multi_steps(...).update(state=...)` must be a state that its `init` or the last step "
            f"returned, got one with a {type(state.inner_state).__name__} for its window. Call "
            "`init` of the optimizer that `multi_steps` returned."
        )
    lacks = ""
    if own.spikes is not None and state.spikes is None:
        lacks = "without `spikes`"
    elif own.track_leaves and state.nonfinite_leaves is None:
        lacks = "without `track_leaves`"
    elif own.shows_norm and state.grad_norm is None:
        lacks = "without `max_norm`"
    elif own.spikes is not None:
        window = jnp.shape(state.spikes.losses)[-1]
        if window != own.spikes.window:
            lacks = f"with `SpikeRule(window={window})`"
            lacks += f", where this one has window={own.spikes.window}"
    if lacks:
        raise ValueError(
            f"`{argument}` is the state of an optimizer {lacks}. Take it over once, before the "
            "first step: `opt_state = jaxscale.from_state_dict(tx.init(params), "
            "jaxscale.to_state_dict(opt_state))`. What is new then starts as `init` makes it."
        )


def check_same_optimizer(
    argument: str,
    own: "WrappedOptimizer",
    state: LossScaledState,
    params: Any,
    way_out: str = "Pass the state that `init` of this optimizer returned for these parameters.",
) -> None:
    """Raises a `ValueError` if a state is not like the one that `tx.init(params)` makes."""
    if not all(map(is_array_like, jax.tree.leaves(params))):
        # for such parameters `init` saw only a part of them, and which is not known
        return
    try:
        expected = own.expected_types(params)
    except Exception:  # an `init` that needs values cannot be asked here
        return
    difference = _explain_difference(state.inner_state, expected)
    if difference:
        raise ValueError(
            f"`{argument}` is the state of another optimizer or of other parameters. "
            f"`tx.init(params)` {difference}. {way_out}"
        )


def _explain_difference(state: Any, expected: TreeTypes) -> str:
    """Returns what `init` makes and what a state has instead, empty if they are alike.

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


def _entries_at(structure: Any, tree: Any) -> list[Any] | None:
    """Returns what a tree has at each leaf of a structure: a leaf, or None.

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

"""A training state as nested dicts of NumPy arrays, which later versions can also read.

`to_state_dict` writes any tree by the names of its fields. `from_state_dict` reads it back into
the structure of a target, node by node, by their paths: fields of jaxscale's own states may come
and go between versions, while everything else must match, as a default would hide a lost number.
"""

from typing import Any

import jax
import numpy as np
import optax

from .._trees.grammar import list_some
from .._trees.leaves import check_in_reach
from .._trees.pytrees import PyTree
from .nodes import Nodes, Path, children_of, is_own_state, names_in, nodes_of
from .saved_nodes import UNMOVED_FIELDS, align
from .saved_numbers import check_number, is_abstract, place_of, restore_leaf
from .scale import UnitLossScaleState, unwrap
from .storage import CompactState, WeightsState

# A new version is for what older code would read wrong, not for any new field. Version 2 has the
# bits beside half-precision parameters, which readers of version 1 would drop. What has none is
# written as version 1, so that they can read it.
_WITH_WEIGHTS = 2
# Fields of our own states that have no default: the optimizer's states, and the number of
# micro-batches in an accumulator, which cannot be read without it.
_REQUIRED = ("inner_state", "inner_opt_state", "counted")
# Of a `WeightsState`, what keeps float32 parameters. Neither of both has what the other keeps.
_FORMS = {"remainders", "copies"}
# A message names at most this many leaves.
_MOST_PATHS = 5


def to_state_dict(tree: PyTree) -> dict[str, Any]:
    """Returns a tree as nested dicts of NumPy arrays, with a version. Waits for the device.

    Args:
      tree: an `opt_state`, a `TrainState`, a dict of them, or another container of numbers
        and arrays, typed keys included. If processes hold parts of an array, gather it first:
        `jax.experimental.multihost_utils.process_allgather(tree, tiled=True)`.

    Returns:
      `{"version": 1, ...}`, or 2 if bits beside half-precision parameters are in it: fields by
      their names, dicts by their keys as strings, tuples and lists by `"0"`, `"1"` and so on.
      Arrays are copied, typed keys become their key data, `None` stays `None`, and empty
      containers become `{}`. An array in a variable of Flax NNX is written without the variable.
      Write it by pickle or `flax.serialization.msgpack_serialize`; files of `np.savez` lose the
      types of bfloat16 and float8 arrays.

    Raises:
      TypeError: if a leaf is not an array or a number, or is traced.
      ValueError: if `tree` is not a container, or has a child named `version`, or if this process
        has only a part of an array.

    Example:
      >>> import jaxscale
      >>> list(jaxscale.to_state_dict(jaxscale.FixedLossScale(8).init()))
      ['version', 'loss_scale', 'growth_tracker', 'hysteresis_tracker']
    """
    nodes = jax.tree.leaves(tree, is_leaf=_is_weights)
    version = _WITH_WEIGHTS if any(map(_is_weights, nodes)) else 1
    return {"version": version} | _save((), _arrays("to_state_dict(tree)", tree))


def _is_weights(node: object) -> bool:
    return isinstance(node, WeightsState)


def _save(path: Path, node: object) -> Any:
    """Returns a node as nested dicts of NumPy arrays."""
    if node is None:
        return None
    children = children_of(node)
    if children is None:
        place = place_of("to_state_dict(tree)", path)
        number = check_number(place, node)
        check_in_reach(place, number)
        return np.array(number)
    return {name: _save((*path, name), child) for name, child in children.items()}


def from_state_dict(target: PyTree, state_dict: PyTree) -> Any:
    """Returns a tree like `target` with the numbers of a dictionary.

    Args:
      target: a tree with the structure of the result, such as a fresh `tx.init(params)`. Leaves may
        also be a `jax.ShapeDtypeStruct`, with a sharding or without, as `jax.eval_shape(tx.init,
        params)` makes them.
      state_dict: a dictionary that `to_state_dict` returned, in this or an earlier version, that
        `flax.serialization.to_state_dict` returned, or that orbax restored without a target.
        Without `"version"` it is read as version 1.

    Returns:
      A tree with the structure, shapes, dtypes and weak types of `target`. Arrays that are
      committed to devices in `target`, or have a sharding there, get that sharding, so that no step
      compiles again. In jaxscale's own states, a field that `state_dict` lacks, or has as `None`,
      keeps the value of `target`, and a field that `target` lacks is ignored, so that states of
      other versions and of other policies can be read. `inner_state`, `inner_opt_state` and
      `counted` have no default; they, and everything that is not jaxscale's own, must match. If a
      `SpikeRule` has another window than the one that was saved, the newest entries are kept. A
      saved loss scale replaces the policy's initial one, except that a `FixedLossScale` goes back
      to its own number in the first step; `opt_state._replace(scaling=policy.init())` starts it
      again. A run that scaled nothing, such as one with `skip_nonfinite`, saved no loss scale, so
      the policy starts with its initial one. A scale outside of the policy's bounds is brought to
      the nearest one in the first step. A float32 state is read into that of
      `jaxscale.compact_state`, rounded to nearest, and a compact one into a float32 state.

      The tree has variables of Flax NNX where `target` has them, and arrays where `target` has
      arrays, whichever were saved. `nnx.update` puts either into an optimizer::

          fresh = optimizer.opt_state  # of an nnx.Optimizer(model, tx, wrt=nnx.Param)
          nnx.update(fresh, nnx.state(jaxscale.from_state_dict(fresh, saved)))
          nnx.update(fresh.scaling, nnx.state(policy.init()))  # starts the scale again

    Raises:
      ValueError: if keys are missing or unknown (the error has their paths), if a shape differs, if
        the dtype of `target` cannot hold a number exactly, if a later version wrote the dictionary,
        or if a number is in neither, as `target` has only types.
      TypeError: if a leaf is not an array or a number, or is traced, or if it is of another
        kind than the one in `target`, such as a float for an integer.

    Warns:
      UserWarning: if only the scale is read from the state of an `AdaptiveLossScale`, a policy that
        went in 0.7.0.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.1, momentum=0.9), 8)
      >>> saved = jaxscale.to_state_dict(tx.init(jnp.ones(2)))
      >>> del saved["total_steps"]  # as if saved before there was such a counter
      >>> jaxscale.from_state_dict(tx.init(jnp.ones(2)), saved).total_steps
      Array(0, dtype=int32)
    """
    is_saved = isinstance(target, dict) and "version" in target
    if is_saved and not isinstance(state_dict, dict):
        raise TypeError(
            "`from_state_dict(target, state_dict)` got what was saved as `target`: pass it second, "
            "after a fresh `tx.init(params)`."
        )
    arrays = _arrays("from_state_dict(target)", target)
    values = children_of(state_dict)
    if values is None:
        raise TypeError(
            f"`from_state_dict(state_dict)` must be a dict, got {type(state_dict).__name__}."
        )
    _check_version(values.pop("version", 1))
    wanted = nodes_of(arrays)
    saved = align(values, arrays)
    _check_same_paths(saved, wanted)
    leaves = {}
    for path, node in wanted.items():
        if children_of(node) is None:
            leaves[path] = _restore(path, saved, wanted)
    _check_has_numbers(leaves)
    return jax.tree.unflatten(jax.tree.structure(target), leaves.values())


def _restore(path: Path, saved: Nodes, target: Nodes) -> Any:
    """Returns a leaf of the target with the numbers that were saved of it, or its default."""
    leaf = target[path]
    number = saved.get(path, leaf)
    if number is leaf:
        state = target[path[:-1]]
        defaults = getattr(state, "_field_defaults", {})
        if isinstance(state, UnitLossScaleState):
            defaults = UNMOVED_FIELDS
        default = defaults.get(path[-1])
        if default is None or not is_abstract(leaf):
            return leaf
        number = np.full(leaf.shape, default, leaf.dtype)
    above = [target[path[:depth]] for depth in range(len(path))]
    rounds = any(isinstance(node, CompactState) for node in above)
    return restore_leaf(path, leaf, number, rounds)


def _check_version(version: Any) -> None:
    # Orbax and NumPy's files make an array of it.
    if not any(np.array_equal(version, known) for known in (1, _WITH_WEIGHTS)):
        raise ValueError(
            f"`from_state_dict(state_dict)` must have a version from 1 to {_WITH_WEIGHTS}, got "
            f"{version!r}. If a later jaxscale wrote it, upgrade jaxscale to read it."
        )


def _check_same_paths(saved: Nodes, target: Nodes) -> None:
    """Raises a `ValueError` if one side has what the other lacks, and that has no default."""
    only_target = _list_only_in(target, saved, target)
    only_saved = _list_only_in(saved, target, target)
    if not only_target and not only_saved:
        return
    way_out = (
        "Make the target from the model and the optimizer that were saved, or rename the keys of "
        "the dictionary. If only one of the two is the state of a `loss_scaled` optimizer: as the "
        "target pass `target.inner_state`, and put the result into it by "
        '`target._replace(inner_state=...)`; or pass what was saved under "inner_state".'
    )
    for path in only_target + only_saved:
        above = [target.get(path[:depth]) for depth in range(len(path))]
        if any(map(_is_weights, above)):
            way_out = (
                "If the `mask` or the `storage` of `master_weights` has changed, restore with "
                "those that were saved, `old = jaxscale.from_state_dict(old_tx.init(params), "
                "state_dict)`, and go on from there, with all bits and moments: `_, opt_state = "
                "jaxscale.with_master_params(old._replace(weights=tx.init(params).weights), "
                "jaxscale.master_params(old, params))`. If the model has changed, make the target "
                "from the one that was saved."
            )
    raise ValueError(
        "`from_state_dict(target, state_dict)` needs the same keys in both, except for fields of "
        f"jaxscale's own states. Only in the target: {_join(*only_target)}; only in the "
        f"dictionary: {_join(*only_saved)}. {way_out}"
    )


def _join(*paths: Path) -> str:
    return ", ".join("/" + "/".join(path) for path in paths) or "none"


def _list_only_in(nodes: Nodes, others: Nodes, target: Nodes) -> list[Path]:
    """Returns the topmost paths that `others` lack and that have no default."""
    paths = []
    for path in nodes:
        above = path[:-1]
        if path in others or above not in others:
            continue
        names = names_in(nodes[above])
        other_names = names_in(others[above])
        # What has no field in common with a state is not another version of it.
        is_other = bool(names and other_names) and names.isdisjoint(other_names)
        is_required = path[-1] in _REQUIRED
        if path[-1] in _FORMS:
            is_required = any((*above, form) in others for form in _FORMS)
        if is_other or is_required or not is_own_state(target[above]):
            paths.append(path)
    return paths


def _check_has_numbers(leaves: dict[Path, Any]) -> None:
    """Raises a `ValueError` if there are types where nothing was saved."""
    paths = [path for path, leaf in leaves.items() if is_abstract(leaf)]
    if paths:
        places = list_some(list(map(_join, paths)), _MOST_PATHS)
        raise ValueError(
            f"`from_state_dict(target)` has only types, and nothing was saved for {places}. Pass a "
            "fresh `tx.init(params)`, whose numbers are the defaults."
        )


def _arrays(argument: str, tree: PyTree) -> Any:
    """Takes variables off the arrays of an argument, or raises an error if it is not a state."""
    if isinstance(tree, optax.GradientTransformation):
        raise TypeError(
            f"`{argument}` must be a state, got the optimizer itself, a {type(tree).__name__}. "
            "Pass `tx.init(params)`, or the state of the last step."
        )
    arrays = unwrap(tree)
    children = children_of(arrays)
    if children is None or "version" in children:
        raise ValueError(
            f"`{argument}` must be a container without a child named version, a key that the "
            f'format needs, got {type(arrays).__name__}. Pass {{"state": ...}}.'
        )
    return arrays

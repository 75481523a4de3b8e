"""A training state as nested dicts of NumPy arrays, which later versions can also read.

`to_state_dict` writes any tree by the names of its fields. `from_state_dict` reads it back into
the structure of a target: fields of jaxscale's own states may come and go between versions, while
everything else must match, as a default would hide a lost number.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.core import Tracer

from .._trees.grammar import list_some
from .._trees.leaves import check_in_reach
from .._trees.pytrees import PyTree, ScaleState
from .nodes import children_of, is_own_state, rebuild
from .optimizer import SPIKE_WINDOWS, SpikeState
from .saved_numbers import check_number, fill, is_abstract, place_of, restore_leaf
from .scale import UnitLossScaleState, is_policy_state, unwrap
from .storage import CompactState, WeightsState

# A new version is for what older code would read wrong, not for any new field. Version 2 has the
# bits beside half-precision parameters, which readers of version 1 would drop. What has none is
# written as version 1, so that they can read it.
_WITH_WEIGHTS = 2
# The fields of a saved state whose scale is 1, and has never moved.
_UNMOVED_FIELDS = {"loss_scale": 1, "growth_tracker": 0, "hysteresis_tracker": 0}
# Fields of our own states that have no default: the optimizer's states, and the number of
# micro-batches in an accumulator, which cannot be read without it.
_REQUIRED = ("inner_state", "inner_opt_state", "counted")
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
    return {"version": version} | _save("", _arrays("to_state_dict(tree)", tree))


def _is_weights(node: object) -> bool:
    return isinstance(node, WeightsState)


def _save(path: str, node: object) -> Any:
    """Returns a node as nested dicts of NumPy arrays."""
    if node is None:
        return None
    children = children_of(node)
    if children is None:
        place = place_of("tree", path)
        number = check_number(place, node)
        check_in_reach(place, number)
        return np.array(number)
    return {name: _save(f"{path}/{name}", child) for name, child in children.items()}


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
      compiles again. In
      jaxscale's own states, a field that `state_dict` lacks, or has as `None`, keeps the value
      of `target`, and a field that `target` lacks is ignored, so that states of other versions
      and of other policies can be read. `inner_state`, `inner_opt_state` and `counted` have no
      default; they, and everything that is not jaxscale's own, must match. If a `SpikeRule` has
      another window than the one that was saved, the newest entries are kept. A saved loss scale
      replaces the policy's initial one, except that a `FixedLossScale` goes back to its own number
      in the first step; `opt_state._replace(scaling=policy.init())` starts it
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
    saved = children_of(state_dict)
    if saved is None:
        raise TypeError(
            f"`from_state_dict(state_dict)` must be a dict, got {type(state_dict).__name__}."
        )
    _check_version(saved.pop("version", 1))
    unmatched = _Unmatched(missing=[], unknown=[])
    restored = _restore("", arrays, saved, unmatched)
    _check_all_matched(unmatched)
    _check_has_numbers(restored)
    return jax.tree.unflatten(jax.tree.structure(target), jax.tree.leaves(restored))


class _Unmatched(NamedTuple):
    """The paths of what only one side has, which `_restore` enters here."""

    missing: list[str]  # only in the target
    unknown: list[str]  # only in the dictionary


def _restore(
    path: str, node: object, saved: PyTree, unmatched: _Unmatched, rounds: bool = False
) -> Any:
    """Returns a node of the target with the numbers that were saved of it.

    `rounds` says that numbers are rounded to nearest where the target holds fewer bits.
    """
    children = children_of(node)
    values = children_of(saved)
    if values is not None and _is_variable(values, children):
        return _restore(path, node, values["value"], unmatched, rounds)
    if children is None and values is None:
        return restore_leaf(path, node, saved, rounds)
    if children is None or values is None:
        raise TypeError(
            f"{place_of('state_dict', path)} must have what the target has there, "
            f"{type(node).__name__}, got {type(saved).__name__}."
        )
    if isinstance(node, UnitLossScaleState):
        return _fill_unit(node)
    if isinstance(node, CompactState):
        rounds = True
        if "inner_state" not in values:  # that of the optimizer, before it was compact
            values = {"inner_state": saved}
    elif values.keys() == set(CompactState._fields) and not children.keys() & values:
        return _restore(path, node, values["inner_state"], unmatched)
    if isinstance(node, WeightsState):
        _check_same_weights(path, children, values)

    # What has no field in common with this state is not another version of it.
    is_other = bool(values) and values.keys().isdisjoint(children)
    is_own = is_own_state(node) and not is_other
    if is_own:
        if "scaling" in children and _scaled_nothing(values.get("scaling"), values):
            values["scaling"] = None  # so that the target's stays
        if path == "" and is_policy_state(node) and _scaled_nothing(values, {}):
            return node
    if children.keys() >= set(SpikeState._fields):
        _resize_windows(children, values)

    restored = []
    for name, child in children.items():
        child_path = f"{path}/{name}"
        value = values.pop(name, None)
        if not _is_empty(child) and not _is_empty(value):
            child = _restore(child_path, child, value, unmatched, rounds)
        elif not is_own or name in _REQUIRED:
            if not _is_empty(child):
                unmatched.missing.append(child_path)
            if not _is_empty(value):
                unmatched.unknown.append(child_path)
        else:
            child = _take_default(node, name, child)
        restored.append(child)
    if not is_own:
        for name, value in values.items():
            if not _is_empty(value):
                unmatched.unknown.append(f"{path}/{name}")
    return rebuild(node, restored)


def _take_default(node: object, name: str, child: object) -> Any:
    """Returns a child of one of our states that was not saved.

    It is that of the target or, where that has only types, the default of the field.
    """
    if isinstance(child, UnitLossScaleState):
        return _fill_unit(child)
    default = getattr(node, "_field_defaults", {}).get(name)
    if default is None:
        return child
    return fill(child, default)


def _fill_unit(state: UnitLossScaleState) -> UnitLossScaleState:
    """Returns a state whose type says that the scale is 1, whatever was saved."""
    return UnitLossScaleState(*map(fill, state, _UNMOVED_FIELDS.values()))


def _check_same_weights(
    path: str, children: dict[str, Any], values: dict[str, Any]
) -> None:
    """Raises a `ValueError` if float32 parameters were saved beside others than the target's.

    It is the `mask` or the `storage` that has changed, and neither of both has what the other
    keeps. What keeps none at all is the state of another wrapper.
    """
    wanted = _list_beside(children)
    saved = _list_beside(values)
    if not saved or not wanted or saved == wanted:
        return
    only_wanted = ", ".join(sorted(wanted - saved)) or "none"
    only_saved = ", ".join(sorted(saved - wanted)) or "none"
    raise ValueError(
        f"{place_of('state_dict', path)} has other float32 parameters than the target. Only in the "
        f"target: {only_wanted}; only in the dictionary: {only_saved}. If the `mask` or the "
        "`storage` of `master_weights` has changed, restore with those that were saved, `old = "
        "jaxscale.from_state_dict(old_tx.init(params), state_dict)`, and go on from there, with "
        "all bits and moments: `_, opt_state = jaxscale.with_master_params(old._replace("
        "weights=tx.init(params).weights), jaxscale.master_params(old, params))`. If the model has "
        "changed, make the target from the one that was saved."
    )


def _list_beside(weights: dict[str, Any]) -> set[str]:
    """Returns the paths of what stands beside parameters, in a state or in what was saved of it."""
    paths = set()
    for form in ("remainders", "copies"):
        pairs = jax.tree_util.tree_leaves_with_path(weights.get(form))
        for path, _ in pairs:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            # Flax and Orbax write variables as dictionaries.
            paths.add(f"{form}/{name}".removesuffix("/value"))
    return paths


def _is_variable(values: dict[str, Any], children: dict[str, Any] | None) -> bool:
    """Returns whether a saved node is a variable around a leaf, as Flax and Orbax write it."""
    is_named_so = children is not None and "value" in children
    return values.keys() == {"value"} and not is_named_so


def _check_version(version: Any) -> None:
    # Orbax and NumPy's files make an array of it.
    is_integer = np.shape(version) == () and np.asarray(version).dtype.kind in "iu"
    if not is_integer or int(version) not in range(1, _WITH_WEIGHTS + 1):
        raise ValueError(
            f"`from_state_dict(state_dict)` must have a version from 1 to {_WITH_WEIGHTS}, got "
            f"{version!r}. If a later jaxscale wrote it, upgrade jaxscale to read it."
        )


def _check_all_matched(unmatched: _Unmatched) -> None:
    if not unmatched.missing and not unmatched.unknown:
        return
    missing = ", ".join(unmatched.missing) or "none"
    unknown = ", ".join(unmatched.unknown) or "none"
    raise ValueError(
        "`from_state_dict(target, state_dict)` needs the same keys in both, except for fields "
        f"of jaxscale's own states. Only in the target: {missing}; only "
        f"in the dictionary: {unknown}. Make the target from the model "
        "and the optimizer that were saved, or rename the keys of the dictionary. If only "
        "one of the two is the state of a `loss_scaled` optimizer: as the target pass "
        "`target.inner_state`, and put the result into it by `target._replace(inner_state=...)`"
        '; or pass what was saved under "inner_state".'
    )


def _check_has_numbers(tree: PyTree) -> None:
    """Raises a `ValueError` if a restored tree has types where nothing was saved."""
    paths = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_abstract(leaf):
            paths.append("/" + jax.tree_util.keystr(path, simple=True, separator="/"))
    if paths:
        places = list_some(paths, _MOST_PATHS)
        raise ValueError(
            f"`from_state_dict(target)` has only types, and nothing was saved for {places}. Pass a "
            "fresh `tx.init(params)`, whose numbers are the defaults."
        )


def _scaled_nothing(scaling: ScaleState, state: dict[str, Any]) -> bool:
    """Returns whether a saved scale of 1 is that of a run that scaled nothing.

    `skip_nonfinite`, and a fixed scale of 1, save such a scale. One that came down to 1 looks the
    same after an overflow, and only there, as any other step counts towards growth. So it is one
    that came down if the last step of the `state` around it was an overflow.
    """
    fields = children_of(scaling) or {}
    for name, unmoved in _UNMOVED_FIELDS.items():
        number = _find_number(fields, name)
        if number is None or np.any(number != unmoved):
            return False
    num_bad = _find_number(state, "total_notfinite", default=0)
    num_bad_losses = _find_number(state, "total_notfinite_loss", default=0)
    is_applied = _find_number(state, "step_applied", default=True)
    return not np.any((num_bad > num_bad_losses) & ~is_applied)


def _find_number(fields: dict[str, Any], name: str, default: PyTree = None) -> Any:
    """Returns the number of a saved field as an array, whatever variable is around it."""
    leaves = jax.tree.leaves(fields.get(name))
    if not leaves or isinstance(leaves[0], Tracer):  # which is an error later
        leaves = jax.tree.leaves(default)
    if not leaves:
        return None
    return np.asarray(leaves[0])


def _is_empty(node: object) -> bool:
    return not jax.tree.leaves(node)


def _resize_windows(children: dict[str, Any], values: dict[str, Any]) -> None:
    """Gives the saved windows of a `SpikeState`, and their counts, the lengths of the target's."""
    for name, count_name, *_ in SPIKE_WINDOWS.values():
        length = np.shape(children[name])[-1]
        window = _find_number(values, name)
        if window is None or window.ndim == 0 or window.shape[-1] == length:
            continue
        # The newest entries are at the end, and zeros before them.
        newest = window[..., -length:]
        missing = np.zeros((*window.shape[:-1], length), window.dtype)
        values[name] = np.concatenate([missing, newest], axis=-1)[..., -length:]
        count = _find_number(values, count_name)
        if count is not None:
            count = np.minimum(count, np.int32(length))
        values[count_name] = count


def _arrays(argument: str, tree: PyTree) -> Any:
    """Returns an argument without variables around its arrays, or an error if it is no state."""
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

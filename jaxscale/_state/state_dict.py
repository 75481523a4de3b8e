"""A training state as nested dicts of NumPy arrays, which later versions can read, too.

`to_state_dict` writes any tree by the names of its fields. `from_state_dict` reads it back into
the structure of a target: fields of jaxscale's own states may come and go between versions, while
everything else must match, as a default would hide a lost number.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from .optimizer import SpikeState
from .scale import UnitLossScaleState, is_policy_state, unwrap

# Raise it if older code could not read a dictionary by its rules; a new field is not such a case.
_VERSION = 1
# Fields of our own states that have no default: the optimizer's states, and the number of
# micro-batches in an accumulator, which cannot be read without it.
_REQUIRED = ("inner_state", "inner_opt_state", "counted")
# The names of fields in version 0.1, and what they are called now.
_RENAMED = {"grads_finite": "step_applied"}
# The windows of a `SpikeState`, and the field that counts the entries of each.
_WINDOWS = {"losses": "loss_count", "grad_norms": "norm_count"}
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def to_state_dict(tree: Any) -> dict[str, Any]:
    """Returns a tree as nested dicts of NumPy arrays, with a version. Waits for the device.

    Args:
      tree: an `opt_state`, a `TrainState`, a dict of them, or another container of numbers
        and arrays, typed keys included. This process must be able to read all of each array.

    Returns:
      `{"version": 1, ...}`: fields by their names, dicts by their keys as strings,
      tuples and lists by `"0"`, `"1"` and so on. Arrays are copied, typed keys become their
      key data, `None` stays, and other empty containers become `{}`. An array in a variable
      of Flax NNX is written without the variable.

    Raises:
      TypeError: if a leaf is not an array or a number, or is traced.
      ValueError: if `tree` is not a container, or has a child named `version`.

    Example:
      >>> import jaxscale
      >>> list(jaxscale.to_state_dict(jaxscale.FixedLossScale(8).init()))
      ['version', 'loss_scale', 'growth_tracker', 'hysteresis_tracker']
    """

    def save(path: str, node: Any) -> Any:
        children, _ = _flatten(node)
        if children is None:
            return np.array(_data(_at("tree", path), node))
        nodes = {name: save(f"{path}/{name}", child) for name, child in children.items()}
        return None if node is None else nodes

    _check_not_optimizer("to_state_dict(tree)", tree)
    tree = unwrap(tree)
    _check_root("to_state_dict(tree)", tree)
    return {"version": _VERSION} | save("", tree)


def from_state_dict(target: Any, state_dict: Any) -> Any:
    """Returns a tree like `target` with the numbers of a dictionary.

    Args:
      target: a tree with the structure of the result, such as a fresh `tx.init(params)`.
      state_dict: a dictionary that `to_state_dict` returned, in this or an earlier version, or
        `flax.serialization.to_state_dict`, or that orbax restored without a target. Without
        `"version"` it is read as version 1.

    Returns:
      A tree with the structure, shapes, dtypes and weak types of `target`, and the shardings of
      those of its arrays that are committed to devices, so that no step compiles anew. In
      jaxscale's own states, a field that `state_dict` lacks, or has as `None`, keeps the value
      of `target`, and a field that `target` lacks is ignored, so that states of other versions
      and of other policies can be read. `inner_state`, `inner_opt_state` and `counted` have no
      default; they, and everything that is not jaxscale's own, must match. If a `SpikeRule` has
      another window than the one that was saved, the newest entries are kept. A saved loss scale
      replaces the policy's own; `opt_state._replace(scaling=policy.init())` starts it anew. A run
      that scaled nothing, as `skip_nonfinite` does, saved no loss scale, and the policy starts with
      its own. A scale above the largest one of a policy is lowered to that in the first step.

      The tree has variables of Flax NNX where `target` has them, and arrays where `target` has
      arrays, whichever were saved. `nnx.update` puts either into an optimizer::

          fresh = optimizer.opt_state  # of an nnx.Optimizer(model, tx, wrt=nnx.Param)
          nnx.update(fresh, nnx.state(jaxscale.from_state_dict(fresh, saved)))
          nnx.update(fresh.scaling, nnx.state(policy.init()))  # starts the scale anew

    Raises:
      ValueError: if keys are missing or unknown, with their paths; if a shape differs, or a number
        has no equal in the dtype of `target`; or if a later version wrote the dictionary.
      TypeError: if a leaf is not an array or a number, or is traced; or if it is of another
        kind than that of `target`, such as a float for an integer.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jaxscale
      >>> tx = jaxscale.loss_scaled(optax.sgd(0.1, momentum=0.9), 8)
      >>> saved = jaxscale.to_state_dict(tx.init(jnp.ones(2)))
      >>> del saved["total_steps"]  # as if saved before there was such a counter
      >>> jaxscale.from_state_dict(tx.init(jnp.ones(2)), saved).total_steps
      Array(0, dtype=int32)
    """
    missing: list[str] = []
    surplus: list[str] = []

    def restore(path: str, node: Any, saved: Any) -> Any:
        (children, rebuild), (values, _) = _flatten(node), _flatten(saved)
        if values is not None and values.keys() == {"value"} and "value" not in (children or ()):
            return restore(path, node, values["value"])  # a variable, as Flax and Orbax write it
        if children is None and values is None:
            return _like(path, node, saved)
        if children is None or values is None:
            raise TypeError(
                f"{_at('state_dict', path)} must have what the target has there, "
                f"{type(node).__name__}, got {type(saved).__name__}."
            )
        if isinstance(node, UnitLossScaleState):
            return node  # its type says that the scale is 1, whatever was saved
        # Without a field in common it is not another version of this state, but something else.
        own = _is_own(node) and not (values and values.keys().isdisjoint(children))
        if own:
            values = {_RENAMED.get(name, name): value for name, value in values.items()}
            if "scaling" in children and _scaled_nothing(values.get("scaling"), values):
                values["scaling"] = None  # so that of the target stays
            if not path and is_policy_state(node) and _scaled_nothing(values, {}):
                return node
        if set(SpikeState._fields) <= children.keys():
            _resize_windows(children, values)

        def restore_child(name: str, child: Any) -> Any:
            where, value = f"{path}/{name}", values.pop(name, None)
            if not (_is_empty(child) or _is_empty(value)):
                return restore(where, child, value)
            if not own or name in _REQUIRED:
                if not _is_empty(child):
                    missing.append(where)
                if not _is_empty(value):
                    surplus.append(where)
            return child

        restored = rebuild([restore_child(name, child) for name, child in children.items()])
        if not own:
            surplus.extend(f"{path}/{name}" for name in values if not _is_empty(values[name]))
        return restored

    if isinstance(target, dict) and "version" in target and not isinstance(state_dict, dict):
        raise TypeError(
            "`from_state_dict(target, state_dict)` got what was saved as `target`: pass it second, "
            "after a fresh `tx.init(params)`."
        )
    _check_not_optimizer("from_state_dict(target)", target)
    arrays = unwrap(target)
    _check_root("from_state_dict(target)", arrays)
    saved, _ = _flatten(state_dict)
    if saved is None:
        raise TypeError(
            f"`from_state_dict(state_dict)` must be a dict, got {type(state_dict).__name__}."
        )
    version = saved.pop("version", 1)
    # Orbax and NumPy's files make an array of it.
    is_number = np.shape(version) == () and np.asarray(version).dtype.kind in "iu"
    if not is_number or int(version) not in range(1, _VERSION + 1):
        raise ValueError(
            f"`from_state_dict(state_dict)` must have a version from 1 to {_VERSION}, got "
            f"{version!r}. If a later jaxscale wrote it, upgrade jaxscale to read it."
        )
    restored = restore("", arrays, saved)
    if missing or surplus:
        raise ValueError(
            "`from_state_dict(target, state_dict)` needs the same keys in both, except for fields "
            f"of jaxscale's own states. Only in the target: {', '.join(missing) or 'none'}; only "
            f"in the dictionary: {', '.join(surplus) or 'none'}. Make the target from the model "
            "and the optimizer that were saved, or rename the keys of the dictionary. If only "
            "one of the two is the state of a `loss_scaled` optimizer: as the target pass "
            "`target.inner_state`, and put the result into it by `target._replace(inner_state=...)`"
            '; or pass what was saved under "inner_state".'
        )
    return jax.tree.unflatten(jax.tree.structure(target), jax.tree.leaves(restored))


def _flatten(node: Any) -> tuple[dict[str, Any] | None, Any]:
    """Returns the children of a node by name, `None` for a leaf, and how to rebuild it."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    children = {jax.tree_util.keystr(path, simple=True): child for path, child in pairs}
    return None if jax.tree_util.all_leaves([node]) else children, treedef.unflatten


def _scaled_nothing(scaling: Any, state: dict[str, Any]) -> bool:
    """Returns whether a saved scale of 1 is none, as `skip_nonfinite` and a fixed one of 1 have.

    One that came down to 1 looks the same after an overflow, and only there: any other step counts
    towards growth. So it is one if the last step of the `state` around it was an overflow.
    """
    names = ("loss_scale", "growth_tracker", "hysteresis_tracker")
    saved = _flatten(scaling)[0] or {}
    numbers = [jax.tree.leaves(saved.get(name)) for name in names]
    if not all(numbers):
        return False
    scale, *trackers = (each[0] for each in numbers)
    if np.any(np.asarray(scale) != 1) or np.any(trackers):
        return False

    def count(name: str, default: Any) -> np.ndarray:
        leaves = jax.tree.leaves(state.get(name))
        return np.asarray(leaves[0] if leaves else default)

    overflows = count("total_notfinite", 0) - count("total_notfinite_loss", 0)
    return not np.any((overflows > 0) & ~count("step_applied", True))


def _is_empty(node: Any) -> bool:
    return not jax.tree.leaves(node)


def _resize_windows(children: dict[str, Any], values: dict[str, Any]) -> None:
    """Gives the saved windows of a `SpikeState`, and their counts, the lengths of a target."""
    for name, count in _WINDOWS.items():
        length = np.shape(children[name])[-1]
        saved, number = (jax.tree.leaves(values.get(key)) for key in (name, count))
        if saved and np.ndim(saved[0]) and np.shape(saved[0])[-1] != length:
            # The newest entries are at the end, and zeros before them.
            kept = np.asarray(saved[0])[..., -length:]
            front = [(0, 0)] * (kept.ndim - 1) + [(length - kept.shape[-1], 0)]
            values[name] = np.pad(kept, front)
            values[count] = np.minimum(number[0], np.int32(length)) if number else None


def _is_own(node: Any) -> bool:
    # Only named tuples: a `TrainState` is jaxscale's own, too, but its fields have no defaults.
    if hasattr(node, "_fields"):
        return type(node).__module__.partition(".")[0] == __name__.partition(".")[0]
    # `nnx.state` makes a mapping of a named tuple.
    return isinstance(node, Mapping) and {"scaling", "total_steps"} <= set(node)


def _at(argument: str, path: str) -> str:
    call = "to_state_dict" if argument == "tree" else "from_state_dict"
    return f"`{call}({argument})` at {path or '/'}"


def _check_not_optimizer(given: str, tree: Any) -> None:
    if isinstance(tree, optax.GradientTransformation):
        raise TypeError(
            f"`{given}` must be a state, got the optimizer itself, a {type(tree).__name__}. Pass "
            "`tx.init(params)`, or the state of the last step."
        )


def _check_root(given: str, tree: Any) -> None:
    children, _ = _flatten(tree)
    if children is None or "version" in children:
        raise ValueError(
            f"`{given}` must be a container without a child named version, a key that the format "
            f'needs, got {type(tree).__name__}. Pass {{"state": ...}}.'
        )


def _is_key(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _data(given: str, leaf: Any) -> Any:
    """Returns a leaf that is an array or a number; for a typed key its data."""
    accepted = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    if not isinstance(leaf, accepted) or isinstance(leaf, Tracer):
        raise TypeError(
            f"{given} must be an array or a number, outside of `jit`, got {leaf!r}. If a model "
            "holds functions, pass only its arrays."
        )
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and _is_key(leaf) else leaf


def _like(path: str, target: Any, leaf: Any) -> Any:
    """Returns the numbers of a leaf with the type, shape, dtype and sharding of `target`."""
    given = _at("state_dict", path)
    like, values = _data(_at("target", path), target), np.array(_data(given, leaf))
    if values.shape != np.shape(like):
        raise ValueError(f"{given} must be of shape {np.shape(like)}, got {values.shape}.")
    values = _exactly(given, values, np.dtype(getattr(like, "dtype", type(like))))
    if isinstance(target, np.ndarray):
        return values
    if not isinstance(target, jax.Array):
        return type(target)(values[()])
    if _is_key(target):
        impl = jax.random.key_impl(target)
        values = jax.random.wrap_key_data(jnp.asarray(values), impl=impl)
    elif jax.typeof(target).weak_type:
        values = target.at[...].set(values)  # keeps the weak type, as a copy does not
    return jax.device_put(values, target.sharding if target.committed else None)


def _exactly(given: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns numbers in a dtype of their kind, in which each of them must have an equal."""
    if values.dtype == dtype:
        return values
    kinds = [[kind for kind in _KINDS if jnp.issubdtype(d, kind)] for d in (values.dtype, dtype)]
    if kinds[0] != kinds[1] or not kinds[0]:
        raise TypeError(f"{given} must be {dtype}, got {values.dtype}: {values.ravel()[:1]}.")
    with np.errstate(all="ignore"):
        cast = values.astype(dtype)
        exact = (cast.astype(values.dtype) == values) | (values != values)
    if kinds[0] == [jnp.integer]:  # a wrapped number wraps back, with another sign between
        exact &= (cast < 0) == (values < 0)
    if not exact.all():
        raise ValueError(
            f"{given} must be {dtype}, got {values.dtype}: {values[~exact][0]} would become "
            f"{cast[~exact][0]}. Cast it in the dictionary, if that is meant."
        )
    return cast

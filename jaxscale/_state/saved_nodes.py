"""The nodes of what was saved, in the form of a target that keeps the same numbers in another."""

import warnings
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._jax import users_stacklevel
from .nodes import Nodes, Path, children_of, is_own_state, nodes_of
from .optimizer import SPIKE_WINDOWS, SpikeState
from .saved_numbers import place_of
from .scale import AdaptiveState, UnitLossScaleState, is_policy_state
from .storage import CompactState

# The fields of a state whose scale is 1, and has never moved.
UNMOVED_FIELDS = {"loss_scale": 1, "growth_tracker": 0, "hysteresis_tracker": 0}


def align(saved: object, target: object, path: Path = ()) -> Nodes:
    """Returns the nodes of what was saved by the paths that they have in a target.

    They stop at what the target lacks. Where nothing was saved that it can use, they are its own.
    """
    values = children_of(saved)
    children = children_of(target)
    is_named_so = children is not None and "value" in children
    if values is not None and values.keys() == {"value"} and not is_named_so:
        # a variable around a leaf, as Flax and Orbax write it
        return align(values["value"], target, path)
    if values is None and children is None:
        return {path: saved}
    if values is None or children is None:
        raise TypeError(
            f"{place_of('from_state_dict(state_dict)', path)} must have what the target has there, "
            f"{type(target).__name__}, got {type(saved).__name__}."
        )
    if isinstance(target, UnitLossScaleState):
        return nodes_of(target, path)  # its type says that the scale is 1
    if isinstance(target, CompactState) and "inner_state" not in values:
        # that of the optimizer, before it was compact
        values = {"inner_state": saved}
    elif values.keys() == set(CompactState._fields) and not children.keys() & values:
        return align(values["inner_state"], target, path)
    values = _leave_out_adaptive(values, children, path)
    if is_own_state(target):
        if path == () and is_policy_state(target) and _scaled_nothing(values, {}):
            return nodes_of(target)
        if "scaling" in children and _scaled_nothing(values.get("scaling"), values):
            values["scaling"] = children["scaling"]
    if children.keys() >= set(SpikeState._fields):
        _resize_windows(values, children)

    nodes: Nodes = {path: values}
    for name, value in values.items():
        child = children.get(name)
        if jax.tree.leaves(value) and jax.tree.leaves(child):
            nodes |= align(value, child, (*path, name))
        elif jax.tree.leaves(value):
            nodes[*path, name] = value
    return nodes


def _leave_out_adaptive(
    values: dict[str, Any], children: dict[str, Any], path: Path
) -> dict[str, Any]:
    """Takes only the scale from the state of an `AdaptiveLossScale`, and warns of the rest."""
    fields = set(AdaptiveState._fields)
    if values.keys() != fields or children.keys() >= fields:
        return values
    if "loss_scale" not in children:
        return values
    warnings.warn(
        f"{place_of('from_state_dict(state_dict)', path)} has the state of an "
        "`AdaptiveLossScale`, a policy that went in jaxscale 0.7.0. Its loss scale is kept, and "
        "so are all counters of the run; the rest of it is dropped. "
        "`examples/adaptive_scale.py` has a policy that also follows the largest gradient.",
        stacklevel=users_stacklevel(),
    )
    return children | {"loss_scale": values["loss_scale"]}


def _scaled_nothing(scaling: object, state: dict[str, Any]) -> bool:
    """Finds that a saved scale of 1 is that of a run that scaled nothing.

    `skip_nonfinite`, and a fixed scale of 1, save such a scale. One that came down to 1 looks the
    same after an overflow, and only there, as any other step counts towards growth. So it is one
    that came down if the last step of the `state` around it was an overflow.
    """
    fields = children_of(scaling) or {}
    for name, unmoved in UNMOVED_FIELDS.items():
        if np.any(_number(fields, name, np.nan) != unmoved):
            return False
    num_bad = _number(state, "total_notfinite", 0)
    num_bad_losses = _number(state, "total_notfinite_loss", 0)
    is_applied = _number(state, "step_applied", True)
    return not np.any((num_bad > num_bad_losses) & ~is_applied)


def _number(fields: dict[str, Any], name: str, default: Any) -> np.ndarray:
    """Returns the number of a saved field, whatever variable is around it."""
    leaves = jax.tree.leaves(fields.get(name))
    if not leaves or isinstance(leaves[0], Tracer):  # which is an error later
        leaves = [default]
    return np.asarray(leaves[0])


def _resize_windows(values: dict[str, Any], spikes: dict[str, Any]) -> None:
    """Gives saved windows of spikes, and their counts, the lengths that a target has."""
    for name, count_name, *_ in SPIKE_WINDOWS.values():
        length = np.shape(spikes[name])[-1]
        window = _number(values, name, 0)
        if window.ndim == 0:
            continue
        # The newest entries are at the end, and zeros before them.
        zeros = np.zeros((*window.shape[:-1], length), window.dtype)
        values[name] = np.concatenate([zeros, window], axis=-1)[..., -length:]
        count = _number(values, count_name, 0)
        values[count_name] = np.minimum(count, np.int32(length))

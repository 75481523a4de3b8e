"""Named axes: along which ones arrays may differ, and devices exchange numbers."""

from collections.abc import Iterable
from typing import Any

import jax

from .jaxpr_types import AbstractValue, AxisName
from .pruned_jaxprs import ClosedJaxpr, Jaxpr


def varying(aval: AbstractValue) -> frozenset[Any]:
    """Returns the mesh axes along which arrays of a type may differ, inside `shard_map`.

    The set is empty where JAX does not know: in `pmap`, and with `check_vma=False`.
    """
    # Refs and tokens have no such type.
    manual = getattr(aval, "manual_axis_type", None)
    return getattr(manual, "varying", frozenset())


def vary(array: jax.Array, axes: Iterable[Any]) -> jax.Array:
    """Returns an array as one that may differ along more axes."""
    missing = frozenset(axes) - varying(jax.typeof(array))
    if not missing:
        return array
    in_order = tuple(sorted(missing, key=repr))
    return jax.lax.pcast(array, in_order, to="varying")


def sum_over_devices(array: jax.Array, axes: Iterable[Any]) -> jax.Array:
    """Returns the sum of an array over all devices along some named axes."""
    # Sorted, as all hosts must trace one program, and the order of a set is up to the process.
    in_order = tuple(sorted(axes, key=repr))
    if not in_order:
        return array
    return jax.lax.psum(array, in_order)


def axes_to_agree_along(array: jax.Array, axes: Iterable[Any]) -> list[Any]:
    """Returns the axes, of some named ones, along which copies of an array may not be equal."""
    known_to_vary = varying(jax.typeof(array))
    return [
        axis for axis in axes if axis in known_to_vary or not is_visible_in_types(axis)
    ]


def collective_axes(jaxpr: Jaxpr | ClosedJaxpr) -> list[Any]:
    """Returns the named axes along which the devices that run a jaxpr exchange numbers."""
    axes = []
    effects: Any = jaxpr.effects  # one for each such axis
    for effect in effects:
        if type(effect).__name__ == "NamedAxisEffect":
            axes.append(effect.name)
    # Sorted, as all hosts must trace one program, and the order of a set is up to the process.
    return sorted(axes, key=repr)


def is_visible_in_types(axis: AxisName) -> bool:
    """True if types say what varies along a named axis, as in a checked `shard_map`."""
    program = jax.make_jaxpr(lambda: jax.lax.axis_index(axis))()
    (index_type,) = program.out_avals
    return bool(varying(index_type))

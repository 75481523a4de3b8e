"""A warning of half-precision parameters whose updates are rounded away."""

import warnings
from typing import Any

import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, tree_leaves_with_path

from .._trees.leaves import dtype_of, is_array_like, is_inexact_leaf
from .rounding import HALF_DTYPES

# Half of the distance between two numbers, in percent of the larger and of the smaller one.
_HALF_UNITS = {"bfloat16": "0.2 to 0.4 %", "float16": "0.02 to 0.05 %"}


def warn_of_losses(
    call: str, params: optax.Params, inner_state: optax.OptState
) -> None:
    """Warns if half-precision parameters are trained without anything beside them.

    A parameter is trained if the state of the optimizer has an array of its shape for it, such as a
    moment: its path ends as that of the parameter. A frozen base has none.
    """
    ends = _EndsOfPaths(inner_state)
    numbers: dict[str, int] = {}
    for path, param in tree_leaves_with_path(params):
        if not is_array_like(param) or dtype_of(param) not in HALF_DTYPES:
            continue
        if ends.has(path, jnp.shape(param)):
            name = str(dtype_of(param))
            numbers[name] = numbers.get(name, 0) + 1
    for name, number in numbers.items():
        leaves = f"{name} leaf is" if number == 1 else f"{name} leaves are"
        warnings.warn(
            f"`{call}(...).init`: {number} {leaves} trained without float32 copies, so "
            f"updates below half a unit of a weight ({_HALF_UNITS[name]}) are lost. Wrap the "
            "optimizer: `jaxscale.master_weights(tx)` (exact) or "
            "`jaxscale.stochastic_rounding(tx)`; `mask=` leaves out what is frozen.",
            UserWarning,
            stacklevel=4,
        )


class _EndsOfPaths:
    """The arrays of a state, by their shapes and the ends of their paths."""

    def __init__(self, state: optax.OptState):
        self._places: set[tuple[Any, tuple[str, ...]]] = set()
        for path, leaf in tree_leaves_with_path(state):
            if not is_inexact_leaf(leaf):
                continue
            names = _names(path)
            for start in range(len(names) + 1):
                self._places.add((jnp.shape(leaf), names[start:]))

    def has(self, path: KeyPath, shape: tuple[int, ...]) -> bool:
        """Looks for an array of a shape whose path ends like this one."""
        return (shape, _names(path)) in self._places


def _names(path: KeyPath) -> tuple[str, ...]:
    return tuple(map(str, path))

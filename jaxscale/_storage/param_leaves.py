"""The leaves of a tree of parameters, with what a state keeps beside each."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._state.storage import WeightsState
from .._trees.arguments import describe_value
from .._trees.gradient_leaves import leaf_name
from .._trees.leaves import dtype_of, is_array_like
from .rounding import BFLOAT16
from .storage_formats import PLAIN, REMAINDER, StorageFormat


class Leaf(NamedTuple):
    """A parameter, or `None` where the step has none."""

    param: Any
    name: str
    dtype: Any  # of the parameter; if that is `None`, what is known from the state
    beside: Any = None  # what stands beside it
    format: StorageFormat = PLAIN


class ParamLeaves(NamedTuple):
    """The leaves of a tree of parameters, and the public call that asks for them."""

    call: str
    leaves: list[Leaf]
    structure: Any

    def unflatten(self, values: list[Any]) -> Any:
        """Returns a tree with the structure of the parameters and other leaves."""
        return self.structure.unflatten(values)

    def unflatten_beside(self, values: list[Any]) -> Any:
        """Returns a tree of what stands beside parameters, with `None` for nothing.

        A class may look at its children, and refuse what is not an array of the dtype that it
        knows. Then they come in a dict, by their names.
        """
        try:
            return self.structure.unflatten(values)
        except Exception:  # whatever the class raises
            pairs = zip(self.leaves, values, strict=True)
            return {leaf.name: value for leaf, value in pairs if value is not None}

    def flatten_beside(self, tree: optax.Params) -> list[Any]:
        """Returns the leaves of a tree that `unflatten_beside` made."""
        try:
            found = self.structure.flatten_up_to(tree)
        except (TypeError, ValueError):
            return self._find_by_name(tree)
        for leaf, value in zip(self.leaves, found, strict=True):
            if isinstance(value, optax.MaskedNode):
                raise ValueError(
                    f"`{self.call}`: the state is that of a part of the parameters, and has "
                    f"nothing for that at {leaf.name}: the optimizer is inside of an "
                    "`optax.partition` or an `optax.masked`. Wrap the whole instead: "
                    "`jaxscale.master_weights(optax.partition(...), mask=...)`. Or pass the "
                    "parameters of this part alone."
                )
        return [None if _is_empty(value) else value for value in found]

    def _find_by_name(self, tree: optax.Params) -> list[Any]:
        """Returns the leaves of a tree of another class, such as what NNX makes of a state."""
        values = {}
        for path, value in jax.tree_util.tree_leaves_with_path(tree):
            values[leaf_name(path)] = value
        names = [leaf.name for leaf in self.leaves]
        if not set(values) <= set(names):
            raise ValueError(
                f"`{self.call}`: the state of the optimizer belongs to parameters of another "
                f"structure. It has {jax.tree.structure(tree)} beside them, and the parameters are "
                f"{self.structure}. Pass the state that `init` made for these parameters."
            )
        return [values.get(name) for name in names]


def flatten(
    call: str, params: optax.Params, state: WeightsState | None = None
) -> ParamLeaves:
    """Returns the leaves of parameters, and what a state has beside them."""
    with_paths, structure = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=_is_none
    )
    leaves = []
    for path, param in with_paths:
        leaves.append(Leaf(param, leaf_name(path), known_dtype_of(param)))
    tree = ParamLeaves(call, leaves, structure)
    for dtype, others in _trees_beside(state):
        for index, beside in enumerate(tree.flatten_beside(others)):
            if beside is not None:
                leaves[index] = leaves[index]._replace(dtype=dtype, beside=beside)
    return tree


def _trees_beside(state: WeightsState | None) -> list[tuple[Any, Any]]:
    """Returns the trees that stand beside parameters, each with the dtype of these."""
    trees = []
    if state is not None and state.remainders is not None:
        trees.append((BFLOAT16, state.remainders))
    if state is not None and state.copies is not None:
        for name, tree in state.copies.items():
            trees.append((jnp.dtype(name), tree))
    return trees


def make_state(
    tree: ParamLeaves, beside: list[Any], key: jax.Array | None
) -> WeightsState:
    """Returns a state, given what stands beside each parameter."""
    remainders: list[Any] = [None] * len(beside)
    copies: dict[str, list[Any]] = {}
    for index, value in enumerate(beside):
        if value is None:
            continue
        values = remainders
        if not REMAINDER.fits(value):
            name = str(tree.leaves[index].dtype)
            values = copies.setdefault(name, [None] * len(beside))
        values[index] = value
    has_remainders = any(value is not None for value in remainders)
    return WeightsState(
        remainders=tree.unflatten_beside(remainders) if has_remainders else None,
        copies={name: tree.unflatten_beside(copies[name]) for name in copies} or None,
        key=key,
    )


def fits(leaf: Leaf) -> bool:
    """Checks that a format finds beside a parameter what it needs."""
    if not leaf.format.fits(leaf.beside):
        return False
    if leaf.beside is None:
        return True
    is_of_shape = jnp.shape(leaf.beside) == jnp.shape(leaf.param)
    return is_of_shape and leaf.dtype == known_dtype_of(leaf.param)


def describe_leaf(leaf: object) -> str:
    return "nothing" if leaf is None else describe_value(leaf)


def known_dtype_of(leaf: object) -> Any:
    """Returns the dtype of an array or number, `None` for what is neither."""
    return dtype_of(leaf) if is_array_like(leaf) else None


def read_mask(
    mask: object, params: optax.Params, tree: ParamLeaves, what: str = "parameters"
) -> list[bool]:
    """Returns a flag for each leaf of a tree: a mask means it. `what` names the contents."""
    if mask is None:
        return [True] * len(tree.leaves)
    if callable(mask) and not _is_tree_of_bools(mask):
        mask = mask(params)

    def spread(flag: object, part: object) -> Any:
        return jax.tree.map(lambda _: flag, part, is_leaf=_is_none)

    try:
        spread_mask = jax.tree.map(spread, mask, params)
        flags = tree.structure.flatten_up_to(spread_mask)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{tree.call}(mask=...)` must be a tree of bools with the structure of the {what}, or "
            f"with one bool for a part of it, got {jax.tree.structure(mask)} for "
            f"{tree.structure}. A function of the {what} may make it: `mask=lambda tree: "
            "jax.tree.map(lambda leaf: leaf.ndim > 1, tree)`."
        ) from error
    for flag, leaf in zip(flags, tree.leaves, strict=True):
        if leaf.param is not None and not isinstance(flag, bool | np.bool_):
            raise TypeError(
                f"`{tree.call}(mask=...)` must be a tree of bools, got {describe_value(flag)} at "
                f"{leaf.name}. It is fixed before anything is traced: pass True or False."
            )
    return [flag is not None and bool(flag) for flag in flags]


def _is_tree_of_bools(mask: object) -> bool:
    """Tells a mask that holds bools from a function of one: a module has a `__call__`, too."""
    leaves = jax.tree.leaves(mask)
    return bool(leaves) and all(isinstance(leaf, bool | np.bool_) for leaf in leaves)


def _is_none(leaf: object) -> bool:
    return leaf is None


def _is_empty(tree: object) -> bool:
    return not jax.tree.leaves(tree)

"""How half-precision parameters are kept, and what an optimizer sees of them.

An optimizer sees float32 parameters, and what it makes of them is rounded to the dtype in which
they are kept. There are four ways to keep a leaf. It is rounded and nothing else; a float32 copy
stands beside it; the bits that it leaves out stand beside it; or it is rounded at random. Each
answers three questions: what does it need beside the parameter, what is the float32 parameter, and
what does a new one become? `Rounded` takes the first way for all leaves, `MasterWeights` the second
and the third, and `StochasticRounding` the last. A step of an optimizer never asks which it has.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._state.storage import WeightsState
from .._trees.casts import cast, widen
from .._trees.checks import describe_value
from .._trees.gradient_leaves import leaf_name, map_gradients
from .._trees.leaf import dtype_of, is_array_like, is_inexact_leaf
from .._trees.params import apply_updates, cast_updates
from .._trees.store_once import store_once
from . import rounding
from .losses import warn_of_losses
from .noise import draw_words, make_key, make_noise, split_key
from .rounding import BFLOAT16, HALF_DTYPES, Halves

_INT16 = jnp.dtype(jnp.int16)


class Stored(NamedTuple):
    """A new parameter as it is kept."""

    param: Any
    beside: Any  # what stands beside it, `None` if nothing does


class Plain:
    """A leaf that is rounded by a cast, if its dtype is narrower than float32."""

    def start(self, param: Any) -> None:
        return None

    def fits(self, beside: Any) -> bool:
        return beside is None

    def widen(self, param: Any, beside: None) -> Any:
        return widen(param) if is_inexact_leaf(param) else param

    def store(self, wide: Any, param: Any, words: Any) -> Stored:
        if not is_array_like(param):
            return Stored(param, None)
        return Stored(cast(wide, dtype_of(param)), None)


class Remainder:
    """A bfloat16 leaf with the other half of float32 beside it."""

    def start(self, param: Any) -> jax.Array:
        # Made from the parameter, so that it has its sharding. All bits are 0.
        return rounding.split(cast(param, jnp.float32)).rest

    def fits(self, beside: Any) -> bool:
        return getattr(beside, "dtype", None) == _INT16

    def widen(self, param: Any, beside: jax.Array) -> jax.Array:
        return rounding.join(param, beside)

    def store(self, wide: jax.Array, param: Any, words: Any) -> Stored:
        halves: Halves = rounding.split(wide)
        return Stored(halves.high, halves.rest)


class Copy:
    """A half-precision leaf with a float32 copy beside it."""

    def start(self, param: Any) -> jax.Array:
        return cast(param, jnp.float32)

    def fits(self, beside: Any) -> bool:
        return getattr(beside, "dtype", None) == jnp.float32

    def widen(self, param: Any, beside: jax.Array) -> jax.Array:
        return rounding.follow(beside, param)

    def store(self, wide: jax.Array, param: Any, words: Any) -> Stored:
        return Stored(rounding.nearest(wide, dtype_of(param)), wide)


class AtRandom:
    """A half-precision leaf that is rounded at random."""

    def start(self, param: Any) -> None:
        return None

    def fits(self, beside: Any) -> bool:
        return beside is None

    def widen(self, param: Any, beside: None) -> jax.Array:
        return cast(param, jnp.float32)

    def store(self, wide: jax.Array, param: Any, words: Any) -> Stored:
        noise = make_noise(words, wide)
        return Stored(rounding.stochastic(wide, dtype_of(param), noise), None)


Way = Plain | Remainder | Copy | AtRandom
_PLAIN = Plain()
_REMAINDER = Remainder()
_COPY = Copy()
_AT_RANDOM = AtRandom()


class Applied(NamedTuple):
    """What comes of updates."""

    outcome: Any  # the new parameters, or updates that lead to them
    state: WeightsState | None


class Leaf(NamedTuple):
    """A parameter, or `None` where the step has none."""

    param: Any
    name: str
    dtype: Any  # of the parameter; if that is `None`, what is known from the state
    beside: Any = None  # what stands beside it
    way: Way = _PLAIN


class ParamLeaves(NamedTuple):
    """The leaves of a tree of parameters, and the public call that asks for them."""

    call: str
    leaves: list[Leaf]
    structure: Any

    def unflatten(self, values: list[Any]) -> Any:
        """Returns a tree with the structure of the parameters and other leaves."""
        return self.structure.unflatten(values)

    def unflatten_beside(self, values: list[Any]) -> Any:
        """Returns such a tree, with leaves that stand beside parameters, and `None`.

        A class may look at its children, and refuse what is not an array of the dtype that it
        knows. Then they come in a dict, by their names.
        """
        try:
            return self.structure.unflatten(values)
        except Exception:  # whatever the class raises
            pairs = zip(self.leaves, values, strict=True)
            return {leaf.name: value for leaf, value in pairs if value is not None}

    def flatten_beside(self, tree: Any) -> list[Any]:
        """Returns the leaves of a tree that `unflatten_beside` made."""
        try:
            found = self.structure.flatten_up_to(tree)
        except (TypeError, ValueError):
            return self._find_by_name(tree)
        return [None if _is_empty(value) else value for value in found]

    def _find_by_name(self, tree: Any) -> list[Any]:
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


@dataclasses.dataclass(frozen=True)
class Rounded:
    """All leaves are rounded by a cast: what an optimizer does that is told nothing else."""

    def init(self, params: optax.Params) -> None:
        return None

    def warn_of_losses(self, params: optax.Params, inner_state: Any) -> None:
        """Warns if half-precision parameters are trained, which lose most updates."""
        warn_of_losses(params, inner_state)

    def check(self, argument: str, state: WeightsState | None) -> None:
        """Raises a `ValueError` if a state is that of another way."""
        if state is not None:
            raise ValueError(
                f"`{argument}` has what `master_weights` or `stochastic_rounding` keeps beside the "
                "parameters, and this optimizer would drop that. Wrap it as it was when the state "
                "was made. To go on without, pass `opt_state._replace(weights=None)`."
            )

    def widen(self, params: optax.Params | None, state: None) -> optax.Params | None:
        """Returns the float32 parameters that the optimizer sees."""
        return map_gradients(widen, params)

    def apply(
        self,
        params: optax.Params | None,
        wide_params: optax.Params | None,
        updates: optax.Updates,
        state: None,
        *,
        returns_params: bool,
    ) -> Applied:
        """Adds updates to parameters: returns the new ones, or only the updates."""
        if returns_params:
            return Applied(apply_updates(params, updates), None)
        return Applied(cast_updates(params, updates), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kept:
    """Half-precision leaves are kept in a way of their own: what two classes have in common.

    Attributes:
      mask: which leaves are meant: a tree of bools, a function that makes one of the parameters, or
        `None` for all.
    """

    mask: Any = None

    call = ""  # the public function that makes it

    def warn_of_losses(self, params: optax.Params, inner_state: Any) -> None:
        """Warns of nothing: what a mask leaves out is meant to be left out."""

    def _find_way(self, dtype: Any) -> Way:
        """Returns how a leaf of a half-precision dtype is kept."""
        raise NotImplementedError

    def _make_key(self, params: optax.Params) -> jax.Array | None:
        return None

    def init(self, params: optax.Params) -> WeightsState:
        """Returns what is kept beside the first parameters."""
        tree = self._with_ways(params, flatten(self.call, params))
        beside = [leaf.way.start(leaf.param) for leaf in tree.leaves]
        return _make_state(tree, beside, self._make_key(params))

    def widen(
        self, params: optax.Params | None, state: WeightsState
    ) -> optax.Params | None:
        """Returns the float32 parameters that the optimizer sees."""
        if params is None:
            raise ValueError(
                f"`loss_scaled(...).update(params=...)` must be the parameters, got None: "
                f"`{self.call}` rounds them itself. Call `tx.update(grads, opt_state, params)`."
            )
        tree = self._read(params, state)
        wide = [leaf.way.widen(leaf.param, leaf.beside) for leaf in tree.leaves]
        return tree.unflatten(wide)

    def apply(
        self,
        params: optax.Params | None,
        wide_params: optax.Params | None,
        updates: optax.Updates,
        state: WeightsState,
        *,
        returns_params: bool,
    ) -> Applied:
        """Adds updates to the float32 parameters, and keeps the sums.

        Returns the new parameters, or updates by which `optax.apply_updates` makes them of the old
        ones: the difference of both in float32.
        """
        # `widen` came first, and takes no `None`
        tree = self._read(params, state)
        new_wide = apply_updates(wide_params, updates)
        if _REMAINDER in (leaf.way for leaf in tree.leaves):
            # Both halves of a number read it. A CPU would make the step of the optimizer twice.
            new_wide = store_once(new_wide)
        wide = tree.structure.flatten_up_to(new_wide)
        key = state.key
        words: Any = [None] * len(wide)
        if key is not None:
            key, drawn = split_key(key)
            words = draw_words(drawn, len(wide))

        new_params = []
        new_beside = []
        for index, leaf in enumerate(tree.leaves):
            stored = Stored(None, leaf.beside)  # stays, where a leaf has no gradient
            if leaf.param is not None:
                stored = leaf.way.store(wide[index], leaf.param, words[index])
            new_params.append(stored.param)
            new_beside.append(stored.beside)
        new_state = _make_state(tree, new_beside, key)
        if returns_params:
            return Applied(tree.unflatten(new_params), new_state)

        outcome = tree.structure.flatten_up_to(cast_updates(params, updates))
        for index, leaf in enumerate(tree.leaves):
            if leaf.way is not _PLAIN:
                outcome[index] = _difference(new_params[index], leaf.param)
        return Applied(tree.unflatten(outcome), new_state)

    def _with_ways(self, params: optax.Params, tree: ParamLeaves) -> ParamLeaves:
        """Returns leaves with the ways in which they are kept."""
        flags = read_mask(self.mask, params, tree)
        leaves = []
        for leaf, is_meant in zip(tree.leaves, flags, strict=True):
            dtype = _dtype_of(leaf.param)
            if is_meant and dtype in HALF_DTYPES:
                leaf = leaf._replace(way=self._find_way(dtype))
            leaves.append(leaf)
        return tree._replace(leaves=leaves)

    def _read(self, params: Any, state: WeightsState) -> ParamLeaves:
        """Returns the leaves of parameters and what is beside them, if they fit together."""
        tree = self._with_ways(params, flatten(self.call, params, state))
        for leaf in tree.leaves:
            if leaf.param is None or _fits(leaf):
                continue
            raise ValueError(
                f"`{self.call}`: the state has {_describe(leaf.beside)} beside the parameter at "
                f"{leaf.name}, which is {_describe(leaf.param)}. It is the state of other "
                "parameters, or of another `storage` or `mask`. Pass the state that `init` made "
                "for these; to start from float32 parameters, as `jaxscale.master_params` returns "
                "them, pass what `jaxscale.with_master_params(tx.init(params), float32_params)` "
                "returns."
            )
        return tree


def _fits(leaf: Leaf) -> bool:
    """Returns whether a way finds beside a parameter what it needs."""
    if not leaf.way.fits(leaf.beside):
        return False
    if leaf.beside is None:
        return True
    is_of_shape = jnp.shape(leaf.beside) == jnp.shape(leaf.param)
    return is_of_shape and leaf.dtype == _dtype_of(leaf.param)


def _describe(leaf: Any) -> str:
    return "nothing" if leaf is None else describe_value(leaf)


def _dtype_of(leaf: Any) -> Any:
    """Returns the dtype of an array or number, `None` for what is neither."""
    return dtype_of(leaf) if is_array_like(leaf) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MasterWeights(_Kept):
    """float32 parameters are kept beside half-precision ones, as copies or as remainders.

    Attributes:
      storage: `"remainder"` if bfloat16 leaves have the other half of float32 beside them,
        `"float32"` if they have a copy.
    """

    storage: Literal["remainder", "float32"]

    call = "master_weights"

    def _find_way(self, dtype: Any) -> Way:
        if dtype == BFLOAT16 and self.storage == "remainder":
            return _REMAINDER
        return _COPY

    def check(self, argument: str, state: WeightsState | None) -> None:
        """Raises a `ValueError` if a state is that of another way."""
        if state is None or state.key is not None:
            raise _lacks(argument, self.call, "no float32 parameters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StochasticRounding(_Kept):
    """Half-precision parameters are rounded at random.

    Attributes:
      seed: that of the random bits.
    """

    seed: int

    call = "stochastic_rounding"

    def _find_way(self, dtype: Any) -> Way:
        return _AT_RANDOM

    def _make_key(self, params: optax.Params) -> jax.Array:
        return make_key(self.seed, jax.tree.leaves(params))

    def check(self, argument: str, state: WeightsState | None) -> None:
        """Raises a `ValueError` if a state is that of another way."""
        if state is None or state.key is None:
            raise _lacks(argument, self.call, "no key")


def _lacks(argument: str, call: str, what: str) -> ValueError:
    return ValueError(
        f"`{argument}` is the state of an optimizer without `{call}`, and has {what} for it. To go "
        "on from there with the parameters as they are, pass "
        "`opt_state._replace(weights=tx.init(params).weights)`; what was saved is read by "
        "`jaxscale.from_state_dict(tx.init(params), saved)`."
    )


Weights = Rounded | MasterWeights | StochasticRounding


def widen_params(
    call: str, state: WeightsState | None, params: optax.Params
) -> optax.Params:
    """Returns float32 parameters, by what stands beside them and by nothing else."""
    tree = flatten(call, params, state)
    wide = []
    for leaf in tree.leaves:
        leaf = leaf._replace(way=_way_beside(leaf.beside))
        if leaf.param is not None and not _fits(leaf):
            raise ValueError(
                f"`{call}(params=...)` must be the parameters as the optimizer keeps them: that at "
                f"{leaf.name} is {_describe(leaf.param)}, and the state has "
                f"{_describe(leaf.beside)} for one of dtype {leaf.dtype}."
            )
        wide.append(leaf.way.widen(leaf.param, leaf.beside))
    return tree.unflatten(wide)


def narrow_params(call: str, state: WeightsState, wide_params: optax.Params) -> Applied:
    """Returns parameters as they are kept, made of float32 ones, and what is beside them."""
    tree = flatten(call, wide_params, state)
    params = []
    beside = []
    for leaf in tree.leaves:
        stored = Stored(leaf.param, leaf.beside)
        if leaf.beside is not None and leaf.param is not None:
            if jnp.shape(leaf.param) != jnp.shape(leaf.beside):
                raise ValueError(
                    f"`{call}(float32_params=...)` must be for the parameters of this state: that "
                    f"at {leaf.name} is {_describe(leaf.param)}, and the state was made for "
                    f"{leaf.dtype}{list(jnp.shape(leaf.beside))}."
                )
            like = jax.ShapeDtypeStruct(jnp.shape(leaf.param), leaf.dtype)
            wide = cast(leaf.param, jnp.float32)
            stored = _way_beside(leaf.beside).store(wide, like, None)
        params.append(stored.param)
        beside.append(stored.beside)
    return Applied(tree.unflatten(params), _make_state(tree, beside, state.key))


def _way_beside(beside: Any) -> Way:
    """Returns the way of which something beside a parameter is."""
    if beside is None:
        return _PLAIN
    if _REMAINDER.fits(beside):
        return _REMAINDER
    return _COPY


def flatten(call: str, params: Any, state: WeightsState | None = None) -> ParamLeaves:
    """Returns the leaves of parameters, and what a state has beside them."""
    with_paths, structure = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=_is_none
    )
    leaves = []
    for path, param in with_paths:
        leaves.append(Leaf(param, leaf_name(path), _dtype_of(param)))
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


def _make_state(
    tree: ParamLeaves, beside: list[Any], key: jax.Array | None
) -> WeightsState:
    """Returns a state, given what stands beside each parameter."""
    remainders: list[Any] = [None] * len(beside)
    copies: dict[str, list[Any]] = {}
    for index, value in enumerate(beside):
        if value is None:
            continue
        values = remainders
        if not _REMAINDER.fits(value):
            name = str(tree.leaves[index].dtype)
            values = copies.setdefault(name, [None] * len(beside))
        values[index] = value
    has_remainders = any(value is not None for value in remainders)
    return WeightsState(
        remainders=tree.unflatten_beside(remainders) if has_remainders else None,
        copies={name: tree.unflatten_beside(copies[name]) for name in copies} or None,
        key=key,
    )


def _difference(new: Any, old: Any) -> jax.Array:
    """Returns what is to be added to a parameter to make a new one, in float32.

    It is minus zero if nothing is, as adding that keeps the sign of a zero.
    """
    wide_new = cast(new, jnp.float32)
    wide_old = cast(old, jnp.float32)
    difference = wide_new - wide_old
    return jnp.where(wide_new == wide_old, jnp.float32(-0.0), difference)


def read_mask(
    mask: Any, params: Any, tree: ParamLeaves, what: str = "parameters"
) -> list[bool]:
    """Returns which leaves of a tree a mask means. `what` says what the tree holds."""
    if mask is None:
        return [True] * len(tree.leaves)
    if callable(mask):
        mask = mask(params)

    def spread(flag: Any, part: Any) -> Any:
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


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_empty(tree: Any) -> bool:
    return not jax.tree.leaves(tree)

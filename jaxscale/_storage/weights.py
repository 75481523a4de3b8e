"""Half-precision parameters in a step, and what an optimizer sees of them.

An optimizer sees float32 parameters, and what it makes of them is rounded to the dtype in which
they are kept. `Rounded` only rounds, for all leaves. `MasterWeights` keeps the other bits or a copy
beside half-precision leaves, and `StochasticRounding` rounds these at random. A step never asks
which of them it has.
"""

import abc
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._jax import ArrayLike
from .._state.storage import WeightsState
from .._trees.gradient_leaves import map_gradients
from .._trees.leaves import cast, dtype_of, is_inexact_leaf, store_once, widen
from .._trees.params import apply_updates
from .._trees.pytrees import Leaf, Params
from .lost_updates import warn_of_losses
from .noise import draw_words, make_key, split_key
from .param_leaves import (
    ParamLeaves,
    describe_leaf,
    fits,
    flatten,
    known_dtype_of,
    make_state,
    read_mask,
)
from .rounding import BFLOAT16, HALF_DTYPES
from .storage_formats import AT_RANDOM, COPY, PLAIN, REMAINDER, StorageFormat, Stored


class Applied(NamedTuple):
    """The result of updates."""

    outcome: Any  # the new parameters, or updates that lead to them
    state: WeightsState | None


@dataclasses.dataclass(frozen=True)
class Rounded:
    """All leaves are rounded by a cast: what an optimizer does that is told nothing else."""

    def init(self, params: optax.Params) -> None:
        return None

    def warn_of_losses(
        self, call: str, params: optax.Params, inner_state: optax.OptState
    ) -> None:
        """Warns if half-precision parameters are trained, which lose most updates."""
        warn_of_losses(call, params, inner_state)

    def check(self, argument: str, state: WeightsState | None) -> None:
        """Raises a `ValueError` if a state is that of another format."""
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
        return Applied(_cast_updates(params, updates), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kept(abc.ABC):
    """Half-precision leaves are kept in a format of their own: the base of two classes.

    Attributes:
      mask: which leaves are meant: a tree of bools, a function that makes one of the parameters, or
        `None` for all.
    """

    mask: Any = None

    call = ""  # the public function that makes it

    def warn_of_losses(
        self, call: str, params: optax.Params, inner_state: optax.OptState
    ) -> None:
        """Warns of nothing: what a mask leaves out is meant to be left out."""
        return

    @abc.abstractmethod
    def _find_format(self, dtype: jnp.dtype) -> StorageFormat:
        """Returns the format for leaves of a half-precision dtype."""

    def _make_key(self, params: optax.Params) -> jax.Array | None:
        return None

    def init(self, params: optax.Params) -> WeightsState:
        """Returns the state that stands beside the first parameters."""
        tree = self._with_formats(params, flatten(self.call, params))
        beside = [leaf.format.start(leaf.param) for leaf in tree.leaves]
        return make_state(tree, beside, self._make_key(params))

    def widen(
        self, params: optax.Params | None, state: WeightsState
    ) -> optax.Params | None:
        """Returns the float32 parameters that the optimizer sees."""
        if params is None:
            raise ValueError(
                f"`{self.call}(...).update(params=...)` must be the parameters, got None: it "
                "rounds them itself. Call `tx.update(grads, opt_state, params)`."
            )
        tree = self._read(params, state)
        wide = [leaf.format.widen(leaf.param, leaf.beside) for leaf in tree.leaves]
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
        if REMAINDER in (leaf.format for leaf in tree.leaves):
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
                stored = leaf.format.store(wide[index], leaf.param, words[index])
            new_params.append(stored.param)
            new_beside.append(stored.beside)
        new_state = make_state(tree, new_beside, key)
        if returns_params:
            return Applied(tree.unflatten(new_params), new_state)

        outcome = tree.structure.flatten_up_to(_cast_updates(params, updates))
        for index, leaf in enumerate(tree.leaves):
            if leaf.format is not PLAIN:
                outcome[index] = _difference(new_params[index], leaf.param)
        return Applied(tree.unflatten(outcome), new_state)

    def _with_formats(self, params: optax.Params, tree: ParamLeaves) -> ParamLeaves:
        """Returns leaves with their formats."""
        flags = read_mask(self.mask, params, tree)
        leaves = []
        for leaf, is_meant in zip(tree.leaves, flags, strict=True):
            dtype = known_dtype_of(leaf.param)
            if is_meant and dtype in HALF_DTYPES:
                leaf = leaf._replace(format=self._find_format(dtype))
            leaves.append(leaf)
        return tree._replace(leaves=leaves)

    def _read(self, params: Params, state: WeightsState) -> ParamLeaves:
        """Returns the leaves of parameters and what is beside them, if they fit together."""
        tree = self._with_formats(params, flatten(self.call, params, state))
        for leaf in tree.leaves:
            if leaf.param is None or fits(leaf):
                continue
            raise ValueError(
                f"`{self.call}`: the state has {describe_leaf(leaf.beside)} beside the parameter "
                f"at {leaf.name}, which is {describe_leaf(leaf.param)}. It is the state of other "
                "parameters, or of another `storage` or `mask`. Pass the state that `init` made "
                "for these. To go on with this one, begin with `opt_state = opt_state._replace("
                "weights=tx.init(params).weights)`; then `jaxscale.with_master_params(opt_state, "
                "float32_params)` puts in the float32 parameters that `jaxscale.master_params` "
                "returned before."
            )
        return tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class MasterWeights(_Kept):
    """float32 parameters are kept beside half-precision ones, as copies or as remainders.

    Attributes:
      storage: `"remainder"` if bfloat16 leaves have the other half of float32 beside them,
        `"float32"` if they have a copy.
    """

    storage: Literal["remainder", "float32"]

    call = "master_weights"

    def _find_format(self, dtype: jnp.dtype) -> StorageFormat:
        if dtype == BFLOAT16 and self.storage == "remainder":
            return REMAINDER
        return COPY

    def check(self, argument: str, state: WeightsState | None) -> None:
        """Raises a `ValueError` if a state is that of another format."""
        if state is None or state.key is not None:
            raise _lacks(argument, self.call, "no float32 parameters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StochasticRounding(_Kept):
    """Half-precision parameters are rounded at random.

    Attributes:
      seed: that of the random bits, an int or an integer of JAX.
    """

    seed: Any

    call = "stochastic_rounding"

    def _find_format(self, dtype: jnp.dtype) -> StorageFormat:
        return AT_RANDOM

    def _make_key(self, params: optax.Params) -> jax.Array:
        return make_key(self.seed, jax.tree.leaves(params))

    def check(self, argument: str, state: WeightsState | None) -> None:
        """Raises a `ValueError` if a state is that of another format."""
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


def _difference(new: ArrayLike, old: ArrayLike) -> jax.Array:
    """Returns the update that makes a new parameter of an old one, in float32.

    It is minus zero if nothing is, as adding that keeps the sign of a zero.
    """
    wide_new = cast(new, jnp.float32)
    wide_old = cast(old, jnp.float32)
    difference = wide_new - wide_old
    return jnp.where(wide_new == wide_old, jnp.float32(-0.0), difference)


def _cast_updates(params: Params, updates: optax.Updates) -> optax.Updates:
    """Casts updates to dtypes that `optax.apply_updates` can add to the parameters.

    JAX does not promote floating-point numbers of 8 bits or less: these need their own dtype.
    """
    if jax.tree.structure(updates) != jax.tree.structure(params):
        return updates

    def make_addable(update: Leaf, param: Leaf) -> Any:
        if update is None or not is_inexact_leaf(param):
            return update
        dtype = dtype_of(param)
        if jnp.finfo(dtype).bits > 8:
            return update
        return cast(update, dtype)

    return jax.tree.map(make_addable, updates, params)

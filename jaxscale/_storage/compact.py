"""An optimizer whose state is kept in bfloat16: what `compact_state` makes of its arguments.

Between two steps the large float32 arrays of the state are bfloat16, rounded at random. The
optimizer itself computes in float32, and notices nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._state.find import is_loss_scaled
from .._state.storage import CompactState
from .._trees.casts import cast
from . import rounding
from .leaves import flatten, read_mask
from .noise import draw_words, make_key, make_noise, split_key
from .rounding import BFLOAT16

# Smaller arrays are not worth it: scales, counters, statistics of a whole layer.
_LEAST_SIZE = 4096

# Optimizers that do not bear it, by the types of their states, and what happens to them.
_ESTIMATES = (
    "it estimates the learning rate from sums, which the noise of rounding moves"
)
_REFUSED = {
    "ProdigyState": ("prodigy", _ESTIMATES),
    "DAdaptAdamWState": ("dadapt_adamw", _ESTIMATES),
    "MechanicState": ("mechanize", _ESTIMATES),
    "DoGState": ("dog", _ESTIMATES),
    "DoWGState": ("dowg", _ESTIMATES),
    "MomoState": ("momo", _ESTIMATES),
    "MomoAdamState": ("momo_adam", _ESTIMATES),
    "ScaleByRStdDevState": (
        "rmsprop(centered=True)",
        "it subtracts two averages that are nearly equal, and what is left may be below 0",
    ),
    "ScaleByLBFGSState": (
        "lbfgs",
        "its memory holds small differences of gradients, and it has not been tried",
    ),
}


@dataclasses.dataclass(frozen=True)
class CompactOptimizer:
    """An optimizer whose state is kept in bfloat16.

    Attributes:
      inner: the optimizer.
      seed: that of the random bits.
      mask: which arrays of the state are meant: a tree of bools, a function that makes one of the
        state, or `None` for all.
    """

    inner: optax.GradientTransformationExtraArgs
    seed: int
    mask: Any | Callable[[Any], Any] | None

    def init(self, params: optax.Params) -> CompactState:
        state = self.inner.init(params)
        _check_inner_state(state)
        tree = flatten("compact_state", state)
        flags = read_mask(self.mask, state, tree, what="state of `inner`")
        leaves = []
        for leaf, is_meant in zip(tree.leaves, flags, strict=True):
            array = leaf.param
            if is_meant and _is_large(array):
                array = rounding.nearest(array, BFLOAT16)
            leaves.append(array)
        key = make_key(self.seed, jax.tree.leaves(params))
        return CompactState(tree.unflatten(leaves), key)

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CompactState]:
        if not isinstance(state, CompactState):
            raise TypeError(
                "`compact_state(...).update(state=...)` must be a state that its `init` or the "
                f"last step returned, got {type(state).__name__}. To go on from a float32 state, "
                "pass `jaxscale.from_state_dict(tx.init(params), jaxscale.to_state_dict(state))`."
            )
        is_compact = self._find_compact(state.inner_state, updates, params)
        kept, structure = jax.tree.flatten(state.inner_state)
        for index, leaf in enumerate(kept):
            if is_compact[index]:
                kept[index] = cast(leaf, jnp.float32)
        updates, new_state = self.inner.update(
            updates, structure.unflatten(kept), params, **extra_args
        )
        leaves, new_structure = jax.tree.flatten(new_state)
        if new_structure != structure:
            raise ValueError(
                "`compact_state(inner)`: `inner.update` must keep the structure of its state, "
                f"{structure}, but returned {new_structure}."
            )
        key, drawn = split_key(state.key)
        words = draw_words(drawn, len(leaves))
        for index, leaf in enumerate(leaves):
            if is_compact[index]:
                noise = make_noise(words[index], leaf)
                wide = cast(leaf, jnp.float32)
                leaves[index] = rounding.stochastic(wide, BFLOAT16, noise)
        return updates, CompactState(structure.unflatten(leaves), key)

    def _find_compact(
        self, state: Any, updates: optax.Updates, params: optax.Params | None
    ) -> list[bool]:
        """Returns which arrays of a state are kept in bfloat16, and were made in float32.

        An optimizer may have moments in bfloat16 of its own, which it rounds itself. So `init` is
        asked what it makes. The size is not asked for: in `shard_map` it is that of a part.
        """
        like = updates if params is None else params
        types = jax.eval_shape(self.inner.init, like)
        structure = jax.tree.structure(state)
        if structure != jax.tree.structure(types):
            raise ValueError(
                "`compact_state(...).update(state=...)` is the state of another optimizer or of "
                f"other parameters. `init` makes {jax.tree.structure(types)}, got {structure}. "
                "Pass the state that `init` of this optimizer returned for these parameters; if "
                "gradients have another structure, pass `params`."
            )
        is_compact = []
        for leaf, made in zip(
            jax.tree.leaves(state), jax.tree.leaves(types), strict=True
        ):
            is_compact.append(made.dtype == jnp.float32 and leaf.dtype == BFLOAT16)
        return is_compact


def _is_large(leaf: Any) -> bool:
    is_float32 = isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32
    return is_float32 and leaf.ndim > 0 and leaf.size >= _LEAST_SIZE


def _check_inner_state(state: Any) -> None:
    """Raises an error if a state is one that cannot be kept in bfloat16."""
    for node in _nodes(state):
        if isinstance(node, CompactState):
            raise TypeError(
                "`compact_state(inner)`: `inner` is wrapped in `compact_state` already. Wrap once."
            )
        if is_loss_scaled(node):
            raise TypeError(
                "`compact_state(inner)`: `inner` is a `loss_scaled` optimizer, or one of "
                "`skip_nonfinite`, `multi_steps`, `master_weights` or `stochastic_rounding`. These "
                "go outside: `jaxscale.loss_scaled(jaxscale.compact_state(optax.adamw(1e-3)))`."
            )
        refused = _REFUSED.get(type(node).__name__)
        if refused is not None:
            name, reason = refused
            raise ValueError(
                f"`compact_state(inner)`: `{name}` needs its state in float32: {reason}. Leave "
                "`compact_state` out."
            )


def _nodes(tree: Any) -> list[Any]:
    """Returns a tree and all trees in it."""
    children = jax.tree.leaves(tree, is_leaf=lambda node: node is not tree)
    nodes = [tree]
    for child in children:
        if child is not tree:
            nodes.extend(_nodes(child))
    return nodes

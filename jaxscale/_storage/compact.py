"""An optimizer whose state is kept in bfloat16: the optimizer that `compact_state` returns.

Between two steps the large float32 moments in the state are bfloat16, rounded at random. The
optimizer itself computes in float32, and notices nothing.

Means and sums of gradients bear that, as each is right on average. What else an optimizer keeps may
not: inverse roots, differences and estimates of a learning rate make much of little noise. What an
array is, the type of the state of Optax says that holds it. One that no such type vouches for stays
in float32, unless a mask asks for it.

A state may also hold weights: the first ones, or those that the optimizer comes back to. Rounded,
they would move the model itself, at any learning rate. `init` computes them from the values of the
parameters, where it makes moments of zeros. So an array stays in float32 if `init` computes it from
the parameters.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._jax import spread, users_stacklevel, without_unused
from .._state.find import is_loss_scaled
from .._state.storage import CompactState
from .._trees.gradient_leaves import map_gradients
from .._trees.grammar import list_some
from .._trees.leaves import cast, is_array_like, widen
from .._trees.pytrees import Leaf
from . import rounding
from .noise import draw_words, make_key, make_noise, split_key
from .param_leaves import flatten, read_mask
from .rounding import BFLOAT16

# Smaller arrays are not worth it: scales, counters, statistics of a whole layer.
_LEAST_SIZE = 4096

# Its bits are not those of a `stochastic_rounding` with the same seed around it.
_STREAM = 1

# The moments, means and sums that bear it: fields of the states of Optax, by the names of these.
_MOMENTS = {
    "EmaState": "ema",
    "FactoredState": "v_row v_col v",
    "MultiStepsState": "acc_grads",
    "MuonState": "mu",
    "ScaleByAdaDeltaState": "e_g e_x",
    "ScaleByAdamState": "mu nu",
    "ScaleByAdanState": "m v n g",
    "ScaleByAdemamixState": "m1 m2 nu",
    "ScaleByAmsgradState": "mu nu nu_max",
    "ScaleByBeliefState": "mu nu",
    "ScaleByLionState": "mu",
    "ScaleByRmsState": "nu",
    "ScaleByRmsWithCountState": "nu",
    "ScaleByRssState": "sum_of_squares",
    "ScaleBySM3State": "mu nu",
    "TraceState": "trace",
}


@dataclasses.dataclass(frozen=True)
class CompactOptimizer:
    """An optimizer whose state is kept in bfloat16.

    Attributes:
      inner: the optimizer.
      seed: that of the random bits.
      mask: which arrays of the state are meant: a tree of bools, a function that makes one of the
        state, or `None` for known moments.
      warnings_given: filled by the first warning of arrays that stay in float32, so that it is the
        only one.
    """

    inner: optax.GradientTransformationExtraArgs
    seed: Any
    mask: Any | Callable[[Any], Any] | None
    warnings_given: list[str] = dataclasses.field(default_factory=list)

    def init(self, params: optax.Params) -> CompactState:
        state = self.inner.init(params)
        _check_inner_state(state)
        tree = flatten("compact_state", state)
        arrays = [leaf.param for leaf in tree.leaves]
        are_large = list(map(_is_large, arrays))
        hold_weights = _find_weights(self.inner, params, are_large)
        mask = _mark_moments if self.mask is None else self.mask
        are_meant = read_mask(mask, state, tree, what="state of `inner`")
        left_out = []
        for index, leaf in enumerate(tree.leaves):
            if not are_large[index] or hold_weights[index]:
                continue
            if are_meant[index]:
                arrays[index] = rounding.nearest(leaf.param, BFLOAT16)
            else:
                left_out.append(leaf.name)
        if self.mask is None and left_out:
            self._warn_once(left_out)
        key = make_key(self.seed, jax.tree.leaves(params), stream=_STREAM)
        return CompactState(tree.unflatten(arrays), key)

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

    def _warn_once(self, names: list[str]) -> None:
        if self.warnings_given:
            return
        message = (
            "`compact_state(inner)`: these arrays of the state stay in float32, as they are not "
            f"known to bear rounding: {list_some(names, 3)}. Choose with `mask=`: `mask=True` "
            "means all large arrays, and a tree of bools some of them."
        )
        self.warnings_given.append(message)
        warnings.warn(message, UserWarning, stacklevel=users_stacklevel())

    def _find_compact(
        self, state: optax.OptState, updates: optax.Updates, params: optax.Params | None
    ) -> list[bool]:
        """Finds the arrays of a state that are kept in bfloat16, and were made in float32.

        An optimizer may have moments in bfloat16 of its own, which it rounds itself. So `init` is
        asked what it makes. The size is not asked for: in `shard_map` it is that of a part.

        Without parameters, those that the updates are for may be wider than the updates, as where
        the gradients are those of a bfloat16 copy. So `init` is asked for float32 ones.
        """
        like = params
        if params is None:
            like = map_gradients(widen, updates)
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


def _find_weights(
    inner: optax.GradientTransformation, params: optax.Params, asked: list[bool]
) -> list[bool]:
    """Finds the leaves of a state that `init` computes from the values of the parameters.

    It answers for the leaves that are asked for. Values do not tell: a weight may be 0 as a moment
    is, and inside of `jit` there are none.
    """
    leaves, structure = jax.tree.flatten(params)
    are_arrays = list(map(is_array_like, leaves))

    def init(arrays: list[Any]) -> list[Any]:
        remaining = iter(arrays)
        given = []
        for leaf, is_array in zip(leaves, are_arrays, strict=True):
            given.append(next(remaining) if is_array else leaf)
        state = flatten("compact_state", inner.init(structure.unflatten(given)))
        made = [leaf.param for leaf in state.leaves]
        return list(itertools.compress(made, asked))

    if not any(asked):
        return asked
    program = jax.make_jaxpr(init)(list(itertools.compress(leaves, are_arrays)))
    number = sum(asked)
    found = []
    for index in range(number):
        returned = [index == other for other in range(number)]
        found.append(any(without_unused(program, returned=returned).used))
    return spread(asked, found, asked)


def _mark_moments(state: optax.OptState) -> Any:
    """Returns a mask of a state: true for moments that are known to bear rounding."""
    return jax.tree.map(_mark_fields, state, is_leaf=_is_of_optax)


def _mark_fields(node: Any) -> Any:
    if not _is_of_optax(node):
        return False
    moments = _MOMENTS.get(type(node).__name__, "").split()
    marks = {}
    for name, part in zip(node._fields, node, strict=True):
        marks[name] = name in moments or _mark_moments(part)
    return node._replace(**marks)


def _is_of_optax(node: object) -> bool:
    package = type(node).__module__.partition(".")[0]
    return package == "optax" and hasattr(node, "_fields")


def _is_large(leaf: Leaf) -> bool:
    is_float32 = isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32
    return is_float32 and leaf.ndim > 0 and leaf.size >= _LEAST_SIZE


def _check_inner_state(state: optax.OptState) -> None:
    """Raises an error if a state is one that cannot be kept in bfloat16."""
    for node in jax.tree.leaves(state, is_leaf=_is_of_jaxscale):
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


def _is_of_jaxscale(node: object) -> bool:
    return isinstance(node, CompactState) or is_loss_scaled(node)

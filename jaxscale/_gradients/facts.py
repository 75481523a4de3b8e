"""Facts: what one pass over the gradients of a step tells, the same on all devices.

The verdict, the policy and clipping ask their questions together, as gradients are read once for
all of them: twice if a hook changed them, or if both the largest gradient and the norm are asked
for.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jax import AxisNames
from .._trees.gradient_leaves import (
    leaf_name,
    list_gradients,
    map_gradients,
    replace_gradients,
)
from .._trees.leaves import is_none
from .._trees.numbers import float_bits, float_of_bits
from .._trees.pytrees import Grads, PyTree
from .._trees.selection import where
from .reduction import nans_are_errors, reduce_gradients, reduce_sizes
from .scaled import Scaled
from .verdict import (
    agree_on_least,
    agree_on_loss,
    agree_on_size,
    axis_names,
)


class Questions(NamedTuple):
    """Questions about gradients, besides whether they are finite."""

    norm: bool  # their global norm
    largest: bool  # how large the largest is
    by_leaf: bool  # which of them are finite


class Facts(NamedTuple):
    """The answers. All devices that decide together have the same."""

    grads_finite: jax.Array  # bool[], of the gradients before and after a hook
    loss_finite: jax.Array  # bool[], true if no loss was passed
    loss: Any  # the mean of all devices, `None` if no loss was passed
    # These are `None` unless they were asked for.
    norm: (
        Any  # f32[] or wider, of the gradients after a hook; NaN if they are not finite
    )
    largest: Any  # f32[], before a hook; also `None` if there are no gradients
    nonfinite_leaves: Any  # like the gradients, with a bool[] for each


def find_facts(
    grads: Scaled,
    loss: Any,
    axis_name: AxisNames,
    before_hook: Scaled | None,
    questions: Questions,
) -> Facts:
    """Returns the facts of one step, on which the devices along `axis_name` agree.

    `before_hook` holds the gradients before a hook changed them, if one did: as a clip hides an
    inf, they must be finite as well.
    """
    original = grads
    if before_hook is not None:
        original = before_hook
    by_leaf = questions.by_leaf
    # If JAX raises an error at each NaN, no square may be one: the norm is taken afterwards.
    squares = questions.norm and not nans_are_errors()
    has_second = before_hook is not None or (questions.largest and squares)
    if questions.largest:
        passes = [reduce_sizes(original, by_leaf=by_leaf)]
    else:
        first_squares = squares and not has_second
        passes = [
            reduce_gradients(original.divided, by_leaf=by_leaf, squares=first_squares)
        ]
    if has_second:
        passes.append(reduce_gradients(grads.divided, by_leaf=by_leaf, squares=squares))

    # Without a hook both passes read the same gradients, so the first says whether they are finite.
    all_hold = functools.partial(functools.reduce, jnp.bitwise_and)
    judged = passes[:1] if before_hook is None else passes
    flags = [
        all_hold(each.finite() for each in judged),
        reduce_gradients(loss).finite(),
    ]
    if by_leaf:
        of_leaves = zip(*[each.finite_groups() for each in judged], strict=True)
        flags += map(all_hold, of_leaves)
    sizes = {}
    if passes[0].holds_sizes:
        sizes["largest"] = passes[0].largest_bits()
    if squares:
        # Where types say which leaves vary, all devices get the same sum. Where they do not, the
        # largest norm is that of all devices, so that copies of a parameter stay copies.
        sizes["norm"] = _norm_bits(passes[-1].squares(axis_names(axis_name)))
    # The sizes are negated, as the least number counts. They are integers, since what becomes of
    # NaN in a maximum of floats is up to the library that devices exchange numbers by.
    negated = [-bits for bits in sizes.values()]
    agreed = [*flags, *negated]
    if axis_name is not None:
        agreed = agree_on_least(agreed, axis_name)
        loss = agree_on_loss(loss, axis_name)
    grads_finite, loss_finite, *leaves_finite = agreed[: len(flags)]
    largest_bits = [float_of_bits(-bits) for bits in agreed[len(flags) :]]
    agreed_sizes = dict(zip(sizes, largest_bits, strict=True))
    if questions.norm and not squares:
        zeros = map_gradients(jnp.zeros_like, grads.divided)
        finite_grads = where(grads_finite, grads.divided, zeros)
        norm = global_norm(finite_grads, axis_name)
        agreed_sizes["norm"] = jnp.where(grads_finite, norm, jnp.inf)
    nonfinite_leaves = None
    if by_leaf:
        nonfinite_leaves = flags_by_leaf(grads.grads, leaves_finite)
    return Facts(
        grads_finite=grads_finite,
        loss_finite=loss_finite,
        loss=loss,
        norm=agreed_sizes.get("norm"),
        largest=agreed_sizes.get("largest"),
        nonfinite_leaves=nonfinite_leaves,
    )


def _norm_bits(squares: jax.Array) -> jax.Array:
    """Returns the bits of a norm, those of a NaN if the gradients were not finite."""
    norm = jnp.sqrt(squares)
    # One of a positive sign, whose bits are above those of all numbers.
    return float_bits(jnp.where(norm >= 0, norm, jnp.nan))


def global_norm(grads: Grads, axis_name: AxisNames) -> jax.Array:
    """Returns the norm of gradients that all devices along `axis_name` agree on."""
    reduction = reduce_gradients(grads, squares=True)
    squares = reduction.squares(axis_names(axis_name))
    return agree_on_size(_norm_bits(squares), axis_name)


def shown_norm(norm: jax.Array) -> jax.Array:
    """Returns a norm as an `f32[]`, inf if the gradients were not finite."""
    return jnp.where(norm >= 0, norm, jnp.inf).astype(jnp.float32)


def clip_by_global_norm(grads: Grads, norm: jax.Array, max_norm: float) -> Any:
    """Scales gradients of a known norm down to `max_norm` if that is less.

    The rule is that of `optax.clip_by_global_norm`, but with one factor, as XLA treats a division
    as expensive and would store a gradient that an optimizer uses twice.
    """
    info = jnp.finfo(norm.dtype)
    if max_norm > float(info.max):
        return grads  # nothing is clipped; in the norm's dtype the number would be inf
    max_norm = max(max_norm, float(info.smallest_normal))  # below it, 0 / 0
    factor = max_norm / jnp.maximum(norm, max_norm)  # exactly 1 if the norm is less

    def clip(leaf: jax.Array) -> jax.Array:
        return leaf * factor.astype(jnp.finfo(leaf.dtype).dtype)

    return map_gradients(clip, grads)


# Flags of leaves.


def flags_by_leaf(tree: PyTree, finite: Sequence[jax.Array] | None = None) -> Any:
    """Returns a tree like `tree` with a `bool[]` for each gradient and `None` elsewhere.

    A flag is set if its leaf is not `finite`. Without `finite` no flag is set. The tree has the
    paths of the gradients, and the same structure and types for any gradients of these parameters.
    """
    gradients = list_gradients(tree)
    if not gradients:
        # `optax.tree_map_params` finds the parameters in a state by calling `init` with
        # placeholders, and would take an empty tree of flags for parameters. So there is one flag,
        # which is never set.
        return jnp.array(False)
    if finite is None:
        # Each flag has a buffer of its own, as a donated state may hold no buffer twice.
        return replace_gradients(tree, [jnp.array(False) for _ in gradients])
    return replace_gradients(tree, [~flag for flag in finite])


def last_flags(old: PyTree, new: PyTree, grads_finite: jax.Array) -> Any:
    """Returns the new flags if the gradients overflowed, otherwise the old ones."""

    def choose(old_flag: Any, new_flag: Any) -> Any:
        if old_flag is None:
            return None
        if new_flag is None:
            new_flag = jnp.array(False)  # without a gradient, nothing could overflow
        return jnp.where(grads_finite, old_flag, new_flag)

    return jax.tree.map(choose, old, new, is_leaf=is_none)


def named_flags(flags: PyTree) -> dict[str, Any]:
    """Returns the flags under the paths of their leaves: `params/Dense_0/kernel`."""
    pairs = jax.tree_util.tree_leaves_with_path(flags)
    return {leaf_name(path): flag for path, flag in pairs}

"""The verdict on the gradients of a step, and what else the same pass over them tells.

All devices go by one verdict, and exchange it in one message. For `track_leaves=True`, flags by
leaf say which gradients the last overflow was in.
"""

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._jax import axes_to_agree_along, sum_over_devices
from .._trees.casts import cast, widen
from .._trees.gradient_leaves import (
    leaf_name,
    list_gradients,
    map_gradients,
    replace_gradients,
)
from .._trees.numbers import float_bits, float_of_bits
from .reduction import Reduction, reduce_gradients, reduce_sizes
from .scaled import Scaled


def all_finite(tree: Any, *, axis_name: Any = None) -> jax.Array:
    """Returns whether every gradient in a tree is finite.

    Args:
      tree: a pytree. Only its floating-point and complex leaves are read, except those under a
        key `_overwrite_with_gradient`. A tree without leaves to read is finite.
      axis_name: a mesh or `pmap` axis name, or a tuple of them, inside `shard_map`
        and `pmap`: all devices along it get one verdict. Leave it out under plain `jit`,
        where the answer already covers all shards.

    Returns:
      A `bool[]`: `False` if any element of any leaf is inf or NaN. Finite gradients of any
      size pass, because no sum or norm is taken that could overflow.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> jaxscale.all_finite({"w": jnp.array([1.0, jnp.inf]), "b": None})
      Array(False, dtype=bool)
      >>> jaxscale.all_finite({"w": jnp.array([3e38, 3e38]), "b": None})
      Array(True, dtype=bool)
    """
    return agree(reduce_gradients(tree).finite(), axis_name)


def largest(grads: Scaled, axis_name: Any = None) -> jax.Array | None:
    """Returns the largest absolute value among gradients, unscaled, an `f32[]`, or `None`.

    Of complex gradients, real and imaginary parts count. The result is inf or NaN exactly if a
    gradient is, or becomes so as it is unscaled. Otherwise it is at most float32's largest number.
    """
    reduction = reduce_sizes(grads)
    if not reduction.holds_sizes:
        return None  # there are no gradients
    return agree_on_size(reduction.largest_bits(), axis_name)


def agree(finite: jax.Array, axis_name: Any) -> jax.Array:
    """Returns a flag, or an array of them, that is set if `finite` is on all devices."""
    if axis_name is None:
        return finite
    return _find_least(finite.astype(jnp.int32), axis_name) == 1


def _find_least(numbers: jax.Array, axis_name: Any) -> jax.Array:
    """Returns, for each of some numbers, the least one on all devices along `axis_name`."""
    try:
        return jax.lax.pmin(numbers, axis_name)
    except NameError as error:
        call = f"`axis_name={axis_name!r}` of `loss_scaled` or `all_finite`"
        raise no_such_axis(call, "verdict") from error


def no_such_axis(call: str, what: str) -> NameError:
    """Returns the error for an `axis_name` that was passed where there is no such axis.

    `what` is what the devices along it were to agree on.
    """
    return NameError(
        f"{call} names an axis of the `shard_map` or `pmap` around this call, and there is none "
        "of that name. Under `jit` alone leave it out: an array there is whole, on however many "
        f"devices, and so is the {what}."
    )


def axis_names(axis_name: Any) -> tuple[Hashable, ...]:
    """Returns the names in an `axis_name`, which is one, a tuple of several, or `None`."""
    if axis_name is None:
        return ()
    if isinstance(axis_name, tuple | list):
        return tuple(axis_name)
    return (axis_name,)


def agree_on_sizes(
    finite: jax.Array, sizes: dict[Any, jax.Array], axis_name: Any
) -> tuple[jax.Array, dict[Any, jax.Array]]:
    """Agrees on flags as `agree` does, and on the largest of some sizes, in one message.

    `finite` is a `bool[n]`. Each size of this device comes as the bits of a float, and the largest
    of all devices is returned as such a float.
    """
    if not sizes:
        return agree(finite, axis_name), {}
    if axis_name is not None:
        # The sizes are negated, as the least number counts. They are integers, since what becomes
        # of NaN in a maximum of floats is up to the library that devices exchange numbers by.
        integers = [bits.dtype for bits in sizes.values()]
        widest = max(integers, key=lambda dtype: dtype.itemsize)
        flags = finite.astype(widest)
        negated = -jnp.stack([bits.astype(widest) for bits in sizes.values()])
        num_flags = flags.shape[0]
        least = _find_least(jnp.append(flags, negated), axis_name)
        finite = least[:num_flags] == 1
        largest = -least[num_flags:]
        for name, bits, dtype in zip(list(sizes), largest, integers, strict=True):
            sizes = sizes | {name: bits.astype(dtype)}
    return finite, {name: float_of_bits(bits) for name, bits in sizes.items()}


def agree_on_size(bits: jax.Array, axis_name: Any) -> jax.Array:
    """Returns the largest of a size, or of each in an array, on all devices along `axis_name`.

    A size of this device comes as the bits of an `f32[]`, and is returned as an `f32[]`.
    """
    if axis_name is not None:
        # As in `agree_on_sizes`.
        bits = -_find_least(-bits, axis_name)
    return float_of_bits(bits)


def agree_on_norm(squares: jax.Array, axis_name: Any) -> jax.Array:
    """Returns the norm, given the sum of squares: the largest of all devices along `axis_name`."""
    if axis_name is None:
        return jnp.sqrt(squares)
    return agree_on_size(_norm_bits(squares), axis_name)


def _norm_bits(squares: jax.Array) -> jax.Array:
    """Returns the bits of a norm, those of a NaN if the gradients were not finite."""
    norm = jnp.sqrt(squares)
    # One of a positive sign, whose bits are above those of all numbers.
    return float_bits(jnp.where(norm >= 0, norm, jnp.nan))


def shown_norm(norm: jax.Array) -> jax.Array:
    """Returns a norm as an `f32[]`, inf if the gradients were not finite."""
    return cast(jnp.where(norm >= 0, norm, jnp.inf), jnp.float32)


def agree_on_loss(loss: Any, axis_name: Any) -> Any:
    """Returns the mean loss of all devices along `axis_name`, in the dtype of the loss.

    A loss whose type says that it is the same on all of them stays as it is. So does `None`.
    """
    if loss is None:
        return None
    axes = axes_to_agree_along(loss, axis_names(axis_name))
    if not axes:
        return loss
    wide = widen(loss)
    # Divide first, so that the sum cannot overflow.
    share = wide / cast(jax.lax.psum(1, tuple(axes)), wide.dtype)
    # How far a loss is rounded matters to whoever judges it.
    return cast(sum_over_devices(share, axes), jnp.result_type(loss))


class Questions(NamedTuple):
    """What a verdict answers, besides whether the gradients and the loss are finite."""

    by_leaf: bool  # which gradients are finite
    largest: bool  # how large the largest gradient is
    norm: bool  # the global norm of the gradients


class Verdict(NamedTuple):
    """What one pass over the gradients of a step says. All devices along `axis_name` agree."""

    axis_name: Any
    grads_finite: jax.Array  # bool[]
    loss_finite: jax.Array  # bool[], true if no loss was passed
    leaves_finite: list[jax.Array]  # a bool[] for each gradient, if leaves are tracked
    loss: Any = None  # the mean of all devices, `None` if no loss was passed
    # These are `None` unless they were asked for.
    norm: jax.Array | None = None  # f32[] or wider, NaN if the gradients are not finite
    largest: jax.Array | None = None  # f32[], the largest gradient


class _Passes(NamedTuple):
    """The passes over the gradients of a step that its verdict rests on."""

    decisive: list[Reduction]  # the gradients are finite if each of these says so
    largest: Reduction  # holds the largest gradient, if that is asked for
    squares: Reduction  # holds the sum of squares, if that is asked for


def judge_gradients(
    grads: Scaled,
    loss: Any,
    axis_name: Any,
    *,
    before_hook: Scaled | None,
    questions: Questions,
) -> Verdict:
    """Judges the gradients and the loss of one step.

    `before_hook` holds the gradients before a hook changed them, if one did. The verdict covers
    both, as a clip hides an inf. The largest gradient is that before the hook, and the norm is that
    of `grads`.
    """
    passes = _make_passes(grads, before_hook, questions)
    flags = _find_flags(passes.decisive, loss, questions.by_leaf)
    sizes = {}
    if passes.largest.holds_sizes:
        sizes["largest"] = passes.largest.largest_bits()
    if questions.norm:
        # Where types say which leaves vary, all devices get the same sum. Where they do not, the
        # largest norm is that of all devices, so that copies of a parameter stay copies.
        squares = passes.squares.squares(axis_names(axis_name))
        sizes["norm"] = _norm_bits(squares)
    flags, agreed = agree_on_sizes(flags, sizes, axis_name)
    grads_finite, loss_finite, *leaves_finite = flags
    return Verdict(
        axis_name=axis_name,
        grads_finite=grads_finite,
        loss_finite=loss_finite,
        leaves_finite=leaves_finite,
        loss=agree_on_loss(loss, axis_name),
        norm=agreed.get("norm"),
        largest=agreed.get("largest"),
    )


def _make_passes(
    grads: Scaled, before_hook: Scaled | None, questions: Questions
) -> _Passes:
    """Makes the passes that answer the questions of `judge_gradients`: one, or two."""
    original = grads
    if before_hook is not None:
        original = before_hook
    if questions.largest:
        first = reduce_sizes(original, by_leaf=questions.by_leaf)
    else:
        needs_squares = questions.norm and before_hook is None
        first = reduce_gradients(
            original.divided, by_leaf=questions.by_leaf, squares=needs_squares
        )
    if before_hook is not None:
        second = reduce_gradients(
            grads.divided, by_leaf=questions.by_leaf, squares=questions.norm
        )
        return _Passes(decisive=[first, second], largest=first, squares=second)
    if questions.largest and questions.norm:
        second = reduce_gradients(grads.divided, squares=True)
        return _Passes(decisive=[first], largest=first, squares=second)
    return _Passes(decisive=[first], largest=first, squares=first)


def _find_flags(passes: Sequence[Reduction], loss: Any, by_leaf: bool) -> jax.Array:
    """Returns a `bool[n]`: if the gradients are finite, the loss, and with `by_leaf` each leaf."""
    of_leaves = []
    if by_leaf:
        of_leaves = [reduction.finite_groups() for reduction in passes]
    of_gradients = [reduction.finite() for reduction in passes]
    groups = [of_gradients, [all_finite(loss)], *zip(*of_leaves, strict=True)]
    return jnp.stack(list(map(_all_hold, groups)))


def _all_hold(flags: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.bitwise_and, flags)


def flags_by_leaf(tree: Any, finite: Sequence[jax.Array] | None = None) -> Any:
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


def last_flags(old: Any, new: Any, grads_finite: jax.Array) -> Any:
    """Returns the new flags if the gradients overflowed, otherwise the old ones."""

    def choose(old_flag: Any, new_flag: Any) -> Any:
        if old_flag is None:
            return None
        if new_flag is None:
            new_flag = jnp.array(False)  # without a gradient, nothing could overflow
        return jnp.where(grads_finite, old_flag, new_flag)

    return jax.tree.map(choose, old, new, is_leaf=lambda flag: flag is None)


def named_flags(flags: Any) -> dict[str, Any]:
    """Returns the flags under the paths of their leaves: `params/Dense_0/kernel`."""
    pairs = jax.tree_util.tree_leaves_with_path(flags)
    return {leaf_name(path): flag for path, flag in pairs}


def flagged_paths(flags: Any) -> list[str]:
    """Returns the paths of the flags that are set, on the host, in any member of a population."""
    named = named_flags(jax.device_get(flags))
    return [name for name, flag in named.items() if np.any(flag)]


def global_norm(grads: optax.Updates, axis_name: Any) -> jax.Array:
    """Returns the norm of gradients that all devices along `axis_name` agree on."""
    reduction = reduce_gradients(grads, squares=True)
    return agree_on_norm(reduction.squares(axis_names(axis_name)), axis_name)


def clip_by_global_norm(
    grads: optax.Updates, norm: jax.Array, max_norm: float
) -> optax.Updates:
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
        return leaf * cast(factor, jnp.finfo(leaf.dtype).dtype)

    return map_gradients(clip, grads)

"""The verdict on the gradients of a step, and what else the same pass over them tells.

All devices go by one verdict, and exchange it in one message. Flags by leaf say which gradients the
last overflow was in, for `track_leaves=True`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._trees.tree import cast, leaf_name, list_gradients, map_gradients, replace_gradients
from .reduction import read, sizes
from .scaled import Scaled


def all_finite(tree: Any, *, axis_name: Any = None) -> jax.Array:
    """Returns whether every gradient in a tree is finite.

    Args:
      tree: a pytree. Only its floating-point and complex leaves are read, and nothing under a
        key `_overwrite_with_gradient`. A tree without any such leaf is finite.
      axis_name: a mesh or `pmap` axis name, or a tuple of them, inside `shard_map`
        and `pmap`: all devices along it get one verdict. Leave it out under plain `jit`,
        where the answer covers all shards already.

    Returns:
      A `bool[]`: `False` if any element of any leaf is inf or NaN. Finite gradients of any
      size pass: no sum or norm decides, which could overflow.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> jaxscale.all_finite({"w": jnp.array([1.0, jnp.inf]), "b": None})
      Array(False, dtype=bool)
      >>> jaxscale.all_finite({"w": jnp.array([3e38, 3e38]), "b": None})
      Array(True, dtype=bool)
    """
    return agree(read(tree).finite(), axis_name)


def largest(grads: Scaled, axis_name: Any = None) -> jax.Array | None:
    """Returns the largest absolute value among gradients, unscaled, an `f32[]`, or `None`.

    Of complex gradients, real and imaginary parts count. It is inf or NaN exactly if one of them
    is, or becomes so as it is unscaled, and at most float32's largest number if none is.
    """
    evidence = sizes(grads)
    return agree_on_size(evidence.bits(), axis_name) if evidence.holds_sizes else None


def agree(finite: jax.Array, axis_name: Any) -> jax.Array:
    """Returns `finite` where it holds on every device along `axis_name`."""
    if axis_name is None:
        return finite
    return _least(finite.astype(jnp.int32), axis_name) == 1


def _least(numbers: jax.Array, axis_name: Any) -> jax.Array:
    """Returns the least of some numbers on all devices along `axis_name`, each for itself."""
    try:
        return jax.lax.pmin(numbers, axis_name)
    except NameError as error:
        raise no_such_axis(
            f"`axis_name={axis_name!r}` of `loss_scaled` or `all_finite`", "verdict"
        ) from error


def no_such_axis(given: str, what: str) -> NameError:
    """Returns the error for an `axis_name` that was given where there is no such axis.

    `what` is what the devices along it were to agree on.
    """
    return NameError(
        f"{given} names an axis of the `shard_map` or `pmap` around this call, and there is none "
        "of that name. Under `jit` alone leave it out: an array there is whole, on however many "
        f"devices, and so is the {what}."
    )


def axis_names(axis_name: Any) -> tuple[Any, ...]:
    """Returns the names in an `axis_name`, which is one, a tuple of several, or `None`."""
    if isinstance(axis_name, tuple | list):
        return tuple(axis_name)
    return () if axis_name is None else (axis_name,)


def agree_on_sizes(
    finite: jax.Array, bits: dict[Any, jax.Array], axis_name: Any
) -> tuple[jax.Array, dict[Any, jax.Array]]:
    """Returns what `agree` does for a `bool[n]`, and the largest of some sizes, in one message.

    The sizes of this device are given as the bits of an `f32[]`, which is what is returned.
    """
    if not bits:
        return agree(finite, axis_name), {}
    if axis_name is not None:
        # Negated, as the least number counts. As an integer, since what becomes of NaN in a
        # maximum of floats is up to the library that devices exchange numbers by.
        local = jnp.append(finite.astype(jnp.int32), -jnp.stack(list(bits.values())))
        least = _least(local, axis_name)
        finite = least[: -len(bits)] == 1
        bits = dict(zip(bits, -least[-len(bits) :], strict=True))
    return finite, {name: _as_float(each) for name, each in bits.items()}


def agree_on_size(bits: jax.Array, axis_name: Any) -> jax.Array:
    """Returns the largest of a size on all devices along `axis_name`, as `agree_on_sizes` does."""
    return agree_on_sizes(jnp.zeros(0, jnp.bool_), {"size": bits}, axis_name)[1]["size"]


def norm_bits(norm: jax.Array) -> jax.Array:
    """Returns the bits of a norm in float32, of inf if the gradients were not finite."""
    return _bits(cast(jnp.where(norm >= 0, norm, jnp.inf), jnp.float32))


def _bits(number: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(number, jnp.int32)


def _as_float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _ordered(bits: jax.Array) -> jax.Array:
    """Returns integers in the order of floats, negative ones too, given their bits, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


class Verdict(NamedTuple):
    """What one pass over the gradients of a step says. All devices along `axis_name` agree."""

    axis_name: Any
    grads_finite: jax.Array  # bool[]
    loss_finite: jax.Array  # bool[], true if no loss was passed
    leaves_finite: list[jax.Array]  # a bool[] for each gradient, if leaves are tracked
    squares: jax.Array | None  # the sum of all squares, if the norm comes from the same pass
    norm: jax.Array | None = None  # that all devices agree on, an f32[], if that was asked for
    loss: jax.Array | None = None  # the largest of all devices, if that was asked for
    largest: jax.Array | None = None  # the largest gradient, an f32[], if the policy needs it


def judge(
    grads: Scaled,
    loss: Any,
    axis_name: Any,
    *,
    seen: Scaled | None,
    by_leaf: bool,
    wants_largest: bool,
    wants_squares: bool,
    agrees_on_norm: bool,
    agrees_on_loss: bool,
) -> Verdict:
    """Returns the verdict on the gradients and the loss of one step.

    `seen` are the gradients before a hook changed them, if one did. The verdict covers both, as a
    clip hides an inf; the largest is that of `seen`, and the norm that of `grads`. The flags say
    what else to find (`by_leaf` is which gradients are finite), and on what devices agree, too.
    """
    first = grads if seen is None else seen
    if wants_largest:
        found = sizes(first, by_leaf=by_leaf)
    else:
        found = read(first.divided, by_leaf=by_leaf, squares=wants_squares and seen is None)
    passes, with_squares = [found], found
    if seen is not None:
        with_squares = read(grads.divided, by_leaf=by_leaf, squares=wants_squares)
        passes.append(with_squares)
    elif wants_largest and wants_squares:
        with_squares = read(grads.divided, squares=True)
    leaves = zip(*(each.finite_groups() for each in passes), strict=True) if by_leaf else ()
    held = [[each.finite() for each in passes], [all_finite(loss)], *leaves]
    local = jnp.stack([functools.reduce(jnp.bitwise_and, each) for each in held])
    squares = with_squares.squares() if wants_squares else None
    bits = {"largest": found.bits()} if found.holds_sizes else {}
    if squares is not None and agrees_on_norm:
        bits["norm"] = norm_bits(jnp.sqrt(squares))
    if loss is not None and agrees_on_loss:
        bits["loss"] = _ordered(_bits(cast(loss, jnp.float32)))
    (grads_finite, loss_finite, *leaves_finite), known = agree_on_sizes(local, bits, axis_name)
    if "loss" in known:
        # In its own dtype: how far a loss is rounded matters to who judges it.
        known["loss"] = cast(_as_float(_ordered(_bits(known["loss"]))), jnp.result_type(loss))
    return Verdict(axis_name, grads_finite, loss_finite, leaves_finite, squares, **known)


def flags_by_leaf(tree: Any, finite: Sequence[jax.Array] | None = None) -> Any:
    """Returns a tree like `tree` with a `bool[]` for each gradient and `None` elsewhere.

    A flag is set if its leaf is not `finite`; without `finite`, none is. The tree has the paths of
    the gradients, and the same structure and types for any gradients of these parameters.
    """
    gradients = list_gradients(tree)
    if not gradients:
        # One flag that is never set. `optax.tree_map_params` finds the parameters in a state by
        # calling `init` with placeholders, and would take an empty tree of flags for parameters.
        return jnp.array(False)
    if finite is None:  # each in a buffer of its own, as a donated state may hold none twice
        return replace_gradients(tree, [jnp.array(False) for _ in gradients])
    return replace_gradients(tree, [~each for each in finite])


def last_flags(flags: Any, new: Any, grads_finite: jax.Array) -> Any:
    """Returns the new flags if the gradients overflowed, otherwise the old ones."""

    def choose(flag: Any, new: Any) -> Any:
        if flag is None:
            return None
        # A parameter without a gradient has no gradient that could overflow.
        return jnp.where(grads_finite, flag, jnp.array(False) if new is None else new)

    return jax.tree.map(choose, flags, new, is_leaf=lambda flag: flag is None)


def named_flags(flags: Any) -> dict[str, Any]:
    """Returns the flags under the paths of their leaves: `params/Dense_0/kernel`."""
    return {leaf_name(path): flag for path, flag in jax.tree_util.tree_leaves_with_path(flags)}


def flagged_paths(flags: Any) -> list[str]:
    """Returns the paths of the flags that are set, on the host, in any member of a population."""
    named = named_flags(jax.device_get(flags))
    return [name for name, flag in named.items() if np.any(flag)]


def global_norm(grads: Any) -> jax.Array:
    """Returns the square root of the sum of all squares, an `f32[]` or wider."""
    return jnp.sqrt(read(grads, squares=True).squares())


def clip_by_global_norm(grads: Any, norm: jax.Array, max_norm: float) -> Any:
    """Returns gradients of a known norm, scaled down to `max_norm` if that is less.

    The rule is that of `optax.clip_by_global_norm`, but with one factor, as XLA treats a division
    as expensive and would store a gradient that an optimizer uses twice.
    """
    info = jnp.finfo(norm.dtype)
    if max_norm > float(info.max):
        return grads  # nothing is clipped; in the norm's dtype the number would be inf
    max_norm = max(max_norm, float(info.smallest_normal))  # below it, 0 / 0
    factor = max_norm / jnp.maximum(norm, max_norm)  # exactly 1 if the norm is less
    return map_gradients(lambda leaf: leaf * cast(factor, jnp.finfo(leaf.dtype).dtype), grads)

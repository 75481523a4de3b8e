"""What one pass over the gradients tells: the verdict, flags for each leaf, and the norm.

From top to bottom:

- *The verdict*, `all_finite`: whether all gradients are finite. A sum or a norm of finite
  numbers may overflow, so neither can decide this. `read` reduces the leaves in groups, as each
  reduction is a kernel of its own, and `Evidence` holds one number for each group.
- *Flags by leaf*: which gradients the last overflow was in, for `track_leaves=True`.
- *Clipping*: the global norm comes from the same numbers as the verdict, if these are sums of
  squares.
- *The largest gradient*, for a policy that follows it.
"""

# The work on each leaf is written in `jax.lax`: `jax.numpy` takes three times as long to trace.

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ._tree import cast, leaf_name, map_gradients, only_gradients, widen

# From this many elements on, a leaf is large: reading it takes longer than starting its kernel.
_LARGE = 2**16

# Up to 64 small or 16 large leaves share one reduction; a CPU slows down beyond that.
_MOST, _MOST_LARGE = 64, 16

# Split a lone large leaf into 8 parts, so that XLA on a CPU stores an eighth of it and uses all
# cores.
_PARTS = 8

_CONFIG: Any = jax.config  # type checkers do not know its attributes


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


def agree(finite: jax.Array, axis_name: Any) -> jax.Array:
    """Returns `finite` where it holds on every device along `axis_name`."""
    if axis_name is None:
        return finite
    return jax.lax.pmin(finite.astype(jnp.int32), axis_name) == 1


class Evidence(NamedTuple):
    """The result of one pass over the gradients: a number for each group of leaves.

    A bool says whether the group is finite. A float is the sum of its squares, which may overflow
    to inf; it is NaN or below 0 if the group is not finite.
    """

    numbers: list[jax.Array]

    def finite_groups(self) -> list[jax.Array]:
        """Returns whether each group is finite, as a `bool[]`."""
        return [number if number.dtype == jnp.bool_ else _holds(number) for number in self.numbers]

    def finite(self) -> jax.Array:
        """Returns whether all groups are finite, a `bool[]`."""
        # Add the sums up before comparing, so that devices exchange a single number.
        bools = (number for number in self.numbers if number.dtype == jnp.bool_)
        return functools.reduce(jnp.bitwise_and, bools, _holds(self.squares()))

    def squares(self) -> jax.Array:
        """Returns the sum of the sums of squares, an `f32[]` or wider."""
        sums = [number for number in self.numbers if number.dtype != jnp.bool_]
        dtype = max((each.dtype for each in sums), key=lambda d: d.itemsize, default=jnp.float32)
        return functools.reduce(jnp.add, (cast(each, dtype) for each in sums), jnp.zeros((), dtype))


def read(tree: Any, *, by_leaf: bool = False, squares: bool = False) -> Evidence:
    """Returns the evidence on which a verdict on the gradients rests.

    Args:
      tree: a pytree. Each gradient in it is read once.
      by_leaf: whether each gradient is a group of its own. Otherwise leaves of one type form
        groups and are combined element by element before the reduction. Each reduction is a
        kernel, and hundreds of kernels are the cost of a verdict.
      squares: whether to reduce to the sum of squares, which a norm needs.
    """
    groups: dict[Any, list[Any]] = {}
    for i, leaf in enumerate(jax.tree.leaves(only_gradients(tree))):
        aval = jax.typeof(leaf)
        alone = by_leaf or not _is_placed(aval)
        groups.setdefault((aval, i if alone else None), []).append(leaf)
    chunks = [chunk for leaves in groups.values() for chunk in _chunks(leaves)]
    return Evidence([_reduced(chunk, squares) for chunk in chunks])


def nans_are_errors() -> bool:
    """Returns whether JAX raises an error at a NaN, so that no sum of squares may be NaN."""
    return _CONFIG.jax_debug_nans


def _chunks(leaves: list[Any]) -> list[list[Any]]:
    most = _MOST_LARGE if _is_large(leaves[0]) else _MOST
    return [leaves[i : i + most] for i in range(0, len(leaves), most)]


def _is_placed(aval: Any) -> bool:
    """Returns whether arrays of one type are known to lie on the same devices in the same way.

    Otherwise only XLA knows, and combining two of them might send one between devices.
    """
    mesh = aval.sharding.mesh
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or AxisType.Auto not in mesh.axis_types


def _is_whole(aval: Any) -> bool:
    """Returns whether arrays of a placed type lie on one device each."""
    mesh = aval.sharding.mesh
    return mesh.size <= 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)


def _is_large(leaf: Any) -> bool:
    size = jnp.size(leaf)
    return isinstance(size, int) and size >= _LARGE  # a symbol in `jax.export`


def _reduced(leaves: list[Any], squares: bool) -> jax.Array:
    """Returns the number that `Evidence` holds for a group of leaves of one type."""
    leaves, aval = list(map(jnp.asarray, leaves)), jax.typeof(leaves[0])
    if not squares and (_is_placed(aval) or nans_are_errors()):
        parts = _in_parts(leaves)
        return jnp.all(functools.reduce(jax.lax.bitwise_and, map(_is_finite, parts)))
    # A sum even if only the verdict is asked for: XLA merges the sums that devices exchange, that
    # of the loss included, into one exchange.
    squared = (_squares(leaf, _is_placed(aval)) for leaf in leaves)
    return widen(jnp.sum(functools.reduce(jax.lax.add, squared)))


def _holds(total: jax.Array) -> jax.Array:
    return total >= 0


def _is_finite(part: jax.Array) -> jax.Array:
    """Returns which elements are finite."""
    if jnp.iscomplexobj(part):
        return _is_finite(part.real) & _is_finite(part.imag)
    return jax.lax.is_finite(widen(part))


def _in_parts(leaves: list[jax.Array]) -> list[jax.Array]:
    """Returns leaves of one type, and if they are large and few, equal parts of them."""
    whole = _is_whole(jax.typeof(leaves[0]))
    number = _PARTS // len(leaves) if whole and _is_large(leaves[0]) else 1
    return [part for leaf in leaves for part in _parts(leaf, number)]


def _parts(leaf: jax.Array, number: int) -> list[jax.Array]:
    """Returns a leaf in `number` parts of one type, or in fewer if no axis can be divided."""
    for axis, size in enumerate(leaf.shape):
        if number > 1 and size % number == 0:
            return jnp.split(leaf, number, axis)
    return _parts(leaf, number // 2) if number > 1 else [leaf]


def _squares(leaf: jax.Array, placed: bool) -> jax.Array:
    """Returns the squares of finite elements, and NaN or a number below 0 for the others.

    Adding x - x would do the same, but compilers remove it if they may reorder arithmetic, as in
    XLA's fast math.
    """
    if jnp.iscomplexobj(leaf):
        return _squares(leaf.real, placed) + _squares(leaf.imag, placed)
    leaf = widen(leaf)
    square, magnitude = jax.lax.mul(leaf, leaf), jax.lax.abs(leaf)
    if not placed:
        # Without constants in the shape of the leaf: leaves that are sharded differently would
        # share one, and XLA would send a leaf between devices to match it.
        return jax.lax.select(jax.lax.is_finite(leaf), square, jax.lax.neg(magnitude))
    # Without a selection: XLA on a CPU fuses only arithmetic into a sum and would store the
    # selection. The excess of an element over the largest number is 0 if it is finite, and inf
    # for an inf, whose square is inf, too: inf - inf is NaN.
    largest = float(jnp.finfo(leaf.dtype).max)
    excess = jax.lax.sub(magnitude, jax.lax.full_like(leaf, largest))
    return jax.lax.sub(square, jax.lax.max(excess, jax.lax.full_like(leaf, 0)))


def flags_by_leaf(tree: Any, finite: Sequence[jax.Array] | None = None) -> Any:
    """Returns a tree like `tree` with a `bool[]` for each gradient and `None` elsewhere.

    A flag is set if its leaf is not `finite`; without `finite`, none is. The tree has the paths of
    the gradients, and the same structure and types for any gradients of these parameters.
    """
    gradients, structure = jax.tree.flatten(only_gradients(tree))
    if not gradients:
        # One flag that is never set. `optax.tree_map_params` finds the parameters in a state by
        # calling `init` with placeholders, and would take an empty tree of flags for parameters.
        return jnp.array(False)
    if finite is None:  # each in a buffer of its own, as a donated state may hold none twice
        return jax.tree.unflatten(structure, [jnp.array(False) for _ in gradients])
    return jax.tree.unflatten(structure, [~each for each in finite])


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
    """Returns the paths of the flags that are set, on the host.

    The flags of a population have leading axes; one counts as set if it is in any member.
    """
    named = named_flags(jax.device_get(flags))
    return [name for name, flag in named.items() if np.any(flag)]


def global_norm(grads: Any) -> jax.Array:
    """Returns the square root of the sum of all squares, an `f32[]` or wider."""
    return jnp.sqrt(read(grads, squares=True).squares())


def clip_by_global_norm(grads: Any, norm: jax.Array, max_norm: float) -> Any:
    """Returns gradients of a known norm, scaled down to `max_norm` if that is less.

    The rule is that of `optax.clip_by_global_norm`, but each gradient is multiplied by one factor.
    Optimizers use a gradient twice, and XLA treats a division as expensive and would store it.
    """
    info = jnp.finfo(norm.dtype)
    if max_norm > float(info.max):
        return grads  # nothing is clipped; in the norm's dtype the number would be inf
    max_norm = max(max_norm, float(info.smallest_normal))  # below it, 0 / 0
    factor = max_norm / jnp.maximum(norm, max_norm)  # exactly 1 if the norm is less
    return map_gradients(lambda leaf: leaf * cast(factor, jnp.finfo(leaf.dtype).dtype), grads)


def largest(tree: Any, axis_name: Any = None) -> jax.Array:
    """Returns the largest absolute value among the gradients in a tree, an `f32[]`.

    Of complex gradients, real and imaginary parts count. The result is capped at float32's largest
    number, which float64 may exceed, and is any number if a gradient is not finite.

    Args:
      tree: a pytree. Each gradient in it is read once.
      axis_name: as in `all_finite`.
    """
    groups: dict[Any, list[jax.Array]] = {}
    for i, leaf in enumerate(jax.tree.leaves(only_gradients(tree))):
        for part in (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,):
            aval = jax.typeof(part)
            groups.setdefault((aval, None if _is_placed(aval) else i), []).append(part)
    chunks = [chunk for leaves in groups.values() for chunk in _chunks(leaves)]
    sizes = (cast(_largest(chunk), jnp.float32) for chunk in chunks)
    largest = functools.reduce(jnp.maximum, sizes, jnp.zeros((), jnp.float32))
    return largest if axis_name is None else jax.lax.pmax(largest, axis_name)


def _largest(leaves: list[Any]) -> jax.Array:
    """Returns the largest absolute value in leaves of one type, in float32 or wider."""
    leaves, aval = list(map(jnp.asarray, leaves)), jax.typeof(leaves[0])
    if jnp.finfo(aval.dtype).bits < 16 or not _is_placed(aval):
        # All in one type, so that devices exchange what they found in one message.
        leaves, aval = list(map(widen, leaves)), jax.typeof(widen(leaves[0]))
    # By their bits: without the sign, floats are ordered as integers are. XLA on a CPU fuses
    # maxima of integers into one pass, but not those of floats, and stores what it does not fuse.
    bits = map(_bits, _in_parts(leaves))
    # The initial value is for empty leaves. The size is not compared, as it may be a symbol.
    most = jnp.max(functools.reduce(jax.lax.max, bits), initial=0)
    size = widen(jax.lax.bitcast_convert_type(most, aval.dtype))
    return jnp.minimum(size, float(jnp.finfo(jnp.float32).max))


def _bits(leaf: jax.Array) -> jax.Array:
    """Returns the bits of the absolute values of a leaf, as integers."""
    integer = jnp.dtype(f"int{jnp.finfo(leaf.dtype).bits}")
    mask = jnp.asarray(jnp.iinfo(integer).max, integer)
    return jax.lax.bitcast_convert_type(leaf, integer) & mask

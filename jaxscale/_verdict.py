"""Whether all gradients are finite: one verdict, from one pass over them.

It is not their sum or norm that is looked at, which overflow on finite numbers.
"""

# What is done to each leaf is written with `jax.lax`: `jax.numpy` takes thrice as long to trace.

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ._tree import cast, leaf_name, map_gradients, only_gradients, widen

# So many numbers make a leaf large: then it is its bytes that take time, and not its kernel.
_LARGE = 2**16

# So many leaves are put together. Of large ones fewer: a CPU reads no more at once without pain.
_MOST, _MOST_LARGE = 64, 16

# In so many parts is a large leaf taken that would have a kernel to itself: what XLA on a CPU
# then stores to reduce it is an eighth, and all cores take part.
_PARTS = 8

_CONFIG: Any = jax.config  # whose attributes no type checker knows


def all_finite(tree: Any, *, axis_name: Any = None) -> jax.Array:
    """Returns whether every gradient in a tree is finite.

    Args:
      tree: a pytree. Only floating and complex leaves are looked at, and nothing under a
        key `_overwrite_with_gradient`. A tree without any such leaf is finite.
      axis_name: a mesh or `pmap` axis name, or a tuple of them, inside `shard_map`
        and `pmap`: all devices along it get one verdict. Under plain `jit` leave it
        out, the answer covers all shards as it is.

    Returns:
      A `bool[]`: `False` if any element of any leaf is inf or NaN. No finite gradient
      is too large: it is not their sum or norm that is looked at.

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
    """What was read of the gradients: a number for each group of leaves that was reduced.

    A bool says whether the group is finite. A float is its sum of squares, which may overflow to
    inf; if the group is not finite, it is NaN or below 0.
    """

    numbers: list[jax.Array]

    def finite_groups(self) -> list[jax.Array]:
        """Returns whether each group is finite, as a `bool[]`."""
        return [number if number.dtype == jnp.bool_ else _holds(number) for number in self.numbers]

    def finite(self) -> jax.Array:
        """Returns whether all groups are finite, a `bool[]`."""
        # Sums are added up before they are compared: devices have one number to agree on.
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
      by_leaf: whether each gradient is a group of its own. Otherwise a group is what can be
        put together element by element before it is reduced. Each reduction is a kernel, and
        hundreds of kernels are what a verdict costs.
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
    """Returns whether JAX takes a NaN for a fault: then no sum of squares may be one."""
    return _CONFIG.jax_debug_nans


def _chunks(leaves: list[Any]) -> list[list[Any]]:
    most = _MOST_LARGE if _is_large(leaves[0]) else _MOST
    return [leaves[i : i + most] for i in range(0, len(leaves), most)]


def _is_placed(aval: Any) -> bool:
    """Returns whether arrays of one type lie on the same devices in the same way.

    Elsewhere only XLA knows, and to put them together might be to send them around.
    """
    mesh = aval.sharding.mesh
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or AxisType.Auto not in mesh.axis_types


def _is_whole(aval: Any) -> bool:
    """Returns whether arrays of a type that is placed lie on one device each."""
    mesh = aval.sharding.mesh
    return mesh.size <= 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)


def _is_large(leaf: Any) -> bool:
    size = jnp.size(leaf)
    return isinstance(size, int) and size >= _LARGE  # of `jax.export` it may be a symbol


def _reduced(leaves: list[Any], squares: bool) -> jax.Array:
    """Returns the number of a group of leaves of one type, as `Evidence` has it."""
    leaves, aval = list(map(jnp.asarray, leaves)), jax.typeof(leaves[0])
    if not squares and (_is_placed(aval) or nans_are_errors()):
        number = _PARTS // len(leaves) if _is_whole(aval) and _is_large(leaves[0]) else 1
        parts = [part for leaf in leaves for part in _parts(leaf, number)]
        return jnp.all(functools.reduce(jax.lax.bitwise_and, map(_is_finite, parts)))
    # A sum also where only the verdict is asked for, as XLA adds up what is reduced over several
    # devices, the loss, too, before they exchange it.
    squared = (_squares(leaf, _is_placed(aval)) for leaf in leaves)
    return widen(jnp.sum(functools.reduce(jax.lax.add, squared)))


def _holds(total: jax.Array) -> jax.Array:
    return total >= 0


def _is_finite(part: jax.Array) -> jax.Array:
    """Returns which elements are finite."""
    if jnp.iscomplexobj(part):
        return _is_finite(part.real) & _is_finite(part.imag)
    return jax.lax.is_finite(widen(part))


def _parts(leaf: jax.Array, number: int) -> list[jax.Array]:
    """Returns a leaf in so many parts of one type, or in fewer where no axis can be divided."""
    for axis, size in enumerate(leaf.shape):
        if number > 1 and size % number == 0:
            return jnp.split(leaf, number, axis)
    return _parts(leaf, number // 2) if number > 1 else [leaf]


def _squares(leaf: jax.Array, placed: bool) -> jax.Array:
    """Returns the squares of the elements, and something below 0 or NaN for one not finite.

    A plain x - x would tell the same, but compilers remove it where they may reorder arithmetic,
    as in XLA's fast math.
    """
    if jnp.iscomplexobj(leaf):
        return _squares(leaf.real, placed) + _squares(leaf.imag, placed)
    leaf = widen(leaf)
    square, magnitude = jax.lax.mul(leaf, leaf), jax.lax.abs(leaf)
    if not placed:
        # Without constants of the shape of the leaf: leaves that are divided differently would
        # share them, and XLA would send one of them around for that.
        return jax.lax.select(jax.lax.is_finite(leaf), square, jax.lax.neg(magnitude))
    # Without a selection: XLA on a CPU fuses nothing but arithmetic into a sum, and would store
    # it. What an element exceeds the largest number by is 0, and inf for inf: inf - inf is NaN.
    largest = float(jnp.finfo(leaf.dtype).max)
    excess = jax.lax.sub(magnitude, jax.lax.full_like(leaf, largest))
    return jax.lax.sub(square, jax.lax.max(excess, jax.lax.full_like(leaf, 0)))


def flags_by_leaf(tree: Any, finite: Sequence[jax.Array] | None = None) -> Any:
    """Returns a tree like `tree`: a `bool[]` for each gradient, `None` elsewhere.

    Set where a leaf is not `finite`; without that, nowhere. So it carries the paths of
    the leaves, and has the avals of any other such tree of these parameters.
    """
    gradients, structure = jax.tree.flatten(only_gradients(tree))
    if not gradients:
        # One flag that is never set. `optax.tree_map_params` takes what has the structure of
        # the parameters for parameters, and tells it by calling `init` with such a tree.
        return jnp.array(False)
    if finite is None:  # each in a buffer of its own: no state is donated that holds one twice
        return jax.tree.unflatten(structure, [jnp.array(False) for _ in gradients])
    return jax.tree.unflatten(structure, [~each for each in finite])


def last_flags(flags: Any, new: Any, grads_finite: jax.Array) -> Any:
    """Returns the new flags if the gradients overflowed, else those that were there."""

    def choose(flag: Any, new: Any) -> Any:
        if flag is None:
            return None
        # A parameter without a gradient has none that is bad.
        return jnp.where(grads_finite, flag, jnp.array(False) if new is None else new)

    return jax.tree.map(choose, flags, new, is_leaf=lambda flag: flag is None)


def named_flags(flags: Any) -> dict[str, Any]:
    """Returns the flags under the paths of their leaves: `params/Dense_0/kernel`."""
    return {leaf_name(path): flag for path, flag in jax.tree_util.tree_leaves_with_path(flags)}


def flagged_paths(flags: Any) -> list[str]:
    """Returns the paths of the leaves that are set, on the host.

    Of a population, whose flags have leading axes, those that are set in any member.
    """
    named = named_flags(jax.device_get(flags))
    return [name for name, flag in named.items() if np.any(flag)]


def global_norm(grads: Any) -> jax.Array:
    """Returns the square root of the sum of all squares, an `f32[]` or wider."""
    return jnp.sqrt(read(grads, squares=True).squares())


def clip_by_global_norm(grads: Any, norm: jax.Array, max_norm: float) -> Any:
    """Returns gradients of a known norm, scaled down to `max_norm` if that is less.

    The rule of `optax.clip_by_global_norm`, but by one product: a division of each gradient
    is stored where it is used twice, as XLA takes it to be expensive, and optimizers do.
    """
    info = jnp.finfo(norm.dtype)
    if max_norm > float(info.max):
        return grads  # "no clipping": as a number of the norm's dtype it would be inf
    max_norm = max(max_norm, float(info.smallest_normal))  # below it, 0 / 0
    factor = max_norm / jnp.maximum(norm, max_norm)  # exactly 1 if the norm is less
    return map_gradients(lambda leaf: leaf * cast(factor, jnp.finfo(leaf.dtype).dtype), grads)

"""Whether all gradients are finite: one verdict, from one pass over them.

It is not their sum or norm that is looked at, which overflow on finite numbers.
"""

# What is done to each leaf is written with `jax.lax`: `jax.numpy` takes thrice as long to trace.

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from ._tree import cast, only_gradients, widen

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
        key ``_overwrite_with_gradient``. A tree without any such leaf is finite.
      axis_name: a mesh or ``pmap`` axis name, or a tuple of them, inside ``shard_map``
        and ``pmap``: all devices along it get one verdict. Under plain ``jit`` leave it
        out, the answer covers all shards as it is.

    Returns:
      A ``bool[]``: ``False`` if any element of any leaf is inf or NaN. No finite gradient
      is too large: it is not their sum or norm that is looked at.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxscale
      >>> jaxscale.all_finite({"w": jnp.array([1.0, jnp.inf]), "b": None})
      Array(False, dtype=bool)
      >>> jaxscale.all_finite({"w": jnp.array([3e38, 3e38]), "b": None})
      Array(True, dtype=bool)
    """
    return agree(combined(evidence(tree))[0], axis_name)


def agree(finite: jax.Array, axis_name: Any) -> jax.Array:
    """Returns ``finite`` where it holds on every device along ``axis_name``."""
    if axis_name is None:
        return finite
    return jax.lax.pmin(finite.astype(jnp.int32), axis_name) == 1


def evidence(tree: Any, *, by_leaf: bool = False, squares: bool = False) -> list[jax.Array]:
    """Returns numbers that tell whether the gradients are finite: see :func:`is_finite`.

    Args:
      tree: a pytree, of which each gradient is read once.
      by_leaf: whether there is one number for each gradient. If not, there is one for
        each group of them that can be put together element by element before they are
        reduced. A reduction is a kernel of its own: hundreds of them are what a verdict costs.
      squares: whether what is reduced is to be the sum of squares, as a norm needs it.
    """
    groups: dict[Any, list[Any]] = {}
    for i, leaf in enumerate(jax.tree.leaves(only_gradients(tree))):
        aval = jax.typeof(leaf)
        alone = by_leaf or not _is_placed(aval)
        groups.setdefault((aval, i if alone else None), []).append(leaf)
    return [_reduced(chunk, squares) for leaves in groups.values() for chunk in _chunks(leaves)]


def is_finite(number: jax.Array) -> jax.Array:
    """Returns as a ``bool[]`` what is one already, or a sum, which is NaN if it does not hold."""
    return number if number.dtype == jnp.bool_ else number == number


def combined(numbers: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns whether all of some evidence is finite, a ``bool[]``, and the sum of its sums.

    They are added up before they are compared: devices have one number to agree on.
    """
    sums = [number for number in numbers if number.dtype != jnp.bool_]
    dtype = max((each.dtype for each in sums), key=lambda d: d.itemsize, default=jnp.float32)
    total = functools.reduce(jnp.add, (cast(each, dtype) for each in sums), jnp.zeros((), dtype))
    bools = (number for number in numbers if number.dtype == jnp.bool_)
    return functools.reduce(jnp.bitwise_and, bools, is_finite(total)), total


def nans_are_errors() -> bool:
    """Returns whether JAX takes a NaN for a fault: then evidence is no sum, but of squares."""
    return _CONFIG.jax_debug_nans


def _chunks(leaves: list[Any]) -> list[list[Any]]:
    most = _MOST if jnp.size(leaves[0]) < _LARGE else _MOST_LARGE
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


def _reduced(leaves: list[Any], squares: bool) -> jax.Array:
    """Returns a sum over leaves of one type, which is NaN, or a bool, if one is not finite."""
    leaves, aval = list(map(jnp.asarray, leaves)), jax.typeof(leaves[0])
    if squares:
        return widen(jnp.sum(functools.reduce(jax.lax.add, map(_squares, leaves))))
    if _is_placed(aval):
        number = _PARTS // len(leaves) if _is_whole(aval) and leaves[0].size >= _LARGE else 1
        parts = [part for leaf in leaves for part in _parts(leaf, number)]
        return jnp.all(functools.reduce(jax.lax.bitwise_and, map(_is_finite, parts)))
    (leaf,) = map(widen, leaves)
    if nans_are_errors():
        return jnp.all(jnp.isfinite(leaf))
    # x - x is 0, and NaN for inf and NaN: a sum that no finite number makes overflow. XLA adds
    # up what is reduced over several devices, of the loss, too, before they exchange it.
    return jnp.sum(leaf - leaf)


def _is_finite(part: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(part):
        return _is_finite(part.real) & _is_finite(part.imag)
    return jax.lax.is_finite(widen(part))


def _parts(leaf: jax.Array, number: int) -> list[jax.Array]:
    """Returns a leaf in so many parts of one type, or in fewer where no axis can be divided."""
    for axis, size in enumerate(leaf.shape):
        if number > 1 and size % number == 0:
            return jnp.split(leaf, number, axis)
    return _parts(leaf, number // 2) if number > 1 else [leaf]


def _squares(leaf: jax.Array) -> jax.Array:
    # Where squares of finite numbers overflow, their sum is inf and no NaN.
    if jnp.iscomplexobj(leaf):
        return _squares(leaf.real) + _squares(leaf.imag)
    leaf = widen(leaf)
    return jax.lax.add(jax.lax.mul(leaf, leaf), jax.lax.sub(leaf, leaf))

"""Whether all gradients are finite: one verdict, from one pass over them.

It is not their sum or norm that is looked at, which overflow on finite numbers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from ._quotient import recall
from ._tree import cast, only_gradients, widen

# Not float16, whose sums XLA on CPU computes from a copy in float32.
_SUMMED = (jnp.float32, jnp.bfloat16, jnp.float64)

# More operands than that make no kernel faster, and XLA slower.
_MOST = 32

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
        each group of them that can be added up element by element before they are reduced.
        A reduction is a kernel of its own, and hundreds of them are what a verdict costs.
      squares: whether what is reduced is to be the sum of squares, as a norm needs it.
    """
    groups: dict[Any, list[Any]] = {}
    for i, leaf in enumerate(jax.tree.leaves(only_gradients(tree))):
        aval = jax.typeof(leaf)
        key = i if by_leaf or not _is_placed(aval) else (aval, _source_dtype(leaf))
        groups.setdefault(key, []).append(leaf)
    return [
        _reduced(leaves[i : i + _MOST], squares)
        for leaves in groups.values()
        for i in range(0, len(leaves), _MOST)
    ]


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


def _is_placed(aval: Any) -> bool:
    """Returns whether arrays of one type lie on the same devices in the same way.

    Elsewhere only XLA knows, and to add them up might be to send them around.
    """
    types = aval.sharding.mesh.axis_types
    return jax.device_count() == 1 or (bool(types) and AxisType.Auto not in types)


def _source_dtype(leaf: Any) -> Any:
    quotient = recall(leaf)
    return jnp.result_type(leaf if quotient is None else quotient.dividend)


def _reduced(leaves: list[Any], squares: bool) -> jax.Array:
    """Returns a sum over leaves of one type, which is NaN, or a bool, if one is not finite."""
    if not squares and (nans_are_errors() or _source_dtype(leaves[0]) not in _SUMMED):
        return jnp.all(functools.reduce(jnp.bitwise_and, map(jnp.isfinite, leaves)))
    terms = map(_squares if squares else _differences, map(jnp.asarray, leaves))
    return widen(jnp.sum(functools.reduce(jax.lax.add, terms)))


def _differences(leaf: jax.Array) -> jax.Array:
    # x - x is 0, and NaN for inf and NaN: a sum that no finite number makes overflow. XLA
    # computes it where it reads x; of `isfinite`, on a CPU, it stores a mask.
    return jax.lax.sub(leaf, leaf)


def _squares(leaf: jax.Array) -> jax.Array:
    # Where squares of finite numbers overflow, their sum is inf and no NaN.
    if jnp.iscomplexobj(leaf):
        return _squares(leaf.real) + _squares(leaf.imag)
    leaf = widen(leaf)
    return leaf * leaf + (leaf - leaf)

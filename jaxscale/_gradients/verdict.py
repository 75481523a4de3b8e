"""What one pass over the gradients tells: the verdict, flags for each leaf, and the norm.

From top to bottom:

- *The verdict*, `all_finite`: whether all gradients are finite. A sum or a norm of finite
  numbers may overflow, so neither can decide this. `read` reduces the leaves in groups, as each
  reduction is a kernel of its own, and `Evidence` holds one number for each group.
- *Flags by leaf*: which gradients the last overflow was in, for `track_leaves=True`.
- *Clipping*: the global norm comes from the same numbers as the verdict, if these are sums of
  squares.

For a policy that follows the largest gradient, `sizes` takes the place of `read`: the largest
absolute value of a group is inf or NaN exactly if the group is not finite, so the verdict comes
from the same pass.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from .._trees.tree import cast, leaf_name, map_gradients, only_gradients, widen
from .scaled import Scaled, representable

# The work on each leaf is written in `jax.lax`: `jax.numpy` takes three times as long to trace.


# From this many elements on, a leaf is large: reading it takes longer than starting its kernel.
_LARGE = 2**16

# Up to 64 small or 16 large leaves share one reduction; a CPU slows down beyond that.
_MOST, _MOST_LARGE = 64, 16

# Split a lone large leaf into 8 parts, so that XLA on a CPU stores an eighth of it and uses all
# cores.
_PARTS = 8

# The bits of inf. As integers, those of finite absolute values are lower, those of NaN higher.
_INF = 0x7F800000

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


def largest(grads: Scaled, axis_name: Any = None) -> jax.Array | None:
    """Returns the largest absolute value among gradients, unscaled, an `f32[]`.

    Of complex gradients, real and imaginary parts count. It is inf or NaN exactly if one of them
    is, or becomes so as it is unscaled, and at most float32's largest number if none is. It is
    `None` if there are no gradients.

    Args:
      grads: a pytree. Each gradient in it is read once.
      axis_name: as in `all_finite`.
    """
    evidence = sizes(grads)
    return agree_on_size(evidence.bits(), axis_name) if evidence.holds_sizes else None


def agree(finite: jax.Array, axis_name: Any) -> jax.Array:
    """Returns `finite` where it holds on every device along `axis_name`."""
    if axis_name is None:
        return finite
    return jax.lax.pmin(finite.astype(jnp.int32), axis_name) == 1


def axis_names(axis_name: Any) -> tuple[Any, ...]:
    """Returns the names in an `axis_name`, which is one, a tuple of several, or `None`."""
    if isinstance(axis_name, tuple | list):
        return tuple(axis_name)
    return () if axis_name is None else (axis_name,)


def agree_on_sizes(
    finite: jax.Array, bits: dict[str, jax.Array], axis_name: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns what `agree` does for a `bool[n]`, and the largest of some sizes, in one message.

    Args:
      finite: the verdicts of this device.
      bits: its sizes by name, each as the bits of a float32, which is what they are returned as.
      axis_name: as in `agree`.
    """
    if not bits:
        return agree(finite, axis_name), {}
    if axis_name is not None:
        # Negated, as the least number counts. As an integer, since what becomes of NaN in a
        # maximum of floats is up to the library that devices exchange numbers by.
        local = jnp.append(finite.astype(jnp.int32), -jnp.stack(list(bits.values())))
        least = jax.lax.pmin(local, axis_name)
        finite = least[: -len(bits)] == 1
        bits = dict(zip(bits, -least[-len(bits) :], strict=True))
    as_numbers = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)
    return finite, {name: as_numbers(each) for name, each in bits.items()}


def agree_on_size(bits: jax.Array, axis_name: Any) -> jax.Array:
    """Returns the largest of a size on all devices along `axis_name`, as `agree_on_sizes` does."""
    return agree_on_sizes(jnp.zeros(0, jnp.bool_), {"size": bits}, axis_name)[1]["size"]


def norm_bits(norm: jax.Array) -> jax.Array:
    """Returns the bits of a norm in float32, of inf if the gradients were not finite."""
    norm = cast(jnp.where(norm >= 0, norm, jnp.inf), jnp.float32)
    return jax.lax.bitcast_convert_type(norm, jnp.int32)


class Evidence(NamedTuple):
    """The result of one pass over the gradients: a number for each group of leaves.

    A bool says whether the group is finite. A float is the sum of its squares, which may overflow
    to inf; it is NaN or below 0 if the group is not finite. An `i32[]` is its largest absolute
    value, as the bits of a float32, which are ordered as the numbers are.
    """

    numbers: list[jax.Array]

    def finite_groups(self) -> list[jax.Array]:
        """Returns whether each group is finite, as a `bool[]`."""
        return list(map(_holds, self.numbers))

    def finite(self) -> jax.Array:
        """Returns whether all groups are finite, a `bool[]`."""
        # Combine the numbers before comparing, so that devices exchange a single one.
        bools = self._of(jnp.bool_)
        held = _holds(self.bits() if self.holds_sizes else self.squares())
        return functools.reduce(jnp.bitwise_and, bools, held)

    @property
    def holds_sizes(self) -> bool:
        """Whether the largest absolute values are known."""
        return bool(self._of(jnp.int32))

    def bits(self) -> jax.Array:
        """Returns the bits of the largest absolute value, an `i32[]`."""
        return functools.reduce(jnp.maximum, self._of(jnp.int32), jnp.zeros((), jnp.int32))

    def squares(self) -> jax.Array:
        """Returns the sum of the sums of squares, an `f32[]` or wider."""
        sums = self._of(jnp.floating)
        dtype = max((each.dtype for each in sums), key=lambda d: d.itemsize, default=jnp.float32)
        return functools.reduce(jnp.add, (cast(each, dtype) for each in sums), jnp.zeros((), dtype))

    def _of(self, kind: Any) -> list[jax.Array]:
        return [number for number in self.numbers if jnp.issubdtype(number.dtype, kind)]


def read(tree: Any, *, by_leaf: bool = False, squares: bool = False) -> Evidence:
    """Returns the evidence on which a verdict on the gradients rests.

    Args:
      tree: a pytree. Each gradient in it is read once.
      by_leaf: whether each gradient is a group of its own. Otherwise leaves of one type form
        groups and are combined element by element before the reduction. Each reduction is a
        kernel, and hundreds of kernels are the cost of a verdict.
      squares: whether to reduce to the sum of squares, which a norm needs.
    """
    return Evidence([_reduced(group, squares) for group in _groups(tree, by_leaf)])


def sizes(grads: Scaled, *, by_leaf: bool = False) -> Evidence:
    """Returns evidence that also holds the largest gradient: bits, where `read` has bools.

    The gradients are read as the backward pass left them, and the largest is divided: division
    and rounding keep the order, so that is the largest of the divided ones.

    Args:
      grads: the gradients. Each is read once.
      by_leaf: as in `read`.
    """
    return Evidence([_size(group, grads.divisor) for group in _groups(grads.grads, by_leaf)])


def nans_are_errors() -> bool:
    """Returns whether JAX raises an error at a NaN, so that no sum of squares may be NaN."""
    return _CONFIG.jax_debug_nans


def _groups(tree: Any, by_leaf: bool) -> list[list[Any]]:
    """Returns the gradients in a tree, in groups that are reduced together."""
    groups: dict[Any, list[Any]] = {}
    for i, leaf in enumerate(jax.tree.leaves(only_gradients(tree))):
        aval = jax.typeof(leaf)
        alone = by_leaf or not _is_placed(aval)
        groups.setdefault((aval, i if alone else None), []).append(leaf)
    return [chunk for leaves in groups.values() for chunk in _chunks(leaves)]


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
        parts = _in_parts(leaves, _PARTS)
        return jnp.all(functools.reduce(jax.lax.bitwise_and, map(_is_finite, parts)))
    # A sum even if only the verdict is asked for: XLA merges the sums that devices exchange, that
    # of the loss included, into one exchange.
    squared = (_squares(leaf, _is_placed(aval)) for leaf in leaves)
    return widen(jnp.sum(functools.reduce(jax.lax.add, squared)))


def _size(leaves: list[Any], divisor: jax.Array | None) -> jax.Array:
    """Returns the largest absolute value in leaves of one type, as the bits of a float32.

    It is divided by `divisor`. A finite float64 may exceed float32's largest number, and becomes
    that.
    """
    leaves = [part for leaf in map(jnp.asarray, leaves) for part in _real_parts(leaf)]
    if jnp.finfo(leaves[0].dtype).bits < 16 or not _is_placed(jax.typeof(leaves[0])):
        # All in one type, so that devices exchange what they found in one message.
        leaves = list(map(widen, leaves))
    # By their bits: without the sign, floats are ordered as integers are, and no NaN is lost, as
    # in a maximum of floats it may be. XLA on a CPU fuses maxima of integers into one pass, but
    # not those of floats. The wider they are, the more parts, as it stores integers of that width.
    integer = jnp.dtype(f"int{jnp.finfo(leaves[0].dtype).bits}")
    mask = jnp.asarray(jnp.iinfo(integer).max, integer)
    parts = _in_parts(leaves, _PARTS // 2 * integer.itemsize)
    bits = [jax.lax.bitcast_convert_type(part, integer) & mask for part in parts]
    # The initial value is for empty leaves. The size is not compared, as it may be a symbol.
    most = jnp.max(functools.reduce(jax.lax.max, bits), initial=0)
    size = widen(jax.lax.bitcast_convert_type(most, leaves[0].dtype))
    if divisor is not None:
        size /= representable(divisor, size.dtype)
    if size.dtype != jnp.float32:
        bounded = jnp.minimum(size, float(jnp.finfo(jnp.float32).max))
        size = jnp.where(jnp.isfinite(size), bounded, size)
    return jax.lax.bitcast_convert_type(cast(size, jnp.float32), jnp.int32)


def _real_parts(leaf: jax.Array) -> list[jax.Array]:
    return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def _holds(number: jax.Array) -> jax.Array:
    """Returns whether a number of `Evidence` says that its group is finite."""
    if number.dtype == jnp.bool_:
        return number
    return number < _INF if number.dtype == jnp.int32 else number >= 0


def _is_finite(part: jax.Array) -> jax.Array:
    """Returns which elements are finite."""
    if jnp.iscomplexobj(part):
        return _is_finite(part.real) & _is_finite(part.imag)
    return jax.lax.is_finite(widen(part))


def _in_parts(leaves: list[jax.Array], total: int) -> list[jax.Array]:
    """Returns leaves of one type, and if they are large and few, `total` equal parts of them."""
    whole = _is_whole(jax.typeof(leaves[0]))
    number = total // len(leaves) if whole and _is_large(leaves[0]) else 1
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


class Verdict(NamedTuple):
    """What one pass over the gradients of a step says. All devices along `axis_name` agree."""

    axis_name: Any
    grads_finite: jax.Array  # bool[]
    loss_finite: jax.Array  # bool[], true if no loss was passed
    leaves_finite: list[jax.Array]  # a bool[] for each gradient, if leaves are tracked
    squares: jax.Array | None  # the sum of all squares, if the norm comes from the same pass
    norm: jax.Array | None  # what the state shows of it, an f32[]
    largest: jax.Array | None  # the largest gradient, an f32[], if the policy needs it
    lowered: jax.Array | None = None  # bool[], whether retries lowered the scale, if there are any

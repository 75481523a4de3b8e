"""One pass over the gradients: whether they are finite, the sum of their squares, the largest.

`reduce_gradients` reduces the leaves in groups, as each reduction is a kernel of its own, and
`Reduction` holds one number for each group. For a policy that follows the largest gradient,
`reduce_sizes` takes its place: the largest absolute value of a group is inf or NaN exactly if the
group is not finite, so the verdict comes from the same pass.
"""

# The work on each leaf is written in `jax.lax`: `jax.numpy` takes three times as long to trace.

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.typing import DTypeLike

from .._jax import ShapedArray, sum_over_devices, varying
from .._trees.gradient_leaves import list_gradients
from .._trees.leaves import cast, widen
from .._trees.numbers import INFINITY_BITS, float_bits
from .._trees.pytrees import Leaf
from .scaled import Scaled, representable

# From this many elements on, a leaf is large: reading it takes longer than starting its kernel.
_LARGE = 2**16

# At most this many leaves share one reduction; a CPU slows down beyond that.
_MAX_SMALL_LEAVES = 64
_MAX_LARGE_LEAVES = 16

# A lone large leaf is split into this many parts. Otherwise XLA on a CPU would store all of it
# before it is reduced, instead of one part, and would not use all cores.
_PARTS = 8

_CONFIG: Any = jax.config  # type checkers do not know its attributes


class Reduction(NamedTuple):
    """The result of one pass over the gradients: a number for each group of leaves.

    A bool says whether the group is finite. A float is the sum of its squares, which may overflow
    to inf. It is NaN or -inf if the group is not finite, and so is then a sum of such floats. An
    `i32[]` is the largest absolute value of the group, as the bits of a float32, which are ordered
    as the numbers are.
    """

    numbers: list[jax.Array]

    def finite_groups(self) -> list[jax.Array]:
        """Lists a `bool[]` for each group, true if it is finite."""
        return [_says_finite(number) for number in self.numbers]

    def finite(self) -> jax.Array:
        """A `bool[]`, true if all groups are finite."""
        # The numbers are combined before they are compared, so that devices exchange a single one.
        flags = self._of_kind(jnp.bool_)
        if self.holds_sizes:
            flags.append(_says_finite(self.largest_bits()))
        elif self._of_kind(jnp.floating):
            flags.append(_says_finite(self.squares()))
        return functools.reduce(jnp.bitwise_and, flags, jnp.array(True))

    @property
    def holds_sizes(self) -> bool:
        """The largest absolute values are known."""
        return bool(self._of_kind(jnp.int32))

    def largest_bits(self) -> jax.Array:
        """Returns the bits of the largest absolute value, an `i32[]`."""
        largest = jnp.zeros((), jnp.int32)
        for bits in self._of_kind(jnp.int32):
            largest = jnp.maximum(largest, bits)
        return largest

    def squares(self, axes: Iterable[Any] = ()) -> jax.Array:
        """Returns the sum of the sums of squares, an `f32[]` or wider.

        Where the types of leaves say that they vary along some of the named `axes`, the sum is that
        of all devices along those. Other leaves are the same on all of them, and count once.
        """
        sums = self._of_kind(jnp.floating)
        widest = jnp.dtype(jnp.float32)
        for number in sums:
            if number.dtype.itemsize > widest.itemsize:
                widest = number.dtype
        by_axes: dict[frozenset[Any], jax.Array] = {}
        for number in sums:
            shared_axes = varying(jax.typeof(number)).intersection(axes)
            total = by_axes.get(shared_axes, jnp.zeros((), widest))
            by_axes[shared_axes] = jnp.add(total, cast(number, widest))
        total = jnp.zeros((), widest)
        for shared_axes, part in by_axes.items():
            total = jnp.add(total, sum_over_devices(part, shared_axes))
        return total

    def _of_kind(self, kind: DTypeLike) -> list[jax.Array]:
        return [number for number in self.numbers if jnp.issubdtype(number.dtype, kind)]


def reduce_gradients(
    tree: optax.Updates, *, by_leaf: bool = False, squares: bool = False
) -> Reduction:
    """Reduces the gradients in a tree to numbers that say whether they are finite.

    Leaves of one type are combined element by element before they are reduced, as most of the cost
    of a verdict would be hundreds of kernels. With `by_leaf` each gradient is a group of its own.
    With `squares` they are reduced to the sum of squares, which a norm needs.
    """
    groups = _groups(tree, by_leaf)
    return Reduction([_reduce_group(group, squares) for group in groups])


def reduce_sizes(grads: Scaled, *, by_leaf: bool = False) -> Reduction:
    """Reduces gradients to their largest absolute values, which also say whether they are finite.

    The gradients are read as the backward pass left them, and only the largest is divided. As
    division and rounding keep the order, it is then the largest of the divided gradients.
    """
    groups = _groups(grads.grads, by_leaf)
    return Reduction([_find_largest(group, grads.divisor) for group in groups])


def nans_are_errors() -> bool:
    """True if JAX raises an error at a NaN, so that no sum of squares may be NaN."""
    return _CONFIG.jax_debug_nans


def _says_finite(number: jax.Array) -> jax.Array:
    """A `bool[]`, true if a number of `Reduction` says that its group is finite."""
    if number.dtype == jnp.bool_:
        return number
    if number.dtype == jnp.int32:
        return number < INFINITY_BITS  # those of a NaN are higher
    return number >= 0


# Groups.


def _groups(tree: optax.Updates, by_leaf: bool) -> list[list[Any]]:
    """Returns the gradients in a tree, in groups of one type that are reduced as one leaf."""
    by_type: dict[Any, list[Any]] = {}
    for i, (_, leaf) in enumerate(list_gradients(tree)):
        aval = jax.typeof(leaf)
        key = (aval, None)
        if by_leaf or not _is_placed(aval):
            key = (aval, i)  # no other leaf has it
        by_type.setdefault(key, []).append(leaf)
    groups = []
    for leaves in by_type.values():
        most = _MAX_SMALL_LEAVES
        if _is_large(leaves[0]):
            most = _MAX_LARGE_LEAVES
        for start in range(0, len(leaves), most):
            groups.append(leaves[start : start + most])
    return groups


def _is_placed(aval: ShapedArray) -> bool:
    """True if arrays of one type are known to lie on the same devices in the same way.

    Otherwise only XLA knows, and combining two of them might send one between devices.
    """
    mesh = aval.sharding.mesh
    if mesh.empty:
        return jax.device_count() == 1
    # With an `Auto` axis the compiler places arrays, and their types do not say where.
    return mesh.size == 1 or AxisType.Auto not in mesh.axis_types


def _is_large(leaf: Leaf) -> bool:
    size = jnp.size(leaf)  # may be a symbol in `jax.export`
    return isinstance(size, int) and size >= _LARGE


# Whether a group is finite, and the sum of its squares.


def _reduce_group(leaves: Sequence[Any], squares: bool) -> jax.Array:
    """Returns the number that `reduce_gradients` finds for a group of leaves of one type."""
    first, *others = arrays = list(map(jnp.asarray, leaves))
    is_placed = _is_placed(jax.typeof(first))
    # If only the verdict is asked for, flags say it. But if devices may hold parts of the leaves, a
    # sum says it: XLA merges the sums that devices exchange, that of the loss included, into one
    # exchange. A sum of squares may be NaN, so flags also say it if JAX raises an error at a NaN.
    if not squares and (is_placed or nans_are_errors()):
        return _reduce_in_parts(_are_finite, arrays, _PARTS)
    total = _square(first, is_placed)
    for array in others:
        total = jax.lax.add(total, _square(array, is_placed))
    return widen(jnp.sum(total))


def _are_finite(parts: Sequence[jax.Array]) -> jax.Array:
    """A `bool[]`, true if all elements of arrays of one type are finite."""
    flags = map(_is_finite, parts)
    return jnp.all(functools.reduce(jax.lax.bitwise_and, flags))


def _is_finite(part: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(part):
        return _is_finite(part.real) & _is_finite(part.imag)
    return jax.lax.is_finite(widen(part))


def _square(leaf: jax.Array, is_placed: bool) -> jax.Array:
    """Squares the finite elements of a leaf. The others become NaN or -inf.

    Adding x - x would do the same, but compilers with fast math remove it.
    """
    if jnp.iscomplexobj(leaf):
        return _square(leaf.real, is_placed) + _square(leaf.imag, is_placed)
    wide = widen(leaf)
    square = jax.lax.mul(wide, wide)
    magnitude = jax.lax.abs(wide)
    if not is_placed:
        # Leaves that are sharded differently would share a constant in the shape of the leaf, and
        # XLA would send a leaf between devices to match it. So no constant is used here.
        is_finite = jax.lax.is_finite(wide)
        return jax.lax.select(is_finite, square, jax.lax.neg(magnitude))
    # XLA on a CPU fuses only arithmetic into a sum, and would store a selection. So no selection is
    # used here. The excess of an element over the largest number is 0 if it is finite, and inf for
    # an inf. The square of an inf is inf as well, and inf - inf is NaN.
    largest = float(jnp.finfo(wide.dtype).max)
    excess = jax.lax.sub(magnitude, jax.lax.full_like(wide, largest))
    excess = jax.lax.max(excess, jax.lax.full_like(wide, 0))
    return jax.lax.sub(square, excess)


# The largest of a group.


def _find_largest(leaves: Sequence[Any], divisor: jax.Array | None) -> jax.Array:
    """Returns the largest absolute value in leaves of one type, divided, as a float32's bits."""
    arrays = _real_arrays(leaves)
    dtype = arrays[0].dtype
    # The bits are compared: without the sign, floats are ordered as integers are. A maximum of
    # floats may lose a NaN, and XLA on a CPU does not fuse it into one pass.
    num_bits = jnp.finfo(dtype).bits
    integer = jnp.dtype(f"int{num_bits}")
    all_but_sign = jnp.asarray(jnp.iinfo(integer).max, integer)

    def remove_sign(part: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(part, integer) & all_but_sign

    def find_largest_bits(parts: Sequence[jax.Array]) -> jax.Array:
        bits = list(map(remove_sign, parts))
        # The initial value is for empty leaves. The size is not compared, as it may be a symbol.
        return jnp.max(functools.reduce(jax.lax.max, bits), initial=0)

    # XLA stores one part, which is to have the same number of bytes for every width. So there are
    # `_PARTS` for 16 bits, and twice as many for 32.
    num_parts = _PARTS // 2 * integer.itemsize
    bits = _reduce_in_parts(find_largest_bits, arrays, num_parts)
    largest = widen(jax.lax.bitcast_convert_type(bits, dtype))
    if divisor is not None:
        largest = largest / representable(divisor, largest.dtype)
    return float_bits(_as_float32(largest))


def _real_arrays(leaves: Sequence[Any]) -> list[jax.Array]:
    """Returns the real and imaginary parts of leaves of one type, as arrays of one type."""
    arrays = []
    for array in map(jnp.asarray, leaves):
        if jnp.iscomplexobj(array):
            arrays += [array.real, array.imag]
        else:
            arrays.append(array)
    # In some 8-bit formats the bits of a NaN are not the highest, so a maximum would miss it.
    is_ordered = jnp.finfo(arrays[0].dtype).bits >= 16
    if is_ordered and _is_placed(jax.typeof(arrays[0])):
        return arrays
    # They are widened to one type, so that devices exchange their numbers in one message.
    return list(map(widen, arrays))


def _as_float32(size: jax.Array) -> jax.Array:
    """Casts a size to float32. A finite float64 that is too large becomes the largest number."""
    if size.dtype != jnp.float32:
        bounded = jnp.minimum(size, float(jnp.finfo(jnp.float32).max))
        size = jnp.where(jnp.isfinite(size), bounded, size)
    return cast(size, jnp.float32)


# Parts of large leaves.


def _reduce_in_parts(
    reduce: Callable[[Sequence[jax.Array]], jax.Array],
    leaves: Sequence[jax.Array],
    num_parts: int,
) -> jax.Array:
    """Reduces leaves of one type. On a CPU, leaves that are large and few are cut into parts.

    On a TPU that would make XLA store the gradients, which otherwise are reduced by the very matrix
    products that compute them.
    """
    parts_per_leaf = num_parts // len(leaves)
    if parts_per_leaf <= 1 or not _is_large(leaves[0]) or not _is_whole(leaves[0]):
        return reduce(leaves)

    def reduce_parts(*leaves: jax.Array) -> jax.Array:
        parts = []
        for leaf in leaves:
            parts += _cut(leaf, parts_per_leaf)
        return reduce(parts)

    def reduce_leaves(*leaves: jax.Array) -> jax.Array:
        return reduce(leaves)

    return jax.lax.platform_dependent(*leaves, cpu=reduce_parts, default=reduce_leaves)


def _is_whole(leaf: jax.Array) -> bool:
    """True if a leaf lies on one device, or is the part of one device in `shard_map`."""
    mesh = jax.typeof(leaf).sharding.mesh
    return mesh.size <= 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)


def _cut(leaf: jax.Array, number: int) -> list[jax.Array]:
    """Cuts a leaf in `number` parts of one type, or in fewer if no axis can be divided."""
    while number > 1:
        for axis, size in enumerate(leaf.shape):
            if size % number == 0:
                return jnp.split(leaf, number, axis)
        number //= 2
    return [leaf]

"""One pass over the gradients: whether they are finite, the sum of their squares, the largest.

`reduce_gradients` reduces the leaves in groups, as each reduction is a kernel of its own, and
`Reduction` holds one number for each group. For a policy that follows the largest gradient,
`reduce_sizes` takes its place: the largest absolute value of a group is inf or NaN exactly if the
group is not finite, so the verdict comes from the same pass.
"""

# The work on each leaf is written in `jax.lax`: `jax.numpy` takes three times as long to trace.

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

from .._trees.casts import cast, widen
from .._trees.gradient_leaves import list_gradients
from .._trees.numbers import INFINITY_BITS
from .scaled import Scaled, representable

# From this many elements on, a leaf is large: reading it takes longer than starting its kernel.
_LARGE = 2**16

# So many leaves share one reduction at most; a CPU slows down beyond that.
_MAX_SMALL_LEAVES = 64
_MAX_LARGE_LEAVES = 16

# A lone large leaf is split into so many parts, so that XLA on a CPU stores one of them and uses
# all cores.
_PARTS = 8

_CONFIG: Any = jax.config  # type checkers do not know its attributes


class Reduction(NamedTuple):
    """The result of one pass over the gradients: a number for each group of leaves.

    A bool says whether the group is finite. A float is the sum of its squares, which may overflow
    to inf; it is NaN or below 0 if the group is not finite. An `i32[]` is its largest absolute
    value, as the bits of a float32, which are ordered as the numbers are.
    """

    numbers: list[jax.Array]

    def finite_groups(self) -> list[jax.Array]:
        """Returns whether each group is finite, as a `bool[]`."""
        return [_says_finite(number) for number in self.numbers]

    def finite(self) -> jax.Array:
        """Returns whether all groups are finite, a `bool[]`."""
        # Combine the numbers before comparing, so that devices exchange a single one.
        combined = self.largest_bits() if self.holds_sizes else self.squares()
        all_finite = _says_finite(combined)
        for flag in self._of_kind(jnp.bool_):
            all_finite = jnp.bitwise_and(all_finite, flag)
        return all_finite

    @property
    def holds_sizes(self) -> bool:
        """Whether the largest absolute values are known."""
        return bool(self._of_kind(jnp.int32))

    def largest_bits(self) -> jax.Array:
        """Returns the bits of the largest absolute value, an `i32[]`."""
        largest = jnp.zeros((), jnp.int32)
        for bits in self._of_kind(jnp.int32):
            largest = jnp.maximum(largest, bits)
        return largest

    def squares(self) -> jax.Array:
        """Returns the sum of the sums of squares, an `f32[]` or wider."""
        sums = self._of_kind(jnp.floating)
        widest = jnp.dtype(jnp.float32)
        for number in sums:
            if number.dtype.itemsize > widest.itemsize:
                widest = number.dtype
        total = jnp.zeros((), widest)
        for number in sums:
            total = jnp.add(total, cast(number, widest))
        return total

    def _of_kind(self, kind: Any) -> list[jax.Array]:
        return [number for number in self.numbers if jnp.issubdtype(number.dtype, kind)]


def reduce_gradients(
    tree: optax.Updates, *, by_leaf: bool = False, squares: bool = False
) -> Reduction:
    """Reduces the gradients in a tree to numbers that say whether they are finite.

    Leaves of one type are combined element by element before they are reduced, as hundreds of
    kernels are the cost of a verdict. With `by_leaf` each gradient is a group of its own. With
    `squares` they are reduced to the sum of squares, which a norm needs.
    """
    return Reduction(
        [_reduce_group(group, squares) for group in _groups(tree, by_leaf)]
    )


def reduce_sizes(grads: Scaled, *, by_leaf: bool = False) -> Reduction:
    """Reduces gradients to their largest absolute values, which also say whether they are finite.

    The gradients are read as the backward pass left them, and the largest is divided: division
    and rounding keep the order, so that is the largest of the divided ones.
    """
    groups = _groups(grads.grads, by_leaf)
    return Reduction([_find_largest(group, grads.divisor) for group in groups])


def nans_are_errors() -> bool:
    """Returns whether JAX raises an error at a NaN, so that no sum of squares may be NaN."""
    return _CONFIG.jax_debug_nans


def float_bits(number: jax.Array) -> jax.Array:
    """Returns the bits of a float32."""
    return jax.lax.bitcast_convert_type(number, jnp.int32)


def float_of_bits(bits: jax.Array) -> jax.Array:
    """Returns the float32 of some bits."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _says_finite(number: jax.Array) -> jax.Array:
    """Returns whether a number of `Reduction` says that its group is finite."""
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


def _is_placed(aval: Any) -> bool:
    """Returns whether arrays of one type are known to lie on the same devices in the same way.

    Otherwise only XLA knows, and combining two of them might send one between devices.
    """
    mesh = aval.sharding.mesh
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or AxisType.Auto not in mesh.axis_types


def _is_large(leaf: Any) -> bool:
    size = jnp.size(leaf)
    return isinstance(size, int) and size >= _LARGE  # a symbol in `jax.export`


# Whether a group is finite, and the sum of its squares.


def _reduce_group(leaves: Sequence[Any], squares: bool) -> jax.Array:
    """Returns the number that `reduce_gradients` finds for a group of leaves of one type."""
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    is_placed = _is_placed(jax.typeof(leaves[0]))
    if not squares and (is_placed or nans_are_errors()):
        return _reduce_in_parts(_are_finite, leaves, _PARTS)
    # A sum even if only the verdict is asked for: XLA merges the sums that devices exchange, that
    # of the loss included, into one exchange.
    total = _squares(leaves[0], is_placed)
    for leaf in leaves[1:]:
        total = jax.lax.add(total, _squares(leaf, is_placed))
    return widen(jnp.sum(total))


def _are_finite(parts: Sequence[jax.Array]) -> jax.Array:
    """Returns whether all elements of arrays of one type are finite."""
    return jnp.all(functools.reduce(jax.lax.bitwise_and, map(_is_finite, parts)))


def _is_finite(part: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(part):
        return _is_finite(part.real) & _is_finite(part.imag)
    return jax.lax.is_finite(widen(part))


def _squares(leaf: jax.Array, is_placed: bool) -> jax.Array:
    """Returns the squares of finite elements, and NaN or a number below 0 for the others.

    Adding x - x would do the same, but compilers with fast math remove it.
    """
    if jnp.iscomplexobj(leaf):
        return _squares(leaf.real, is_placed) + _squares(leaf.imag, is_placed)
    leaf = widen(leaf)
    square = jax.lax.mul(leaf, leaf)
    magnitude = jax.lax.abs(leaf)
    if not is_placed:
        # Without constants in the shape of the leaf: leaves that are sharded differently would
        # share one, and XLA would send a leaf between devices to match it.
        is_finite = jax.lax.is_finite(leaf)
        return jax.lax.select(is_finite, square, jax.lax.neg(magnitude))
    # Without a selection: XLA on a CPU fuses only arithmetic into a sum and would store the
    # selection. The excess of an element over the largest number is 0 if it is finite, and inf
    # for an inf. The square of that is inf as well, and inf - inf is NaN.
    largest = float(jnp.finfo(leaf.dtype).max)
    excess = jax.lax.sub(magnitude, jax.lax.full_like(leaf, largest))
    excess = jax.lax.max(excess, jax.lax.full_like(leaf, 0))
    return jax.lax.sub(square, excess)


# The largest of a group.


def _find_largest(leaves: Sequence[Any], divisor: jax.Array | None) -> jax.Array:
    """Returns the largest absolute value in leaves of one type, divided, as a float32's bits."""
    leaves = _real_leaves(leaves)
    dtype = leaves[0].dtype
    # By their bits: without the sign, floats are ordered as integers are. A maximum of floats may
    # lose a NaN, and XLA on a CPU does not fuse it into one pass.
    integer = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    without_sign = jnp.asarray(jnp.iinfo(integer).max, integer)

    def find_largest_bits(parts: Sequence[jax.Array]) -> jax.Array:
        bits = [
            jax.lax.bitcast_convert_type(part, integer) & without_sign for part in parts
        ]
        # The initial value is for empty leaves. The size is not compared, as it may be a symbol.
        return jnp.max(functools.reduce(jax.lax.max, bits), initial=0)

    # The wider the integers are, the more parts, as XLA stores one part.
    num_parts = _PARTS // 2 * integer.itemsize
    bits = _reduce_in_parts(find_largest_bits, leaves, num_parts)
    largest = widen(jax.lax.bitcast_convert_type(bits, dtype))
    if divisor is not None:
        largest = largest / representable(divisor, largest.dtype)
    return float_bits(_as_float32(largest))


def _real_leaves(leaves: Sequence[Any]) -> list[jax.Array]:
    """Returns the real and imaginary parts of leaves of one type, as arrays of one type."""
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    if jnp.iscomplexobj(arrays[0]):
        parts = []
        for array in arrays:
            parts += [array.real, array.imag]
        arrays = parts
    has_own_integers = jnp.finfo(arrays[0].dtype).bits >= 16
    if has_own_integers and _is_placed(jax.typeof(arrays[0])):
        return arrays
    # All in one type, so that devices exchange their numbers in one message.
    return [widen(array) for array in arrays]


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
    total: int,
) -> jax.Array:
    """Reduces leaves of one type. On a CPU they are cut in `total` parts if they are large and few.

    A TPU would store the parts, and gradients that its matrix products could reduce as they write.
    """
    number = total // len(leaves)
    if number <= 1 or not _is_large(leaves[0]) or not _is_whole(leaves[0]):
        return reduce(leaves)

    def reduce_parts(*leaves: jax.Array) -> jax.Array:
        parts = []
        for leaf in leaves:
            parts += _cut(leaf, number)
        return reduce(parts)

    def reduce_leaves(*leaves: jax.Array) -> jax.Array:
        return reduce(leaves)

    return jax.lax.platform_dependent(*leaves, cpu=reduce_parts, default=reduce_leaves)


def _is_whole(leaf: jax.Array) -> bool:
    """Returns whether a leaf lies on one device, or is what one device has of it."""
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

"""One pass over the gradients: whether they are finite, the sum of their squares, the largest.

`read` reduces the leaves in groups, as each reduction is a kernel of its own, and `Reduction` holds
one number for each group. For a policy that follows the largest gradient, `sizes` takes the place
of `read`: the largest absolute value of a group is inf or NaN exactly if the group is not finite,
so the verdict comes from the same pass.
"""

# The work on each leaf is written in `jax.lax`: `jax.numpy` takes three times as long to trace.

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from .._trees.tree import cast, list_gradients, widen
from .scaled import Scaled, representable

# From this many elements on, a leaf is large: reading it takes longer than starting its kernel.
_LARGE = 2**16

# Up to 64 small or 16 large leaves share one reduction; a CPU slows down beyond that.
_MAX_LEAVES, _MAX_LARGE_LEAVES = 64, 16

# A lone large leaf is split into so many parts, so that XLA on a CPU stores one of them and uses
# all cores.
_PARTS = 8

# The bits of inf. As integers, those of finite absolute values are lower, those of NaN higher.
_INF = 0x7F800000

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


def read(tree: Any, *, by_leaf: bool = False, squares: bool = False) -> Reduction:
    """Returns the reduction on which a verdict on the gradients in a tree rests.

    Leaves of one type are combined element by element before they are reduced, as hundreds of
    kernels are the cost of a verdict. With `by_leaf` each gradient is a group of its own. With
    `squares` they are reduced to the sum of squares, which a norm needs.
    """
    return Reduction([_reduced(group, squares) for group in _groups(tree, by_leaf)])


def sizes(grads: Scaled, *, by_leaf: bool = False) -> Reduction:
    """Returns a reduction that also holds the largest gradient: bits, where `read` has bools.

    The gradients are read as the backward pass left them, and the largest is divided: division
    and rounding keep the order, so that is the largest of the divided ones.
    """
    return Reduction([_size(group, grads.divisor) for group in _groups(grads.grads, by_leaf)])


def nans_are_errors() -> bool:
    """Returns whether JAX raises an error at a NaN, so that no sum of squares may be NaN."""
    return _CONFIG.jax_debug_nans


def _groups(tree: Any, by_leaf: bool) -> list[list[Any]]:
    """Returns the gradients in a tree, in groups of one type that are reduced as one leaf."""
    by_type: dict[Any, list[Any]] = {}
    for i, (_, leaf) in enumerate(list_gradients(tree)):
        aval = jax.typeof(leaf)
        alone = by_leaf or not _is_placed(aval)
        by_type.setdefault((aval, i if alone else None), []).append(leaf)
    groups = []
    for leaves in by_type.values():
        most = _MAX_LARGE_LEAVES if _is_large(leaves[0]) else _MAX_LEAVES
        groups += [leaves[i : i + most] for i in range(0, len(leaves), most)]
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


def _reduced(leaves: list[Any], squares: bool) -> jax.Array:
    """Returns the number that `Reduction` holds for a group of leaves of one type."""
    leaves, aval = list(map(jnp.asarray, leaves)), jax.typeof(leaves[0])
    if not squares and (_is_placed(aval) or nans_are_errors()):
        return _over_parts(
            lambda parts: jnp.all(functools.reduce(jax.lax.bitwise_and, map(_is_finite, parts))),
            leaves,
            _PARTS,
        )
    # A sum even if only the verdict is asked for: XLA merges the sums that devices exchange, that
    # of the loss included, into one exchange.
    squared = (_squares(leaf, _is_placed(aval)) for leaf in leaves)
    return widen(jnp.sum(functools.reduce(jax.lax.add, squared)))


def _size(leaves: list[Any], divisor: jax.Array | None) -> jax.Array:
    """Returns the largest absolute value in leaves of one type, divided, as a float32's bits.

    A finite float64 may exceed float32's largest number, and becomes that.
    """
    leaves = list(map(jnp.asarray, leaves))
    if jnp.iscomplexobj(leaves[0]):
        leaves = [part for leaf in leaves for part in (leaf.real, leaf.imag)]
    if jnp.finfo(leaves[0].dtype).bits < 16 or not _is_placed(jax.typeof(leaves[0])):
        # All in one type, so that devices exchange what they found in one message.
        leaves = list(map(widen, leaves))
    # By their bits: without the sign, floats are ordered as integers are. A maximum of floats may
    # lose a NaN, and XLA on a CPU does not fuse it into one pass. The wider they are, the more
    # parts, as it stores integers of that width.
    integer = jnp.dtype(f"int{jnp.finfo(leaves[0].dtype).bits}")
    mask = jnp.asarray(jnp.iinfo(integer).max, integer)

    def most_of(parts: list[jax.Array]) -> jax.Array:
        bits = [jax.lax.bitcast_convert_type(part, integer) & mask for part in parts]
        # The initial value is for empty leaves. The size is not compared, as it may be a symbol.
        return jnp.max(functools.reduce(jax.lax.max, bits), initial=0)

    most = _over_parts(most_of, leaves, _PARTS // 2 * integer.itemsize)
    size = widen(jax.lax.bitcast_convert_type(most, leaves[0].dtype))
    if divisor is not None:
        size /= representable(divisor, size.dtype)
    if size.dtype != jnp.float32:
        bounded = jnp.minimum(size, float(jnp.finfo(jnp.float32).max))
        size = jnp.where(jnp.isfinite(size), bounded, size)
    return jax.lax.bitcast_convert_type(cast(size, jnp.float32), jnp.int32)


def _holds(number: jax.Array) -> jax.Array:
    """Returns whether a number of `Reduction` says that its group is finite."""
    if number.dtype == jnp.bool_:
        return number
    return number < _INF if number.dtype == jnp.int32 else number >= 0


def _is_finite(part: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(part):
        return _is_finite(part.real) & _is_finite(part.imag)
    return jax.lax.is_finite(widen(part))


def _over_parts(
    reduce: Callable[[list[jax.Array]], jax.Array], leaves: list[jax.Array], total: int
) -> jax.Array:
    """Returns what leaves of one type reduce to; on a CPU in `total` equal parts, if large and few.

    A TPU would store the parts, and gradients that its matrix products could reduce as they write.
    """
    mesh = jax.typeof(leaves[0]).sharding.mesh
    is_whole = mesh.size <= 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)
    number = total // len(leaves) if is_whole and _is_large(leaves[0]) else 1
    if number <= 1:
        return reduce(leaves)
    return jax.lax.platform_dependent(
        *leaves,
        cpu=lambda *leaves: reduce([part for leaf in leaves for part in _parts(leaf, number)]),
        default=lambda *leaves: reduce(list(leaves)),
    )


def _parts(leaf: jax.Array, number: int) -> list[jax.Array]:
    """Returns a leaf in `number` parts of one type, or in fewer if no axis can be divided."""
    for axis, size in enumerate(leaf.shape):
        if number > 1 and size % number == 0:
            return jnp.split(leaf, number, axis)
    return _parts(leaf, number // 2) if number > 1 else [leaf]


def _squares(leaf: jax.Array, placed: bool) -> jax.Array:
    """Returns the squares of finite elements, and NaN or a number below 0 for the others.

    Adding x - x would do the same, but compilers with fast math remove it.
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

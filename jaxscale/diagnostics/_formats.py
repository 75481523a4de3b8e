"""What a number becomes in a smaller format: 0, a subnormal number, a normal one, inf.

Rounding is to nearest, ties to even. Each boundary between two outcomes has a mantissa of
few bits, so a histogram need tell apart only the mantissas between them, and what it
says is exact at every scale that is a power of two.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import only_gradients

INFINITY = 0x7F800000  # the bits of float32's inf; those of a NaN are larger
_LARGEST_FINITE = INFINITY - 1
_MANTISSA = 23  # bits of float32's mantissa, less the leading one
_SMALLEST_EXPONENT = -149  # of float32's smallest subnormal


def is_ndarray(leaf: Any) -> bool:
    """Returns whether a leaf is an array. Types, modules and avals are not, but have a dtype."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def kind(leaf: Any) -> str:
    """Returns the dtype and the shape of an array, or the type of what is not one."""
    if is_ndarray(leaf):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return f"`{type(leaf).__name__}`"


def gradient_leaves(call: str, name: str, tree: Any) -> Any:
    """Returns the gradients in a tree, `None` elsewhere, or raises a `ValueError`."""
    gradients = only_gradients(tree)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    if not leaves:
        others = sorted(set(map(kind, jax.tree.leaves(tree))))
        raise ValueError(
            f"`{call}({name}=...)` must hold floating or complex arrays, got "
            + (f"only {', '.join(others)}." if others else "a tree without any leaf.")
            + " Pass what `jaxscale.grad` returned."
        )
    for path, leaf in leaves:
        if jnp.size(leaf) >= 2**31:  # twice as many numbers, if complex
            raise ValueError(
                f"`{call}({name}=...)` counts up to 2**32 numbers a leaf, got "
                f"{jnp.size(leaf)} elements at {jax.tree_util.keystr(path) or 'the root'}. "
                "Pass the leaf in parts."
            )
    return gradients


def magnitude_bits(leaf: Any) -> jax.Array:
    """Returns the bits of `|leaf|` in float32, as integers in the order of the numbers.

    A complex leaf becomes its real and imaginary parts. A float64 number is cut to 24
    bits, the last of which is set if any was cut off, so that no comparison with a number
    of fewer bits changes; beyond float32's range it becomes the nearest end of it.
    """
    leaf = jnp.asarray(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.float64:
        return _cut(jax.lax.bitcast_convert_type(leaf, jnp.uint64))
    if leaf.dtype == jnp.bfloat16:  # the upper half of a float32
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32) << 16
    else:  # the subnormal numbers of float16 and FP8 are normal ones in float32
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    return bits & jnp.uint32(0x7FFFFFFF)


def _cut(bits: jax.Array) -> jax.Array:
    """Returns the bits of a float64 magnitude as those of a float32."""
    bits = bits & jnp.uint64(2**63 - 1)
    exponent = (bits >> 52).astype(jnp.int32) - 1023
    mantissa = (bits & jnp.uint64(2**52 - 1)) | jnp.uint64(2**52)
    # Below float32's normal range there is less room for the mantissa, at last none.
    shift = jnp.clip(29 + jnp.maximum(-126 - exponent, 0), 29, 63).astype(jnp.uint64)
    kept = mantissa >> shift
    rest = (kept << shift) != mantissa
    # The leading one of a normal number is what adds one to its exponent field.
    field = jnp.maximum(exponent + 126, 0).astype(jnp.uint64) << 23
    finite = ((field + kept) | rest.astype(jnp.uint64)).astype(jnp.uint32)
    finite = jnp.where(exponent > 127, jnp.uint32(_LARGEST_FINITE), finite)
    special = jnp.uint32(INFINITY) + (mantissa != 2**52).astype(jnp.uint32)
    return jnp.where(bits == 0, jnp.uint32(0), jnp.where(exponent == 1024, special, finite))


def exponent_and_mantissa(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `e` and `m` of finite nonzero numbers `2**e * (1 + m / 2**23)`."""
    field = (bits >> _MANTISSA).astype(jnp.int32)
    mantissa = bits & jnp.uint32(2**_MANTISSA - 1)
    leading = 31 - jax.lax.clz(bits).astype(jnp.int32)  # of a subnormal number
    shift = jnp.clip(_MANTISSA - leading, 0, 31).astype(jnp.uint32)
    subnormal = (bits << shift) & jnp.uint32(2**_MANTISSA - 1)
    return (
        jnp.where(field == 0, leading + _SMALLEST_EXPONENT, field - 127),
        jnp.where(field == 0, subnormal, mantissa),
    )


FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class Boundary(NamedTuple):
    """The least number beyond a boundary, `2**exponent * (1 + mantissa / 2**23)`."""

    exponent: int
    mantissa: int


class Format(NamedTuple):
    """Where outcomes begin, and the exponents of the numbers that a format holds."""

    nonzero: Boundary
    normal: Boundary
    overflow: Boundary
    least_exponent: int
    least_normal_exponent: int
    largest_exponent: int


def _boundary(value: float, inclusive: bool) -> Boundary:
    mantissa, exponent = math.frexp(value)
    return Boundary(exponent - 1, int((2 * mantissa - 1) * 2**23) + (not inclusive))


def _format(name: str) -> Format:
    info = jnp.finfo(name)
    largest, normal = float(info.max), float(info.smallest_normal)
    subnormal = float(info.smallest_subnormal)
    exponents = [math.frexp(value)[1] - 1 for value in (subnormal, normal, largest)]
    spacing = 2.0 ** (exponents[2] - info.nmant)  # of the largest numbers
    # A tie goes to the even neighbour: halfway to the smallest subnormal, that is 0; below
    # the smallest normal, the normal; above the largest number, what would come next if
    # its last bit is 1, and itself in e4m3fn, where all ones mean NaN.
    return Format(
        _boundary(subnormal / 2, inclusive=False),
        _boundary(normal - subnormal / 2, inclusive=True),
        _boundary(largest + spacing / 2, inclusive=largest / spacing % 2 == 1),
        *exponents,
    )


FORMAT = {name: _format(name) for name in FORMATS}

# Classes of mantissas: class `i` holds those that are at least `i` of these.
CUTS = sorted(
    {
        boundary.mantissa
        for each in FORMAT.values()
        for boundary in (each.nonzero, each.normal, each.overflow)
        if boundary.mantissa
    }
)

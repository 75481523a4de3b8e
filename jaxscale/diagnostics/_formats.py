"""Gradients as the bits of float32 magnitudes, and where smaller formats round them to what.

A gradient's size is read from its bits, as integers: XLA on CPU may take subnormal numbers for
zeros, but it does not touch integers.

Formats round to nearest, ties to even. The mantissas of all boundaries therefore have few nonzero
bits, and few different values (`CUTS`). A histogram that splits each power of two at these cuts is
exact at every loss scale that is a power of two.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._trees.leaf import is_array_like, is_python_number
from .._trees.tree import list_gradients

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INFINITY = 0x7F800000  # the bits of float32's inf; those of a NaN are larger


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array of numbers, and not a Python number."""
    # A Python number in a batch stays static, and one given as a loss scale is checked first.
    return is_array_like(leaf) and not is_python_number(leaf)


def kind(leaf: Any) -> str:
    """Returns what an error message calls a leaf: the dtype and shape of an array, or its type."""
    # By type, because modules and scalar types have a `dtype` too. Arrays of text are arrays here.
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return f"`{type(leaf).__name__}`"


def check_result(call: str, name: str, value: Any, cls: type, function: str) -> None:
    """Raises a `TypeError` unless a value is what a function returned, and not traced."""
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
    if is_traced or not isinstance(value, cls):
        raise TypeError(
            f"`{call}({name}=...)` must be what `jaxscale.diagnostics.{function}` returned, "
            f"outside of `jit`, got {type(value).__name__}."
        )


def gradient_leaves(call: str, name: str, tree: Any) -> list[Any]:
    """Returns the gradients in a tree, or raises a `ValueError` if they cannot be counted."""
    leaves = list_gradients(tree)
    if not leaves:
        others = ", ".join(sorted(set(map(kind, jax.tree.leaves(tree)))))
        raise ValueError(
            f"`{call}({name}=...)` must hold floating or complex arrays, got "
            f"{f'only {others}' if others else 'a tree without any leaf'}. Pass what "
            "`jaxscale.grad` returned."
        )
    for path, leaf in leaves:
        if jnp.size(leaf) >= 2**31:  # twice as many numbers, if complex
            raise ValueError(
                f"`{call}({name}=...)` counts up to 2**32 numbers in a leaf, got "
                f"{jnp.size(leaf)} elements at {jax.tree_util.keystr(path) or 'the root'}. "
                "Pass the leaf in several parts."
            )
    return [leaf for _, leaf in leaves]


def magnitude_bits(leaf: Any) -> jax.Array:
    """Returns the bits of `|leaf|` in float32, as integers in the order of the numbers.

    A complex leaf becomes its real and imaginary parts. A float64 number is cut to 24 bits. The
    last is set if any nonzero bit was cut off, so that it compares with numbers of fewer bits as
    before. Outside float32's range it becomes the nearest end of the range.
    """
    leaf = jnp.asarray(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.float64:
        return _cut(jax.lax.bitcast_convert_type(leaf, jnp.uint64))
    if leaf.dtype == jnp.bfloat16:  # the upper half of a float32
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32) << 16
    else:  # the subnormal numbers of float16 and FP8 are normal numbers in float32
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    return bits & jnp.uint32(0x7FFFFFFF)


def _cut(bits: jax.Array) -> jax.Array:
    """Returns the bits of a float64 magnitude as those of a float32."""
    bits = bits & jnp.uint64(2**63 - 1)
    exponent = (bits >> 52).astype(jnp.int32) - 1023
    mantissa = (bits & jnp.uint64(2**52 - 1)) | jnp.uint64(2**52)
    # Below float32's normal range fewer and fewer bits of the mantissa fit, and in the end none.
    shift = jnp.clip(29 + jnp.maximum(-126 - exponent, 0), 29, 63).astype(jnp.uint64)
    kept = mantissa >> shift
    rest = (kept << shift) != mantissa
    # The leading one of a normal number adds the missing one to its exponent field.
    field = jnp.maximum(exponent + 126, 0).astype(jnp.uint64) << 23
    finite = ((field + kept) | rest.astype(jnp.uint64)).astype(jnp.uint32)
    finite = jnp.where(exponent > 127, jnp.uint32(INFINITY - 1), finite)
    special = jnp.uint32(INFINITY) + (mantissa != 2**52).astype(jnp.uint32)
    return jnp.where(bits == 0, jnp.uint32(0), jnp.where(exponent == 1024, special, finite))


class Boundary(NamedTuple):
    """The least number beyond a boundary, `2**exponent * (1 + mantissa / 2**23)`.

    No boundary needs the last bit of the mantissa. Set, it stands for "more than": a number exactly
    at the boundary is not beyond it.
    """

    exponent: int
    mantissa: int

    def bits(self, loss_scale: jax.Array) -> jax.Array:
        """Returns the bits of the least number that is beyond it once it is scaled."""
        # The last bit is left out of the division, so that the quotient by a power of two is
        # exact, and added again.
        exact = self.mantissa // 2 * 2
        value = jnp.float32(2.0**self.exponent * (1 + exact / 2**23))
        bits = jax.lax.bitcast_convert_type(value / loss_scale, jnp.uint32)
        return bits + jnp.uint32(self.mantissa - exact)


class Format(NamedTuple):
    """The least numbers that a format does not make 0, keeps in full, and makes inf or NaN.

    Then the exponents of its smallest subnormal, its smallest normal and its largest number.
    """

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
    # A tie goes to the even neighbour. Between 0 and the smallest subnormal that is 0. Just below
    # the smallest normal number it is that number. Above the largest number it is the next one,
    # which overflows, if the last bit of the largest is 1. In e4m3fn, where all ones mean NaN, it
    # is 0, and the tie stays finite.
    return Format(
        _boundary(subnormal / 2, inclusive=False),
        _boundary(normal - subnormal / 2, inclusive=True),
        _boundary(largest + spacing / 2, inclusive=largest / spacing % 2 == 1),
        *exponents,
    )


FORMAT = {name: _format(name) for name in FORMATS}

# The mantissas of all boundaries. Class `i` holds the mantissas that are at least `i` of these.
CUTS = sorted({edge.mantissa for each in FORMAT.values() for edge in each[:3]} - {0})

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

from .._trees.checks import describe_value
from .._trees.gradient_leaves import list_gradients
from .._trees.leaf import is_array_like, is_python_number

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array of numbers, and not a Python number."""
    # A Python number in a batch stays static, and a loss scale that is one is checked first.
    return is_array_like(leaf) and not is_python_number(leaf)


def describe(leaf: Any) -> str:
    """Returns what an error message calls a leaf: the dtype and shape of an array, or its type."""
    # The type decides, because modules and scalar types also have a `dtype`.
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return describe_value(leaf)
    return f"`{type(leaf).__name__}`"


def gradient_leaves(call: str, name: str, tree: Any) -> list[Any]:
    """Returns the gradients in a tree, or raises a `ValueError` if they cannot be counted."""
    gradients = list_gradients(tree)
    if not gradients:
        content = "a tree without any leaf"
        kinds = set(map(describe, jax.tree.leaves(tree)))
        if kinds:
            content = f"only {', '.join(sorted(kinds))}"
        raise ValueError(
            f"`{call}({name}=...)` must hold floating or complex arrays, got {content}. Pass what "
            "`jaxscale.grad` returned."
        )
    leaves = []
    for path, leaf in gradients:
        if jnp.size(leaf) >= 2**31:  # twice as many numbers, if complex
            raise ValueError(
                f"`{call}({name}=...)` counts up to 2**32 numbers in a leaf, got "
                f"{jnp.size(leaf)} elements at {jax.tree_util.keystr(path) or 'the root'}. "
                "Pass the leaf in several parts."
            )
        leaves.append(leaf)
    return leaves


def magnitude_bits(leaf: Any) -> jax.Array:
    """Returns the bits of `|leaf|` in float32, as integers in the order of the numbers.

    A complex leaf becomes its real and imaginary parts. A float64 number is rounded to float32.
    """
    leaf = jnp.asarray(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bfloat16:  # the upper half of a float32
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32) << 16
    else:  # the subnormal numbers of float16 and FP8 are normal numbers in float32
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    return bits & jnp.uint32(0x7FFFFFFF)


class Boundary(NamedTuple):
    """The least number beyond a boundary, `2**exponent * (1 + mantissa / 2**23)`.

    No boundary needs the last bit of the mantissa. Set, it stands for "more than": a number exactly
    at the boundary is not beyond it.
    """

    exponent: int
    mantissa: int


class Format(NamedTuple):
    """Where a format rounds to what, from small numbers to large ones."""

    nonzero: Boundary  # of the numbers that it does not make 0
    normal: Boundary  # of those that it keeps in full
    overflow: Boundary  # of those that it makes inf or NaN


def _find_format(name: str) -> Format:
    info = jnp.finfo(name)
    largest = float(info.max)
    normal = float(info.smallest_normal)
    subnormal = float(info.smallest_subnormal)
    spacing = 2.0 ** (exponent_of(largest) - info.nmant)  # of the largest numbers
    # A tie goes to the even neighbour. Between 0 and the smallest subnormal that is 0. Just below
    # the smallest normal number it is that number. Above the largest number it is the next one,
    # which overflows, if the last bit of the largest is 1. In e4m3fn, where all ones mean NaN, it
    # is 0, and the tie stays finite.
    is_last_bit_set = largest / spacing % 2 == 1
    return Format(
        nonzero=_find_boundary(subnormal / 2, inclusive=False),
        normal=_find_boundary(normal - subnormal / 2, inclusive=True),
        overflow=_find_boundary(largest + spacing / 2, inclusive=is_last_bit_set),
    )


def _find_boundary(value: float, inclusive: bool) -> Boundary:
    """Returns a number as a boundary. If it is inclusive, the number itself is beyond it."""
    fraction, exponent = math.frexp(value)
    mantissa = int((2 * fraction - 1) * 2**23)
    if not inclusive:
        mantissa += 1
    return Boundary(exponent - 1, mantissa)


def exponent_of(value: float) -> int:
    """Returns the exponent of the largest power of two that a number is not below."""
    return math.frexp(value)[1] - 1


FORMAT_BY_NAME = {name: _find_format(name) for name in FORMATS}


_MANTISSAS = {edge.mantissa for edges in FORMAT_BY_NAME.values() for edge in edges}
# The mantissas of all boundaries. Class `i` holds the mantissas that are at least `i` of these.
CUTS = sorted(_MANTISSAS - {0})

"""Gradients as the bits of float32 magnitudes, and where smaller formats round them to what.

A gradient's size is read from its bits, as integers: XLA on CPU may take subnormal numbers for
zeros, but it does not touch integers.

Formats round to nearest, ties to even. The numbers from which on they round to something else
(`THRESHOLDS`) therefore have few different mantissas.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._trees.arguments import describe_value
from .._trees.gradient_leaves import list_gradients
from .._trees.leaves import is_array_like, is_python_number
from .._trees.pytrees import Leaf, PyTree

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def is_array(leaf: Leaf) -> bool:
    """Returns whether a leaf is an array of numbers, and not a Python number."""
    # A Python number in a batch stays static, and a loss scale that is one is checked first.
    return is_array_like(leaf) and not is_python_number(leaf)


def describe(leaf: Leaf) -> str:
    """Returns what an error message calls a leaf: the dtype and shape of an array, or its type."""
    # The type decides, because modules and scalar types also have a `dtype`.
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return describe_value(leaf)
    return f"`{type(leaf).__name__}`"


def gradient_leaves(call: str, name: str, tree: PyTree) -> list[Any]:
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


def magnitude_bits(leaf: Leaf) -> jax.Array:
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


def find_thresholds(
    dtype: DTypeLike, find_next: Callable[[float], float]
) -> np.ndarray:
    """Returns the least numbers that a format does not make 0, keeps in full, and overflows.

    `find_next` returns the next larger one of the numbers that are rounded.
    """
    info = jnp.finfo(dtype)
    largest = float(info.max)
    normal = float(info.smallest_normal)
    subnormal = float(info.smallest_subnormal)
    spacing = 2.0 ** (exponent_of(largest) - info.nmant)  # of the largest numbers
    # A tie goes to the even neighbour. Between 0 and the smallest subnormal that is 0. Just below
    # the smallest normal number it is that number. Above the largest number it is the next one,
    # which overflows, if the last bit of the largest is 1. In e4m3fn, where all ones mean NaN, it
    # is 0, and the tie stays finite.
    overflow = largest + spacing / 2
    if largest / spacing % 2 == 0:
        overflow = find_next(overflow)
    return np.array([find_next(subnormal / 2), normal - subnormal / 2, overflow])


def _next_of_float32(value: float) -> float:
    """Returns the next larger number with as many digits as float32 has."""
    return value + 2.0 ** (exponent_of(value) - 23)


def exponent_of(value: float) -> int:
    """Returns the exponent of the largest power of two that a number is not below."""
    return math.frexp(value)[1] - 1


THRESHOLDS = {name: find_thresholds(name, _next_of_float32) for name in FORMATS}

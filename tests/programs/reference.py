"""The reference: a program with its products in half precision and everything else in float32.

PyTorch's autocast catches each product when it is called, casts what goes in, and lets the result
go on in half precision. So does this: while a program is traced, the two primitives of JAX that
matrix products and convolutions are made of cast their operands, and what comes out goes back to
float32. It needs no rule for control flow and derivatives, as JAX itself traces and transposes
what stands there. It shares no code with jaxscale, which rewrites programs that were traced before.

Whose a product is, is read off the stack: from the product outwards, through JAX, to whoever is not
JAX. If that is Optax, or if there is an algorithm of JAX on the way, it is a library's own.
"""

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

PRODUCTS = (
    "dot_general_p",
    "conv_general_dilated_p",
    "ragged_dot_general_p",
)

# Algorithms of JAX that hold products which nobody asked for by name.
ALGORITHMS = (
    "/jax/experimental/ode.py",
    "/jax/_src/scipy/",
    "/jax/_src/numpy/linalg.py",
    "/jax/_src/numpy/polynomial.py",
    "/jax/_src/image/",
    "/jax/_src/lax/linalg.py",
    "/jax/_src/third_party/scipy/",
)
# Functions in these files whose product a user asks for by name.
ASKED_FOR = {
    "matmul",
    "multi_dot",
    "vecdot",
    "tensordot",
    "outer",
    "convolve",
    "convolve2d",
    "correlate",
    "correlate2d",
    "_convolve_nd",
}


@contextlib.contextmanager
def half_products(dtype: Any) -> Iterator[None]:
    """Traces what is inside with products in half precision."""
    products = [
        getattr(primitives, name) for name in PRODUCTS if hasattr(primitives, name)
    ]
    # Functions of JAX may be traced already, such as `jnp.matmul`.
    jax.clear_caches()
    for primitive in products:
        primitive.bind = _half_bind(primitive.bind, jnp.dtype(dtype))
    try:
        yield
    finally:
        for primitive in products:
            del primitive.bind  # which leaves the method of its class
        jax.clear_caches()


def _half_bind(bind: Any, dtype: Any) -> Any:
    """Returns a `bind` that rounds the operands and the result of a product of matrices."""

    def round_operand(x: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return jax.lax.convert_element_type(x, dtype)
        return x

    def bind_in_half(*operands: Any, **params: Any) -> Any:
        if (
            not _is_of_float32(operands, params)
            or not _is_of_matrices(operands, params)
            or _is_of_library()
        ):
            return bind(*operands, **params)
        halves = [round_operand(x) for x in operands]
        params["preferred_element_type"] = dtype
        if _is_logit_of_attention():
            params["preferred_element_type"] = jnp.float32
        return jax.lax.convert_element_type(bind(*halves, **params), jnp.float32)

    return bind_in_half


def _is_of_float32(operands: Any, params: Any) -> bool:
    """Returns whether a product of float32 numbers returns float32.

    One operand may be of integers. A product of nothing else is exact, and rounds nothing.
    """
    dtypes = {jnp.result_type(x) for x in operands}
    inexact = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)}
    is_wide = params.get("preferred_element_type") in (None, jnp.float32)
    return is_wide and inexact == {jnp.dtype("float32")}


def _is_of_matrices(operands: Any, params: Any) -> bool:
    """Returns whether a product sums over something, and has a row or a column left.

    Dots of vectors, one or many, are sums in PyTorch as well.
    """
    numbers = params.get("dimension_numbers")
    is_convolution = hasattr(numbers, "lhs_spec")
    if not isinstance(numbers, tuple) or is_convolution:
        return True
    contracted, batched = numbers
    summed = math.prod(operands[0].shape[axis] for axis in contracted[0])
    free = 1
    for operand, contracted_axes, batch_axes in zip(
        operands, contracted, batched, strict=True
    ):
        for axis, size in enumerate(operand.shape):
            if axis not in contracted_axes and axis not in batch_axes:
                free *= size
    return summed > 1 and free > 1


def _is_of_library() -> bool:
    for file, function, _ in _frames():
        if "/optax/" in file:
            return True
        if function in ASKED_FOR:
            return False
        if any(part in file for part in ALGORITHMS):
            return True
    return False


def _is_logit_of_attention() -> bool:
    """Returns whether this is the product that attention asks for in float32 itself."""
    for file, function, names in _frames():
        is_attention = file.endswith("nn/functions.py") and "attention" in function
        if is_attention and "logits" not in names:
            return True
    return False


def _frames() -> Iterator[tuple[str, str, Any]]:
    """Yields the functions of JAX that the stack is in, and then the first that is not of JAX."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if file != __file__:
            yield file, frame.f_code.co_name, frame.f_locals
            if not any(word in file for word in ("/jax/", "contextlib", "functools")):
                return
        frame = frame.f_back

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
    "ragged_dot_p",
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
# What is a product by its name, though it stands in one of these files.
ASKED_FOR = {"matmul", "multi_dot", "vecdot", "tensordot", "outer"}
ASKED_FOR |= {"convolve", "convolve2d", "correlate", "correlate2d", "_convolve_nd"}


@contextlib.contextmanager
def half_products(dtype: Any, half_carries: bool = False) -> Iterator[None]:
    """Traces what is inside with products in half precision.

    With `half_carries`, what a `scan` carries from product to product is rounded with every turn.
    """
    found = [
        getattr(primitives, name) for name in PRODUCTS if hasattr(primitives, name)
    ]
    scan = jax.lax.scan
    # of functions of JAX that were traced before, such as `jnp.matmul`
    jax.clear_caches()
    for primitive in found:
        primitive.bind = _half_bind(primitive, primitive.bind, jnp.dtype(dtype))
    if half_carries:
        jax.lax.scan = _rounding_scan(scan, dtype)
    try:
        yield
    finally:
        jax.lax.scan = scan
        for primitive in found:
            del primitive.bind  # what remains is the method of its class
        jax.clear_caches()


def _half_bind(primitive: Any, bind: Any, dtype: Any) -> Any:
    def bind_in_half(*operands: Any, **params: Any) -> Any:
        floats = [
            x for x in operands if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        ]
        is_float32 = all(jnp.result_type(x) == jnp.float32 for x in floats)
        if not (
            is_float32 and _is_of_matrices(operands, params) and not _is_of_library()
        ):
            return bind(*operands, **params)
        halves = [
            jax.lax.convert_element_type(x, dtype) if any(x is y for y in floats) else x
            for x in operands
        ]
        params["preferred_element_type"] = (
            jnp.float32 if _is_logit_of_attention() else dtype
        )
        return jax.lax.convert_element_type(bind(*halves, **params), jnp.float32)

    return bind_in_half


def _is_of_matrices(operands: Any, params: Any) -> bool:
    """Returns whether a product sums over something, and has a row or a column left.

    What is no more than a dot of vectors, or of many pairs of vectors, PyTorch too has as sums.
    """
    if "dimension_numbers" not in params or not isinstance(
        params["dimension_numbers"], tuple
    ):
        return True
    if hasattr(params["dimension_numbers"], "lhs_spec"):  # a convolution
        return True
    contracted, batched = params["dimension_numbers"]
    summed = math.prod(operands[0].shape[i] for i in contracted[0])
    free = 1
    for operand, one, other in zip(operands, contracted, batched, strict=True):
        free *= math.prod(
            n for i, n in enumerate(operand.shape) if i not in (*one, *other)
        )
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
    return any(
        "attention" in function
        and "logits" not in names
        and file.endswith("nn/functions.py")
        for file, function, names in _frames()
    )


def _frames() -> Iterator[tuple[str, str, Any]]:
    """Yields the functions of JAX that the stack is in, and then the first that is not of JAX."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if file != __file__:
            yield file, frame.f_code.co_name, frame.f_locals
            if (
                "/jax/" not in file
                and "contextlib" not in file
                and "functools" not in file
            ):
                return
        frame = frame.f_back


def _rounding_scan(scan: Any, dtype: Any) -> Any:
    def scan_and_round(
        f: Any, init: Any, xs: Any = None, *args: Any, **options: Any
    ) -> Any:
        is_rounded = _leads_to_itself(f, init, xs)

        def rounded(carry: Any) -> Any:
            leaves, treedef = jax.tree.flatten(carry)
            pairs = zip(leaves, is_rounded, strict=True)
            return treedef.unflatten(
                leaf.astype(dtype).astype(leaf.dtype) if is_in else leaf
                for leaf, is_in in pairs
            )

        def body(carry: Any, x: Any) -> Any:
            carry, y = f(carry, x)
            return rounded(carry), y

        return scan(
            body, rounded(jax.tree.map(jnp.asarray, init)), xs, *args, **options
        )

    return scan_and_round


def _leads_to_itself(f: Any, init: Any, xs: Any) -> list[bool]:
    """Returns which float32 carries of a loop are computed from a product that reads them."""
    x = jax.tree.map(lambda leaf: leaf[0], xs)
    program = jax.make_jaxpr(f)(init, x).jaxpr
    carries = jax.tree.leaves(init)
    given = [
        {(i, False)} if i < len(carries) else set() for i in range(len(program.invars))
    ]
    reached = _reached(program, given)
    return [
        jnp.result_type(leaf) == jnp.float32 and (i, True) in reached[i]
        for i, leaf in enumerate(carries)
    ]


def _reached(program: Any, given: Any) -> list[Any]:
    """Returns for each output which inputs it is computed from, and whether by a product."""
    known = dict(zip(program.invars, given, strict=True))

    def read(atom: Any) -> Any:
        return set() if hasattr(atom, "val") else known.get(atom, set())

    for eqn in program.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        inner = [getattr(p, "jaxpr", p) for p in eqn.params.values()]
        inner = [
            p for p in inner if hasattr(p, "eqns") and len(p.invars) == len(inputs)
        ]
        if len(inner) == 1 and eqn.primitive.name not in ("scan", "while"):
            outputs = _reached(inner[0], inputs)
        else:
            is_product = eqn.primitive.name in ("dot_general", "conv_general_dilated")
            from_any = set().union(*inputs)
            if is_product or inner:
                from_any = {(i, True) for i, _ in from_any}
            outputs = [from_any] * len(eqn.outvars)
        known |= zip(eqn.outvars, outputs, strict=False)
    return [read(atom) for atom in program.outvars]

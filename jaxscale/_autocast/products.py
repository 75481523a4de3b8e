"""Which products are cast: those of matrices, and convolutions, that the user's model asks for."""

import contextvars
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from .._jax import JaxprEqn, dot_dimensions, frames_of_jax, product_precision
from .table import LIBRARIES, LIBRARY_PRODUCTS, PRODUCTS
from .values import is_float32, is_floating, is_full_precision

# Whether what is traced now is traced for an `autocast`.
under_autocast: contextvars.ContextVar[bool]
under_autocast = contextvars.ContextVar("under_autocast", default=False)


def is_cast(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a product of float32 arrays, without a demand of its own."""
    if eqn.primitive.name not in PRODUCTS:
        return False
    floating = filter(is_floating, (*eqn.invars, *eqn.outvars))
    precision = product_precision(eqn)
    # An algorithm such as `F32_F32_F32` names the precision of each step.
    named = not isinstance(precision, tuple | jax.lax.Precision | None)
    is_typed = is_float32(eqn.outvars[0]) and all(map(is_float32, floating)) and not named
    return is_typed and _is_of_matrices(eqn) and not _is_of_library(eqn)


def _is_of_matrices(eqn: JaxprEqn) -> bool:
    """Returns whether a product has something to sum over, and a row or a column left over.

    Otherwise it is a product of elements, or a sum of such products. Half precision makes these no
    faster, and a sum that is a loss gets the loss scale itself as its cotangent.
    """
    if eqn.primitive.name != "dot_general":
        return True
    summed, free = [], []
    operands: list[Any] = eqn.invars
    for atom, (contracted, batch) in zip(operands, dot_dimensions(eqn), strict=True):
        for i, size in enumerate(atom.aval.shape):
            is_one = type(size) is int and size == 1  # it is not a number if it is not known yet
            if i not in batch and not is_one:
                (summed if i in contracted else free).append(size)
    return bool(summed and free)


def _is_of_library(eqn: JaxprEqn) -> bool:
    """Returns whether a product is a step of an algorithm of JAX that is written for float32."""
    for file, function in frames_of_jax(eqn):
        if file in LIBRARIES:
            return function not in LIBRARY_PRODUCTS
    return False


def reads_half(eqn: JaxprEqn) -> bool:
    """Returns whether an equation casts its inputs to half precision, whatever they are."""
    return is_cast(eqn) and not is_full_precision(eqn)


def joined(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Returns the operands of a product of activations, whose gradients are read together.

    Both operands of a product with batch dimensions are large, as in attention. Its gradients need
    one operand each. If XLA goes on with what follows from the first gradient, it keeps the operand
    of the second meanwhile: another array of queries times keys.
    """
    if eqn.primitive.name != "dot_general" or not any(batch for _, batch in dot_dimensions(eqn)):
        return operands
    return list(_joined(*operands))


@jax.custom_jvp
def _joined(*operands: Any) -> Any:
    return operands


def _joined_jvp(operands: Any, tangents: Any) -> Any:
    # The gradient of an operand that is a constant is not computed for this.
    if not any(isinstance(each, SymbolicZero) for each in tangents):
        tangents = jax.lax.optimization_barrier(tangents)
    return tuple(operands), tuple(tangents)


_joined.defjvp(_joined_jvp, symbolic_zeros=True)

"""Operands and precision of matrix products and convolutions."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import dot_general_p

_OPERANDS = 2
_NO_DEMAND = (jax.lax.Precision.DEFAULT,) * _OPERANDS


def demands_precision(eqn: JaxprEqn) -> bool:
    """Returns whether a product names how precise it is to be, and not all products do.

    An algorithm such as `F32_F32_F32` names the precision of each step. The one that is called
    `DEFAULT` names none.
    """
    precision = product_precision(eqn)
    # Set for all products, it says nothing of this one.
    if precision is None or precision == precision_of_all():
        return False
    if _is_algorithm(precision):
        return precision is not jax.lax.DotAlgorithmPreset.DEFAULT
    if isinstance(precision, tuple):
        return jax.lax.Precision.HIGHEST in precision
    return precision is jax.lax.Precision.HIGHEST


def _is_algorithm(precision: object) -> bool:
    return not isinstance(precision, tuple | jax.lax.Precision | None)


def precision_of_all() -> Any:
    """Returns the `jax.default_matmul_precision` of now, in the form in which products name it."""
    name = jax.config.jax_default_matmul_precision
    if name is None:
        return None
    if name in jax.lax.DotAlgorithmPreset.__members__:
        return jax.lax.DotAlgorithmPreset[name]
    return (jax.lax.Precision(name),) * _OPERANDS


def product_precision(eqn: JaxprEqn) -> Any:
    """Returns the precision that a matrix product or a convolution asks for, if it does."""
    return eqn.params.get("precision")


def dot_dimensions(eqn: JaxprEqn) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
    """Returns the contracted and the batch dimensions of each operand of a `dot_general`.

    For other equations there are none.
    """
    if eqn.primitive.name != dot_general_p.name:
        return ()
    return tuple(zip(*eqn.params["dimension_numbers"], strict=True))


def with_preferred_type(eqn: JaxprEqn, old: np.dtype, new: np.dtype) -> dict[str, Any]:
    """Returns the parameters of a product of other operands than those that are written.

    If it asks to accumulate in the dtype `old`, it asks for `new` instead. It keeps no algorithm,
    which names the dtypes of what is written.
    """
    params = _without_algorithm(eqn)
    if params.get("preferred_element_type") != old:
        return params
    return params | {"preferred_element_type": new}


def with_result_type(params: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Makes a product return a dtype, given its other parameters."""
    return params | {"preferred_element_type": dtype}


def _without_algorithm(eqn: JaxprEqn) -> dict[str, Any]:
    if not _is_algorithm(product_precision(eqn)):
        return eqn.params
    # Not `None`, for which derivatives put what is set for all products.
    return eqn.params | {"precision": _NO_DEMAND}

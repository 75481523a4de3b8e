"""What a matrix product or a convolution says of its operands and its precision."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn


def demands_precision(eqn: JaxprEqn) -> bool:
    """Returns whether a product names how precise it is to be, and not all products do.

    An algorithm such as `F32_F32_F32` names the precision of each step.
    """
    precision = product_precision(eqn)
    if not isinstance(precision, tuple | jax.lax.Precision | None):
        return True
    of_operands: Any = precision
    if not isinstance(precision, tuple):
        of_operands = (precision,)
    if jax.lax.Precision.HIGHEST not in of_operands:
        return False
    # Set for all products, it says nothing of this one.
    return jax.config.jax_default_matmul_precision not in ("highest", "float32")


def product_precision(eqn: JaxprEqn) -> Any:
    """Returns what a matrix product or a convolution asks of its precision, if it does."""
    return eqn.params.get("precision")


def dot_dimensions(eqn: JaxprEqn) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yields the contracted and the batch dimensions of each operand of a `dot_general`."""
    return zip(*eqn.params["dimension_numbers"], strict=True)


def with_preferred_type(eqn: JaxprEqn, old: Any, new: Any) -> dict[str, Any]:
    """Returns the parameters of a product, with another dtype if it asks to accumulate in `old`."""
    if eqn.params.get("preferred_element_type") != old:
        return eqn.params
    return eqn.params | {"preferred_element_type": new}


def with_result_type(eqn: JaxprEqn, dtype: Any) -> dict[str, Any]:
    """Returns the parameters of a product whose result is of a dtype, whatever it multiplies."""
    return eqn.params | {"preferred_element_type": dtype}

"""Rules under `jax.vmap` for primitives that run a jaxpr."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching

from ..jaxpr_types import Arrays, BatchAxis, BatchDims


def over_batch(
    fun: Callable[..., Any], axis: BatchAxis, in_axes: int | Sequence[Any] | None
) -> Callable[..., Any]:
    """Returns a function over a batch, which lies along the axis that a batching rule is given."""
    return jax.vmap(
        fun,
        in_axes,
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )


def set_batching(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Sets the batching rule of a primitive with several results: one that is told the axis."""

    def batch(axis: BatchAxis, args: Arrays, dims: BatchDims, **params: Any) -> Any:
        if all(dim is None for dim in dims):
            outputs: Any = primitive.bind(*args, **params)
            return outputs, [None] * len(outputs)
        return rule(axis, args, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batch

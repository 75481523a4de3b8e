"""A program in the forms that the entries need: as a tree of parameters, and as it was written."""

from collections.abc import Callable
from typing import Any, NamedTuple

import corpus
import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx


class Case(NamedTuple):
    """A program in two forms, whatever its framework.

    `loss(params, state, batch) -> (loss, (state, aux))` takes the parameters as a tree of arrays.
    `written(model, batch) -> (loss, aux)` is the program as it was written. It takes the model
    that `build(params)` returns.
    """

    name: str
    framework: str
    params: Any
    state: Any
    batch: Any
    loss: Callable[[Any, Any, Any], Any]
    build: Callable[[Any], Any]
    written: Callable[[Any, Any], Any]
    transform: Callable[..., Any]  # what differentiates `written`
    scale: float


def make_case(row: corpus.Row) -> Case:
    program = row.make()
    if row.framework == "nnx":
        return _case_of_nnx(row, program)
    if row.framework == "equinox":
        params, static = eqx.partition(program.model, eqx.is_inexact_array)
        transform = eqx.filter_value_and_grad

        def build(params: Any) -> Any:
            return eqx.combine(params, static)

    else:
        params, transform = program.model, jax.value_and_grad

        def build(params: Any) -> Any:
            return params

    state = (
        {"seen": jnp.zeros((), jnp.int32)} if program.state is None else program.state
    )

    def loss(params: Any, state: Any, batch: Any) -> Any:
        if program.state is None:
            value, aux = program.loss(build(params), batch)
            return value, ({"seen": state["seen"] + 1}, aux)
        return program.loss(build(params), state, batch)

    def written(model: Any, batch: Any) -> Any:
        if program.state is None:
            return program.loss(model, batch)
        return program.loss(model, program.state, batch)

    return Case(
        name=row.name,
        framework=row.framework,
        params=params,
        state=state,
        batch=program.batch,
        loss=loss,
        build=build,
        written=written,
        transform=transform,
        scale=program.scale,
    )


def _case_of_nnx(row: corpus.Row, program: corpus.Program) -> Case:
    graphdef, params, rest = nnx.split(program.model, nnx.Param, ...)

    def merge(params: Any, state: Any) -> Any:
        # With new variables, that belong to where they are traced.
        return nnx.merge(graphdef, *jax.tree.map(jnp.asarray, (params, state)))

    def build(params: Any) -> Any:
        return merge(params, rest)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        model = merge(params, state)
        value, aux = program.loss(model, batch)
        return value, (nnx.split(model, nnx.Param, ...)[2], aux)

    return Case(
        name=row.name,
        framework=row.framework,
        params=params,
        state=rest,
        batch=program.batch,
        loss=loss,
        build=build,
        written=program.loss,
        transform=nnx.value_and_grad,
        scale=program.scale,
    )

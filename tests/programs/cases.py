"""A program in the forms that the entries need: as a tree of parameters, and as it was written."""

from collections.abc import Callable
from typing import Any, NamedTuple

import corpus
import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx


class Case(NamedTuple):
    """A program, and how its model is made of a tree of parameters.

    `loss(params, state, batch) -> (loss, (state, aux))` is the program with parameters that are a
    tree of arrays, whatever the framework. `written(model, batch) -> (loss, aux)` is the program
    as it is written, with what `build(params)` returns.
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
    integrates: bool


def make_case(row: corpus.Row) -> Case:
    made = row.make()
    if row.framework == "nnx":
        return _case_of_nnx(row, made)
    if row.framework == "equinox":
        params, static = eqx.partition(made.model, eqx.is_inexact_array)
        transform = eqx.filter_value_and_grad

        def build(params: Any) -> Any:
            return eqx.combine(params, static)

    else:
        params, transform = made.model, jax.value_and_grad

        def build(params: Any) -> Any:
            return params

    state = {"seen": jnp.zeros((), jnp.int32)} if made.state is None else made.state

    def loss(params: Any, state: Any, batch: Any) -> Any:
        if made.state is None:
            value, aux = made.loss(build(params), batch)
            return value, ({"seen": state["seen"] + 1}, aux)
        return made.loss(build(params), state, batch)

    def written(model: Any, batch: Any) -> Any:
        if made.state is None:
            return made.loss(model, batch)
        return made.loss(model, made.state, batch)

    return Case(
        name=row.name,
        framework=row.framework,
        params=params,
        state=state,
        batch=made.batch,
        loss=loss,
        build=build,
        written=written,
        transform=transform,
        scale=made.scale,
        integrates=made.integrates,
    )


def _case_of_nnx(row: corpus.Row, made: corpus.Program) -> Case:
    graphdef, params, rest = nnx.split(made.model, nnx.Param, ...)

    def merge(params: Any, state: Any) -> Any:
        # With new variables, that belong to where they are traced.
        return nnx.merge(graphdef, *jax.tree.map(jnp.asarray, (params, state)))

    def build(params: Any) -> Any:
        return merge(params, rest)

    def loss(params: Any, state: Any, batch: Any) -> Any:
        model = merge(params, state)
        value, aux = made.loss(model, batch)
        return value, (nnx.split(model, nnx.Param, ...)[2], aux)

    return Case(
        name=row.name,
        framework=row.framework,
        params=params,
        state=rest,
        batch=made.batch,
        loss=loss,
        build=build,
        written=made.loss,
        transform=nnx.value_and_grad,
        scale=made.scale,
        integrates=made.integrates,
    )

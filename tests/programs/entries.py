"""The entries of jaxscale: each differentiates a program in half precision.

An entry takes a case and returns a function `(params, batch) -> Result` that can be traced.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from cases import Case
from flax import nnx

import jaxscale
import jaxscale.flax
import jaxscale.nnx


class Result(NamedTuple):
    """The loss of an entry, its gradients as a list, and what must be true."""

    loss: Any
    grads: list[Any]
    checks: dict[str, Any]


Differentiate = Callable[[Any, Any], Result]


class Entry(NamedTuple):
    make: Callable[[Case], Differentiate]
    dtype: str = "float16"


def in_float32(case):
    """Differentiates in float32, which all others are compared with."""
    return _differentiate(case, case.written)


def with_loss_scale(case):
    """Differentiates by plain JAX at the loss scale of the program, for the reference."""

    def differentiate(params, batch):
        def loss(params):
            value, _ = case.loss(params, case.state, batch)
            return value * case.scale, value

        grads, value = jax.grad(loss, has_aux=True)(params)
        return Result(value, [leaf / case.scale for leaf in jax.tree.leaves(grads)], {})

    return differentiate


def _differentiate(case, fun, transform=None):
    """Differentiates a form of the program, if nothing is given as its framework does."""

    def differentiate(params, batch):
        backward = (transform or case.transform)(fun, has_aux=True)
        (value, _), grads = backward(case.build(params), batch)
        return Result(value, jax.tree.leaves(grads), {})

    return differentiate


def _by_value_and_grad(dtype):
    def entry(case):
        def transform(fun, **options):
            scaling = jaxscale.FixedLossScale(case.scale).init()
            options["transform"] = case.transform
            return jaxscale.value_and_grad(fun, scaling, **options)

        return _differentiate(case, jaxscale.autocast(case.written, dtype), transform)

    return entry


def _outside(dtype):
    """Puts `scale_backward` around `autocast`."""

    def entry(case):
        half = jaxscale.autocast(case.written, dtype)
        return _differentiate(case, jaxscale.scale_backward(half))

    return entry


def _inside(dtype):
    """Puts `autocast` around `scale_backward`."""

    def entry(case):
        scaled = jaxscale.scale_backward(case.written)
        return _differentiate(case, jaxscale.autocast(scaled, dtype))

    return entry


def _keeping_gradients():
    """An optimizer whose state holds the last gradients, exactly."""
    return optax.chain(optax.trace(decay=0.0), optax.scale(-1e-3))


def _kept(opt_state):
    """Returns the gradients that `_keeping_gradients` holds."""
    trace = optax.tree.get(opt_state, "trace")
    return jax.tree.leaves(trace)


def _by_train_step(case):
    """Makes a whole step with state and aux. Its scale is too high at first: it has to retry."""
    is_equinox = case.framework == "equinox"

    def loss(model, state, batch):
        params = model
        if is_equinox:
            params = eqx.filter(model, eqx.is_inexact_array)
        return case.loss(params, state, batch)

    def differentiate(params, batch):
        policy = jaxscale.DynamicLossScale(init_scale=2.0**24)
        tx = jaxscale.loss_scaled(_keeping_gradients(), policy)
        options: dict[str, Any] = {"has_state": True, "has_aux": True, "retries": 30}
        model = params
        if is_equinox:
            options["transform"] = eqx.filter_value_and_grad
            model = case.build(params)
        step = jaxscale.train_step(jaxscale.autocast(loss), tx, **options)
        opt_state = tx.init(params)
        _, opt_state, state, (value, _) = step(model, opt_state, case.state, batch)
        same = jax.tree.structure(state) == jax.tree.structure(case.state)
        checks = {
            "a state of the same structure": same,
            "the step was made": opt_state.step_applied,
        }
        return Result(value, _kept(opt_state), checks)

    return differentiate


class _State(jaxscale.flax.TrainState):
    extra: Any


def _by_linen(case):
    def loss(params, fields, batch):
        value, (extra, aux) = case.loss(params["model"], fields["extra"], batch)
        return value, ({"extra": extra}, aux)

    def differentiate(params, batch):
        tx = jaxscale.loss_scaled(_keeping_gradients(), case.scale)
        half = jaxscale.autocast(loss)
        step = jaxscale.flax.train_step(half, has_state=True, has_aux=True)
        # In a dict, as Flax looks for keys in it.
        params = {"model": params}
        state = _State.create(apply_fn=None, tx=tx, params=params, extra=case.state)
        state, (value, _) = step(state, batch)
        checks = {"the step was made": state.step == 1}
        return Result(value, _kept(state.opt_state), checks)

    return differentiate


class _Model(nnx.Module):
    """An NNX model that holds the parameters and the state of another framework."""

    def __init__(self, params, state):
        self.leaves = nnx.List([nnx.Param(leaf) for leaf in jax.tree.leaves(params)])
        self.state = nnx.List([nnx.BatchStat(leaf) for leaf in jax.tree.leaves(state)])


def _unflatten(tree, variables):
    """Returns the values of some variables, as a tree of the structure of another one."""
    values = [variable[...] for variable in variables]
    return jax.tree.structure(tree).unflatten(values)


def _by_nnx(case):
    batch_treedef = jax.tree.structure(case.batch)

    def loss_of_leaves(model, batch):
        params = _unflatten(case.params, model.leaves)
        state = _unflatten(case.state, model.state)
        value, (state, aux) = case.loss(params, state, batch_treedef.unflatten(batch))
        for variable, leaf in zip(model.state, jax.tree.leaves(state), strict=True):
            variable[...] = leaf
        return value, aux

    def differentiate(params, batch):
        if case.framework == "nnx":
            model = case.build(params)
            loss = case.written
        else:
            model = _Model(params, case.state)
            loss = loss_of_leaves
            # NNX puts objects that are no arrays into trees, which some classes refuse.
            batch = jax.tree.leaves(batch)
        tx = jaxscale.loss_scaled(_keeping_gradients(), case.scale)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step = jaxscale.nnx.train_step(jaxscale.autocast(loss), has_aux=True)
        value, _ = step(model, optimizer, batch)
        checks = {"the step was made": jaxscale.metrics(optimizer)["step_applied"]}
        return Result(value, _kept_by_nnx(optimizer), checks)

    return differentiate


def _kept_by_nnx(optimizer):
    """Returns the gradients in the state of `_keeping_gradients`, as NNX holds it."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(optimizer))
    return [leaf for path, leaf in leaves if "'trace'" in jax.tree_util.keystr(path)]


ENTRIES = {
    "value_and_grad": Entry(_by_value_and_grad("float16")),
    "value_and_grad, bfloat16": Entry(_by_value_and_grad("bfloat16"), "bfloat16"),
    "train_step": Entry(_by_train_step),
    "scale_backward outside": Entry(_outside("float16")),
    "scale_backward inside": Entry(_inside("float16")),
    "scale_backward, bfloat16": Entry(_outside("bfloat16"), "bfloat16"),
    "flax": Entry(_by_linen),
    "nnx": Entry(_by_nnx),
}
DOCTOR = "doctor"

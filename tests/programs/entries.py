"""The entries of jaxscale: each makes gradients of a program, in half precision.

An entry takes a case and returns a function `(params, batch) -> Made` that can be traced.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from cases import Case
from corpus import nnx_list
from flax import nnx

import jaxscale
import jaxscale.flax
import jaxscale.nnx


class Made(NamedTuple):
    """What an entry made: the loss, the gradients as a list, and what must be true."""

    loss: Any
    grads: list[Any]
    checks: dict[str, Any]


class Entry(NamedTuple):
    name: str
    make: Callable[[Case], Callable[[Any, Any], Made]]
    dtype: str = "float16"
    half_carries: bool = False


def in_float32(case: Case) -> Callable[[Any, Any], Made]:
    """The gradients that all others are compared with."""
    return _differentiated(case, lambda fun: fun)


def with_loss_scale(case: Case) -> Callable[[Any, Any], Made]:
    """The gradients at the loss scale of the program, for the reference, by plain JAX."""

    def make(params: Any, batch: Any) -> Made:
        def loss(params: Any) -> Any:
            value, _ = case.loss(params, case.state, batch)
            return value * case.scale, value

        grads, value = jax.grad(loss, has_aux=True)(params)
        return Made(value, [leaf / case.scale for leaf in jax.tree.leaves(grads)], {})

    return make


def _differentiated(
    case: Case, wrap: Callable[[Any], Any]
) -> Callable[[Any, Any], Made]:
    def make(params: Any, batch: Any) -> Made:
        transform = case.transform
        fun = wrap(case.written)
        (value, _), grads = transform(fun, has_aux=True)(case.build(params), batch)
        return Made(value, jax.tree.leaves(grads), {})

    return make


def _by_value_and_grad(dtype: str, half_carries: bool = False) -> Any:
    def entry(case: Case) -> Callable[[Any, Any], Made]:
        def make(params: Any, batch: Any) -> Made:
            fun = jaxscale.autocast(case.written, dtype, half_carries=half_carries)
            scaling = jaxscale.FixedLossScale(case.scale).init()
            options = {"transform": case.transform, "has_aux": True}
            backward = jaxscale.value_and_grad(fun, scaling, **options)
            (value, _), grads = backward(case.build(params), batch)
            return Made(value, jax.tree.leaves(grads), {})

        return make

    return entry


def _outside(dtype: str) -> Any:
    def wrap(fun: Any) -> Any:
        return jaxscale.scale_backward(jaxscale.autocast(fun, dtype))

    return lambda case: _differentiated(case, wrap)


def _inside(dtype: str) -> Any:
    def wrap(fun: Any) -> Any:
        return jaxscale.autocast(jaxscale.scale_backward(fun), dtype)

    return lambda case: _differentiated(case, wrap)


def _keeping_gradients() -> optax.GradientTransformation:
    """An optimizer whose state holds the last gradients, exactly."""
    return optax.chain(optax.trace(decay=0.0), optax.scale(-1e-3))


def _kept(opt_state: Any) -> list[Any]:
    (trace,) = (
        each
        for each in jax.tree.leaves(
            opt_state, is_leaf=lambda x: isinstance(x, optax.TraceState)
        )
        if isinstance(each, optax.TraceState)
    )
    return jax.tree.leaves(trace.trace)


def _trained(case: Case) -> Callable[[Any, Any], Made]:
    """A whole step with state and aux, from a scale that is too high: it has to retry."""

    def make(params: Any, batch: Any) -> Made:
        policy = jaxscale.DynamicLossScale(init_scale=2.0**24)
        tx = jaxscale.loss_scaled(_keeping_gradients(), policy)
        options = {"has_state": True, "has_aux": True, "retries": 30}
        if case.framework == "equinox":
            options["transform"] = eqx.filter_value_and_grad

        def loss(model: Any, state: Any, batch: Any) -> Any:
            params = eqx.filter(model, eqx.is_inexact_array) if is_equinox else model
            return case.loss(params, state, batch)

        is_equinox = case.framework == "equinox"
        step = jaxscale.train_step(jaxscale.autocast(loss), tx, **options)
        new, opt_state, state, (value, _) = step(
            case.build(params) if is_equinox else params,
            tx.init(params),
            case.state,
            batch,
        )
        same = jax.tree.structure(state) == jax.tree.structure(case.state)
        checks = {
            "a state of the same structure": same,
            "the step was made": opt_state.step_applied,
            "parameters that moved": _have_moved(new, params),
        }
        return Made(value, _kept(opt_state), checks)

    return make


def _have_moved(new: Any, old: Any) -> Any:
    """Returns whether any parameter is another one, of those that are trained."""
    leaves = [leaf for leaf in jax.tree.leaves(new) if eqx.is_inexact_array(leaf)]
    pairs = zip(leaves, jax.tree.leaves(old), strict=True)
    return jnp.any(jnp.array([jnp.any(one != other) for one, other in pairs]))


def _skipping(case: Case) -> Callable[[Any, Any], Made]:
    """A loop of one's own: a good step, and one with a NaN, which leaves everything as it was."""

    def make(params: Any, batch: Any) -> Made:
        tx = jaxscale.skip_nonfinite(_keeping_gradients())

        def loss(params: Any, factor: Any) -> Any:
            value, _ = case.loss(params, case.state, batch)
            return value * factor

        backward = jax.value_and_grad(jaxscale.scale_backward(jaxscale.autocast(loss)))

        def step(carry: Any, factor: Any) -> Any:
            params, opt_state = carry
            value, grads = backward(params, factor)
            updates, opt_state = tx.update(grads, opt_state, params, value=value)
            params = optax.apply_updates(params, updates)
            return (params, opt_state), (value, jax.tree.leaves(params))

        factors = jnp.array([1.0, jnp.nan])
        carry = params, tx.init(params)
        (_, opt_state), (values, seen) = jax.lax.scan(step, carry, factors)
        kept = jnp.array([jnp.all(leaf[0] == leaf[1]) for leaf in seen])
        checks = {
            "parameters that a NaN left alone": jnp.all(kept),
            "one step that was skipped": opt_state.total_notfinite == 1,
        }
        return Made(values[0], _kept(opt_state), checks)

    return make


class _State(jaxscale.flax.TrainState):
    extra: Any


def _by_linen(case: Case) -> Callable[[Any, Any], Made]:
    def make(params: Any, batch: Any) -> Made:
        def loss(params: Any, fields: Any, batch: Any) -> Any:
            value, (extra, aux) = case.loss(params["model"], fields["extra"], batch)
            return value, ({"extra": extra}, aux)

        tx = jaxscale.loss_scaled(_keeping_gradients(), case.scale)
        options = {"has_state": True, "has_aux": True}
        step = jaxscale.flax.train_step(jaxscale.autocast(loss), **options)
        # In a dict, as Flax looks for keys in it.
        fields = {"params": {"model": params}, "extra": case.state}
        state = _State.create(apply_fn=None, tx=tx, **fields)
        state, (value, _) = step(state, batch)
        return Made(
            value, _kept(state.opt_state), {"the step was made": state.step == 1}
        )

    return make


class _Model(nnx.Module):
    """A model of another framework, as one of NNX."""

    def __init__(self, params: Any, state: Any) -> None:
        self.leaves = nnx_list([nnx.Param(leaf) for leaf in jax.tree.leaves(params)])
        self.state = nnx_list([nnx.BatchStat(leaf) for leaf in jax.tree.leaves(state)])


def _by_nnx(case: Case) -> Callable[[Any, Any], Made]:
    treedefs = [jax.tree.structure(tree) for tree in (case.params, case.state)]
    batch_treedef = jax.tree.structure(case.batch)

    def loss_of_leaves(model: Any, batch: Any) -> Any:
        params, state = (
            treedef.unflatten([leaf[...] for leaf in leaves])
            for treedef, leaves in zip(
                treedefs, (model.leaves, model.state), strict=True
            )
        )
        value, (state, aux) = case.loss(params, state, batch_treedef.unflatten(batch))
        for variable, leaf in zip(model.state, jax.tree.leaves(state), strict=True):
            variable[...] = leaf
        return value, aux

    def make(params: Any, batch: Any) -> Made:
        if case.framework == "nnx":
            model, loss = case.build(params), case.written
        else:
            model, loss = _Model(params, case.state), loss_of_leaves
            # NNX itself makes trees of what is no array, which some classes refuse.
            batch = jax.tree.leaves(batch)
        tx = jaxscale.loss_scaled(_keeping_gradients(), case.scale)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step = jaxscale.nnx.train_step(jaxscale.autocast(loss), has_aux=True)
        value, _ = step(model, optimizer, batch)
        return Made(
            value,
            _kept_by_nnx(optimizer),
            {"the step was made": _has_stepped(optimizer)},
        )

    return make


def _kept_by_nnx(optimizer: nnx.Optimizer) -> list[Any]:
    """The gradients in the state of `_keeping_gradients`, as NNX holds it."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(optimizer))
    return [leaf for path, leaf in leaves if "'trace'" in jax.tree_util.keystr(path)]


def _has_stepped(optimizer: nnx.Optimizer) -> Any:
    return jaxscale.metrics(optimizer)["step_applied"]


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("value_and_grad", _by_value_and_grad("float16")),
        Entry("value_and_grad, bfloat16", _by_value_and_grad("bfloat16"), "bfloat16"),
        Entry("half_carries", _by_value_and_grad("float16", True), "float16", True),
        Entry("train_step", _trained),
        Entry("scale_backward outside", _outside("float16")),
        Entry("scale_backward inside", _inside("float16")),
        Entry("scale_backward, bfloat16", _outside("bfloat16"), "bfloat16"),
        Entry("skip_nonfinite", _skipping),
        Entry("flax", _by_linen),
        Entry("nnx", _by_nnx),
    )
}
DOCTOR = "doctor"

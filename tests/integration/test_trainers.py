"""How trainers call an optimizer that they were given: with what arguments, from where.

Each row does what one or several public trainers do between the gradients and the next parameters.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tables import assert_close, cases, run

import jaxscale

PARAMS = {"w": jnp.array([1.0, -2.0])}
GRADS = [{"w": jnp.array([0.5, 0.25])}, {"w": jnp.array([jnp.nan, 1.0])}, {"w": jnp.ones(2)}]
LOSSES = [1.0, 2.0, 0.5]


INJECTED = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5, momentum=0.9)


def looped(update, tx, grads=GRADS):
    """Trains with a function that calls an optimizer: it takes grads, state, params and loss."""
    params, state = PARAMS, tx.init(params=PARAMS)
    step = jax.jit(functools.partial(update, tx))
    for each, loss in zip(grads, LOSSES, strict=True):
        updates, state = step(each, state, params, jnp.array(loss))
        params = optax.apply_updates(params, updates)
    return params, state


def by_arguments(*names):
    """Calls `tx.update` with some arguments by keyword."""

    def update(tx, grads, state, params, loss):
        norm = jnp.sqrt(jnp.sum(grads["w"] ** 2))
        known = {"value": loss, "loss": loss, "grad_norm": norm, "obj_fn": jnp.sum}
        return tx.update(grads, state, params, **{name: known[name] for name in names})

    return functools.partial(looped, update)


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(PARAMS["w"])


def in_an_optimizer_of_nnx(tx):
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    for grads in GRADS:
        step(model, optimizer, nnx.State({"w": nnx.Param(grads["w"])}))
    return {"w": model.w[...]}, optimizer.opt_state


WAYS = {
    "three arguments (Kauldron, big_vision, Penzai, Flax, purejaxrl)": by_arguments(),
    "no parameters (brax)": functools.partial(
        looped, lambda tx, grads, state, *_: tx.update(grads, state)
    ),
    "value= (numpyro)": by_arguments("value"),
    "loss= and others (MaxText, levanter)": by_arguments("loss", "grad_norm", "obj_fn"),
    "value= and loss=": by_arguments("value", "loss"),
    "all by keyword (EasyDeL)": functools.partial(
        looped, lambda tx, g, state, params, _: tx.update(updates=g, state=state, params=params)
    ),
    "nnx.Optimizer (Tunix)": in_an_optimizer_of_nnx,
    # The trainer rounds gradients to the dtype of the parameters before it hands them over.
    "cast gradients (Tunix)": functools.partial(
        by_arguments(), grads=jax.tree.map(lambda g: g.astype(jnp.bfloat16), GRADS)
    ),
}


@cases("way", WAYS, fast=["loss= and others (MaxText, levanter)", "nnx.Optimizer (Tunix)"])
def test_a_bad_step_is_skipped_and_hyperparameters_are_in_reach(way):
    params, state = WAYS[way](jaxscale.skip_nonfinite(INJECTED, spikes=jaxscale.SpikeRule()))
    expected, _ = run(INJECTED, GRADS[::2], params=PARAMS)
    assert_close(params, expected)
    assert jaxscale.metrics(state)["total_notfinite"] == 1
    rate = state.hyperparams["learning_rate"]
    assert float(rate[...] if hasattr(rate, "get_value") else rate) == 0.5


def test_hyperparameters_are_written_through_the_wrapper():
    """As trainers do that adapt the learning rate on the host: into the dictionary."""
    for tx in (
        jaxscale.loss_scaled(INJECTED),
        jaxscale.multi_steps(jaxscale.loss_scaled(INJECTED), 1),
        jaxscale.skip_nonfinite(optax.chain(optax.clip(9.0), INJECTED)),
        optax.inject_hyperparams(
            lambda learning_rate: jaxscale.skip_nonfinite(optax.sgd(learning_rate))
        )(learning_rate=0.5),
    ):
        state = tx.init(PARAMS)
        state.hyperparams["learning_rate"] = jnp.asarray(0.25)
        updates, state = jax.jit(tx.update)(GRADS[2], state, PARAMS)
        np.testing.assert_array_equal(updates["w"], [-0.25, -0.25])
        assert state.hyperparams["learning_rate"] == 0.25
    assert not hasattr(jaxscale.skip_nonfinite(optax.sgd(0.5)).init(PARAMS), "hyperparams")
    both = optax.chain(INJECTED, INJECTED)
    with pytest.raises(AttributeError, match=r"exactly one `optax.inject_hyperparams`.* got 2"):
        _ = jaxscale.skip_nonfinite(both).init(PARAMS).hyperparams

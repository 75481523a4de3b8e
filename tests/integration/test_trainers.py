"""How public trainers call an optimizer that they were given: with what arguments, from where."""

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
GRADS = [
    {"w": jnp.array([0.5, 0.25])},
    {"w": jnp.array([jnp.nan, 1.0])},
    {"w": jnp.ones(2)},
]
LOSSES = [1.0, 2.0, 0.5]
INJECTED = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5, momentum=0.9)


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
    "three arguments (Kauldron, big_vision, Penzai, Flax, purejaxrl)": (
        lambda tx, grads, state, params, loss: tx.update(grads, state, params)
    ),
    "no parameters (brax)": lambda tx, grads, state, *_, loss: tx.update(grads, state),
    "value= (numpyro)": lambda tx, *args, loss: tx.update(*args, value=loss),
    "loss= and others (MaxText, levanter)": lambda tx, grads, *args, loss: tx.update(
        grads, *args, loss=loss, grad_norm=jnp.linalg.norm(grads["w"]), obj_fn=jnp.sum
    ),
    "value= and loss=": lambda tx, *args, loss: tx.update(*args, value=loss, loss=loss),
    "all by keyword (EasyDeL)": lambda tx, grads, state, params, loss: tx.update(
        updates=grads, state=state, params=params
    ),
    # The trainer rounds gradients to the dtype of the parameters before it hands them over.
    "cast gradients (Tunix)": lambda tx, grads, *args, loss: tx.update(
        jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads), *args
    ),
    "nnx.Optimizer (Tunix)": None,
}


@cases(
    "way", WAYS, fast=["loss= and others (MaxText, levanter)", "nnx.Optimizer (Tunix)"]
)
def test_a_bad_step_is_skipped_and_hyperparameters_are_in_reach(way):
    tx = jaxscale.skip_nonfinite(INJECTED, spikes=jaxscale.SpikeRule())
    if WAYS[way] is None:
        params, state = in_an_optimizer_of_nnx(tx)
    else:
        params, state = PARAMS, tx.init(params=PARAMS)
        step = jax.jit(functools.partial(WAYS[way], tx))
        for grads, loss in zip(GRADS, LOSSES, strict=True):
            updates, state = step(grads, state, params, loss=jnp.array(loss))
            params = optax.apply_updates(params, updates)
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
    assert not hasattr(
        jaxscale.skip_nonfinite(optax.sgd(0.5)).init(PARAMS), "hyperparams"
    )
    both = optax.chain(INJECTED, INJECTED)
    with pytest.raises(
        AttributeError, match=r"exactly one `optax.inject_hyperparams`.* got 2"
    ):
        _ = jaxscale.skip_nonfinite(both).init(PARAMS).hyperparams

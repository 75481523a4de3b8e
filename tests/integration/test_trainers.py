"""Calls of an optimizer by public trainers: with what arguments, and from where."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import assert_close, cases, run

import jaxscale


def test_a_trainer_that_passes_the_loss_skips_its_nan():
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    params = jnp.array([1.0, 2.0])
    state = tx.init(params)
    updates, state = tx.update(jnp.ones(2), state, params, loss=jnp.float32(jnp.nan))
    np.testing.assert_array_equal(updates, [0, 0])
    assert jaxscale.metrics(state)["total_notfinite_loss"] == 1


PARAMS = {"w": jnp.array([1.0, -2.0])}
GRADS = [
    {"w": jnp.array([0.5, 0.25])},
    {"w": jnp.array([jnp.nan, 1.0])},
    {"w": jnp.ones(2)},
]
LOSSES = [1.0, 2.0, 0.5]
INJECTED = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5, momentum=0.9)


# How trainers call `update`, with gradients, state, parameters and a loss.
WAYS = {
    "three arguments (Kauldron, big_vision, Penzai, Flax, purejaxrl)": (
        lambda tx, g, s, p, loss: tx.update(g, s, p)
    ),
    "value= (numpyro)": lambda tx, g, s, p, loss: tx.update(g, s, p, value=loss),
    "loss= and others (MaxText, levanter)": lambda tx, g, s, p, loss: tx.update(
        g, s, p, loss=loss, grad_norm=jnp.linalg.norm(g["w"]), obj_fn=jnp.sum
    ),
    "all by keyword (EasyDeL)": lambda tx, g, s, p, loss: tx.update(
        updates=g, state=s, params=p
    ),
    # in the dtype of the parameters
    "cast gradients (Tunix)": lambda tx, g, s, p, loss: tx.update(
        {"w": g["w"].astype(jnp.bfloat16)}, s, p
    ),
}


@pytest.mark.worlds
@cases("way", WAYS, fast=["loss= and others (MaxText, levanter)"])
def test_a_bad_step_is_skipped_and_hyperparameters_are_in_reach(way):
    tx = jaxscale.skip_nonfinite(INJECTED, spikes=jaxscale.SpikeRule())
    params = PARAMS
    state = tx.init(params=PARAMS)
    step = jax.jit(functools.partial(WAYS[way], tx))
    for grads, loss in zip(GRADS, LOSSES, strict=True):
        updates, state = step(grads, state, params, jnp.array(loss))
        params = optax.apply_updates(params, updates)
    expected, _ = run(INJECTED, GRADS[::2], params=PARAMS)
    assert_close(params, expected)
    assert jaxscale.metrics(state)["total_notfinite"] == 1
    assert state.hyperparams["learning_rate"] == 0.5


def sgd_that_skips(learning_rate):
    return jaxscale.skip_nonfinite(optax.sgd(learning_rate))


WRAPPED = {
    "loss_scaled": jaxscale.loss_scaled(INJECTED),
    "multi_steps": jaxscale.multi_steps(jaxscale.loss_scaled(INJECTED), 1),
    "chain": jaxscale.skip_nonfinite(optax.chain(optax.clip(9.0), INJECTED)),
    "outside": optax.inject_hyperparams(sgd_that_skips)(learning_rate=0.5),
}


@pytest.mark.worlds
@cases("name", WRAPPED)
def test_hyperparameters_are_written_through_the_wrapper(name):
    """As trainers do that adapt the learning rate on the host: into the dictionary."""
    tx = WRAPPED[name]
    state = tx.init(PARAMS)
    state.hyperparams["learning_rate"] = jnp.asarray(0.25)
    updates, state = jax.jit(tx.update)(GRADS[2], state, PARAMS)
    np.testing.assert_array_equal(updates["w"], [-0.25, -0.25])
    assert state.hyperparams["learning_rate"] == 0.25


def test_hyperparameters_of_two_optimizers_are_an_error():
    both = optax.chain(INJECTED, INJECTED)
    message = r"exactly one `optax.inject_hyperparams`.* got 2"
    with pytest.raises(AttributeError, match=message):
        _ = jaxscale.skip_nonfinite(both).init(PARAMS).hyperparams

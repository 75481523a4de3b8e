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


# How trainers call `update`.


def with_three_arguments(tx, grads, state, params, loss):
    return tx.update(grads, state, params)


def without_parameters(tx, grads, state, params, loss):
    return tx.update(grads, state)


def with_value(tx, grads, state, params, loss):
    return tx.update(grads, state, params, value=loss)


def with_loss_and_others(tx, grads, state, params, loss):
    others = {"grad_norm": jnp.linalg.norm(grads["w"]), "obj_fn": jnp.sum}
    return tx.update(grads, state, params, loss=loss, **others)


def with_value_and_loss(tx, grads, state, params, loss):
    return tx.update(grads, state, params, value=loss, loss=loss)


def by_keyword(tx, grads, state, params, loss):
    return tx.update(updates=grads, state=state, params=params)


def with_cast_gradients(tx, grads, state, params, loss):
    """The trainer rounds gradients to the dtype of the parameters before it hands them over."""
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    return tx.update(grads, state, params)


WAYS = {
    "three arguments (Kauldron, big_vision, Penzai, Flax, purejaxrl)": (
        with_three_arguments
    ),
    "no parameters (brax)": without_parameters,
    "value= (numpyro)": with_value,
    "loss= and others (MaxText, levanter)": with_loss_and_others,
    "value= and loss=": with_value_and_loss,
    "all by keyword (EasyDeL)": by_keyword,
    "cast gradients (Tunix)": with_cast_gradients,
}
SPIKES = jaxscale.SpikeRule()


@pytest.mark.worlds
@cases("way", WAYS, fast=["loss= and others (MaxText, levanter)"])
def test_a_bad_step_is_skipped_and_hyperparameters_are_in_reach(way):
    tx = jaxscale.skip_nonfinite(INJECTED, spikes=SPIKES)
    params = PARAMS
    state = tx.init(params=PARAMS)
    step = jax.jit(functools.partial(WAYS[way], tx))
    for grads, loss in zip(GRADS, LOSSES, strict=True):
        updates, state = step(grads, state, params, loss=jnp.array(loss))
        params = optax.apply_updates(params, updates)
    assert_close(params, params_of_good_steps())
    assert jaxscale.metrics(state)["total_notfinite"] == 1
    assert state.hyperparams["learning_rate"] == 0.5


@pytest.mark.worlds
def test_an_nnx_optimizer_skips_a_bad_step_and_has_hyperparameters_in_reach():
    """As Tunix uses it."""
    model = Model()
    tx = jaxscale.skip_nonfinite(INJECTED, spikes=SPIKES)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    for grads in GRADS:
        step(model, optimizer, nnx.State({"w": nnx.Param(grads["w"])}))
    assert_close({"w": model.w[...]}, params_of_good_steps())
    state = optimizer.opt_state
    assert jaxscale.metrics(state)["total_notfinite"] == 1
    assert float(state.hyperparams["learning_rate"][...]) == 0.5


def params_of_good_steps():
    params, _ = run(INJECTED, GRADS[::2], params=PARAMS)
    return params


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


def test_a_state_without_hyperparameters_has_no_such_attribute():
    state = sgd_that_skips(0.5).init(PARAMS)
    assert not hasattr(state, "hyperparams")


def test_hyperparameters_of_two_optimizers_are_an_error():
    both = optax.chain(INJECTED, INJECTED)
    message = r"exactly one `optax.inject_hyperparams`.* got 2"
    with pytest.raises(AttributeError, match=message):
        _ = jaxscale.skip_nonfinite(both).init(PARAMS).hyperparams

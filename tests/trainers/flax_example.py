"""A step as the examples of Flax have it: `TrainState`, batch statistics, `jax.value_and_grad`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.training import train_state
from runs import FACTOR, WIDTH, batches, examples, optimizer, skipped

import jaxscale

STEPS = 160


class TrainState(train_state.TrainState):
    batch_stats: Any


class Model(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(WIDTH, dtype=self.dtype)(x)
        x = nn.BatchNorm(not train, momentum=0.9, dtype=self.dtype)(x)
        x = nn.Dense(1, dtype=self.dtype)(nn.tanh(x))
        return x.astype(jnp.float32)


def mean_squared_error(predictions, y):
    return jnp.mean((predictions - y) ** 2)


@jax.jit
def train_step(state, x, y):
    """Makes a step as an example does. Nothing in it knows of scaling."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        predictions, new_state = state.apply_fn(variables, x, mutable=["batch_stats"])
        return FACTOR * mean_squared_error(predictions, y), new_state

    (_, new_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=new_state["batch_stats"])


def train(dtype, scaled, skips, batch):
    x, y = examples()
    model = Model(jnp.dtype(dtype))
    variables = model.init(jax.random.key(0), x)
    apply_fn = model.apply
    if scaled:
        apply_fn = jaxscale.scale_backward(model.apply)
    state = TrainState.create(
        apply_fn=apply_fn,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optimizer(skips),
    )
    for pair in batches(STEPS, batch):
        state = train_step(state, *pair)
    # With the statistics of these examples: those that the step kept have met the inf batch.
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    predictions, _ = model.apply(variables, x, mutable=["batch_stats"])
    return float(mean_squared_error(predictions, y)), skipped(state.opt_state)

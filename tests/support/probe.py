"""A loss whose gradients are whatever a batch says, and runs with it."""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tables import member

import jaxscale


class Batch(NamedTuple):
    """The input of a step, or, with an axis in front, of the steps of a run."""

    highest: Any  # up to which loss scale its gradients are finite
    size: Any  # each of its gradients
    loss: Any = 0.0
    leaf: Any = 0  # which of the two parameters has an inf where the scale is too high


@jax.custom_vjp
def probe(params, batch):
    """A loss of two parameters."""
    return batch.loss


def pull_back(batch, cotangent):
    grads = []
    for leaf in range(2):
        overflows = (cotangent > batch.highest) & (batch.leaf == leaf)
        grads.append(jnp.where(overflows, jnp.inf, cotangent * batch.size))
    return grads, None


probe.defvjp(lambda params, batch: (batch.loss, batch), pull_back)
PARAMS = [jnp.zeros(()), jnp.zeros(())]


def simulate(tx, highest, size=0.25, loss=0.0, retries=0):
    """The states after each step of runs of the real step, by name, or of one run.

    `highest` has a run, or runs by name, of one length; all are in one program.
    """
    runs = highest if isinstance(highest, dict) else {"": (highest, size, loss)}
    columns = []
    for run in runs.values():
        columns.append(np.broadcast_arrays(*map(np.float32, run)))
    states = jax.device_get(
        _simulate(tx, retries, *map(np.stack, zip(*columns, strict=True)))
    )
    by_name = {}
    for i, name in enumerate(runs):
        by_name[name] = member(states, i)
    return by_name if isinstance(highest, dict) else by_name[""]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _simulate(tx, retries, *columns):
    step = jaxscale.train_step(probe, tx, retries=retries)

    def advance(state, row):
        _, state, _ = step(PARAMS, state, Batch(*row))
        return state, state

    def run(*columns):
        return jax.lax.scan(advance, tx.init(PARAMS), columns)[1]

    return jax.vmap(run)(*columns)


def after(states, step):
    """The state after a number of steps."""
    return member(states, step - 1)


def texts_of_check(state, tx=None, **options):
    """The texts that `check` says of a state."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            jaxscale.check(state, tx=tx, **options)
        except jaxscale.LossScaleStuckError as error:
            return [str(error)]
    return [str(warning.message) for warning in caught]

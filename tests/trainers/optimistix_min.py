"""Optimistix's `OptaxMinimiser`, which takes the optimizer and the loss, and draws no batches.

The loss fetches its own from the host, as one does that is measured.
"""

import itertools

import jax
import jax.numpy as jnp
import optimistix as optx
from mlp import init, mean_squared_error, small_loss
from runs import BATCH, FEATURES, batches, examples, optimizer, skipped
from watch import in_precision

STEPS = 160
SHAPES = (
    jax.ShapeDtypeStruct((BATCH, FEATURES), jnp.float32),
    jax.ShapeDtypeStruct((BATCH, 1), jnp.float32),
)


def train(dtype, scaled, skips, batch):
    loss = in_precision(small_loss, dtype, scaled)
    given = itertools.chain(batches(STEPS, batch))

    def measured_loss(params, args):
        # It depends on the parameters, or XLA fetches one batch for all steps.
        y = jax.lax.stop_gradient(params["last"]["b"])
        return loss(params, *jax.pure_callback(lambda _: next(given), SHAPES, y))

    solution = optx.minimise(
        measured_loss,
        optx.OptaxMinimiser(optimizer(skips), rtol=0.0, atol=0.0),
        init(),
        max_steps=STEPS - (batch is None),
        throw=False,  # nothing has converged when the steps are over
    )
    loss = mean_squared_error(solution.value, *examples())
    return float(loss), skipped(solution.state)

"""Optimistix's `OptaxMinimiser`, which takes the optimizer and the loss, and draws no batches.

The loss fetches its batches from the host, as a loss does that is measured.
"""

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
    batches_left = iter(batches(STEPS, batch))

    def fetch(_):
        return next(batches_left)

    def measured_loss(params, args):
        # It depends on the parameters, or XLA fetches one batch for all steps.
        bias = jax.lax.stop_gradient(params["last"]["b"])
        x, y = jax.pure_callback(fetch, SHAPES, bias)
        return loss(params, x, y)

    solution = optx.minimise(
        measured_loss,
        optx.OptaxMinimiser(optimizer(skips), rtol=0.0, atol=0.0),
        init(),
        max_steps=STEPS - (batch is None),
        throw=False,  # nothing has converged when the steps are over
    )
    loss = mean_squared_error(solution.value, *examples())
    return float(loss), skipped(solution.state)

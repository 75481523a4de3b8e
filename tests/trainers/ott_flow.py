"""OTT-JAX's `flow_matching_step`, which takes an `nnx.Optimizer`, and a model of NNX."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from ott.neural.methods.flow_matching import flow_matching_step, interpolate_samples
from runs import BAD_STEP, BATCH, FACTOR, WIDTH, optimizer, skipped
from watch import in_precision

STEPS = 160


class Velocity(nnx.Module):
    def __init__(self, dtype, scaled):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 2, rngs=rngs)
        self.precision = dtype, scaled

    def _velocity(self, t, x):
        hidden = nnx.tanh(self.first(jnp.concatenate([t[:, None], x], 1)))
        return self.last(hidden)

    def __call__(self, t, x, cond=None, rngs=None):
        return in_precision(Velocity._velocity, *self.precision)(self, t, x)


def small_error(predictions, targets):
    return FACTOR * (predictions - targets) ** 2


def batches(batch):
    """Yields points of a normal distribution, and where each belongs."""
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        start = rng.standard_normal((BATCH, 2)).astype("float32")
        end = start / 4 + 2 * np.tanh(4 * start[:, :1])
        is_bad = step == BAD_STEP
        if is_bad and batch == "bad":
            end[0, 0] = np.nan
        if not is_bad or batch is not None:
            yield interpolate_samples(jax.random.key(step), start, end)


def train(dtype, scaled, skips, batch):
    """Returns the last loss over all examples, and how many steps were skipped."""
    model = Velocity(dtype, scaled)
    nnx_optimizer = nnx.Optimizer(model, optimizer(skips), wrt=nnx.Param)

    @nnx.jit
    def step(model, nnx_optimizer, samples):
        return flow_matching_step(model, nnx_optimizer, samples, loss_fn=small_error)

    for samples in batches(batch):
        step(model, nnx_optimizer, samples)
    model.precision = "float32", False
    errors = []
    for samples in batches("good"):
        velocity = model(samples["t"], samples["x_t"])
        errors.append((velocity - samples["v_t"]) ** 2)
    return float(jnp.stack(errors).mean()), skipped(nnx_optimizer)

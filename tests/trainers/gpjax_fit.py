"""gpjax's `fit`, which takes the optimizer and the loss, and draws its batches itself.

A kernel on what a network makes of the inputs, as in its example of deep kernels. One row is bad.
"""

import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpjax.kernels.base import AbstractKernel
from gpjax.kernels.computations import DenseKernelComputation
from gpjax.parameters import Real
from runs import FACTOR, examples
from watch import Journal, in_precision

STEPS, BATCH, WIDTH, BAD_ROW = 100, 32, 32, 7
BAD_STEPS = 13  # so often the row is drawn


class DeepKernel(AbstractKernel):
    def __init__(self):
        super().__init__(compute_engine=DenseKernelComputation())
        self.base = gpx.kernels.RBF()
        features = examples()[0].shape[1]
        first, last = jax.random.split(jax.random.key(0))
        self.first = Real(jax.random.normal(first, (features, WIDTH)) / features**0.5)
        self.bias = Real(jnp.zeros(WIDTH))
        self.last = Real(jax.random.normal(last, (WIDTH, 2)) / WIDTH**0.5)

    def _features(self, x):
        return jnp.tanh(x @ self.first[...] + self.bias[...]) @ self.last[...]

    def __call__(self, x, y):
        return self.base(self._features(x), self._features(y))


def negative_likelihood(model, data):
    return -gpx.objectives.conjugate_mll(model, data)


def fit(dtype, scaled, skips, batch, left_out=()):
    x, y = examples()
    data = gpx.Dataset(jnp.array(x), jnp.array(y))
    if batch == "bad":
        bad = x.copy()
        bad[BAD_ROW, 0] = np.nan
        data = gpx.Dataset(jnp.array(bad), jnp.array(y))
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=DeepKernel())
    posterior = prior * gpx.likelihoods.Gaussian(num_datapoints=len(x), obs_stddev=0.1)
    journal = Journal()

    def small_loss(model, data):
        return FACTOR * negative_likelihood(model, data)

    model, _ = gpx.fit(
        model=posterior,
        objective=in_precision(small_loss, dtype, scaled),
        train_data=data,
        optim=journal.optimizer(skips, left_out, optax.adam(1e-2)),
        num_iters=STEPS,
        batch_size=BATCH,
        key=jax.random.key(0),
        verbose=False,
    )
    return float(
        negative_likelihood(model, gpx.Dataset(jnp.array(x), jnp.array(y)))
    ) / len(x), journal


def train(dtype, scaled, skips, batch):
    left_out = ()
    if batch is None:  # the steps that drew the bad row
        left_out, batch = fit(dtype, scaled, skips, "bad")[1].bad, "good"
    loss, journal = fit(dtype, scaled, skips, batch, left_out)
    return loss, journal.skipped

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
from runs import FACTOR, FEATURES, examples
from watch import Journal, in_precision, train_by

STEPS = 100
BATCH = 32
WIDTH = 32
BAD_ROW = 7
BAD_STEPS = 13  # how often the row is drawn


class DeepKernel(AbstractKernel):
    def __init__(self):
        super().__init__(compute_engine=DenseKernelComputation())
        self.base = gpx.kernels.RBF()
        first_key, last_key = jax.random.split(jax.random.key(0))
        first = jax.random.normal(first_key, (FEATURES, WIDTH))
        self.first = Real(first / FEATURES**0.5)
        self.bias = Real(jnp.zeros(WIDTH))
        last = jax.random.normal(last_key, (WIDTH, 2))
        self.last = Real(last / WIDTH**0.5)

    def _features(self, x):
        hidden = jnp.tanh(x @ self.first[...] + self.bias[...])
        return hidden @ self.last[...]

    def __call__(self, x, y):
        return self.base(self._features(x), self._features(y))


def negative_likelihood(model, data):
    return -gpx.objectives.conjugate_mll(model, data)


def fit(dtype, scaled, skips, batch, left_out=()):
    x, y = examples()
    good_data = gpx.Dataset(jnp.array(x), jnp.array(y))
    data = good_data
    if batch == "bad":
        x[BAD_ROW, 0] = np.nan
        data = gpx.Dataset(jnp.array(x), jnp.array(y))
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
    loss = float(negative_likelihood(model, good_data)) / len(x)
    return loss, journal


train = train_by(fit)

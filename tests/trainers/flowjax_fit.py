"""flowjax's `fit_to_data`, which takes the optimizer and the loss, and shuffles the data itself.

One of its rows is bad, and each row is seen once.
"""

import jax
import numpy as np
import optax
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import Normal
from flowjax.flows import coupling_flow
from flowjax.train import fit_to_data
from flowjax.train.losses import MaximumLikelihoodLoss
from runs import BATCH, FACTOR
from watch import Journal, in_precision, train_by

STEPS = 160
BAD_ROW = 7
ROWS = (STEPS + 1) * BATCH  # one batch is for validation


def moons(batch):
    """Returns points on two half circles."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, np.pi, ROWS)
    side = rng.choice([-1.0, 1.0], ROWS)
    circles = [side * (np.cos(angle) - 0.5), side * (np.sin(angle) - 0.25)]
    noise = 0.1 * rng.standard_normal((ROWS, 2))
    x = (np.stack(circles, 1) + noise).astype("float32")
    if batch == "bad":
        x[BAD_ROW, 0] = np.nan
    return x


def fit(dtype, scaled, skips, batch, left_out=()):
    """Returns the last loss over all examples, and what the optimizer met."""
    key, shuffles = jax.random.split(jax.random.key(0))
    flow = coupling_flow(
        key,
        base_dist=Normal(np.zeros(2, "float32")),
        transformer=RationalQuadraticSpline(knots=6, interval=4),
        flow_layers=2,
        nn_width=32,
    )
    likelihood = MaximumLikelihoodLoss()
    journal = Journal()

    def small_loss(params, static, x, key):
        return FACTOR * likelihood(params, static, x, key=key)

    loss = in_precision(small_loss, dtype, scaled)
    flow, _ = fit_to_data(
        shuffles,
        flow,
        moons(batch),
        loss_fn=lambda *args, key: loss(*args, key),
        optimizer=journal.optimizer(skips, left_out, optax.adam(3e-3)),
        batch_size=BATCH,
        max_epochs=1,
        val_prop=BATCH / ROWS,
        return_best=False,
        show_progress=False,
    )
    return -float(flow.log_prob(moons("good")).mean()), journal


train = train_by(fit)

"""Float16 training with a loss scale that follows the gradients, and ways to start it.

The default rule doubles the scale now and then, until something overflows. The adaptive rule looks
at the largest gradient. It may begin low, and then finds its level within a few dozen steps; or at
the largest scale that does not overflow on a first batch; or anywhere, with retries. A multilayer
perceptron reads digits. Its loss is a sum, so a large scale overflows.
"""

import argparse
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import jaxscale
from jaxscale import diagnostics

LAYER_SIZES = [64, 256, 128, 10]
BATCH_SIZE = 128


def init_params(key):
    """Returns float32 weights and biases, one pair per layer."""
    init = jax.nn.initializers.he_normal()
    keys = iter(jax.random.split(key, len(LAYER_SIZES) - 1))
    return [
        (init(next(keys), shape), jnp.zeros(shape[1]))
        for shape in pairwise(LAYER_SIZES)
    ]


@jaxscale.autocast
def loss_fn(params, batch):
    """Returns the summed cross-entropy of a batch."""
    activations, labels = batch
    for weight, bias in params[:-1]:
        activations = jax.nn.relu(activations @ weight + bias)
    logits = activations @ params[-1][0] + params[-1][1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def train(loss_scale, retries, batches):
    """Returns the metrics of a run, and the loss of its last step."""
    tx = jaxscale.loss_scaled(optax.adamw(1e-3), loss_scale)
    train_step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=retries))
    params, loss = init_params(jax.random.key(0)), jnp.inf
    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state, loss = train_step(params, opt_state, batch)
    jaxscale.check(opt_state, tx=tx)
    return jaxscale.metrics(opt_state), float(loss)


def main(num_steps: int = 300) -> float:
    """Trains with each rule and each start, prints a table, and returns the last loss."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    rng = np.random.default_rng(0)
    chosen = [
        rng.choice(len(images), BATCH_SIZE, replace=False) for _ in range(num_steps)
    ]
    batches = [(images[indices], labels[indices]) for indices in chosen]

    found = diagnostics.calibrate(loss_fn, init_params(jax.random.key(0)), batches[:1])
    calibrated = jaxscale.AdaptiveLossScale(init_scale=found.init_scale or 1.0)
    runs = {
        "dynamic": (jaxscale.DynamicLossScale(), 0),
        "adaptive": (jaxscale.AdaptiveLossScale(), 0),
        "adaptive, from a first batch": (calibrated, 0),
        "adaptive, from 2**24": (jaxscale.AdaptiveLossScale(init_scale=2.0**24), 0),
        "adaptive, from 2**24, with retries": (
            jaxscale.AdaptiveLossScale(init_scale=2.0**24),
            30,
        ),
    }
    table = Table("rule", "from", "skipped", "retries", "to", "level", "last loss")
    loss = float("nan")
    for name, (policy, retries) in runs.items():
        now, loss = train(policy, retries, batches)
        start, end = (
            f"2**{np.log2(s):.0f}" for s in (policy.init_scale, now["loss_scale"])
        )
        level = f"{now['level']:.2f}" if "level" in now else ""
        counts = str(now["total_notfinite"]), str(now["total_retries"])
        table.add_row(name, start, *counts, end, level, f"{loss:.3f}")
    Console(width=100).print(table)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=300, help="training steps of each run"
    )
    main(parser.parse_args().steps)

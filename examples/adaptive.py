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
    keys = jax.random.split(key, len(LAYER_SIZES) - 1)
    params = []
    for layer_key, (inputs, outputs) in zip(keys, pairwise(LAYER_SIZES), strict=True):
        weight = init(layer_key, (inputs, outputs))
        params.append((weight, jnp.zeros(outputs)))
    return params


@jaxscale.autocast
def loss_fn(params, batch):
    """Returns the summed cross-entropy of a batch."""
    activations, labels = batch
    for weight, bias in params[:-1]:
        activations = jax.nn.relu(activations @ weight + bias)
    weight, bias = params[-1]
    logits = activations @ weight + bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def train(loss_scale, retries, batches):
    """Returns the metrics of a run, and the loss of its last step."""
    tx = jaxscale.loss_scaled(optax.adamw(1e-3), loss_scale)
    train_step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=retries))
    params = init_params(jax.random.key(0))
    opt_state = tx.init(params)
    loss = jnp.inf
    for batch in batches:
        params, opt_state, loss = train_step(params, opt_state, batch)
    jaxscale.check(opt_state, tx=tx)
    return jaxscale.metrics(opt_state), float(loss)


def make_batches(num_steps):
    """Returns a batch of images and labels for each step."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(num_steps):
        chosen = rng.choice(len(images), BATCH_SIZE, replace=False)
        batches.append((images[chosen], labels[chosen]))
    return batches


def power_of_two(scale):
    """Writes a loss scale as a power."""
    return f"2**{np.log2(scale):.0f}"


def main(num_steps: int = 300) -> float:
    """Trains with each rule and each start, prints a table, and returns the last loss."""
    batches = make_batches(num_steps)
    params = init_params(jax.random.key(0))
    calibration = diagnostics.calibrate(loss_fn, params, batches[:1])

    dynamic = jaxscale.DynamicLossScale()
    adaptive = jaxscale.AdaptiveLossScale()
    calibrated = jaxscale.AdaptiveLossScale(init_scale=calibration.init_scale or 1.0)
    high = jaxscale.AdaptiveLossScale(init_scale=2.0**24)
    runs = {  # the rule, and the retries
        "dynamic": (dynamic, 0),
        "adaptive": (adaptive, 0),
        "adaptive, from a first batch": (calibrated, 0),
        "adaptive, from 2**24": (high, 0),
        "adaptive, from 2**24, with retries": (high, 30),
    }
    table = Table("rule", "from", "skipped", "retries", "to", "level", "last loss")
    loss = float("nan")
    for name, (policy, retries) in runs.items():
        metrics, loss = train(policy, retries, batches)
        level = ""
        if "level" in metrics:
            level = f"{metrics['level']:.2f}"
        table.add_row(
            name,
            power_of_two(policy.init_scale),
            str(metrics["total_notfinite"]),
            str(metrics["total_retries"]),
            power_of_two(metrics["loss_scale"]),
            level,
            f"{loss:.3f}",
        )
    Console(width=100).print(table)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=300, help="training steps of each run"
    )
    main(parser.parse_args().steps)

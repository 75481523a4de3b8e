"""Float16 training with little memory: one optimizer step for several micro-batches.

A multilayer perceptron reads digits, a quarter of each batch at a time. A corrupt micro-batch,
whose loss is NaN, is dropped, and the step is made from the other three. A micro-batch that
overflows is not lost: `retries` repeats its backward pass at a lower scale. The program either
calls the step for each micro-batch, or once for all of them with `scan`. The result is the same.
"""

import argparse
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxscale

LAYER_SIZES = [64, 256, 128, 10]
MICRO_BATCHES = 4  # of each step
MICRO_BATCH_SIZE = 32
NUM_TEST = 360

# The scale grows early, so that even a short run meets an overflow.
loss_scale = jaxscale.DynamicLossScale(growth_interval=25)
tx = jaxscale.loss_scaled(optax.adamw(1e-3), loss_scale)
tx = jaxscale.multi_steps(tx, MICRO_BATCHES)


def init_params(key):
    """Returns float32 weights and biases, one pair per layer."""
    init = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(LAYER_SIZES) - 1)
    params = []
    for layer_key, (inputs, outputs) in zip(keys, pairwise(LAYER_SIZES), strict=True):
        weight = init(layer_key, (inputs, outputs))
        params.append((weight, jnp.zeros(outputs)))
    return params


def predict(params, images):
    """Returns float32 logits, computed in float16."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    activations = images.astype(jnp.float16)
    for weight, bias in params[:-1]:
        activations = jax.nn.relu(activations @ weight + bias)
    weight, bias = params[-1]
    logits = activations @ weight + bias
    return logits.astype(jnp.float32)


def loss_fn(params, images, labels):
    """Returns the mean cross-entropy of a batch, in float32."""
    logits = predict(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


step = jaxscale.train_step(loss_fn, tx, retries=5)


@partial(jax.jit, donate_argnums=0)
def micro_step(state, batch):
    """Returns the state after one micro-batch, and the loss of that micro-batch."""
    *state, loss = step(*state, *batch)
    return state, loss


# The same for all micro-batches of a step, stacked in one array.
train_step = jax.jit(partial(jax.lax.scan, micro_step), donate_argnums=0)


def train_by_micro_batch(state, batches):
    """Returns the state after all micro-batches of a step, with a call for each."""
    for batch in zip(*batches, strict=True):
        state, _ = micro_step(state, batch)
    return state


def train_by_step(state, batches):
    """Returns the state after all micro-batches of a step, with one call for all."""
    state, _ = train_step(state, batches)
    return state


def make_batches(images, labels, num_steps):
    """Yields the stacked micro-batches of each step. One in 50 is corrupt."""
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        shape = (MICRO_BATCHES, MICRO_BATCH_SIZE)
        chosen = rng.choice(len(images), shape, replace=False)
        is_corrupt = rng.random((MICRO_BATCHES, 1, 1)) < 0.02
        yield np.where(is_corrupt, np.nan, images[chosen]), labels[chosen]


def main(num_steps: int = 300) -> float:
    """Trains for a number of steps in two ways, and returns the accuracy of the second way."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    ways = {
        "a call for each micro-batch": train_by_micro_batch,
        "a call for each step": train_by_step,
    }
    accuracy = 0.0
    for name, train in ways.items():
        params = init_params(jax.random.key(0))
        state = [params, tx.init(params)]
        for batches in make_batches(images[:-NUM_TEST], labels[:-NUM_TEST], num_steps):
            state = train(state, batches)
        jaxscale.check(state, tx=tx)
        guesses = predict(state[0], images[-NUM_TEST:]).argmax(-1)
        accuracy = float(np.mean(guesses == labels[-NUM_TEST:]))
        print(f"{name}: accuracy {accuracy:.3f} after {num_steps} steps")
        line = "  of {total_steps} micro-batches {total_notfinite_loss} were corrupt and dropped, "
        line += "{total_retries} overflowed and were repeated, scale {loss_scale:.0f}"
        print(line.format(**jaxscale.metrics(state)))
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    main(parser.parse_args().steps)

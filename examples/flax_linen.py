"""Float16 training in Flax Linen, where a skipped step also keeps the old batch statistics.

A small convolutional network with batch normalization reads digits, in a `TrainState`
of `jaxscale.flax`.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxscale
import jaxscale.flax

BATCH_SIZE, NUM_TEST = 64, 360


class TrainState(jaxscale.flax.TrainState):
    """A training state with the running statistics of batch normalization."""

    batch_stats: Any


class ConvNet(nn.Module):
    """A convolutional network with float32 parameters and float16 arithmetic."""

    @nn.compact
    def __call__(self, images, train):
        """Returns logits in float32, so that the loss is float32 too."""
        activations = images
        for features in (16, 32):
            activations = nn.Conv(features, (3, 3), dtype=jnp.float16)(activations)
            norm = nn.BatchNorm(not train, momentum=0.9, dtype=jnp.float16)
            activations = nn.max_pool(nn.relu(norm(activations)), (2, 2), (2, 2))
        activations = activations.reshape(len(activations), -1)
        return nn.Dense(10, dtype=jnp.float16)(activations).astype(jnp.float32)


@jax.jit
def train_step(state, images, labels):
    """Returns the state after one step, and the loss."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, mutated = state.apply_fn(variables, images, train=True, mutable="batch_stats")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), mutated["batch_stats"]

    value_and_grad = jaxscale.value_and_grad(loss_fn, state, has_aux=True)
    (loss, batch_stats), grads = value_and_grad(state.params)
    return state.apply_gradients(grads=grads, value=loss, batch_stats=batch_stats), loss


def main(num_steps: int = 150) -> float:
    """Trains for a number of steps and returns the accuracy on the held-out images."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    num_train = len(images) - NUM_TEST
    rng = np.random.default_rng(0)

    model = ConvNet()
    variables = model.init(jax.random.key(0), images[:1], train=False)
    # The scale grows early, so that even a short run sees overflows.
    loss_scale = jaxscale.DynamicLossScale(growth_interval=10)
    tx = jaxscale.loss_scaled(optax.adam(3e-3), loss_scale)
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    for step in range(1, num_steps + 1):
        chosen = rng.choice(num_train, BATCH_SIZE, replace=False)
        state, loss = train_step(state, images[chosen], labels[chosen])
        if step % 25 == 0:
            line = "step {}: loss {:.4f}, scale {loss_scale:.0f}, skipped {total_notfinite}"
            print(line.format(step, loss, **jaxscale.metrics(state)))

    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images[num_train:], train=False)
    accuracy = float(np.mean(logits.argmax(-1) == labels[num_train:]))
    print(f"flax_linen: accuracy {accuracy:.3f} after {num_steps} steps")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    main(parser.parse_args().steps)

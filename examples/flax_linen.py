"""Float16 training in Flax Linen, where a skipped step keeps the batch statistics too.

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

BATCH_SIZE = 64


class TrainState(jaxscale.flax.TrainState):
    """A training state with the running statistics of batch normalization."""

    batch_stats: Any


class ConvNet(nn.Module):
    """A convolutional network with float32 parameters and float16 arithmetic."""

    @nn.compact
    def __call__(self, images, train):
        """Returns logits, in float32 so that the loss is."""
        activations = images
        for features in (16, 32):
            activations = nn.Conv(features, (3, 3), dtype=jnp.float16)(activations)
            activations = nn.BatchNorm(
                use_running_average=not train, momentum=0.9, dtype=jnp.float16
            )(activations)
            activations = nn.max_pool(nn.relu(activations), (2, 2), (2, 2))
        activations = activations.reshape(len(activations), -1)
        return nn.Dense(10, dtype=jnp.float16)(activations).astype(jnp.float32)


@jax.jit
def train_step(state, images, labels):
    """Returns the state after one step, and the loss."""

    def loss_fn(params):
        logits, mutated = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), mutated["batch_stats"]

    (loss, batch_stats), grads = jaxscale.value_and_grad(loss_fn, state, has_aux=True)(
        state.params
    )
    return state.apply_gradients(grads=grads, value=loss, batch_stats=batch_stats), loss


def main(num_steps: int = 150) -> float:
    """Trains for a number of steps and returns the accuracy on images held out."""
    digits = load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits.target))
    train, test = order[:-360], order[-360:]
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target

    model = ConvNet()
    variables = model.init(jax.random.key(0), images[:1], train=False)
    state = TrainState.create(
        apply_fn=model.apply, tx=jaxscale.loss_scaled(optax.adam(3e-3)), **variables
    )
    for step in range(1, num_steps + 1):
        chosen = rng.choice(train, BATCH_SIZE, replace=False)
        state, loss = train_step(state, images[chosen], labels[chosen])
        if step % 25 == 0:
            metrics = jaxscale.metrics(state)
            print(
                f"step {step:4d}  loss {loss:.4f}  loss scale {metrics['loss_scale']:.0f}  "
                f"skipped {metrics['total_notfinite']}"
            )

    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images[test], train=False)
    accuracy = float(np.mean(logits.argmax(-1) == labels[test]))
    print(f"flax_linen: accuracy {accuracy:.3f} after {num_steps} steps")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    main(parser.parse_args().steps)

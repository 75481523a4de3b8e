"""Float16 training in Flax Linen, where a skipped step also keeps the old batch statistics.

A small convolutional network with batch normalization and dropout reads digits, with the
`TrainState` of `jaxscale.flax`. Every step replaces the random key of dropout, even a skipped one.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxscale
import jaxscale.flax

BATCH_SIZE = 64
NUM_TEST = 360


class TrainState(jaxscale.flax.TrainState):
    """A training state with the statistics of batch normalization and a key for dropout."""

    batch_stats: Any
    key: jax.Array


class ConvNet(nn.Module):
    """A convolutional network, written in float32."""

    @nn.compact
    def __call__(self, images, train):
        """Returns logits."""
        activations = images
        for features in (16, 32):
            activations = nn.Conv(features, (3, 3))(activations)
            activations = nn.BatchNorm(not train, momentum=0.9)(activations)
            activations = nn.relu(activations)
            activations = nn.max_pool(activations, (2, 2), (2, 2))
        activations = activations.reshape(len(activations), -1)
        activations = nn.Dropout(0.1, deterministic=not train)(activations)
        return nn.Dense(10)(activations)


model = ConvNet()


def loss_fn(params, fields, images, labels):
    """Returns the mean cross-entropy of a batch, and the new fields of the training state."""
    key, dropout_key = jax.random.split(fields["key"])
    logits, mutated = model.apply(
        {"params": params, "batch_stats": fields["batch_stats"]},
        images,
        train=True,
        mutable="batch_stats",
        rngs={"dropout": dropout_key},
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, {"key": key, **mutated}


train_step = jaxscale.flax.train_step(
    jaxscale.autocast(loss_fn), has_state=True, always_replace=("key",)
)
train_step = jax.jit(train_step)


def main(num_steps: int = 150) -> float:
    """Trains for a number of steps and returns the accuracy on the held-out images."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    num_train = len(images) - NUM_TEST
    rng = np.random.default_rng(0)

    variables = model.init(jax.random.key(0), images[:1], train=False)
    # The scale grows early, so that even a short run meets an overflow.
    loss_scale = jaxscale.DynamicLossScale(growth_interval=20)
    tx = jaxscale.loss_scaled(optax.adam(3e-3), loss_scale)
    state = TrainState.create(
        apply_fn=model.apply, tx=tx, key=jax.random.key(1), **variables
    )
    # `state.step` only counts the steps that were applied.
    for step in range(1, num_steps + 1):
        chosen = rng.choice(num_train, BATCH_SIZE, replace=False)
        scale = jaxscale.metrics(state)["loss_scale"]
        state, loss = train_step(state, images[chosen], labels[chosen])
        metrics = jaxscale.metrics(state)
        new_scale = metrics["loss_scale"]
        if not metrics["step_applied"]:
            print(
                f"step {step}: overflow, skipped, scale {scale:.0f} -> {new_scale:.0f}"
            )
        if step % 50 == 0:
            jaxscale.check(state)
            print(f"step {step}: loss {loss:.4f}, scale {new_scale:.0f}")

    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images[num_train:], train=False)
    guesses = logits.argmax(-1)
    accuracy = float(np.mean(guesses == labels[num_train:]))
    steps = f"{num_steps} steps, {state.step} applied"
    print(f"flax_linen: accuracy {accuracy:.3f} after {steps}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    main(parser.parse_args().steps)

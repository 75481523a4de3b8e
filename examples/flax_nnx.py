"""Float16 training in Flax NNX, where a skipped step also keeps the old batch statistics.

A convolutional network with batch normalization reads digits. NNX changes the model in place. A
skipped step puts back what the forward pass changed, so you need not write anything for that.
The model is written in float32, and `jaxscale.autocast` computes its products in float16.
"""

import argparse

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxscale
import jaxscale.nnx

BATCH_SIZE = 64
NUM_TEST = 360


class ConvNet(nnx.Module):
    """A convolutional network."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.linear = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images):
        """Returns logits."""
        activations = nnx.relu(self.norm1(self.conv1(images)))
        activations = nnx.max_pool(activations, (2, 2), (2, 2))
        activations = nnx.relu(self.norm2(self.conv2(activations)))
        activations = nnx.max_pool(activations, (2, 2), (2, 2))
        return self.linear(activations.reshape(len(images), -1))


def loss_fn(model, images, labels):
    """Returns the mean cross-entropy of a batch."""
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


train_step = nnx.jit(jaxscale.nnx.train_step(jaxscale.autocast(loss_fn)))


def main(num_steps: int = 150) -> float:
    """Trains for a number of steps and returns the accuracy on the held-out images."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    num_train = len(images) - NUM_TEST
    rng = np.random.default_rng(0)

    model = ConvNet(nnx.Rngs(0))
    # The scale grows early, so that even a short run meets an overflow.
    loss_scale = jaxscale.DynamicLossScale(growth_interval=20)
    tx = jaxscale.loss_scaled(optax.adam(3e-3), loss_scale)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for step in range(1, num_steps + 1):
        chosen = rng.choice(num_train, BATCH_SIZE, replace=False)
        scale = jaxscale.metrics(optimizer)["loss_scale"]
        loss = train_step(model, optimizer, images[chosen], labels[chosen])
        metrics = jaxscale.metrics(optimizer)
        new_scale = metrics["loss_scale"]
        if not metrics["step_applied"]:
            print(
                f"step {step}: overflow, skipped, scale {scale:.0f} -> {new_scale:.0f}"
            )
        if step % 50 == 0:
            jaxscale.check(optimizer)
            print(f"step {step}: loss {loss:.4f}, scale {new_scale:.0f}")

    model.eval()
    guesses = model(images[num_train:]).argmax(-1)
    accuracy = float(np.mean(guesses == labels[num_train:]))
    print(f"flax_nnx: accuracy {accuracy:.3f} after {num_steps} steps")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    main(parser.parse_args().steps)

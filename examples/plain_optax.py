"""Float16 training with Optax: the two lines that jaxscale changes.

A multilayer perceptron reads digits. It is written in float32, and `jaxscale.autocast` computes its
matrix products in float16.
"""

import argparse
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxscale

LAYER_SIZES = [64, 256, 128, 10]
BATCH_SIZE = 128
NUM_TEST = 360

# The scale grows early, so that even a short run meets an overflow.
loss_scale = jaxscale.DynamicLossScale(growth_interval=25)
tx = jaxscale.loss_scaled(optax.adamw(1e-3), loss_scale)  # 1


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
    """Returns logits."""
    activations = images
    for weight, bias in params[:-1]:
        activations = jax.nn.relu(activations @ weight + bias)
    weight, bias = params[-1]
    return activations @ weight + bias


def loss_fn(params, images, labels):
    """Returns the mean cross-entropy of a batch."""
    logits = predict(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


train_step = jax.jit(jaxscale.train_step(jaxscale.autocast(loss_fn), tx))  # 2


def main(num_steps: int = 300) -> float:
    """Trains for a number of steps and returns the accuracy on the held-out images."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    num_train = len(images) - NUM_TEST
    rng = np.random.default_rng(0)

    params = init_params(jax.random.key(0))
    opt_state = tx.init(params)
    for step in range(1, num_steps + 1):
        chosen = rng.choice(num_train, BATCH_SIZE, replace=False)
        scale = jaxscale.metrics(opt_state)["loss_scale"]
        params, opt_state, loss = train_step(
            params, opt_state, images[chosen], labels[chosen]
        )
        # Waits for the device: a real loop would look rarely.
        metrics = jaxscale.metrics(opt_state)
        new_scale = metrics["loss_scale"]
        if not metrics["step_applied"]:
            print(
                f"step {step}: overflow, skipped, scale {scale:.0f} -> {new_scale:.0f}"
            )
        if step % 100 == 0:
            # Raises an error if all steps are skipped.
            jaxscale.check(opt_state, tx=tx)
            print(f"step {step}: loss {loss:.4f}, scale {new_scale:.0f}")

    guesses = predict(params, images[num_train:]).argmax(-1)
    accuracy = float(np.mean(guesses == labels[num_train:]))
    print(f"plain_optax: accuracy {accuracy:.3f} after {num_steps} steps")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    main(parser.parse_args().steps)

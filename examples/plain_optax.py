"""Float16 training in an ordinary Optax loop: the three lines that jaxscale changes.

A multilayer perceptron reads digits. Its parameters are float32, its arithmetic is float16, and
its loss is float32 again.
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
BATCH_SIZE, NUM_TEST = 128, 360

tx = jaxscale.loss_scaled(optax.adamw(1e-3))  # 1


def init_params(key):
    """Returns float32 weights and biases, one pair per layer."""
    init = jax.nn.initializers.he_normal()
    keys = iter(jax.random.split(key, len(LAYER_SIZES) - 1))
    return [(init(next(keys), shape), jnp.zeros(shape[1])) for shape in pairwise(LAYER_SIZES)]


def predict(params, images):
    """Returns float32 logits, computed in float16."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    activations = images.astype(jnp.float16)
    for weight, bias in params[:-1]:
        activations = jax.nn.relu(activations @ weight + bias)
    return (activations @ params[-1][0] + params[-1][1]).astype(jnp.float32)


def loss_fn(params, batch):
    """Returns the mean cross-entropy of a batch, in float32."""
    images, labels = batch
    logits = predict(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def train_step(params, opt_state, batch):
    """Returns the parameters and the optimizer state after one step, and the loss."""
    loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, batch)  # 2
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)  # 3
    return optax.apply_updates(params, updates), opt_state, loss


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
        batch = images[chosen], labels[chosen]
        params, opt_state, loss = train_step(params, opt_state, batch)
        if step % 50 == 0:
            jaxscale.check(opt_state)  # raises an error if all steps are skipped
            line = "step {}: loss {:.4f}, scale {loss_scale:.0f}, skipped {total_notfinite}"
            print(line.format(step, loss, **jaxscale.metrics(opt_state)))

    guesses = predict(params, images[num_train:]).argmax(-1)
    accuracy = float(np.mean(guesses == labels[num_train:]))
    print(f"plain_optax: accuracy {accuracy:.3f} after {num_steps} steps")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    main(parser.parse_args().steps)

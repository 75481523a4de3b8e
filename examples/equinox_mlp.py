"""Float16 training in Equinox: scaled gradients by `eqx.filter_value_and_grad`.

A multilayer perceptron reads digits. The optimizer only sees the arrays of the model, which
`eqx.filter` picks out, and not its activation functions.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxscale

BATCH_SIZE, NUM_TEST = 128, 360

tx = jaxscale.loss_scaled(optax.adam(1e-3))


def predict(model, images):
    """Returns float32 logits, computed in float16."""
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    arrays = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), arrays)
    half_model = eqx.combine(arrays, rest)
    return jax.vmap(half_model)(images.astype(jnp.float16)).astype(jnp.float32)


def loss_fn(model, images, labels):
    """Returns the mean cross-entropy of a batch, in float32."""
    logits = predict(model, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def train_step(model, opt_state, images, labels):
    """Returns the model and the optimizer state after one step, and the loss."""
    value_and_grad = jaxscale.value_and_grad(
        loss_fn, opt_state, transform=eqx.filter_value_and_grad
    )
    loss, grads = value_and_grad(model, images, labels)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return eqx.apply_updates(model, updates), opt_state, loss


def main(num_steps: int = 300) -> float:
    """Trains for a number of steps and returns the accuracy on the held-out images."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    num_train = len(images) - NUM_TEST
    rng = np.random.default_rng(0)

    model = eqx.nn.MLP(64, 10, width_size=128, depth=2, key=jax.random.key(0))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    for step in range(1, num_steps + 1):
        chosen = rng.choice(num_train, BATCH_SIZE, replace=False)
        model, opt_state, loss = train_step(model, opt_state, images[chosen], labels[chosen])
        if step % 50 == 0:
            line = "step {}: loss {:.4f}, scale {loss_scale:.0f}, skipped {total_notfinite}"
            print(line.format(step, loss, **jaxscale.metrics(opt_state)))

    guesses = predict(model, images[num_train:]).argmax(-1)
    accuracy = float(np.mean(guesses == labels[num_train:]))
    print(f"equinox_mlp: accuracy {accuracy:.3f} after {num_steps} steps")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    main(parser.parse_args().steps)

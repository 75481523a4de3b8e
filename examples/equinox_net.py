"""Float16 training in Equinox, where a skipped step also keeps the old `eqx.nn.State`.

A perceptron with batch normalization reads digits. It is written in float32, and
`jaxscale.autocast` computes its matrix products in float16. The optimizer only sees the arrays of
the model, which `eqx.filter` selects.
"""

import argparse

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxscale

BATCH_SIZE = 128
NUM_TEST = 360

# The scale grows early, so that even a short run meets an overflow.
loss_scale = jaxscale.DynamicLossScale(growth_interval=12)
tx = jaxscale.loss_scaled(optax.adam(3e-3), loss_scale)


class Net(eqx.Module):
    """A perceptron whose batch normalization keeps its running statistics in a state."""

    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    output: eqx.nn.Linear

    def __init__(self, key):
        hidden_key, output_key = jax.random.split(key)
        self.hidden = eqx.nn.Linear(64, 128, key=hidden_key)
        self.norm = eqx.nn.BatchNorm(128, "batch", momentum=0.9, mode="batch")
        self.output = eqx.nn.Linear(128, 10, key=output_key)

    def __call__(self, image, state):
        """Returns the logits of one image of a batch, and the new state."""
        activations, state = self.norm(self.hidden(image), state)
        return self.output(jax.nn.relu(activations)), state


def predict(model, state, images):
    """Returns the logits of a batch, and the new state."""
    of_batch = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    return of_batch(images, state)


def loss_fn(model, state, images, labels):
    """Returns the mean cross-entropy of a batch, and the new state."""
    logits, state = predict(model, state, images)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, state


train_step = eqx.filter_jit(
    jaxscale.train_step(
        jaxscale.autocast(loss_fn),
        tx,
        transform=eqx.filter_value_and_grad,
        has_state=True,
    )
)


def main(num_steps: int = 150) -> float:
    """Trains for a number of steps and returns the accuracy on the held-out images."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    num_train = len(images) - NUM_TEST
    rng = np.random.default_rng(0)

    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    for step in range(1, num_steps + 1):
        chosen = rng.choice(num_train, BATCH_SIZE, replace=False)
        scale = jaxscale.metrics(opt_state)["loss_scale"]
        model, opt_state, state, loss = train_step(
            model, opt_state, state, images[chosen], labels[chosen]
        )
        metrics = jaxscale.metrics(opt_state)
        new_scale = metrics["loss_scale"]
        if not metrics["step_applied"]:
            print(
                f"step {step}: overflow, skipped, scale {scale:.0f} -> {new_scale:.0f}"
            )
        if step % 50 == 0:
            jaxscale.check(opt_state, tx=tx)
            print(f"step {step}: loss {loss:.4f}, scale {new_scale:.0f}")

    logits, _ = predict(eqx.nn.inference_mode(model), state, images[num_train:])
    guesses = logits.argmax(-1)
    accuracy = float(np.mean(guesses == labels[num_train:]))
    print(f"equinox_net: accuracy {accuracy:.3f} after {num_steps} steps")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    main(parser.parse_args().steps)

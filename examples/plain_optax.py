"""Float16 training with Optax: the two lines that jaxscale changes.

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
from jaxscale import diagnostics

LAYER_SIZES = [64, 256, 128, 10]
BATCH_SIZE, NUM_TEST = 128, 360
RULES = "dynamic", "adaptive", "calibrated"


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


def loss_fn(params, images, labels):
    """Returns the mean cross-entropy of a batch, in float32."""
    logits = predict(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def policy(rule, params, batch):
    """Returns the rule by which the loss scale moves."""
    if rule == "dynamic":  # it grows early, so that even a short run meets an overflow
        return jaxscale.DynamicLossScale(growth_interval=25)
    if rule == "adaptive":  # it follows the largest gradient, from a scale of 2**8
        return jaxscale.AdaptiveLossScale()
    # The same, from the largest scale that does not overflow on a first batch.
    found = diagnostics.calibrate(lambda params, batch: loss_fn(params, *batch), params, [batch])
    return jaxscale.AdaptiveLossScale(init_scale=found.init_scale or 1.0)


def main(num_steps: int = 300, rule: str = "dynamic", retries: int = 0) -> float:
    """Trains for a number of steps and returns the accuracy on the held-out images."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    num_train = len(images) - NUM_TEST
    rng = np.random.default_rng(0)

    params = init_params(jax.random.key(0))
    loss_scale = policy(rule, params, (images[:BATCH_SIZE], labels[:BATCH_SIZE]))
    tx = jaxscale.loss_scaled(optax.adamw(1e-3), loss_scale)  # 1
    train_step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=retries))  # 2
    opt_state = tx.init(params)
    for step in range(1, num_steps + 1):
        chosen = rng.choice(num_train, BATCH_SIZE, replace=False)
        scale = jaxscale.metrics(opt_state)["loss_scale"]
        params, opt_state, loss = train_step(params, opt_state, images[chosen], labels[chosen])
        now = jaxscale.metrics(opt_state)
        if not now["grads_finite"]:  # waits for the device: a real loop would look rarely
            print(f"step {step}: overflow, skipped, scale {scale:.0f} -> {now['loss_scale']:.0f}")
        if step % 100 == 0:
            jaxscale.check(opt_state, tx=tx)  # raises an error if all steps are skipped
            print(f"step {step}: loss {loss:.4f}, scale {now['loss_scale']:.0f}")

    guesses = predict(params, images[num_train:]).argmax(-1)
    accuracy = float(np.mean(guesses == labels[num_train:]))
    now = jaxscale.metrics(opt_state)
    skipped, retried = now["total_notfinite"], now["total_retries"]
    print(f"{rule}: {num_steps} steps, {skipped} skipped, {retried} retries, {accuracy=:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--rule", choices=RULES, default="dynamic", help="for the loss scale")
    parser.add_argument("--retries", type=int, default=0, help="of a step that overflows")
    options = parser.parse_args()
    main(options.steps, options.rule, options.retries)

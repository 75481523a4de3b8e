"""A GAN in float16: two losses, two optimizers, and a loss scale for each.

The losses overflow at different times, so each optimizer skips its own steps and has its own scale.
"""

import argparse
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxscale

BATCH_SIZE = 128
NOISE_SIZE = 16
GENERATOR_SIZES = (NOISE_SIZE, 128, 128, 64)
DISCRIMINATOR_SIZES = (64, 128, 128, 1)

# The scale grows early, so that even a short run meets overflows.
loss_scale = jaxscale.DynamicLossScale(growth_interval=150)
gen_tx = jaxscale.loss_scaled(optax.adam(1e-3, b1=0.5), loss_scale)
disc_tx = jaxscale.loss_scaled(optax.adam(1e-3, b1=0.5), loss_scale)


def init_params(key, sizes):
    """Returns float32 weights and biases, one pair per layer."""
    init = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(sizes) - 1)
    params = []
    for layer_key, (inputs, outputs) in zip(keys, pairwise(sizes), strict=True):
        weight = init(layer_key, (inputs, outputs))
        params.append((weight, jnp.zeros(outputs)))
    return params


def perceptron(params, activations):
    """Returns the float32 outputs of the last layer, computed in float16."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    activations = activations.astype(jnp.float16)
    for weight, bias in params[:-1]:
        activations = jax.nn.leaky_relu(activations @ weight + bias, 0.2)
    weight, bias = params[-1]
    return (activations @ weight + bias).astype(jnp.float32)


def generate(gen_params, noise):
    """Returns images, with pixels between 0 and 1."""
    return jax.nn.sigmoid(perceptron(gen_params, noise))


def generator_loss(gen_params, disc_params, noise):
    """Returns a loss that is low if the discriminator mistakes generated images for real ones."""
    logits = perceptron(disc_params, generate(gen_params, noise))
    return jax.nn.softplus(-logits).mean()


def discriminator_loss(disc_params, gen_params, images, noise):
    """Returns a loss that is low if the discriminator tells real images from generated ones."""
    on_images = perceptron(disc_params, images)
    on_generated = perceptron(disc_params, generate(gen_params, noise))
    return jax.nn.softplus(-on_images).mean() + jax.nn.softplus(on_generated).mean()


gen_step = jax.jit(jaxscale.train_step(generator_loss, gen_tx))
disc_step = jax.jit(jaxscale.train_step(discriminator_loss, disc_tx))


def make_noise(rng):
    """Returns what the generator makes a batch of images from."""
    return rng.normal(size=(BATCH_SIZE, NOISE_SIZE)).astype(np.float32)


def report(step, name, tx, opt_state, loss):
    """Prints that an optimizer skipped a step, and its loss now and then."""
    metrics = jaxscale.metrics(opt_state)
    scale = metrics["loss_scale"]
    if not metrics["step_applied"]:
        print(f"step {step}: {name}: overflow, skipped, scale now {scale:.0f}")
    if step % 250 == 0:
        jaxscale.check(opt_state, tx=tx)
        print(f"step {step}: {name}: loss {loss:.4f}, scale {scale:.0f}")


def main(num_steps: int = 1000) -> float:
    """Trains for a number of steps and returns the generator's loss on fresh noise."""
    images, _ = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    rng = np.random.default_rng(0)
    gen_params = init_params(jax.random.key(0), GENERATOR_SIZES)
    gen_state = gen_tx.init(gen_params)
    disc_params = init_params(jax.random.key(1), DISCRIMINATOR_SIZES)
    disc_state = disc_tx.init(disc_params)
    for step in range(1, num_steps + 1):
        noise = make_noise(rng)
        batch = images[rng.choice(len(images), BATCH_SIZE, replace=False)]
        gen_params, gen_state, gen_loss = gen_step(
            gen_params, gen_state, disc_params, noise
        )
        disc_params, disc_state, disc_loss = disc_step(
            disc_params, disc_state, gen_params, batch, noise
        )
        report(step, "generator", gen_tx, gen_state, gen_loss)
        report(step, "discriminator", disc_tx, disc_state, disc_loss)

    loss = float(generator_loss(gen_params, disc_params, make_noise(rng)))
    print(f"gan: generator loss {loss:.3f} after {num_steps} steps")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="training steps")
    main(parser.parse_args().steps)

"""A GAN in float16: two losses, two optimizers, and a loss scale for each.

Generator and discriminator overflow independently, so each skips its own steps and
moves its own scale.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxscale

BATCH_SIZE, NOISE_SIZE, HIDDEN_SIZE, IMAGE_SIZE = 128, 16, 128, 64

gen_tx = jaxscale.loss_scaled(optax.adam(1e-3, b1=0.5))
disc_tx = jaxscale.loss_scaled(optax.adam(1e-3, b1=0.5))


def init_params(key, *sizes):
    """Returns float32 weights and biases, one pair per layer."""
    init = jax.nn.initializers.he_normal()
    shapes = zip(sizes[:-1], sizes[1:], strict=True)
    return [(init(jax.random.fold_in(key, n), (n, m)), jnp.zeros(m)) for n, m in shapes]


def perceptron(params, activations):
    """Returns the outputs of the last layer, computed in float16."""
    params, activations = optax.tree.cast((params, activations), jnp.float16)
    *hidden, (last_weight, last_bias) = params
    for weight, bias in hidden:
        activations = jax.nn.leaky_relu(activations @ weight + bias, 0.2)
    return activations @ last_weight + last_bias


def generate(gen_params, noise):
    """Returns images, with pixels between 0 and 1."""
    return jax.nn.sigmoid(perceptron(gen_params, noise))


def adversarial_loss(disc_params, images, label):
    """Returns how far the discriminator is from the label 1, real, or 0, generated."""
    logits = perceptron(disc_params, images).astype(jnp.float32)
    return optax.sigmoid_binary_cross_entropy(logits, jnp.full_like(logits, label)).mean()


def generator_loss(gen_params, disc_params, noise):
    """Returns a loss that is low if generated images are taken for real ones."""
    return adversarial_loss(disc_params, generate(gen_params, noise), 1)


def discriminator_loss(disc_params, gen_params, images, noise):
    """Returns a loss that is low if images are told from generated ones."""
    on_generated = adversarial_loss(disc_params, generate(gen_params, noise), 0)
    return adversarial_loss(disc_params, images, 1) + on_generated


@jax.jit
def train_step(gen, disc, images, noise):
    """Returns both players, parameters and optimizer state, after one step; and losses."""
    (gen_params, gen_state), (disc_params, disc_state) = gen, disc
    value_and_grad = jaxscale.value_and_grad(generator_loss, gen_state)
    gen_loss, gen_grads = value_and_grad(gen_params, disc_params, noise)
    value_and_grad = jaxscale.value_and_grad(discriminator_loss, disc_state)
    disc_loss, disc_grads = value_and_grad(disc_params, gen_params, images, noise)
    apply = jaxscale.apply_gradients
    gen = apply(gen_tx, gen_grads, gen_state, gen_params, value=gen_loss)
    disc = apply(disc_tx, disc_grads, disc_state, disc_params, value=disc_loss)
    return gen, disc, gen_loss, disc_loss


def main(num_steps: int = 1000) -> float:
    """Trains for a number of steps and returns the generator's loss on fresh noise."""
    images = (load_digits(return_X_y=True)[0] / 16).astype(np.float32)
    rng = np.random.default_rng(0)
    gen_params = init_params(
        jax.random.key(0), NOISE_SIZE, HIDDEN_SIZE, HIDDEN_SIZE, IMAGE_SIZE
    )
    disc_params = init_params(jax.random.key(1), IMAGE_SIZE, HIDDEN_SIZE, HIDDEN_SIZE, 1)
    gen, disc = (gen_params, gen_tx.init(gen_params)), (disc_params, disc_tx.init(disc_params))
    for step in range(1, num_steps + 1):
        noise = rng.normal(size=(BATCH_SIZE, NOISE_SIZE)).astype(np.float32)
        chosen = rng.choice(len(images), BATCH_SIZE, replace=False)
        gen, disc, gen_loss, disc_loss = train_step(gen, disc, images[chosen], noise)
        if step % 200 == 0:
            print(f"step {step}:")
            line = "  {} loss {:.3f}, scale {loss_scale:.0f}, skipped {total_notfinite}"
            print(line.format("generator    ", gen_loss, **jaxscale.metrics(gen)))
            print(line.format("discriminator", disc_loss, **jaxscale.metrics(disc)))

    noise = rng.normal(size=(BATCH_SIZE, NOISE_SIZE)).astype(np.float32)
    loss = float(generator_loss(gen[0], disc[0], noise))
    print(f"gan: generator loss {loss:.3f} after {num_steps} steps")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="training steps")
    main(parser.parse_args().steps)

"""Models that make things: an autoencoder, diffusion."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from corpus import Program, integers, normal, program
from flax import nnx


@program("haiku")
def vae():
    """Haiku's variational autoencoder: a Bernoulli likelihood, a key in the batch."""

    def network(images, noise):
        x = hk.Flatten()(images)
        x = jax.nn.relu(hk.Linear(32)(x))
        mean = hk.Linear(4)(x)
        log_std = hk.Linear(4)(x)
        z = mean + jnp.exp(log_std) * noise
        head = hk.Linear(16)
        hidden = jax.nn.relu(hk.Linear(32)(z))
        logits = head(hidden)
        return mean, log_std, logits.reshape(images.shape)

    model = hk.without_apply_rng(hk.transform(network))
    images = jnp.asarray(integers(2, 8, 4, 4, seed=1), jnp.float32)
    params = model.init(jax.random.key(0), images, normal(8, 4))

    def loss(params, batch):
        images, key = batch
        noise = jax.random.normal(key, (8, 4))
        mean, log_std, logits = model.apply(params, images, noise)
        likelihood = optax.sigmoid_binary_cross_entropy(logits, images)
        likelihood = likelihood.sum((1, 2))
        divergence = -log_std - 0.5 * (1 - jnp.exp(2 * log_std) - mean**2)
        losses = likelihood + divergence.sum(-1)
        return jnp.mean(losses), {"divergence": divergence.mean()}

    return Program(loss, params, (images, jax.random.key(3)))


class Denoiser(nnx.Module):
    def __init__(self, rngs):
        self.time = nnx.Linear(16, 32, rngs=rngs)
        self.inside = nnx.Conv(2, 16, (3, 3), rngs=rngs)
        self.shift = nnx.Linear(32, 32, rngs=rngs)
        self.norm = nnx.GroupNorm(16, num_groups=4, rngs=rngs)
        self.outside = nnx.Conv(16, 2, (3, 3), rngs=rngs)

    def __call__(self, x, t):
        times = t[:, None]
        frequencies = jnp.exp(-jnp.arange(8) * 0.5)
        angles = times * frequencies
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        embedded = nnx.silu(self.time(waves))
        modulation = self.shift(embedded)[:, None, None]
        scale, shift = jnp.split(modulation, 2, axis=-1)
        normalized = self.norm(self.inside(x))
        x = normalized * (1 + scale) + shift
        return self.outside(nnx.silu(x))


@program("nnx")
def diffusion():
    """Denoising diffusion: the noise is predicted, times are embedded, scales modulate."""
    betas = jnp.linspace(1e-3, 0.2, 20)
    kept = jnp.cumprod(1 - betas)

    def loss(model, batch):
        images, times, noise = batch
        level = kept[times]
        level = level[:, None, None, None]
        noisy = jnp.sqrt(level) * images + jnp.sqrt(1 - level) * noise
        predicted = model(noisy, times.astype(jnp.float32))
        squares = jnp.square(predicted - noise)
        return jnp.mean(squares), {}

    batch = (
        normal(4, 6, 6, 2, seed=1),
        integers(20, 4, seed=2),
        normal(4, 6, 6, 2, seed=3),
    )
    return Program(loss, Denoiser(nnx.Rngs(0)), batch)

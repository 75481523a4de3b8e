"""Models that make things: autoencoders, diffusion, flows, adversaries, energies, codes."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from corpus import Program, apply_dense, dense, integers, normal, program
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


@program("jax")
def wasserstein_with_gradient_penalty():
    """A critic whose gradient at points between the real and the fake has norm 1."""
    params = {
        "hidden": dense(6, 32, seed=1),
        "middle": dense(32, 32, seed=2),
        "out": dense(32, 1, seed=3),
    }

    def critic(params, x):
        x = jnp.tanh(apply_dense(params["hidden"], x))
        x = jnp.tanh(apply_dense(params["middle"], x))
        return apply_dense(params["out"], x)[0]

    def loss(params, batch):
        real, fake, mix = batch
        score = jax.vmap(critic, in_axes=(None, 0))
        by_input = jax.grad(critic, argnums=1)
        slope = jax.vmap(by_input, in_axes=(None, 0))
        real_share = mix[:, None] * real
        between = real_share + (1 - mix[:, None]) * fake
        slopes = slope(params, between)
        norms = jnp.linalg.norm(slopes, axis=-1)
        penalty = jnp.mean((norms - 1) ** 2)
        fake_score = score(params, fake).mean()
        real_score = score(params, real).mean()
        distance = fake_score - real_score
        return distance + 10 * penalty, {}

    batch = normal(8, 6, seed=4), normal(8, 6, seed=5), jnp.linspace(0, 1, 8)
    return Program(loss, params, batch, scale=2.0**8)


@program("jax")
def vector_quantized_autoencoder():
    """VQ-VAE: the nearest code by argmin, straight through, with a commitment loss."""
    params = {
        "encoder": dense(12, 8, seed=1),
        "decoder": dense(8, 12, seed=2),
        "codes": normal(10, 8, seed=3),
    }

    def loss(params, x):
        z = apply_dense(params["encoder"], x)
        differences = z[:, None] - params["codes"][None]
        distances = jnp.sum(differences**2, axis=-1)
        chosen = jnp.argmin(distances, axis=-1)
        codes = params["codes"][chosen]
        straight = z + jax.lax.stop_gradient(codes - z)
        decoded = apply_dense(params["decoder"], straight)
        error = jnp.mean((decoded - x) ** 2)
        frozen_z = jax.lax.stop_gradient(z)
        codebook = jnp.mean((frozen_z - codes) ** 2)
        frozen_codes = jax.lax.stop_gradient(codes)
        commitment = jnp.mean((z - frozen_codes) ** 2)
        counts = jnp.zeros(10).at[chosen].add(1.0)
        value = error + codebook + 0.25 * commitment
        return value, {"used": jnp.sum(counts > 0)}

    return Program(loss, params, normal(16, 12, seed=4))


@jax.custom_jvp
def watch(x):
    """Sends an array to a log. Its result has nothing to differentiate."""
    jax.debug.callback(lambda x: None, x)
    return ()


@watch.defjvp
def _watch_jvp(primals, tangents):
    return watch(*primals), ()


@program("jax")
def masked_autoregression():
    """MADE over pixels of 4 values, with masked matrices; its author prints what goes on."""
    degrees = jnp.arange(24) % 5 + 1
    places = jnp.arange(1, 7)
    inner = degrees[None, :] >= places[:, None]
    inner = inner.astype(jnp.float32)
    outer = jnp.repeat(places, 4)[None, :] > degrees[:, None]
    outer = outer.astype(jnp.float32)
    params = {"hidden": dense(6, 24, seed=1), "out": dense(24, 24, seed=2)}
    pixels = integers(4, 16, 6, seed=3)

    def loss(params, pixels):
        x = pixels / 2.0 - 0.75
        hidden = params["hidden"]
        masked = hidden["w"] * inner
        x = jax.nn.relu(x @ masked + hidden["b"])
        watch(x)
        # The log gets fewer digits.
        jax.debug.callback(lambda x: None, x.astype(jnp.float16))
        masked = params["out"]["w"] * outer
        logits = x @ masked
        jax.debug.print("the first logits: {}", logits[0, 0])
        logits = logits + params["out"]["b"]
        logits = logits.reshape(16, 6, 4)
        log_probs = jax.nn.log_softmax(logits)
        labels = jax.nn.one_hot(pixels, 4)
        taken = jnp.sum(labels * log_probs, axis=(1, 2))
        value = -taken.mean()
        bits = -taken.mean() / jnp.log(2.0)
        return value, {"bits": bits / 6}

    return Program(loss, params, pixels)

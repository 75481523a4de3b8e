"""Faults in normalization: variances, norms and their epsilons."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from trial_entry import cast, faulty, filled, mean_square, normal


@faulty(source="https://github.com/pytorch/pytorch/issues/66707", kind="overflow", tuned=True)
def layer_norm(half=jnp.float16):
    """Squares beyond 65504: the variance is inf, its inverse root 0, and no gradient is left."""
    params = {"w": normal(0, 4, 8), "scale": jnp.ones(8), "bias": jnp.zeros(8)}

    def loss_fn(params, batch):
        p = cast(params, half)
        x = batch["x"].astype(half) @ p["w"]
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)  # fault
        y = x * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]
        return mean_square(y - batch["y"].astype(half))

    return loss_fn, params, {"x": normal(1, 3, 4, scale=400.0), "y": normal(2, 3, 8)}


@faulty(source="https://github.com/deepspeedai/DeepSpeed/issues/581", kind="epsilon", tuned=True)
def constant_row(half=jnp.float16):
    """1e-12 is 0, and a row of padding has no variance."""
    params = {"w": normal(0, 4, 8), "scale": jnp.ones(8)}

    def loss_fn(params, x):
        p = cast(params, half)
        x = x.astype(half) @ p["w"]
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        y = x * jax.lax.rsqrt(variance + 1e-12) * p["scale"]  # fault
        return mean_square(y - 1)

    return loss_fn, params, normal(1, 3, 4).at[2].set(0.0)


@faulty(source="https://github.com/google/flax/issues/1491", kind="cancellation", tuned=True)
def negative_variance(half=jnp.float16):
    """The mean of the squares minus the square of the mean is less than 0."""
    params = {"scale": jnp.ones(3), "bias": jnp.zeros(3)}

    def loss_fn(params, batch):
        p = cast(params, half)
        x = batch.astype(half) + p["bias"]
        mean = jnp.mean(x, axis=0)
        variance = jnp.mean(jnp.square(x), axis=0) - jnp.square(mean)  # fault
        y = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"]  # fault
        return mean_square(y - 1)

    return loss_fn, params, 25.3 + normal(2, 16, 3, scale=0.03)


@faulty(source="https://github.com/tenstorrent/tt-metal/issues/45968", kind="cancellation")
def variance_clipped_at_zero(half=jnp.float16):
    """The same difference, clipped: it is finite, and far from the variance."""

    class BatchNorm(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.ones, (x.shape[-1],)).astype(half)
            bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],)).astype(half)
            mean = jnp.mean(x, axis=0)
            variance = jnp.maximum(jnp.mean(x * x, axis=0) - mean * mean, 0)  # fault
            return (x - mean) * jax.lax.rsqrt(variance + 1e-3) * scale + bias

    model = nn.Sequential([nn.Dense(3, dtype=half), BatchNorm(), nn.Dense(1, dtype=half)])
    batch = 20 + normal(3, 16, 2, scale=0.3)

    def loss_fn(params, batch):
        return mean_square(model.apply(params, batch) - 1)

    return loss_fn, filled(lambda: model.init(jax.random.key(1), batch)), batch


@faulty(source="https://github.com/neuroneural/brainchop-cli/pull/56", kind="overflow")
def group_norm(half=jnp.float16):
    """Linen's GroupNorm, told not to compute its statistics in float32."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, dtype=half)(x)
            x = nn.GroupNorm(2, dtype=half, force_float32_reductions=False)(x)  # fault
            return nn.Dense(1, dtype=half)(nn.relu(x))

    model, batch = Net(), normal(4, 2, 6, 3, scale=900.0)

    def loss_fn(params, batch):
        return mean_square(model.apply(params, batch) - 1)

    return loss_fn, filled(lambda: model.init(jax.random.key(0), batch)), batch


@faulty(source="https://github.com/tensorflow/tensorflow/issues/47156", kind="overflow")
def instance_norm_mean(half=jnp.float16):
    """The mean of an image by its sum: 400 pixels of 200 are too many."""
    params = {"w": jnp.array([1.0, 0.5]), "b": jnp.zeros(2)}

    def loss_fn(params, image):
        p = cast(params, half)
        x = image.astype(half) * p["w"]
        mean = jnp.sum(x, axis=(0, 1)) / (x.shape[0] * x.shape[1])  # fault
        x = (x - mean).astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=(0, 1)) + 1e-3) + p["b"]
        return mean_square(jax.nn.relu(y) - 1)

    return loss_fn, params, 200 + normal(5, 20, 20, 2, scale=20.0)


@faulty(source="https://github.com/pytorch/pytorch/issues/32137", kind="epsilon")
def normalized_zero_vector(half=jnp.float16):
    """A vector divided by its norm, but by 1e-12 at least: that is 0, and so is the vector."""

    class Encoder(eqx.Module):
        layer: eqx.nn.Linear

        def __call__(self, x):
            z = jax.nn.relu(self.layer(x))
            norm = jnp.max(jnp.abs(z), keepdims=True)
            return z / jnp.maximum(norm, 1e-12)  # fault

    model = Encoder(eqx.nn.Linear(3, 4, use_bias=False, key=jax.random.key(2)))

    def loss_fn(model, x):
        return mean_square(jax.vmap(cast(model, half))(x.astype(half)) - 0.5)

    return loss_fn, model, normal(6, 4, 3).at[1].set(0.0)


@faulty(source="https://github.com/numpy/numpy/issues/8775", kind="overflow", tuned=True)
def norm_is_inf(half=jnp.float16):
    """The norm of a long vector is inf, and the normalized vector 0."""
    params = {"w": normal(7, 6, scale=300.0), "g": jnp.ones(())}

    def loss_fn(params, x):
        p = cast(params, half)
        norm = jnp.sqrt(jnp.sum(p["w"] * p["w"]))  # fault
        return mean_square(x.astype(half) @ (p["g"] * p["w"] / norm) - 1)

    return loss_fn, params, normal(8, 4, 6)

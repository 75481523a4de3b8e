"""Faults in normalization: variances, norms and their epsilons."""

import jax
import jax.numpy as jnp
from trial_entry import cast, faulty, mean_square, normal


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


@faulty(source="https://github.com/numpy/numpy/issues/8775", kind="overflow", tuned=True)
def norm_is_inf(half=jnp.float16):
    """The norm of a long vector is inf, and the normalized vector 0."""
    params = {"w": normal(7, 6, scale=300.0), "g": jnp.ones(())}

    def loss_fn(params, x):
        p = cast(params, half)
        norm = jnp.sqrt(jnp.sum(p["w"] * p["w"]))  # fault
        return mean_square(x.astype(half) @ (p["g"] * p["w"] / norm) - 1)

    return loss_fn, params, normal(8, 4, 6)

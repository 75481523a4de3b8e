"""Faults in attention and normalization: masks, scores, normalizers and variances."""

import jax
import jax.numpy as jnp
from trial_entry import cast, faulty, mean_square, normal


def _projections(half):
    params = {name: normal(i, 4, 4) for i, name in enumerate("qkv")}
    return params, lambda params, x: (x.astype(half) @ cast(params, half)[name] for name in "qkv")


@faulty(source="https://github.com/google/flax/issues/982", kind="overflow", tuned=True)
def minus_1e9(half=jnp.float16):
    """A causal mask of 0 and 1 times -1e9, which is -inf: 0 times that is NaN."""
    params, project = _projections(half)

    def loss_fn(params, x):
        q, k, v = project(params, x)
        allowed = jnp.tril(jnp.ones((5, 5), half))
        scores = q @ k.T / 2 + (1 - allowed) * -1e9  # fault
        return mean_square(jax.nn.softmax(scores) @ v)

    return loss_fn, params, normal(3, 5, 4)


@faulty(source="https://github.com/pytorch/pytorch/issues/41508", kind="input", tuned=True)
def packed_padding(half=jnp.float16):
    """Packed sequences: the padding belongs to none, so that its row of the mask is empty."""
    params, project = _projections(half)
    segment = jnp.array([1, 1, 2, 2, 0])

    def loss_fn(params, x):
        q, k, v = project(params, x)
        seen = (segment[:, None] == segment) & (segment > 0)
        scores = jnp.where(seen, q @ k.T / 2, -jnp.inf)  # fault
        y = jax.nn.softmax(scores) @ v  # fault
        return mean_square(y * (segment > 0)[:, None])

    return loss_fn, params, normal(3, 5, 4)


@faulty(source="https://github.com/uTensor/uTensor/issues/175", kind="overflow")
def softmax_without_its_maximum(half=jnp.float16):
    params, project = _projections(half)

    def loss_fn(params, x):
        q, k, v = project(params, x)
        weights = jnp.exp(q @ k.T)  # fault
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return mean_square(weights @ v)

    return loss_fn, params, normal(6, 5, 4, scale=2.0)


@faulty(source="https://github.com/facebookresearch/xformers/issues/96", kind="underflow")
def random_features(half=jnp.float16):
    """FAVOR: exp(w x - |x|**2 / 2) is 0 for all features, and so is their sum."""
    directions = normal(8, 4, 8, scale=0.3)

    def loss_fn(params, x):
        def features(x):
            size = jnp.sum(jnp.square(x), axis=-1, keepdims=True) / 2
            return jnp.exp(x @ directions.astype(half) - size)  # fault

        q, k, v = (x.astype(half) @ params[name].astype(half) for name in "qkv")
        q, k = features(q), features(k)
        return mean_square(q @ (k.T @ v) / (q @ jnp.sum(k, axis=0))[:, None])  # fault

    params = {"q": jnp.eye(4), "k": jnp.eye(4), "v": normal(2, 4, 4)}
    return loss_fn, params, 3.2 + normal(9, 6, 4, scale=0.1)


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

"""Faults in attention: masks, scores and normalizers."""

import equinox as eqx
import jax
import jax.numpy as jnp
from trial_entry import cast, faulty, mean_square, normal


def _projections(half, *, scale=1.0):
    params = {name: normal(i, 4, 4, scale=scale) for i, name in enumerate("qkv")}
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


@faulty(source="https://github.com/huggingface/diffusers/pull/1590", kind="overflow")
def scores_before_scaling(half=jnp.float16):
    """The product of queries and keys overflows before it is divided by the root of the width."""

    class Attention(eqx.Module):
        query: eqx.nn.Linear
        key: eqx.nn.Linear
        value: eqx.nn.Linear

        def __call__(self, x):
            q, k, v = (jax.vmap(layer)(x) for layer in (self.query, self.key, self.value))
            scores = q @ k.T  # fault
            return jax.nn.softmax(scores * 16**-0.5) @ v

    keys = jax.random.split(jax.random.key(0), 3)
    model = Attention(*(eqx.nn.Linear(4, 16, key=key) for key in keys))

    def loss_fn(model, x):
        return mean_square(cast(model, half)(x.astype(half)))

    return loss_fn, model, normal(5, 6, 4, scale=250.0)


@faulty(source="https://github.com/uTensor/uTensor/issues/175", kind="overflow")
def softmax_without_its_maximum(half=jnp.float16):
    params, project = _projections(half)

    def loss_fn(params, x):
        q, k, v = project(params, x)
        weights = jnp.exp(q @ k.T)  # fault
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return mean_square(weights @ v)

    return loss_fn, params, normal(6, 5, 4, scale=2.0)


@faulty(source="https://github.com/idiap/fast-transformers/issues/32", kind="overflow")
def linear_attention(half=jnp.float16):
    """The keys are added up over a long sequence, and the outputs are divided by inf: all are 0."""
    params = {"q": 0.02 * jnp.eye(4), "k": 40 * jnp.eye(4), "v": normal(2, 4, 4, scale=0.01)}

    def loss_fn(params, x):
        q, k, v = (x.astype(half) @ params[name].astype(half) for name in "qkv")
        q, k = jax.nn.relu(q), jax.nn.relu(k)
        normalizer = jnp.sum(k, axis=0)  # fault
        return mean_square(q @ (k.T @ v) / (q @ normalizer)[:, None])

    return loss_fn, params, 5 + normal(7, 400, 4, scale=0.5)


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

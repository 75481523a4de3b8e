"""Policies in live float16 training of a transformer: skips, scale, what is flushed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale
from jaxscale import presets

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]

STEPS, BATCH, LENGTH, WORDS, WIDTH = 2000, 8, 16, 24, 32
SHAPES = {
    "embed": (WORDS, WIDTH),
    "places": (LENGTH, WIDTH),
    "qkv": (WIDTH, 3 * WIDTH),
    "mix": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
    "output": (WIDTH, WORDS),
}
PARAMS = {
    name: jax.random.normal(jax.random.key(seed), shape) / np.sqrt(shape[0])
    for seed, (name, shape) in enumerate(SHAPES.items())
}


def logits(params, tokens):
    """Of the next token of each, by one block of a transformer with four heads."""
    x = params["embed"][tokens] + params["places"]

    def norm(x):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    q, k, v = jnp.split((norm(x) @ params["qkv"]).reshape(*x.shape[:2], 4, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float16(np.sqrt(q.shape[-1]))
    masked = jnp.where(np.tri(LENGTH, dtype=bool), scores.astype(jnp.float32), -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(masked).astype(x.dtype), v)
    x = x + mixed.reshape(x.shape) @ params["mix"]
    x = x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]
    return norm(x) @ params["output"]


def batches():
    """Sentences that count up by a step of their own, with some words replaced at random."""
    rng = np.random.default_rng(0)
    first, step = rng.integers(0, WORDS, (2, STEPS, BATCH, 1))
    words = (first + step % 5 * np.arange(LENGTH + 1)) % WORDS
    noise = rng.integers(0, WORDS, words.shape)
    return jnp.asarray(np.where(rng.random(words.shape) < 0.05, noise, words).astype(np.int32))


def loss_fn(params, words):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    scores = logits(half, words[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, words[:, 1:]).mean()


def trained(policy):
    """The scale before each step, the losses, the share of zero gradients, and the last state."""
    tx = jaxscale.loss_scaled(optax.adam(3e-3), policy)

    def step(carry, words):
        params, state = carry
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, words)
        params, new_state = jaxscale.apply_gradients(tx, grads, state, params, value=loss)
        zeros = sum(jnp.sum(g == 0) for g in jax.tree.leaves(grads))
        share = zeros / sum(g.size for g in jax.tree.leaves(grads))
        return (params, new_state), (state.scaling.loss_scale, loss, share)

    run = jax.jit(lambda carry, words: jax.lax.scan(step, carry, words))
    (_, state), (scale, loss, share) = run((PARAMS, tx.init(PARAMS)), batches())
    return np.log2(scale), np.asarray(loss), np.asarray(share), state


def test_live_training_skips_little_and_flushes_no_more():
    # PyTorch's rule probes once in 2,000 steps; with an interval of 200 it probes as a long run.
    ours, theirs = trained(jaxscale.AdaptiveLossScale()), trained(presets.torch())
    probing = trained(presets.torch(growth_interval=200))
    late = slice(STEPS // 2, None)
    assert ours[3].total_notfinite <= probing[3].total_notfinite / 4
    assert ours[0][late].mean() >= theirs[0][late].mean() - 2
    assert ours[2][late].mean() <= theirs[2][late].mean() + 0.0001
    assert abs(ours[1][-100:].mean() - theirs[1][-100:].mean()) < 0.05
    assert ours[1][-100:].mean() < ours[1][:100].mean() / 2

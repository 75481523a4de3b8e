"""Policies in live float16 training of an LSTM and a transformer: skips, scale, what is flushed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale
from jaxscale import presets

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]

STEPS, BATCH, LENGTH, WORDS, WIDTH = 2000, 8, 16, 24, 32


def lstm(params, tokens):
    """The logits of the next token of each, by one layer of an LSTM."""
    inputs = params["embed"][tokens].swapaxes(0, 1)

    def cell(carry, x):
        hidden, memory = carry
        gates = x @ params["input"] + hidden @ params["hidden"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(f + 1) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
        return (hidden, memory), hidden

    zeros = jnp.zeros_like(inputs[0])
    return jax.lax.scan(cell, (zeros, zeros), inputs)[1].swapaxes(0, 1) @ params["output"]


def transformer(params, tokens):
    """The same by one block of a transformer with four heads."""
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


MODELS = {"lstm": lstm, "transformer": transformer}
SHAPES = [
    {"embed": (WORDS, WIDTH), "input": (WIDTH, 4 * WIDTH), "hidden": (WIDTH, 4 * WIDTH)},
    {"embed": (WORDS, WIDTH), "places": (LENGTH, WIDTH), "qkv": (WIDTH, 3 * WIDTH)}
    | {"mix": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)},
]


def init_params(model):
    seed = list(MODELS).index(model)
    shapes = SHAPES[seed] | {"output": (WIDTH, WORDS)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def batches():
    """Sentences that count up by a step of their own, with some words replaced at random."""
    rng = np.random.default_rng(0)
    first, step = rng.integers(0, WORDS, (2, STEPS, BATCH, 1))
    words = (first + step % 5 * np.arange(LENGTH + 1)) % WORDS
    noise = rng.integers(0, WORDS, words.shape)
    return jnp.asarray(np.where(rng.random(words.shape) < 0.05, noise, words).astype(np.int32))


def loss_of(model):
    def loss_fn(params, words):
        half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        scores = MODELS[model](half, words[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, words[:, 1:]).mean()

    return loss_fn


def run(step, tx, model):
    """The optimizer state after all steps, and what each of them returned."""
    params = init_params(model)
    scan = jax.jit(lambda carry, words: jax.lax.scan(step, carry, words))
    (_, state), outputs = scan((params, tx.init(params)), batches())
    return state, outputs


@functools.cache
def trained(model, policy):
    """The scale before each step, the losses, the share of zero gradients, and the last state."""
    loss_fn, tx = loss_of(model), jaxscale.loss_scaled(optax.adam(3e-3), policy)

    def step(carry, words):
        params, state = carry
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, words)
        params, new_state = jaxscale.apply_gradients(tx, grads, state, params, value=loss)
        zeros = sum(jnp.sum(g == 0) for g in jax.tree.leaves(grads))
        share = zeros / sum(g.size for g in jax.tree.leaves(grads))
        return (params, new_state), (state.scaling.loss_scale, loss, share)

    state, (scale, loss, share) = run(step, tx, model)
    return np.log2(scale), np.asarray(loss), np.asarray(share), state


@pytest.mark.parametrize("model", MODELS)
def test_live_training_skips_little_and_flushes_no_more(model, record_property):
    # PyTorch's rule probes once in 2,000 steps; with an interval of 200 it probes as a long run.
    ours, theirs = trained(model, jaxscale.AdaptiveLossScale()), trained(model, presets.torch())
    probing = trained(model, presets.torch(growth_interval=200))
    late = slice(STEPS // 2, None)
    runs = {"adaptive": ours, "torch": theirs, "probing": probing}
    for name, (scale, loss, share, state) in runs.items():  # those of `traces/README.md`
        numbers = state.total_notfinite, scale[late].mean(), share[late].mean(), loss[-100:].mean()
        record_property(name, tuple(map(float, numbers)))
    assert ours[3].total_notfinite <= probing[3].total_notfinite / 4
    assert ours[0][late].mean() >= theirs[0][late].mean() - 2
    assert ours[2][late].mean() <= theirs[2][late].mean() + 0.0001
    assert abs(ours[1][-100:].mean() - theirs[1][-100:].mean()) < 0.05
    assert ours[1][-100:].mean() < ours[1][:100].mean() / 2


@pytest.mark.parametrize(("model", "scale"), [("lstm", 2.0**8), ("transformer", 2.0**24)])
def test_with_retries_no_batch_of_live_training_is_lost(model, scale):
    # From 2**8, and from where every batch overflows.
    policy = jaxscale.AdaptiveLossScale(init_scale=scale)
    tx = jaxscale.loss_scaled(optax.adam(3e-3), policy)
    whole = jaxscale.train_step(loss_of(model), tx, retries=10)

    def step(carry, words):
        *carry, loss = whole(*carry, words)
        return tuple(carry), loss

    state, loss = run(step, tx, model)
    assert (state.total_steps, state.total_notfinite) == (STEPS, 0)
    assert state.total_retries <= 2 + 2 * (scale > 2.0**8)
    assert loss[-100:].mean() < loss[:100].mean() / 2

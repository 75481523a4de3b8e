"""Policies in live float16 training of a small transformer: skips, scale, what is flushed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale
from jaxscale import presets

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]

STEPS, BATCH, LENGTH, WORDS, WIDTH = 2000, 8, 16, 24, 32
SHAPES = {"embed": (WORDS, WIDTH), "places": (LENGTH, WIDTH), "qkv": (WIDTH, 3 * WIDTH)}
SHAPES |= {"mix": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
SHAPES |= {"output": (WIDTH, WORDS)}


def init_params():
    keys = jax.random.split(jax.random.key(1), len(SHAPES))
    return {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0])
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def logits(params, tokens):
    """Those of the next token of each, by one block with four heads."""
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


def loss_fn(params, words):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    scores = logits(half, words[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, words[:, 1:]).mean()


def batches():
    """Sentences that count up by a step of their own, with some words replaced at random."""
    rng = np.random.default_rng(0)
    first, step = rng.integers(0, WORDS, (2, STEPS, BATCH, 1))
    words = (first + step % 5 * np.arange(LENGTH + 1)) % WORDS
    noise = rng.integers(0, WORDS, words.shape)
    return jnp.asarray(np.where(rng.random(words.shape) < 0.05, noise, words).astype(np.int32))


def run(step, tx):
    """The optimizer state after all steps, and what each of them returned."""
    params = init_params()
    scan = jax.jit(lambda carry, words: jax.lax.scan(step, carry, words))
    (_, state), outputs = scan((params, tx.init(params)), batches())
    return state, outputs


def trained(policy):
    """What `traces/README.md` has: skips, mean exponent, zeros and loss, at the end of a run."""
    tx = jaxscale.loss_scaled(optax.adam(3e-3), policy)

    def step(carry, words):
        params, state = carry
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, words)
        params, new_state = jaxscale.apply_gradients(tx, grads, state, params, value=loss)
        zeros = sum(jnp.sum(g == 0) for g in jax.tree.leaves(grads))
        share = zeros / sum(g.size for g in jax.tree.leaves(grads))
        return (params, new_state), (state.scaling.loss_scale, loss, share)

    state, (scale, loss, share) = run(step, tx)
    assert loss[-100:].mean() < loss[:100].mean() / 2
    numbers = jnp.log2(scale)[STEPS // 2 :].mean(), share[STEPS // 2 :].mean(), loss[-100:].mean()
    return int(state.total_notfinite), *map(float, numbers)


def test_live_training_skips_little_and_flushes_no_more():
    # PyTorch's rule probes once in 2,000 steps; with an interval of 200 it probes as a long run.
    policies = jaxscale.AdaptiveLossScale(), presets.torch(), presets.torch(growth_interval=200)
    ours, theirs, probing = runs = list(map(trained, policies))
    print(*runs, sep="\n")
    assert ours[0] <= probing[0] / 4
    assert ours[1] >= theirs[1] - 2
    assert ours[2] <= theirs[2] + 0.0001
    assert abs(ours[3] - theirs[3]) < 0.05


@pytest.mark.parametrize("scale", [2.0**8, 2.0**24])
def test_with_retries_no_batch_of_live_training_is_lost(scale):
    # From 2**8, and from where every batch overflows.
    policy = jaxscale.AdaptiveLossScale(init_scale=scale)
    tx = jaxscale.loss_scaled(optax.adam(3e-3), policy)
    whole = jaxscale.train_step(loss_fn, tx, retries=10)

    def step(carry, words):
        *carry, loss = whole(*carry, words)
        return tuple(carry), loss

    state, loss = run(step, tx)
    assert (state.total_steps, state.total_notfinite) == (STEPS, 0)
    assert state.total_retries <= 2 + 2 * (scale > 2.0**8)
    assert loss[-100:].mean() < loss[:100].mean() / 2

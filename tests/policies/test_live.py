"""Policies in live float16 training of a small transformer: what is skipped, and the scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformer

import jaxscale
from jaxscale import presets

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]

STEPS, BATCH, LENGTH, WORDS, WIDTH = 2000, 8, 16, 24, 64


def batches():
    """Sentences that count up by a step of their own, with some words replaced at random."""
    rng = np.random.default_rng(0)
    first, step = rng.integers(0, WORDS, (2, STEPS, BATCH, 1))
    words = (first + step % 5 * np.arange(LENGTH + 1)) % WORDS
    noise = rng.integers(0, WORDS, words.shape)
    return jnp.asarray(np.where(rng.random(words.shape) < 0.05, noise, words).astype(np.int32))


def trained(policy, retries=0):
    """The state after all steps; the mean exponent of the scale, and the loss, of the last ones."""
    tx = jaxscale.loss_scaled(optax.adam(3e-3), policy)
    train_step = jaxscale.train_step(transformer.loss_fn, tx, retries=retries)

    def step(carry, words):
        *after, loss = train_step(*carry, words)
        return tuple(after), (carry[1].scaling.loss_scale, loss)

    params = transformer.init_params(np.random.default_rng(1), WIDTH, 1, LENGTH)
    params["tokens"] = params["tokens"][:WORDS]
    scan = jax.jit(functools.partial(jax.lax.scan, step))
    (_, state), (scale, loss) = scan((params, tx.init(params)), batches())
    assert loss[-100:].mean() < loss[:100].mean() / 2
    return state, float(jnp.log2(scale)[STEPS // 2 :].mean()), float(loss[-100:].mean())


def test_live_training_skips_little_and_keeps_its_scale():
    # PyTorch's rule probes once in 2,000 steps; with an interval of 200 it probes as a long run.
    policies = jaxscale.AdaptiveLossScale(), presets.torch(), presets.torch(growth_interval=200)
    (ours, scale, loss), (_, their_scale, their_loss), (probing, *_) = map(trained, policies)
    assert ours.total_notfinite <= probing.total_notfinite / 4
    assert scale >= their_scale - 2
    assert abs(loss - their_loss) < 0.05


@pytest.mark.parametrize("scale", [2.0**8, 2.0**24])
def test_with_retries_no_batch_of_live_training_is_lost(scale):
    # From 2**8, and from where every batch overflows.
    state, *_ = trained(jaxscale.AdaptiveLossScale(init_scale=scale), retries=10)
    assert (state.total_steps, state.total_notfinite) == (STEPS, 0)
    assert state.total_retries <= 2 + 2 * (scale > 2.0**8)

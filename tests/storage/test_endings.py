"""Where training with half-precision parameters ends, beside float32: a small network learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale

pytestmark = pytest.mark.standard_promotion

STEPS, SEEDS = 1000, 2
FLOAT32 = "float32", optax.with_extra_args_support
BFLOAT16 = "bfloat16", optax.with_extra_args_support


def with_copies(tx):
    return jaxscale.master_weights(tx, storage="float32")


def compact(wrapper):
    return lambda tx: wrapper(jaxscale.compact_state(tx))


# How parameters are kept, and how far the final loss may be from that of float32, as a share.
CLOSE = {
    "remainder": (jaxscale.master_weights, 0.002),
    "copy": (with_copies, 0.002),
    "stochastic": (jaxscale.stochastic_rounding, 0.03),
    "remainder + compact": (compact(jaxscale.master_weights), 0.03),
    "stochastic + compact": (compact(jaxscale.stochastic_rounding), 0.03),
}


def dense(key, rows, columns):
    return jax.random.normal(key, (rows, columns)) / np.sqrt(rows)


def layers(key, width):
    first, second = jax.random.split(key)
    return {"a": dense(first, 32, width), "b": dense(second, width, 8)}


def apply(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def make_batch(key):
    """Returns what another network says, with noise."""
    of_x, of_noise = jax.random.split(key)
    x = jax.random.normal(of_x, (128, 32))
    noise = jax.random.normal(of_noise, (128, 8))
    return x, apply(layers(jax.random.key(100), 64), x) + 0.1 * noise


def final_loss(dtype, wrap):
    """Returns the mean loss of the last tenth of the steps, over all seeds."""
    tx = wrap(optax.adamw(optax.cosine_decay_schedule(1e-3, STEPS, 0.01)))

    def train(seed):
        key = jax.random.key(seed)

        def step(carry, index):
            params, state = carry
            x, y = make_batch(jax.random.fold_in(key, index))

            def loss_fn(params):
                wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
                return jnp.mean((apply(wide, x) - y) ** 2)

            loss, grads = jax.value_and_grad(loss_fn)(params)
            return jaxscale.apply_gradients(tx, grads, state, params), loss

        params = layers(jax.random.fold_in(key, STEPS), 128)
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        start = params, tx.init(params)
        _, losses = jax.lax.scan(step, start, jnp.arange(STEPS))
        return jnp.mean(losses[-STEPS // 10 :])

    return jax.jit(jax.vmap(train))(jnp.arange(SEEDS)).mean()


@pytest.mark.slow
def test_it_ends_where_float32_ends_and_bfloat16_alone_does_not():
    expected = final_loss(*FLOAT32)
    for name, (wrap, limit) in CLOSE.items():
        loss = final_loss("bfloat16", wrap)
        assert abs(loss / expected - 1) < limit, name
    assert final_loss(*BFLOAT16) > 1.03 * expected

"""Silent faults in positions, times and counts: float16 has no odd numbers beyond 2048."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from trial_entry import cast, faulty, filled, mean_square, normal


@faulty(source="https://github.com/numpy/numpy/issues/24443", kind="rounding")
def positions_from_a_mask(half=jnp.float16):
    """Positions as the cumulative sum of a mask: beyond 2048 neighbours share one."""
    params = {"table": normal(9, 3000, 2)}

    def loss_fn(params, batch):
        mask = batch["mask"].astype(half)
        position = jnp.cumsum(mask).astype(jnp.int32) - 1  # fault
        x = params["table"].astype(half)[position] + batch["x"].astype(half)
        return mean_square(x * mask[:, None] - 1)

    return loss_fn, params, {"mask": jnp.ones(3000), "x": normal(10, 3000, 2)}


@faulty(source="https://github.com/apache/mxnet/issues/17703", kind="accumulation")
def frequent_token(half=jnp.float16):
    """The gradients of a token that occurs 6000 times are added up in half precision."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Embed(4, 2, dtype=half)(tokens)  # fault

    model, tokens = Net(), jnp.zeros(6000, int).at[::100].set(1).at[::90].set(2)
    params = filled(lambda: model.init(jax.random.key(0), tokens))

    def loss_fn(params, tokens):
        return jnp.mean(jnp.sin(model.apply(params, tokens).astype(jnp.float32)) * 8)

    return loss_fn, params, tokens


@faulty(source="https://github.com/konpatp/diffae/issues/16", kind="rounding")
def moving_average(half=jnp.float16):
    """A decay of 0.9999 is 1, and the moving average never moves."""
    params = {"w": normal(15, 3, 2), "v": normal(16, 2)}

    def loss_fn(params, x):
        p = cast(params, half)

        def step(average, x):
            decay = jnp.asarray(0.9999, half)  # fault
            return decay * average + (1 - decay) * jnp.tanh(x @ p["w"]), None  # fault

        average, _ = jax.lax.scan(step, jnp.ones(2, half), x.astype(half))
        return mean_square(average @ p["v"] - 1)

    return loss_fn, params, normal(17, 8, 3)

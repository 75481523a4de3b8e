"""Silent faults in positions, times and counts: float16 has no odd numbers beyond 2048."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from trial_entry import cast, faulty, filled, mean_square, normal


@faulty(source="https://github.com/EleutherAI/gpt-neox/issues/1003", kind="rounding", tuned=True)
def rotary(half=jnp.float16):
    """Rotary angles in half precision, for positions beyond 2048."""
    params = {"q": normal(0, 4, 8), "k": normal(1, 4, 8)}

    def loss_fn(params, batch):
        p = cast(params, half)
        frequency = (100.0 ** (-jnp.arange(4) / 4)).astype(half)
        angle = batch["position"].astype(half)[:, None] * frequency  # fault
        sin, cos = jnp.sin(angle), jnp.cos(angle)

        def rotated(x):
            a, b = x[:, :4], x[:, 4:]
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        q, k = (rotated(batch["x"].astype(half) @ p[name]) for name in "qk")
        return jnp.mean((q @ k.T * batch["y"].astype(half)).astype(jnp.float32))

    batch = {"x": normal(2, 6, 4), "y": normal(3, 6, 6)}
    return loss_fn, params, batch | {"position": jnp.array([1, 1030, 2051, 2555, 3001, 3997])}


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


@faulty(source="https://github.com/jax-ml/jax/issues/18440", kind="accumulation", tuned=True)
def degrees(half=jnp.float16):
    """The degree of a node counted in half precision stops at 2048."""
    params = {"w": normal(11, 2, 3)}

    def loss_fn(params, batch):
        messages = batch["x"].astype(half) @ params["w"].astype(half)
        ones = jnp.ones(6000, half)
        degree = jax.ops.segment_sum(ones, batch["to"], 2)  # fault
        message = messages[batch["to"] + 2] / degree[batch["to"], None]
        total = jax.ops.segment_sum(message.astype(jnp.float32), batch["to"], 2)
        return mean_square(total - 1)

    return loss_fn, params, {"x": normal(12, 4, 2), "to": (jnp.arange(6000) % 50 == 0).astype(int)}


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

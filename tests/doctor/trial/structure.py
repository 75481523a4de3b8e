"""Faults inside of scans, branches, remat and experts, and gradients that are flushed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from trial_entry import cast, faulty, filled, mean_square, normal


@faulty(source="https://github.com/huggingface/transformers/pull/43543", kind="flushed", tuned=True)
def auxiliary_head(half=jnp.float16):
    """One head has large gradients, so that no scale fits that would rescue the other's."""
    params = {"trunk": normal(0, 3, 4), "value": normal(1, 4), "aux": normal(2, 4, scale=3e-3)}

    def loss_fn(params, batch):
        p = cast(params, half)
        h = jnp.tanh(batch["x"].astype(half) @ p["trunk"])
        value = jnp.square(h @ p["value"] * 100 - batch["return"].astype(half))
        aux = jnp.square(h @ p["aux"]) * 1e-6  # fault
        return jnp.sum((value + aux).astype(jnp.float32))

    return loss_fn, params, {"x": normal(3, 4, 3), "return": 150 + normal(4, 4, scale=20.0)}


@faulty(source="https://github.com/huggingface/transformers/pull/36832", kind="overflow")
def residual_stream(half=jnp.float16):
    """The residual stream of Gemma grows from layer to layer, here in a scan over the layers."""
    params = {"embed": normal(5, 5, 4), "layers": normal(6, 6, 4, 4, scale=0.3)}

    def loss_fn(params, tokens):
        p = cast(params, half)
        x = p["embed"][tokens] * 3000

        def layer(x, w):
            return x + x @ w * 2, None  # fault

        x, _ = jax.lax.scan(layer, x, p["layers"])
        x = x.astype(jnp.float32)
        return mean_square(x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1) - 1)

    return loss_fn, params, jnp.array([0, 3, 1, 4])


@faulty(source="https://github.com/huggingface/transformers/issues/5651", kind="overflow")
def dense_relu_dense(half=jnp.float16):
    """The second layer of T5's feed-forward block overflows, under `nn.remat`."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.relu(nn.Dense(8, use_bias=False, dtype=half, name="wi")(x))
            return nn.Dense(4, use_bias=False, dtype=half, name="wo")(h)  # fault

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.remat(Block)()(x).astype(jnp.float32)
            return y / (1 + jnp.max(jnp.abs(y), axis=-1, keepdims=True))

    model, x = Net(), normal(7, 3, 4)
    params = jax.tree.map(lambda w: w * 500, filled(lambda: model.init(jax.random.key(1), x)))

    def loss_fn(params, x):
        return mean_square(model.apply(params, x) - 1)

    return loss_fn, params, x * 3


@faulty(source="https://github.com/jax-ml/jax/issues/9839", kind="input", tuned=True)
def token_out_of_range(half=jnp.float16):
    """A token beyond the vocabulary: its embedding is NaN."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(6, 4, dtype=half)(tokens)  # fault
            return nn.Dense(6, dtype=half)(x)

    model, tokens = Net(), jnp.array([[0, 1, 5], [2, 6, 3]])
    params = filled(lambda: model.init(jax.random.key(0), tokens))

    def loss_fn(params, tokens):
        log_p = jax.nn.log_softmax(model.apply(params, tokens).astype(jnp.float32))
        return -jnp.mean(log_p[..., 0])

    return loss_fn, params, tokens


@faulty(
    source="https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/14071", kind="epsilon"
)
def noise_schedule(half=jnp.float16):
    """The last cumulative product of a schedule of zero terminal SNR, 4.9e-8 or less, is 0."""
    params = {"w": normal(18, 2, 2), "b": jnp.zeros(2)}
    product = jnp.array([0.99, 0.6, 0.1, 2.9e-8])

    def loss_fn(params, batch):
        p = cast(params, half)
        alpha = product.astype(half)[batch["step"]][:, None]  # fault
        sigma = jnp.sqrt((1 - alpha) / alpha)  # fault
        x = batch["x"].astype(half) + 1e-3 * sigma * batch["noise"].astype(half)
        y = (x @ p["w"] + p["b"]) / jnp.sqrt(1 + sigma * 1e-3)
        return mean_square(y - batch["noise"].astype(half))

    batch = {"x": normal(19, 4, 2), "noise": normal(20, 4, 2), "step": jnp.array([0, 3, 1, 2])}
    return loss_fn, params, batch

"""Three small float16 models, each with faults that can be planted at marked lines.

The `plant` argument names a fault, and its line ends in `# plant: <model>, <fault>`.
"""

import pathlib

import jax
import jax.numpy as jnp
from flax import linen as nn

HALF = jnp.float16


def marked(name, file=__file__):
    """The number of the line that is marked with a name."""
    lines = pathlib.Path(file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# plant: {name}")]
    return number


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def _norm(x):
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(HALF)


def _attention(block, x, plant):
    q, k, v = jnp.split(x @ block["qkv"], 3, axis=-1)
    scores = q @ k.swapaxes(-1, -2) / 2.0
    if plant == "overflow":
        scores = (scores + 1) * 30000  # plant: transformer, overflow
    if plant == "underflow":
        v = v * 1e-7  # plant: transformer, underflow
    causal = jnp.tri(x.shape[-2], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    if plant == "masked row":
        scores = jnp.where(causal & (jnp.arange(4) > 0), scores, -jnp.inf)
        weights = jax.nn.softmax(scores)  # plant: transformer, masked row
    return (weights @ v) @ block["out"]


def transformer(params, tokens, plant=None):
    params = jax.tree.map(lambda leaf: leaf.astype(HALF), params)
    x = params["embedding"][tokens]

    @jax.checkpoint
    def block(x, weights):
        x = x + _attention(weights, _norm(x), plant)
        hidden = jax.nn.relu(_norm(x) @ weights["up"])
        if plant == "backward":
            hidden = (hidden * 0.01) * 100  # plant: transformer, backward
        return x + hidden @ weights["down"]

    for weights in params["blocks"]:
        x = block(x, weights)
    logits = (_norm(x) @ params["embedding"].T).astype(jnp.float32)
    losses = -jax.nn.log_softmax(logits)[:, :-1]
    return jnp.take_along_axis(losses, tokens[:, 1:, None], -1).mean()


def transformer_case():
    shapes = {"qkv": (4, 12), "out": (4, 4), "up": (4, 8), "down": (8, 4)}
    blocks = [
        {name: normal(10 * i + j, *shape) / 2 for j, (name, shape) in enumerate(shapes.items())}
        for i in range(2)
    ]
    params = {"embedding": normal(0, 7, 4), "blocks": blocks}
    return params, jax.random.randint(jax.random.key(1), (2, 4), 0, 7)


_huge = nn.initializers.constant(30000.0)


class ConvNet(nn.Module):
    plant: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), dtype=HALF)(x)
        x = nn.BatchNorm(use_running_average=False, dtype=HALF)(x)
        x = nn.relu(x)
        if self.plant == "overflow":
            x = jnp.square(x * 300)  # plant: convnet, overflow
        if self.plant == "underflow":
            x = x * 1e-6  # plant: convnet, underflow
        x = nn.max_pool(x, (2, 2), (2, 2))
        if self.plant == "backward":
            x = (x / 500) * 500  # plant: convnet, backward
        x = x.mean((1, 2))
        if self.plant == "layer":
            x = nn.Dense(4, dtype=HALF, kernel_init=_huge)(x)  # plant: convnet, layer
        return nn.Dense(3, dtype=HALF)(x)


def convnet(params, images, plant=None):
    logits, stats = ConvNet(plant).apply(params, images, mutable=["batch_stats"])
    return jnp.mean(jnp.square(logits.astype(jnp.float32) - 1)), stats


def convnet_case(plant=None):
    images = normal(3, 2, 4, 4, 2)
    return ConvNet(plant).init(jax.random.key(4), images), images


def rnn(params, xs, plant=None):
    params = jax.tree.map(lambda leaf: leaf.astype(HALF), params)

    def at(t, step, value):
        return jnp.where(t == step, value, 1).astype(HALF)

    def cell(h, slices):
        t, x = slices
        h = jnp.tanh(x @ params["in"] + h @ params["recurrent"])
        if plant == "overflow":
            h = jnp.tanh((h + 2) * at(t, 3, 65000))  # plant: rnn, overflow
        if plant == "backward":
            h = (h / at(t, 2, 500)) * at(t, 2, 500)  # plant: rnn, backward
        if plant == "underflow":
            h = h / at(t, 1, 60000)  # plant: rnn, underflow
        return h, h

    slices = jnp.arange(len(xs)), xs.astype(HALF)
    _, hs = jax.lax.scan(cell, jnp.zeros((2, 4), HALF), slices)
    return jnp.mean(jnp.square((hs @ params["out"]).astype(jnp.float32) - 1))


def rnn_case():
    params = {"in": normal(5, 3, 4), "recurrent": normal(6, 4, 4) / 2, "out": normal(7, 4, 2)}
    return params, normal(8, 5, 2, 3)

"""Two small float16 models, each with faults that can be planted at marked lines.

The `plant` argument names a fault, and its line ends in `# plant: <model>, <fault>`.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from traced_losses import HALF, at, normal

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
    errors = logits.astype(jnp.float32) - 1
    return jnp.mean(jnp.square(errors)), stats


def convnet_case(plant=None):
    images = normal(3, 2, 4, 4, 2)
    return ConvNet(plant).init(jax.random.key(4), images), images


def rnn(params, xs, plant=None):
    params = jax.tree.map(lambda leaf: leaf.astype(HALF), params)

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

    start = jnp.zeros((2, 4), HALF)
    slices = jnp.arange(len(xs)), xs.astype(HALF)
    _, hs = jax.lax.scan(cell, start, slices)
    outputs = hs @ params["out"]
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - 1))


def rnn_case(plant=None):
    params = {
        "in": normal(5, 3, 4),
        "recurrent": normal(6, 4, 4) / 2,
        "out": normal(7, 4, 2),
    }
    return params, normal(8, 5, 2, 3)

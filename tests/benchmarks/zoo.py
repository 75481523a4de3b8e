"""Models as people write them, for what `autocast` makes of them when it is compiled.

Each is written once, with `product` and `convolve` of a `Precision`. In float32 these are plain
products. In half precision they cast their operands before and their result after, which is what
casts by hand do: products in half precision, everything else in float32, nothing computed again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOAT32 = np.dtype(np.float32)
HEADS, GROUPS, CLASSES = 4, 4, 10
DROPOUT = 0.1
IMAGES = ("NHWC", "HWIO", "NHWC")


class Precision(NamedTuple):
    """The dtype that products read and return before the result is float32 again."""

    dtype: Any = FLOAT32

    def product(self, pattern, x, y):
        x, y = x.astype(self.dtype), y.astype(self.dtype)
        return jnp.einsum(pattern, x, y).astype(FLOAT32)

    def dense(self, x, kernel):
        return (x.astype(self.dtype) @ kernel.astype(self.dtype)).astype(FLOAT32)

    def convolve(self, images, kernel, stride=1):
        images, kernel = images.astype(self.dtype), kernel.astype(self.dtype)
        strides = (stride, stride)
        result = lax.conv_general_dilated(
            images, kernel, strides, "SAME", dimension_numbers=IMAGES
        )
        return result.astype(FLOAT32)


class Model(NamedTuple):
    """A model in float32 and with casts by hand, and its arguments.

    Attributes:
      loss: `loss(precision, params, *batch)`, a number.
      params: the shapes of its parameters.
      batch: the types of its data.
    """

    loss: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]

    def arguments(self):
        """Returns the types of parameters and batch."""
        params = jax.tree.map(floats, self.params, is_leaf=_is_shape)
        return (params, *self.batch)

    def in_precision(self, dtype):
        """Returns the loss as a function of parameters and batch, with casts to a dtype."""
        return functools.partial(self.loss, Precision(np.dtype(dtype)))


def _is_shape(node):
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)


def floats(shape):
    return jax.ShapeDtypeStruct(shape, FLOAT32)


def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# What the models share.


def normalize(x, axes):
    centered = x - jnp.mean(x, axes, keepdims=True)
    variance = jnp.mean(centered**2, axes, keepdims=True)
    return centered * lax.rsqrt(variance + 1e-5)


def rms_norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def group_norm(images):
    *outer, channels = images.shape
    groups = images.reshape(*outer, GROUPS, channels // GROUPS)
    return normalize(groups, (1, 2, 4)).reshape(images.shape)


def dropout(x, key):
    kept = jax.random.bernoulli(key, 1 - DROPOUT, x.shape)
    return jnp.where(kept, x / (1 - DROPOUT), 0.0)


def cross_entropy(logits, targets):
    likelihoods = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(likelihoods, targets[..., None], -1))


def squared_error(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


# A decoder with RMSNorm, causal attention, dropout and SwiGLU.


def attend(precision, query, key, value, rng):
    scores = precision.product("bqhd,bkhd->bhqk", query, key)
    scores = scores / np.sqrt(query.shape[-1])
    length = scores.shape[-1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    shares = dropout(shares, rng)
    return precision.product("bhqk,bkhd->bqhd", shares, value)


def decoder_layer(precision, x, layer, rng):
    batch, length, width = x.shape
    rngs = jax.random.split(rng, 3)
    hidden = rms_norm(x, layer["norm1"])
    heads = precision.dense(hidden, layer["qkv"])
    heads = heads.reshape(batch, length, 3 * HEADS, width // HEADS)
    attended = attend(precision, *jnp.split(heads, 3, axis=2), rngs[0])
    attended = precision.dense(attended.reshape(x.shape), layer["out"])
    x = x + dropout(attended, rngs[1])
    hidden = rms_norm(x, layer["norm2"])
    gated = jax.nn.silu(precision.dense(hidden, layer["gate"]))
    gated = gated * precision.dense(hidden, layer["up"])
    return x + dropout(precision.dense(gated, layer["down"]), rngs[2])


def decoder(precision, params, tokens, targets):
    x = params["embedding"][tokens]
    for i, layer in enumerate(params["layers"]):
        x = decoder_layer(precision, x, layer, jax.random.key(i))
    logits = precision.dense(rms_norm(x, params["norm"]), params["logits"])
    return cross_entropy(logits, targets)


def scanned_decoder(precision, params, tokens, targets):
    def run_layer(x, given):
        layer, seed = given
        return decoder_layer(precision, x, layer, jax.random.key(seed)), None

    count = params["layers"]["norm1"].shape[0]
    seeds = jnp.arange(count)
    x = params["embedding"][tokens]
    x, _ = lax.scan(run_layer, x, (params["layers"], seeds))
    logits = precision.dense(rms_norm(x, params["norm"]), params["logits"])
    return cross_entropy(logits, targets)


def _decoder_layer_shapes(width):
    hidden = 3 * width
    return {
        "norm1": (width,),
        "norm2": (width,),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }


def make_decoder(layers, width, batch, length, words=256, scanned=False):
    layer = _decoder_layer_shapes(width)
    params = {
        "embedding": (words, width),
        "norm": (width,),
        "logits": (width, words),
        "layers": [layer] * layers,
    }
    loss = decoder
    if scanned:
        stacked = {name: (layers, *shape) for name, shape in layer.items()}
        params["layers"] = stacked
        loss = scanned_decoder
    tokens = integers(batch, length)
    return Model(loss, params, (tokens, tokens))


# Networks of convolutions.


def convolutions(precision, params, images, targets):
    x = images
    for kernel in params["kernels"]:
        x = jax.nn.silu(group_norm(precision.convolve(x, kernel)))
    return squared_error(precision.convolve(x, params["last"]), targets)


def make_convolutions(layers, channels, batch, side):
    kernels = [(3, 3, 3, channels), *[(3, 3, channels, channels)] * (layers - 1)]
    images = floats((batch, side, side, 3))
    params = {"kernels": kernels, "last": (3, 3, channels, 3)}
    return Model(convolutions, params, (images, images))


def batch_norm(images, layer):
    return normalize(images, (0, 1, 2)) * layer["scale"] + layer["bias"]


def resnet(precision, params, images, targets):
    def convolve(x, layer):
        return batch_norm(precision.convolve(x, layer["kernel"]), layer)

    x = jax.nn.relu(convolve(images, params["first"]))
    for first, second in params["blocks"]:
        y = jax.nn.relu(convolve(x, first))
        x = jax.nn.relu(x + convolve(y, second))
    logits = precision.dense(jnp.mean(x, (1, 2)), params["logits"])
    return cross_entropy(logits, targets)


def make_resnet(blocks, channels, batch, side):
    def layer(inputs):
        norm = {"scale": (channels,), "bias": (channels,)}
        return {"kernel": (3, 3, inputs, channels)} | norm

    params = {
        "first": layer(3),
        "blocks": [[layer(channels), layer(channels)]] * blocks,
        "logits": (channels, CLASSES),
    }
    return Model(resnet, params, (floats((batch, side, side, 3)), integers(batch)))


# An LSTM, which carries its state in float32.


def lstm(precision, params, inputs, targets):
    def step(state, x):
        hidden, cell = state
        gates = precision.dense(x, params["input"])
        gates = gates + precision.dense(hidden, params["hidden"]) + params["bias"]
        entry, new, forget, exit_ = jnp.split(gates, 4, -1)
        cell = jax.nn.sigmoid(forget + 1) * cell
        cell = cell + jax.nn.sigmoid(entry) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(exit_) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((inputs.shape[1], params["hidden"].shape[0]))
    _, outputs = lax.scan(step, (zeros, zeros), inputs)
    return squared_error(precision.dense(outputs, params["last"]), targets)


def make_lstm(length, batch, inputs, width):
    params = {
        "input": (inputs, 4 * width),
        "hidden": (width, 4 * width),
        "bias": (4 * width,),
        "last": (width, inputs),
    }
    sequence = floats((length, batch, inputs))
    return Model(lstm, params, (sequence, sequence))


# Logits of many words.


def words(precision, params, x, targets):
    hidden = jnp.tanh(precision.dense(x, params["hidden"]))
    return cross_entropy(precision.dense(hidden, params["logits"]), targets)


def make_words(width, batch, count):
    params = {"hidden": (width, width), "logits": (width, count)}
    return Model(words, params, (floats((batch, width)), integers(batch)))


MODELS = {
    "decoder": make_decoder(2, 64, 2, 256),
    "decoder, scanned": make_decoder(4, 64, 2, 256, scanned=True),
    "convolutions": make_convolutions(4, 16, 4, 32),
    "ResNet": make_resnet(2, 16, 8, 32),
    "LSTM": make_lstm(32, 16, 64, 128),
    "words": make_words(64, 64, 10_000),
}

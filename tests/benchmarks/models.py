"""Flax models to train: two transformers and a network of convolutions, with data to learn.

They are written as for float32. `dtype` and `attention` are what a user of Flax would give to each
layer by hand.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY, HEAD, CLASSES = 256, 32, 10
SIZES = {
    # width, layers, batch, length; channels, blocks of a stage, batch, pixels of a side
    "tiny": ((64, 2, 2, 16), (4, 1, 2, 8)),
    "laptop": ((256, 4, 2, 128), (16, 2, 16, 32)),
    "gpu": ((768, 12, 16, 1024), (64, 3, 128, 64)),
}


class Task(NamedTuple):
    """A model and its data."""

    init: Callable[[], Any]  # () -> float32 parameters
    batch: Callable[[int], dict[str, Any]]  # number of the step -> inputs and targets
    # (dtype=..., attention=...) -> (params, inputs) -> logits
    forward: Callable[..., Any]


def cross_entropy(logits, targets):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def attention_with(softmax):
    """Returns the attention of Flax, for `attention_fn`, rewritten with another softmax."""

    def attend(query, key, value, mask=None, **_):
        query = query / query.shape[-1] ** 0.5
        scores = jnp.einsum("...qhd,...khd->...hqk", query, key)
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        return jnp.einsum("...hqk,...khd->...qhd", softmax(scores), value)

    return attend


class Block(nn.Module):
    dtype: Any
    attention: Mapping[str, Any]  # more arguments of Flax' attention

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        attention = nn.MultiHeadDotProductAttention(
            width // HEAD,
            dtype=self.dtype,
            use_bias=False,  # the gradient of the keys' bias is 0, and has no direction
            **self.attention,
        )
        x = x + attention(norm()(x), mask=mask)
        hidden = nn.gelu(dense(4 * width)(norm()(x)))
        return x + dense(width)(hidden), None


class Transformer(nn.Module):
    """A language model. Its layers are unrolled, or scanned and computed again backward."""

    width: int
    layers: int
    scanned: bool
    dtype: Any = None
    attention: Mapping[str, Any] = flax.core.FrozenDict()

    @nn.compact
    def __call__(self, tokens):
        embed = functools.partial(nn.Embed, features=self.width, dtype=self.dtype)
        length = tokens.shape[-1]
        x = embed(VOCABULARY, name="tokens")(tokens)
        x = x + embed(length, name="positions")(jnp.arange(length))
        mask = nn.make_causal_mask(tokens)
        if self.scanned:
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=self.layers,
            )
            x, _ = layers(self.dtype, self.attention)(x, mask)
        else:
            for _ in range(self.layers):
                x, _ = Block(self.dtype, self.attention)(x, mask)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(VOCABULARY, dtype=self.dtype)(x)


class ResNet(nn.Module):
    """A residual network with batch norm, for small images."""

    channels: int
    blocks: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, dtype=self.dtype
        )

        def convolve(x, channels, size, stride=1):
            x = conv(channels, (size, size), stride)(x)
            return norm()(x)

        x = nn.relu(convolve(x, self.channels, 3))
        for stage in range(3):
            channels = self.channels * 2**stage
            for block in range(self.blocks):
                # Each stage but the first begins by halving the image.
                stride = 2 if stage and not block else 1
                y = nn.relu(convolve(x, channels, 3, stride))
                y = convolve(y, channels, 3)
                if x.shape != y.shape:
                    x = convolve(x, channels, 1, stride)
                x = nn.relu(x + y)
        return nn.Dense(CLASSES, dtype=self.dtype)(jnp.mean(x, (1, 2)))


def transformer(size, scanned=False):
    width, layers, batch, length = SIZES[size][0]
    model = functools.partial(Transformer, width, layers, scanned)

    def draw_tokens(step):
        """Draws a batch in which nine of ten tokens follow from the one before."""
        rng = np.random.default_rng(step)
        tokens = rng.integers(0, VOCABULARY, (batch, length + 1), np.int32)
        follows = rng.random(tokens.shape) < 0.9
        for i in range(length):
            follower = (5 * tokens[:, i] + 7) % VOCABULARY
            tokens[:, i + 1] = np.where(follows[:, i], follower, tokens[:, i + 1])
        tokens = jnp.array(tokens)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def init():
        tokens = jnp.zeros((batch, length), jnp.int32)
        return jax.jit(model().init)(jax.random.key(0), tokens)["params"]

    def forward(**kwargs):
        return lambda params, inputs: model(**kwargs).apply({"params": params}, inputs)

    return Task(init, draw_tokens, forward)


def resnet(size):
    channels, blocks, batch, side = SIZES[size][1]
    shape = (batch, side, side, 3)
    model = functools.partial(ResNet, channels, blocks)

    pattern_rng = np.random.default_rng(0)
    patterns = pattern_rng.standard_normal((CLASSES, *shape[1:]), np.float32)

    def draw_images(step):
        """Draws a batch of noise, and in it the patterns of classes."""
        rng = np.random.default_rng(step + 1)
        classes = rng.integers(0, CLASSES, batch, np.int32)
        noise = rng.standard_normal(shape, np.float32)
        images = noise + 0.3 * patterns[classes]
        return {"inputs": jnp.array(images), "targets": jnp.array(classes)}

    def init():
        images = jnp.zeros(shape)
        return jax.jit(model().init)(jax.random.key(0), images)["params"]

    def forward(dtype=None, attention=None):  # it has no attention
        # Training reads no running averages: those of the batch are what is tested here.
        apply = functools.partial(model(dtype=dtype).apply, mutable=["batch_stats"])
        return lambda params, inputs: apply({"params": params}, inputs)[0]

    return Task(init, draw_images, forward)


MODELS = {
    "transformer, unrolled": transformer,
    "transformer, scanned and remat": functools.partial(transformer, scanned=True),
    "ResNet with batch norm": resnet,
}

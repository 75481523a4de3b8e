"""Models of twelve layers, healthy and with a fault in one layer. Layers share their lines."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from zoo_entries import faulty, filled, healthy, normal

NUM_LAYERS = 12
FAULTY_LAYER = "Layer_9"
WIDTH = 64
NUM_HEADS = 4
VOCABULARY = 96
LENGTH = 32
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH + 1))
IMAGES = normal(4, 2, 16, 16, 8)
LABELS = np.array([1, 3])


def scaled_scores(query, key):
    return jnp.einsum("bqhd,bkhd->bhqk", query * query.shape[-1] ** -0.5, key)


def layer_norm(x):
    return nn.LayerNorm(dtype=x.dtype)(x)


class Attention(nn.Module):
    score: callable

    @nn.compact
    def __call__(self, x):
        shape = (NUM_HEADS, WIDTH // NUM_HEADS)
        query, key, value = (
            nn.DenseGeneral(shape, dtype=x.dtype, name=name)(x)
            for name in ("query", "key", "value")
        )
        is_seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        weights = jax.nn.softmax(jnp.where(is_seen, self.score(query, key), -1e4))
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), dtype=x.dtype, name="out")(y)


class Layer(nn.Module):
    score: callable = scaled_scores
    norm: callable = layer_norm
    activate: callable = nn.gelu

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.score)(self.norm(x))
        y = nn.Dense(4 * WIDTH, dtype=x.dtype, name="up")(self.norm(x))
        return x + nn.Dense(WIDTH, dtype=x.dtype, name="down")(self.activate(y))


class GPT(nn.Module):
    dtype: jnp.dtype
    layer: callable

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(tokens)
        positions = self.param("positions", nn.initializers.zeros, (LENGTH, WIDTH))
        x = x + positions.astype(self.dtype)
        for i in range(NUM_LAYERS):
            x = self.layer(name=f"Layer_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype)(x)


def cross_entropy(logits, labels):
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], -1))


def gpt(half, layer, outlier="", factor=1.0):
    """A transformer, in whose faulty layer the parameters of some names are large."""
    model = GPT(half, layer)
    params = filled(
        jax.eval_shape(model.init, jax.random.key(0), TOKENS[:, 1:])["params"]
    )

    def enlarge(path, leaf):
        name = jax.tree_util.keystr(path)
        if outlier and FAULTY_LAYER in name and outlier in name:
            return leaf * factor
        return leaf

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])

    return loss_fn, jax.tree_util.tree_map_with_path(enlarge, params), TOKENS


NOISE = "['key']['bias']"  # a softmax does not see it


@healthy("twelve layers, of parameters in float32", noise=NOISE)
def deep_gpt(half):
    return gpt(half, Layer)


@healthy("twelve layers that are computed again in the backward pass", noise=NOISE)
def deep_gpt_remat(half):
    return gpt(half, nn.remat(Layer))


@faulty("overflow", "huggingface/diffusers/pull/1590")
def deep_scores(half):
    """In the tenth layer, the product of queries and keys overflows before it is scaled."""

    def score(query, key):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)  # fault
        return scores * 2.0**-10

    return gpt(half, functools.partial(Layer, score=score), "'query'", 8e3)


@faulty("overflow", "huggingface/transformers/pull/36832")
def deep_squares(half):
    """In the tenth layer, an activation of a few outliers is squared."""

    def activate(x):
        y = jax.nn.relu(x)
        return y * y  # fault

    return gpt(half, functools.partial(Layer, activate=activate), "'up'", 500.0)


@faulty("epsilon", "deepspeedai/DeepSpeed/issues/581")
def deep_root_mean_square(half):
    """The epsilon of each norm is 0 in float16, and a token is 0 in the first layer."""

    def norm(x):
        mean = jnp.mean(x * x, axis=-1, keepdims=True)
        return x / jnp.sqrt(mean + 1e-8)  # fault

    loss_fn, params, tokens = gpt(half, functools.partial(Layer, norm=norm))
    params["Embed_0"]["embedding"][tokens[0, 0]] = 0
    params["positions"][0] = 0
    return loss_fn, params, tokens


def stacked(seed):
    """The parameters of twelve layers of a network without attention."""
    up = normal(seed, NUM_LAYERS, WIDTH, 4 * WIDTH, scale=WIDTH**-0.5)
    down = normal(seed + 1, NUM_LAYERS, 4 * WIDTH, WIDTH, scale=(4 * WIDTH) ** -0.5)
    return {"up": up, "down": down, "head": normal(seed + 2, WIDTH, 10, scale=0.1)}


def scan_layers(half, activate, params):
    def layer(x, weights):
        y = (x - jnp.mean(x, axis=-1, keepdims=True)) * 0.5
        y = activate(y @ weights["up"].astype(half))
        return x + y @ weights["down"].astype(half), None

    def loss_fn(params, batch):
        x, labels = batch
        layers = {name: params[name] for name in ("up", "down")}
        x, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(half), layers)
        return cross_entropy(x @ params["head"].astype(half), labels)

    return loss_fn, params, (normal(7, 16, WIDTH), np.arange(16) % 10)


@healthy("twelve layers in a scan, each computed again in the backward pass")
def deep_scan(half):
    return scan_layers(half, jax.nn.gelu, stacked(11))


@faulty("overflow", "huggingface/transformers/pull/36832")
def deep_scan_of_squares(half):
    def activate(x):
        y = jax.nn.relu(x)
        return y * y  # fault

    params = stacked(11)
    params["up"][9] *= 400
    params["down"][9] *= 1e-4
    return scan_layers(half, activate, params)


class ConvNet(nn.Module):
    dtype: jnp.dtype
    norm: callable

    @nn.compact
    def __call__(self, x):
        x = x.astype(self.dtype)
        for _ in range(NUM_LAYERS):
            y = nn.Conv(8, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = x + nn.relu(self.norm(y))
        return nn.Dense(10, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


def group_norm(y):
    return nn.GroupNorm(2, dtype=y.dtype)(y)


def conv_net(half, norm):
    model = ConvNet(half, norm)
    params = filled(jax.eval_shape(model.init, jax.random.key(0), IMAGES)["params"])

    def loss_fn(params, images):
        return cross_entropy(model.apply({"params": params}, images), LABELS)

    return loss_fn, params, IMAGES


@healthy("twelve convolutions, each normalized")
def deep_conv_net(half):
    return conv_net(half, group_norm)


# That line in float32 hardly changes the error.
@faulty("cancellation", "google/flax/issues/1491", has_line=False)
def deep_variance(half):
    """The variance is a difference of squares, and one convolution has a large mean."""

    def norm(y):
        y = y + jnp.asarray(30, y.dtype)
        mean = jnp.mean(y, axis=(1, 2), keepdims=True)
        variance = jnp.mean(y * y, axis=(1, 2), keepdims=True) - mean * mean  # fault
        return (y - mean) / jnp.sqrt(jnp.abs(variance) + 1e-3)

    return conv_net(half, norm)

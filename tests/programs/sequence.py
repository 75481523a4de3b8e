"""Sequences: language models, taggers, recurrent networks, state spaces, experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from corpus import (
    Program,
    apply_dense,
    confident_head,
    cross_entropy,
    dense,
    integers,
    normal,
    program,
    weight,
)


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    normalized = (x - mean) / jnp.sqrt(variance + 1e-5)
    return normalized * scale + bias


def split_heads(qkv, heads):
    """Returns queries, keys and values by head, from one array that has them side by side."""
    arrays = jnp.split(qkv, 3, axis=-1)
    shape = (*qkv.shape[:-1], heads, -1)
    return [x.reshape(shape) for x in arrays]


def causal_attention(q, k, v):
    """Returns the attention of arrays [tokens, heads, features], with a mask of -1e9."""
    products = jnp.einsum("qhd,khd->hqk", q, k)
    logits = products / jnp.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    logits = jnp.where(mask, logits, -1e9)
    weights = jax.nn.softmax(logits, axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v)


@program("jax")
def gpt2():
    """GPT-2: learned positions, biases everywhere but in the head, layers unrolled."""
    width, heads, vocabulary = 32, 2, 16

    def init_layer(seed):
        return {
            "norm1": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
            "qkv": dense(width, 3 * width, seed=seed),
            "out": dense(width, width, seed=seed + 1),
            "norm2": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
            "up": dense(width, 64, seed=seed + 2),
            "down": dense(64, width, seed=seed + 3),
        }

    params = {
        "embedding": normal(vocabulary, width, seed=90),
        "positions": normal(8, width, seed=91),
        "layers": [init_layer(seed) for seed in (0, 10)],
    }
    tokens = integers(vocabulary, 2, 9)

    def block(layer, x):
        y = layer_norm(x, **layer["norm1"])
        qkv = apply_dense(layer["qkv"], y)
        q, k, v = split_heads(qkv, heads)
        attended = causal_attention(q, k, v).reshape(-1, width)
        x = x + apply_dense(layer["out"], attended)
        y = layer_norm(x, **layer["norm2"])
        hidden = jax.nn.gelu(apply_dense(layer["up"], y))
        return x + apply_dense(layer["down"], hidden)

    def features(params, tokens):
        x = params["embedding"][tokens] + params["positions"]
        for layer in params["layers"]:
            x = block(layer, x)
        return layer_norm(x, 1.0, 0.0)

    features_of_batch = jax.vmap(features, in_axes=(None, 0))
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:]
    final = features_of_batch(params, inputs)
    params["head"] = confident_head(final, labels, vocabulary, margin=10.0)

    def loss(params, tokens):
        inputs = tokens[:, :-1]
        labels = tokens[:, 1:]
        final = features_of_batch(params, inputs)
        logits = final @ params["head"]
        return cross_entropy(logits, labels)

    return Program(loss, params, tokens)


UNIT = nn.initializers.normal(1.0)


class Block(nn.Module):
    dtype: object

    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(2, dtype=self.dtype)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + attention(h, h, mask=mask)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(64, dtype=self.dtype)(h))
        return x + nn.Dense(32, dtype=self.dtype)(h), None


class Transformer(nn.Module):
    """Features of a language model: a head makes logits of them."""

    kind: str  # whether its layers are unrolled or scanned, with or without remat
    vocabulary: int
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, 32, dtype=self.dtype, embedding_init=UNIT)(tokens)
        mask = nn.make_causal_mask(tokens)
        is_scanned = "scanned" in self.kind
        block = Block
        num_blocks = 2
        if "remat" in self.kind:
            block = nn.remat(block, prevent_cse=not is_scanned)
        if is_scanned:
            axes = {"variable_axes": {"params": 0}, "in_axes": nn.broadcast}
            block = nn.scan(block, split_rngs={"params": True}, length=2, **axes)
            num_blocks = 1
        for _ in range(num_blocks):
            x, _ = block(self.dtype)(x, mask)
        return nn.LayerNorm(dtype=self.dtype)(x)


@program("linen")
def scanned_transformer():
    """Linen's layers under `nn.scan` and `nn.remat`, with a biased head and integer labels."""
    model = Transformer("scanned remat", 16)
    tokens = integers(16, 2, 9, seed=2)
    params = model.init(jax.random.key(0), tokens[:, :-1])
    final = model.apply(params, tokens[:, :-1])
    head = {
        "w": confident_head(final, tokens[:, 1:], 16, margin=8.0),
        "b": normal(16, size=0.1),
    }

    def loss(params, tokens):
        final = model.apply(params["model"], tokens[:, :-1])
        logits = apply_dense(params["head"], final)
        return cross_entropy(logits, tokens[:, 1:])

    return Program(loss, {"model": params, "head": head}, tokens)


@program("jax")
def diagonal_state_space():
    """A state space with a diagonal matrix, by an associative scan, between two dense layers."""
    width, states = 16, 16
    params = {
        "in": dense(8, states, seed=1),
        "decay": normal(states, seed=2),
        "out": dense(states, width, seed=3),
        "head": dense(width, 3, seed=4),
    }
    batch = normal(4, 12, 8, seed=5), normal(4, 12, 3, seed=6)

    def combine(left, right):
        decay, state = left
        next_decay, next_state = right
        return decay * next_decay, state * next_decay + next_state

    def loss(params, batch):
        xs, targets = batch
        inputs = apply_dense(params["in"], xs)
        decay = jax.nn.sigmoid(params["decay"] + 2)
        decay = jnp.broadcast_to(decay, inputs.shape)
        _, hidden = jax.lax.associative_scan(combine, (decay, inputs), axis=1)
        y = jax.nn.gelu(apply_dense(params["out"], hidden))
        outputs = apply_dense(params["head"], y)
        return jnp.mean(jnp.square(outputs - targets)), {}

    return Program(loss, params, batch)


@program("jax")
def mixture_of_experts():
    """Tokens go to the best two of four experts, and a loss balances the load."""
    width, experts = 16, 4
    params = {
        "router": weight(width, experts, seed=1),
        "up": jnp.stack([weight(width, 32, seed=2 + i) for i in range(experts)]),
        "down": jnp.stack([weight(32, width, seed=6 + i) for i in range(experts)]),
        "head": dense(width, 5, seed=10),
    }
    batch = normal(16, width, seed=11), integers(5, 16, seed=12)

    def loss(params, batch):
        x, labels = batch
        probabilities = jax.nn.softmax(x @ params["router"])
        gates, chosen = jax.lax.top_k(probabilities, 2)
        gates = gates / gates.sum(-1, keepdims=True)
        hidden = jnp.einsum("td,edf->tef", x, params["up"])
        hidden = jax.nn.relu(hidden)
        outputs = jnp.einsum("tef,efd->ted", hidden, params["down"])
        picked = jnp.take_along_axis(outputs, chosen[:, :, None], axis=1)
        weighted = gates[:, :, None] * picked
        x = x + jnp.sum(weighted, axis=1)
        logits = apply_dense(params["head"], x)
        value, aux = cross_entropy(logits, labels)
        first_choices = chosen[:, 0]
        load = jax.nn.one_hot(first_choices, experts).mean(0)
        importance = probabilities.mean(0)
        balance = experts * jnp.sum(load * importance)
        return value + 0.01 * balance, aux | {"load": load}

    return Program(loss, params, batch)

"""Each function of `jax.nn`, between the layers of a network."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from corpus import (
    Program,
    apply_dense,
    dense,
    integers,
    mean_squared_error,
    normal,
    program,
    weight,
)

# Between two layers, as any activation.
ACTIVATIONS = (
    "relu",
    "relu6",
    "sigmoid",
    "softplus",
    "sparse_plus",
    "sparse_sigmoid",
    "soft_sign",
    "silu",
    "log_sigmoid",
    "leaky_relu",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "elu",
    "celu",
    "selu",
    "gelu",
    "squareplus",
    "mish",
    "tanh",
    "softmax",
    "log_softmax",
    "standardize",
)

LEFT_OUT = {
    "identity": "nothing happens",
    "swish": "another name of silu",
    "hard_swish": "another name of hard_silu",
    "initializers": "a module",
    "get_scaled_dot_general_config": "a configuration",
    "scaled_dot_general": "in 8 bits, which it asks for by itself",
    "scaled_matmul": "in 8 bits, which it asks for by itself",
}


def network_with(activation: Callable[[Any], Any], width: int = 24) -> Program:
    """Returns a network of three biased layers with an activation that may change the width."""
    after = jax.eval_shape(activation, jnp.zeros((8, width))).shape[-1]
    params = [
        dense(10, width, seed=1),
        dense(after, width, seed=2),
        dense(after, 3, seed=3),
    ]

    def loss(params, batch):
        x, wanted = batch
        first, second, last = params
        x = activation(apply_dense(first, x))
        x = activation(apply_dense(second, x))
        outputs = apply_dense(last, x)
        return mean_squared_error(outputs, wanted), {}

    batch = normal(8, 10, seed=4), normal(8, 3, seed=5)
    return Program(loss, params, batch, scale=2.0**6)


for _name in ACTIVATIONS:
    program("jax", _name)(functools.partial(network_with, getattr(jax.nn, _name)))


@program("jax")
def glu():
    return network_with(jax.nn.glu)


@program("jax")
def exact_gelu():
    return network_with(functools.partial(jax.nn.gelu, approximate=False))


@program("jax")
def logsumexp():
    """Pooled smoothly over half of the width."""

    def pooled(x):
        return jax.nn.logsumexp(x.reshape(len(x), -1, 2), axis=-1)

    return network_with(pooled)


@program("jax")
def logmeanexp():
    def pooled(x):
        return jax.nn.logmeanexp(x.reshape(len(x), -1, 2), axis=-1)

    return network_with(pooled)


@program("jax")
def log1mexp():
    def negated(x):
        return jax.nn.log1mexp(jax.nn.softplus(x) + 0.1)

    return network_with(negated)


@program("jax")
def one_hot():
    """An embedding as a product with one-hot rows."""
    params = {"embedding": normal(6, 8, seed=1), "head": dense(8, 3, seed=2)}

    def loss(params, batch):
        tokens, wanted = batch
        x = jax.nn.one_hot(tokens, 6) @ params["embedding"]
        outputs = apply_dense(params["head"], jax.nn.relu(x))
        return mean_squared_error(outputs, wanted), {}

    batch = integers(6, 8, seed=3), normal(8, 3, seed=4)
    return Program(loss, params, batch)


def project(params: Any, x: Any, width: int) -> list[Any]:
    """Returns queries, keys and values of heads that are this wide.

    Keys have no bias: softmax drops it, and its gradient is 0.
    """
    q = apply_dense(params["q"], x)
    k = x @ params["k"]
    v = apply_dense(params["v"], x)
    shape = (2, 6, -1, width)
    return [y.reshape(shape) for y in (q, k, v)]


@program("jax")
def dot_product_attention():
    """Queries of four heads share the keys of two, with a bias and lengths of their own."""
    params = {
        "q": dense(8, 32, seed=1),
        "k": weight(8, 16, seed=2),
        "v": dense(8, 16, seed=3),
        "bias": normal(1, 4, 6, 6, seed=4),
    }

    def loss(params, batch):
        x, lengths, wanted = batch
        q, k, v = project(params, x, 8)
        y = jax.nn.dot_product_attention(
            q, k, v, bias=params["bias"], key_value_seq_lengths=lengths, scale=0.5
        )
        outputs = y.reshape(2, 6, 32)
        return mean_squared_error(outputs, wanted), {}

    batch = normal(2, 6, 8, seed=5), jnp.array([6, 4]), normal(2, 6, 32, seed=6)
    return Program(loss, params, batch)


@program("jax")
def attention_with_large_logits():
    """Logits above what float16 holds, which attention asks for in float32 itself."""
    params = {
        "q": dense(8, 16, seed=1),
        "k": weight(8, 16, seed=2),
        "v": dense(8, 16, seed=3),
    }

    def loss(params, batch):
        x, wanted = batch
        q, k, v = project(params, x, 16)
        q = 128.0 * q
        k = 128.0 * k
        scale = 1.0 / 128.0**2
        y = jax.nn.dot_product_attention(q, k, v, scale=scale)
        outputs = y.reshape(2, 6, 16)
        return mean_squared_error(outputs, wanted), {}

    batch = normal(2, 6, 8, seed=4), normal(2, 6, 16, seed=5)
    return Program(loss, params, batch)

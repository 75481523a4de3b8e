"""Each function of `jax.nn`, between the layers of a network."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from corpus import (
    Program,
    apply_dense,
    dense,
    mean_squared_error,
    normal,
    program,
    weight,
)


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


@program("jax")
def relu():
    return network_with(jax.nn.relu)


@program("jax")
def celu():
    return network_with(jax.nn.celu)


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

"""A network and its loss in plain JAX, for trainers that take a function of parameters."""

import jax
import jax.numpy as jnp
from runs import FACTOR, FEATURES, WIDTH


def init():
    first, last = jax.random.split(jax.random.key(0))
    return {
        "first": {
            "w": jax.random.normal(first, (FEATURES, WIDTH)) / FEATURES**0.5,
            "b": jnp.zeros(WIDTH),
        },
        "last": {
            "w": jax.random.normal(last, (WIDTH, 1)) / WIDTH**0.5,
            "b": jnp.zeros(1),
        },
    }


def mean_squared_error(params, x, y):
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    outputs = hidden @ params["last"]["w"] + params["last"]["b"]
    return jnp.mean((outputs - y) ** 2)


def small_loss(params, x, y):
    return FACTOR * mean_squared_error(params, x, y)

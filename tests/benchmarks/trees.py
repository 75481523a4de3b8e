"""The trees that are stepped: shapes of parameters, and gradients for them."""

import math

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "float16", "bfloat16")
GRADIENT = 1e-3  # the standard deviation of unscaled gradients


def gpt2(width, layers=12, positions=1024):
    """The shapes of GPT-2: 148 leaves at 12 layers, 124 million parameters at a width of 768.

    The vocabulary shrinks with the width, so that its share of the parameters stays.
    """
    block = {
        "norm_1/scale": (width,),
        "norm_1/bias": (width,),
        "attention/in/kernel": (width, 3 * width),
        "attention/in/bias": (3 * width,),
        "attention/out/kernel": (width, width),
        "attention/out/bias": (width,),
        "norm_2/scale": (width,),
        "norm_2/bias": (width,),
        "mlp/in/kernel": (width, 4 * width),
        "mlp/in/bias": (4 * width,),
        "mlp/out/kernel": (4 * width, width),
        "mlp/out/bias": (width,),
    }
    shapes = {"tokens": (50257 * width // 768, width), "positions": (positions, width)}
    shapes |= {
        f"{i:02}/{name}": shape for i in range(layers) for name, shape in block.items()
    }
    return shapes | {"norm/scale": (width,), "norm/bias": (width,)}


# For AdamW on a laptop and on a GPU, and for the tests.
SIZES = {
    "tiny": gpt2(16, layers=1, positions=16),
    "laptop": gpt2(192),
    "gpu": gpt2(768),
}


def size(shapes):
    """The number of parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


def avals(shapes, dtype, sharding=None):
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, shape in shapes.items()
    }


def params(shapes):
    """Parameters of order one, in float32."""
    return _normal(shapes, 0, 1.0, "float32")


def gradients(shapes, dtype, scale=1.0, seed=1):
    """Gradients times a loss scale, in the dtype that a backward pass gave them."""
    return _normal(shapes, seed, GRADIENT * scale, dtype)


ROWS = 8


def rows(shapes, dtype):
    """What each leaf is multiplied by in `products`: few rows, so that the step costs more."""
    return _normal(
        {name: (ROWS, shape[0]) for name, shape in shapes.items()}, 2, 1.0, dtype
    )


def products(dtype):
    """A loss of which the gradient of each leaf is a product of its own, in a dtype."""

    def loss_fn(params, rows):
        loss = jnp.float32(0)
        for name, param in params.items():
            w = param.astype(dtype)
            x = rows[name]
            y = x @ w if w.ndim == 2 else x * w
            squares = jnp.square(y.astype(jnp.float32))
            loss += GRADIENT * jnp.mean(squares)
        return loss

    return loss_fn


def _normal(shapes, seed, deviation, dtype):
    # Of one pool of numbers, begun at another place for each leaf: nothing is compiled for it.
    size = 2**18
    pool = deviation * np.random.default_rng(seed).standard_normal(size, np.float32)
    pool = np.concatenate([pool, pool]).astype(jnp.dtype(dtype))
    leaves = {}
    for index, (name, shape) in enumerate(shapes.items()):
        start = 7919 * index % size
        numbers = pool[start : start + size]
        leaves[name] = jnp.array(np.resize(numbers, shape))
    return leaves

"""Quantization with straight-through derivatives, and adapters of low rank."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from corpus import (
    Program,
    apply_dense,
    cross_entropy,
    dense,
    integers,
    mean_squared_error,
    normal,
    program,
    two_layers,
    weight,
)


@jax.custom_vjp
def rounded(x):
    """The nearest integer, with the derivative of the identity."""
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, cotangent: (cotangent,))


@program("jax")
def quantization_aware():
    """Weights and activations on 8 bits, rounded with a custom derivative, labels integers."""
    params = two_layers(12, 32, 5)
    batch = normal(16, 12, seed=3), integers(5, 16, seed=4)

    def quantize(x, axis):
        largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
        scale = jax.lax.stop_gradient(largest) / 127
        return rounded(x / scale) * scale

    def apply_layer(layer, x):
        return quantize(x, -1) @ quantize(layer["w"], 0) + layer["b"]

    def loss(params, batch):
        x, labels = batch
        hidden = jax.nn.relu(apply_layer(params["hidden"], x))
        return cross_entropy(apply_layer(params["head"], hidden), labels)

    return Program(loss, params, batch)


@jax.custom_jvp
def sign(x):
    return jnp.where(x > 0, 1.0, -1.0)


@sign.defjvp
def _sign_jvp(primals, tangents):
    (x,) = primals
    (dx,) = tangents
    return sign(x), jnp.where(jnp.abs(x) <= 1, dx, 0.0)


@program("linen")
def binary_network():
    """Weights of -1 and 1 with a custom forward derivative, and batch normalization."""

    class BinaryDense(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x):
            shape = (x.shape[-1], self.features)
            kernel = self.param("kernel", nn.initializers.normal(0.5), shape)
            product = x @ sign(kernel)
            return product / jnp.sqrt(x.shape[-1])

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = BinaryDense(32)(x)
            x = nn.BatchNorm(use_running_average=False)(x)
            x = BinaryDense(32)(sign(x))
            return nn.Dense(4)(x)

    model = Network()
    x = normal(16, 12, seed=1)
    labels = integers(4, 16, seed=2)
    variables = model.init(jax.random.key(0), x)

    def loss(params, stats, batch):
        x, labels = batch
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(variables, x, mutable=["batch_stats"])
        value, aux = cross_entropy(logits, labels)
        return value, (new["batch_stats"], aux)

    return Program(
        loss, variables["params"], (x, labels), state=variables["batch_stats"]
    )


@program("equinox")
def adapter_on_frozen_attention():
    """An adapter beside the projections of attention, whose own weights are stopped."""

    class Adapter(eqx.Module):
        base: eqx.nn.Linear
        down: jax.Array
        up: jax.Array

        def __init__(self, base, key):
            self.base = base
            self.down = jax.random.normal(key, (base.in_features, 4)) / 4
            self.up = jnp.full((4, base.out_features), 0.05)

        def __call__(self, x):
            frozen = jax.lax.stop_gradient(self.base.weight)
            return frozen @ x + (x @ self.down) @ self.up

    class Network(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        head: eqx.nn.Linear

        def __call__(self, x):
            y = self.attention(x, x, x)
            return self.head(jnp.mean(x + y, axis=0))

    keys = jax.random.split(jax.random.key(0), 4)
    attention = eqx.nn.MultiheadAttention(2, 16, key=keys[0])
    adapted = (
        Adapter(attention.query_proj, keys[1]),
        Adapter(attention.value_proj, keys[2]),
    )
    attention = eqx.tree_at(lambda a: (a.query_proj, a.value_proj), attention, adapted)
    model = Network(attention, eqx.nn.Linear(16, 4, key=keys[3]))

    def loss(model, batch):
        x, labels = batch
        return cross_entropy(jax.vmap(model)(x), labels)

    return Program(loss, model, (normal(8, 6, 16, seed=1), integers(4, 8, seed=2)))


@program("haiku")
def prefix_tuning():
    """Only a prefix of keys and values is trained; the attention layer of Haiku is frozen."""

    def network(x, prefix):
        prefixes = jnp.broadcast_to(prefix, (len(x), *prefix.shape))
        memory = jnp.concatenate([prefixes, x], axis=1)
        w_init = hk.initializers.VarianceScaling(1.0)
        attention = hk.MultiHeadAttention(2, 8, w_init=w_init)
        y = attention(x, memory, memory)
        pooled = jax.nn.relu(x + y).mean(1)
        return hk.Linear(4)(pooled)

    model = hk.without_apply_rng(hk.transform(network))
    x = normal(6, 5, 16, seed=1)
    prefix = normal(3, 16, seed=2)
    frozen = model.init(jax.random.key(0), x, prefix)

    def loss(params, batch):
        x, labels, frozen = batch
        logits = model.apply(frozen, x, params["prefix"])
        return cross_entropy(logits, labels)

    return Program(loss, {"prefix": prefix}, (x, integers(4, 6, seed=3), frozen))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def compressed_product(x, w, rank):
    """A product that keeps only a projection of its input for the backward pass."""
    return x @ w


def _compressed_forward(x, w, rank):
    projection = weight(x.shape[0], rank, seed=9)
    return x @ w, (projection.T @ x, projection, w)


def _compressed_backward(rank, residuals, cotangent):
    kept, projection, w = residuals
    return cotangent @ w.T, kept.T @ (projection.T @ cotangent)


compressed_product.defvjp(_compressed_forward, _compressed_backward)


@program("jax")
def compressed_activations():
    """A layer with a backward rule of its own, in which there are more products."""
    params = two_layers(12, 24, 3)

    def loss(params, batch):
        x, wanted = batch
        layer = params["hidden"]
        hidden = compressed_product(x, layer["w"], 8) + layer["b"]
        outputs = apply_dense(params["head"], jax.nn.tanh(hidden))
        return mean_squared_error(outputs, wanted), {}

    return Program(loss, params, (normal(16, 12, seed=3), normal(16, 3, seed=4)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product_of_integers(multiply, x, w):
    """A product of rows and columns on 8 bits, with the derivative of the product itself."""
    return multiply_integers(multiply, x, w)


def multiply_integers(multiply, x, w):
    def quantize(x, axis):
        scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127
        return jnp.round(x / scale).astype(jnp.int8), scale

    rows, row_scales = quantize(x, -1)
    columns, column_scales = quantize(w, 0)
    product = multiply(rows, columns, preferred_element_type=jnp.float32)
    return product * row_scales * column_scales


def _integers_forward(multiply, x, w):
    return multiply_integers(multiply, x, w), (x, w)


def _integers_backward(multiply, residuals, cotangent):
    x, w = residuals
    return cotangent @ w.T, x.T @ cotangent


product_of_integers.defvjp(_integers_forward, _integers_backward)


def convolve_rows(rows, columns, **options):
    """A product of matrices, as a convolution of pixels."""
    window = (1, 1)
    pixels = jnp.expand_dims(rows, (1, 2))
    kernel = jnp.expand_dims(columns, (0, 1))
    layout = ("NHWC", "HWIO", "NHWC")
    product = jax.lax.conv_general_dilated(
        pixels, kernel, window, "VALID", dimension_numbers=layout, **options
    )
    return jnp.squeeze(product, (1, 2))


@program("jax")
def products_of_integers():
    """W8A8: layers on 8-bit integers, whose sums are beyond float16, between float32 layers."""
    ways = {
        "dot": jax.lax.dot,
        "matmul": jnp.matmul,
        "einsum": functools.partial(jnp.einsum, "ij,jk->ik"),
        "convolution": convolve_rows,
    }
    params = two_layers(12, 24, 3)
    for i, name in enumerate(ways):
        params[name] = dense(24, 24, seed=10 + i)

    def loss(params, batch):
        x, wanted = batch
        x = jax.nn.tanh(apply_dense(params["hidden"], x))
        for name, multiply in ways.items():
            layer = params[name]
            x = jax.nn.tanh(product_of_integers(multiply, x, layer["w"]) + layer["b"])
        outputs = apply_dense(params["head"], x)
        return mean_squared_error(outputs, wanted), {}

    return Program(loss, params, (normal(16, 12, seed=3), normal(16, 3, seed=4)))

"""Quantization with straight-through derivatives, and adapters of low rank."""

import equinox as eqx
import jax
import jax.numpy as jnp
from corpus import (
    Program,
    cross_entropy,
    integers,
    normal,
    program,
    two_layers,
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

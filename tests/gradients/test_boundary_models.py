"""`scale_backward` with models of other libraries."""

import functools
import itertools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tables import assert_same_bits, cases

from jaxscale import scale_backward

pytestmark = pytest.mark.standard_promotion

HALF, SMALL = jnp.float16, 2.0**-30
rng = np.random.default_rng(0)
X = jnp.asarray(rng.standard_normal((16, 8)), jnp.float32)
Y = jnp.asarray(rng.standard_normal((16, 4)), jnp.float32)


def assert_near(got, expected, factor=SMALL):
    """Gradients are those of float32 but for float16's accuracy, which a normalization doubles."""
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    norm = np.sqrt(sum(np.sum(np.square(e, dtype=np.float64)) for e in expected))
    for g, e in zip(got, expected, strict=True):
        assert np.linalg.norm(np.asarray(g, np.float64) / factor - e) < 5e-3 * norm


class Linen(nn.Module):
    dtype: object = HALF

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(16, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(x))
        self.sow("intermediates", "hidden", x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(4, dtype=self.dtype)(x).astype(jnp.float32)


def linen_loss(apply, factor):
    def loss_fn(params, variables, key):
        out, updates = apply(
            {"params": params} | variables,
            X,
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats", "intermediates"],
        )
        return factor * jnp.mean((out - Y) ** 2), updates

    return loss_fn


LINEN = {
    "apply": lambda: linen_loss(scale_backward(Linen().apply), SMALL),
    "loss": lambda: scale_backward(linen_loss(Linen().apply, SMALL)),
}


@cases("place", LINEN, fast=["apply"])
def test_linen_with_mutable_collections(place):
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(Linen().init)(keys, X)
    args = variables["params"], {"batch_stats": variables["batch_stats"]}, jax.random.key(2)

    def grad(loss):
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)

    outputs, grads = grad(LINEN[place]())
    assert_same_bits(outputs, grad(linen_loss(Linen().apply, SMALL))[0])
    assert_near(grads, grad(linen_loss(Linen(jnp.float32).apply, 1.0))[1])


class Network(nnx.Module):
    def __init__(self, rngs, dtype=HALF):
        self.first = nnx.Linear(8, 16, dtype=dtype, rngs=rngs)
        self.lora = nnx.LoRA(16, 2, 16, dtype=dtype, rngs=rngs)
        self.lora.lora_b[...] = jnp.full((2, 16), 0.1)
        self.norm = nnx.BatchNorm(16, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, 4, dtype=dtype, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.rngs = rngs  # of which any attribute is a stream

    def __call__(self, x):
        self.calls[...] += 1
        x = self.first(x)
        x = self.dropout(nnx.relu(self.norm(x + self.lora(x))))
        return self.last(x).astype(jnp.float32)

    def loss(self, factor=SMALL):
        return factor * jnp.mean((self(X) - Y) ** 2)


NNX = {
    "loss": lambda m: scale_backward(lambda m: m.loss())(m),
    "module": lambda m: SMALL * jnp.mean((scale_backward(m)(X) - Y) ** 2),
    "method": lambda m: scale_backward(m.loss)(),
    "keyword": lambda m: scale_backward(lambda *, model: model.loss())(model=m),
}


ARGNUMS = {"all": 0, "LoRA": nnx.DiffState(0, nnx.LoRAParam)}


@cases(
    "place, wrt",
    itertools.product(NNX, ARGNUMS),
    fast=[("loss", "LoRA"), ("module", "LoRA")],
)
def test_nnx_keeps_what_the_forward_pass_changes(place, wrt):
    def run(loss, dtype=HALF):
        model = Network(nnx.Rngs(0), dtype)
        loss, grads = nnx.jit(nnx.value_and_grad(loss, argnums=ARGNUMS[wrt]))(model)
        return loss, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))), grads

    *numbers, grads = run(NNX[place])
    assert_same_bits(numbers, list(run(lambda m: m.loss())[:2]))
    assert_near(grads, run(lambda m: m.loss(1.0), jnp.float32)[2])
    assert numbers[1]["calls"] == 1


class Equinox(eqx.Module):
    layers: list
    act: object

    def __call__(self, x, *, dtype=HALF):
        for layer in self.layers:
            w, b = layer.weight.astype(dtype), layer.bias.astype(dtype)
            x = self.act(x.astype(dtype) @ w.T + b)
        return x.astype(jnp.float32)


def equinox_loss(call, factor=SMALL):
    return lambda model: factor * jnp.mean((call(model)(X) - Y) ** 2)


EQUINOX = {
    "loss": scale_backward(equinox_loss(lambda model: model)),
    "module": equinox_loss(scale_backward),
    "method": equinox_loss(lambda model: scale_backward(model.__call__)),
}


@cases("place", EQUINOX, fast=["module"])
def test_equinox(place):
    keys = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(8, 16, key=keys[0]), eqx.nn.Linear(16, 4, key=keys[1])]
    model = Equinox(layers, jnp.tanh)
    _, grads = eqx.filter_jit(eqx.filter_value_and_grad(EQUINOX[place]))(model)
    full = equinox_loss(lambda model: functools.partial(model, dtype=jnp.float32), 1.0)
    assert_near(grads, eqx.filter_jit(eqx.filter_grad(full))(model))

"""Models of libraries with `scale_backward`: their gradients, and whatever else they return.

Each row of `BUILT` makes both, of a model in which `scale_backward`, or nothing, is in its place.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from scaled_networks import HALF, SMALL, X, Y, error
from tables import assert_same_bits, cases, unchanged

from jaxscale import scale_backward


@pytest.mark.standard_promotion
def test_a_dense_layer_has_its_small_gradient():
    layer = nn.Dense(1, use_bias=False, dtype=jnp.float16)

    def loss(params):
        output = layer.apply(params, jnp.ones((1, 1)))
        return 2.0**-30 * output.astype(jnp.float32)[0, 0]

    params = {"params": {"kernel": jnp.ones((1, 1))}}
    assert jax.tree.leaves(jax.grad(loss)(params)) == [0]
    assert jax.tree.leaves(jax.grad(scale_backward(loss))(params)) == [2.0**-30]


class Linen(nn.Module):
    dtype: object

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        self.sow("intermediates", "hidden", x)
        x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dense(8, dtype=self.dtype)(x).astype(jnp.float32)


def run_linen(wrap_apply, wrap_loss, dtype, factor):
    model = Linen(dtype)
    apply = wrap_apply(model.apply)
    keys = [jax.random.key(i) for i in range(3)]
    variables = jax.jit(model.init)({"params": keys[0], "dropout": keys[1]}, X)
    options = {
        "rngs": {"dropout": keys[2]},
        "mutable": ["batch_stats", "intermediates"],
    }

    def loss_fn(params):
        out, updates = apply(variables | {"params": params}, X, **options)
        return factor * jnp.mean((out - Y) ** 2), updates

    return jax.jit(jax.value_and_grad(wrap_loss(loss_fn), has_aux=True))(
        variables["params"]
    )


class Network(nnx.Module):
    def __init__(self, dtype):
        self.rngs = nnx.Rngs(0)  # of which any attribute is a stream
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        options = {"dtype": dtype, "rngs": self.rngs}
        lora = nnx.LoRA(8, 2, 16, base_module=nnx.Linear(8, 16, **options), **options)
        lora.lora_b[...] = jnp.full((2, 16), 0.1)
        self.layers = nnx.Sequential(
            lora,
            nnx.BatchNorm(16, **options),
            nnx.relu,
            nnx.Dropout(0.5, rngs=self.rngs),
            nnx.Linear(16, 8, **options),
        )

    def __call__(self, x):
        self.calls[...] += 1
        return self.layers(x).astype(jnp.float32)


def run_nnx(place, argnums, wrap, dtype, factor):
    model = Network(dtype)
    loss_fn = functools.partial(PLACES[place], wrap, factor)
    loss, grads = nnx.jit(nnx.value_and_grad(loss_fn, argnums=argnums))(model)
    variables = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))
    return (loss, variables), grads


def mean_of(factor, model):
    return factor * jnp.mean((model(X) - Y) ** 2)


def wrap_keyword(wrap, factor, model):
    return wrap(lambda *, model: mean_of(factor, model))(model=model)


PLACES = {
    "loss": lambda wrap, factor, model: wrap(mean_of)(factor, model),
    "module": lambda wrap, factor, model: mean_of(factor, wrap(model)),
    "method": lambda wrap, factor, model: mean_of(factor, wrap(model.__call__)),
    "keyword": wrap_keyword,
}
LORA = nnx.DiffState(0, nnx.LoRAParam)
BUILT = {
    "Linen, apply": lambda wrap, *options: run_linen(wrap, unchanged, *options),
    "Linen, loss": functools.partial(run_linen, unchanged),
}
for place in PLACES:
    BUILT[f"NNX, {place}"] = functools.partial(run_nnx, place, 0)
    BUILT[f"NNX, {place}, LoRA"] = functools.partial(run_nnx, place, LORA)


@pytest.mark.worlds
@pytest.mark.standard_promotion
@cases("name", BUILT, fast=["Linen, apply", "NNX, module"])
def test_models_of_libraries_have_their_gradients_and_change_as_they_do(name):
    others, grads = BUILT[name](scale_backward, HALF, SMALL)
    plain_others, _ = BUILT[name](unchanged, HALF, SMALL)
    assert_same_bits(others, plain_others)
    _, expected = BUILT[name](unchanged, jnp.float32, 1.0)
    # normalization doubles what float16 loses
    assert error(grads, expected, SMALL) < 5e-3

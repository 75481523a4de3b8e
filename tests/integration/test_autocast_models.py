"""`autocast` with models of other libraries, over devices, and what it costs."""

import collections
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import COMPILED
from flax import nnx
from half_programs import primitives, products
from jaxpr_equations import residual_bytes
from sequence import Transformer
from tables import cases, unchanged

import jaxscale
from jaxscale._autocast import table
from jaxscale._jax import jaxprs
from jaxscale.diagnostics._switches import places

pytestmark = pytest.mark.standard_promotion


def test_a_layer_of_nnx_rounds_what_it_multiplies():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.array([[1 + 2.0**-12, 0], [0, 2]])
    assert jaxscale.autocast(layer)(jnp.ones((1, 2))).tolist() == [[1, 2]]


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 64)))


@functools.cache
def transformer(kind, dtype=jnp.float32):
    model = nn.Sequential([Transformer(kind, 32, dtype), nn.Dense(32, dtype=dtype)])
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels

    def loss_fn(params, tokens):
        logits = model.apply(params, tokens).astype(jnp.float32)
        return jnp.mean(cross_entropy(logits[:, :-1], tokens[:, 1:]))

    return loss_fn, jax.jit(model.init)(jax.random.key(0), TOKENS)


kinds = cases(
    "kind",
    ["unrolled", "scanned", "remat", "scanned remat"],
    fast=["scanned remat"],
    shared=True,
)


@pytest.mark.worlds
@kinds
def test_a_transformer_keeps_no_more_than_one_written_in_float16(kind):
    plain, params = transformer(kind)
    by_hand, _ = transformer(kind, jnp.float16)
    ours = residual_bytes(jaxscale.autocast(plain), params, TOKENS)
    assert ours <= 1.1 * residual_bytes(by_hand, params, TOKENS)
    assert ours < residual_bytes(plain, params, TOKENS)


def gated(x):
    values, gates = jnp.split(x, 2, -1)
    return values * nn.silu(gates)


def multiplied_in_jit(x):
    return jax.jit(lambda x: nn.gelu(x) @ jnp.eye(64, dtype=x.dtype))(x)


AFTER = {"relu": nn.relu, "gelu": nn.gelu, "tanh": nn.tanh, "softplus": nn.softplus}
AFTER |= {"gated": gated, "jit": multiplied_in_jit}


@pytest.mark.worlds
@cases("kind", AFTER, fast=["gated"])
def test_layers_with_biases_keep_no_more_than_those_written_in_float16(kind):
    def layers(dtype):
        first, second, third = (nn.Dense(64, dtype=dtype) for _ in range(3))
        after = AFTER[kind]
        return nn.Sequential([first, after, second, after, third, after])

    def loss_fn(params, x, dtype=jnp.float32):
        return jnp.sum(layers(dtype).apply(params, x).astype(jnp.float32) ** 2)

    x = jnp.ones((64, 64))
    params = jax.jit(layers(jnp.float32).init)(jax.random.key(0), x)
    by_hand = functools.partial(loss_fn, dtype=jnp.float16)
    ours = residual_bytes(jaxscale.autocast(loss_fn), params, x)
    assert ours <= 1.02 * residual_bytes(by_hand, params, x)


@pytest.mark.worlds
@kinds
@cases("differentiate", [unchanged, jax.grad])
def test_a_program_has_half_as_many_equations_more_at_most(differentiate, kind):
    # Tracing and compiling take as long as there are equations.
    plain, params = transformer(kind)
    cast = differentiate(jaxscale.autocast(plain))
    number = len(primitives(differentiate(plain), params, TOKENS))
    assert len(primitives(cast, params, TOKENS)) <= 1.5 * number


PLACED = table.PRODUCTS | {"tanh", "exp", "rsqrt", "log"}


class Operation(NamedTuple):
    """An operation, with its source line and its layer."""

    name: str
    line: str
    layer: str


def walk_operations(jaxpr, around=()):
    for eqn in jaxpr.eqns:
        for inner in jaxprs.programs(eqn):
            yield from walk_operations(inner, (*around, eqn))
        if eqn.primitive.name in PLACED:
            line = str(places.find_line(eqn, around))
            yield Operation(eqn.primitive.name, line, places.find_layer(eqn, around))


def count_operations(fun, *args):
    return collections.Counter(walk_operations(jax.make_jaxpr(fun)(*args)))


@kinds
def test_lines_and_scopes_are_those_of_the_model(kind):
    plain, params = transformer(kind)
    expected = count_operations(plain, params, TOKENS)
    actual = count_operations(jaxscale.autocast(plain), params, TOKENS)
    assert expected.total() >= 16
    assert set(actual) == set(expected)
    # Operations in float32 between products may be computed more than once.
    assert actual >= expected
    layers = [operation.layer for operation in expected]
    assert any("Dense" in layer or "Attention" in layer for layer in layers)


class Network(nnx.Module):
    """It changes itself as it runs, by its batch statistics."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


IMAGES = jnp.asarray(np.random.default_rng(0).standard_normal((16, 8)), jnp.float32)


@pytest.mark.slow
def test_a_function_called_eagerly_compiles_once():
    layer = jax.jit(lambda x, w: jax.nn.gelu(x @ w))
    fun = jaxscale.autocast(lambda x, w: layer(layer(x, w), w))
    x = jnp.ones((3, 3))
    before = len(COMPILED)
    fun(x, x)
    after_first = len(COMPILED)
    assert before < after_first
    fun(x, x)
    assert len(COMPILED) == after_first


both_jits = cases("jit", [jax.jit, nnx.jit], fast=[nnx.jit])


@both_jits
def test_a_module_from_outside_of_a_jit_is_read(jit):
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    by_argument = jaxscale.autocast(lambda model, x: model(x))
    for fun in (jaxscale.autocast(model), lambda x: by_argument(model, x)):
        actual = jit(fun)(IMAGES)
        np.testing.assert_allclose(actual, model(IMAGES), rtol=0.02, atol=5e-3)


@pytest.mark.worlds
@both_jits
def test_a_module_from_outside_of_a_jit_that_changes_is_an_error_and_stays_whole(jit):
    changing = Network()
    with pytest.raises(Exception, match="from a different trace level"):
        jit(jaxscale.autocast(changing))(IMAGES)
    assert changing(IMAGES).shape == (16, 4)


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, x):
        norm = nn.BatchNorm(use_running_average=False)
        x = jaxscale.full_precision(norm)(nn.Dense(8)(x))
        return jaxscale.full_precision(nn.Dense(4))(x)


@pytest.mark.worlds
def test_full_precision_takes_layers_of_linen():
    model = Mixed()
    variables = model.init(jax.random.key(0), IMAGES)

    def loss_fn(params, x):
        outputs, updated = model.apply(
            variables | {"params": params}, x, mutable="batch_stats"
        )
        return jnp.mean(outputs**2), updated

    cast = jaxscale.autocast(loss_fn)
    params = variables["params"]
    assert products(cast, params, IMAGES) == ["float16", "float32"]
    both_passes = products(jax.grad(cast, has_aux=True), params, IMAGES)
    # The first layer needs no gradient of its inputs.
    assert sorted(both_passes) == ["float16"] * 2 + ["float32"] * 3


def test_full_precision_may_change_a_module_of_nnx_that_it_closes_over():
    model = Network()

    def loss_fn(model, x):
        part = jaxscale.full_precision(lambda x: model.norm(x))
        return jnp.mean(model.last(part(model.first(x))) ** 2)

    before = model.norm.mean[...]
    nnx.jit(nnx.grad(jaxscale.autocast(loss_fn)))(model, IMAGES)
    assert not np.array_equal(model.norm.mean[...], before)

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
from half_programs import assert_near_by_norm, primitives, products
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import residual_bytes
from tables import cases, unchanged

import jaxscale
from jaxscale import _jaxprs
from jaxscale._autocast import table
from jaxscale.diagnostics._switches import places

pytestmark = pytest.mark.standard_promotion


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 64)))


class Block(nn.Module):
    dtype: object

    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(2, dtype=self.dtype)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + attention(h, h, mask=mask)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(128, dtype=self.dtype)(h))
        return x + nn.Dense(32, dtype=self.dtype)(h), None


class Transformer(nn.Module):
    kind: str  # whether its layers are unrolled or scanned, with or without remat
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 32, dtype=self.dtype)(tokens)
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
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(32, dtype=self.dtype)(x)


@functools.cache
def transformer(kind, dtype=jnp.float32):
    model = Transformer(kind, dtype)
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
        for inner in _jaxprs.programs(eqn):
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
    """It changes itself as it runs: batch statistics, the dropout's keys and a counter."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.shared = self.first
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        hidden = nnx.relu(self.norm(self.first(x)))
        return self.last(self.dropout(hidden))


IMAGES = jnp.asarray(np.random.default_rng(0).standard_normal((16, 8)), jnp.float32)


def leaves_of_kind(model, kind):
    return jax.tree.leaves(nnx.state(model, kind))


@pytest.mark.worlds
@cases("jit", [nnx.jit, unchanged], fast=[nnx.jit])
def test_an_nnx_module_is_changed_in_place(jit):
    def nnx_loss(model, x):
        return jnp.mean((model(x) - 1.0) ** 2)

    cast_loss = jaxscale.autocast(nnx_loss)
    state = jaxscale.DynamicLossScale().init()
    ours = jit(jaxscale.value_and_grad(cast_loss, state, transform=nnx.value_and_grad))
    theirs = jit(nnx.value_and_grad(nnx_loss))
    plain = Network()
    cast = Network()
    for _ in range(2):
        loss, gradients = theirs(plain, IMAGES)
        half_loss, half_gradients = ours(cast, IMAGES)
        np.testing.assert_allclose(half_loss, loss, rtol=2e-3)
        assert jax.tree.structure(half_gradients) == jax.tree.structure(gradients)
    assert cast.calls[...] == 2
    assert cast.shared is cast.first
    stats = leaves_of_kind(cast, nnx.BatchStat)
    for a, b in zip(stats, leaves_of_kind(plain, nnx.BatchStat), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4)
    keys = leaves_of_kind(cast, nnx.RngState)
    assert str(keys) == str(leaves_of_kind(plain, nnx.RngState))


def mlp(params, x):
    hidden = jax.nn.gelu(x @ params["in"] + params["bias"])
    outputs = jax.nn.softmax(hidden @ params["out"])
    # float16 would flush those of a mean
    return jnp.sum(outputs.astype(jnp.float32) ** 2)


MLP = {
    "in": jnp.linspace(-1.0, 1.0, 16 * 32).reshape(16, 32),
    "bias": jnp.zeros(32),
    "out": jnp.linspace(1.0, -1.0, 32 * 8).reshape(32, 8),
}
X = jnp.linspace(0.1, 1.0, 16 * 16).reshape(16, 16)


SPECS = {"in_specs": (P(), P("data")), "out_specs": P()}


def by_shard_map(run, **options):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(run, mesh=mesh, **SPECS, **options))


def by_pmap(run):
    mapped = jax.pmap(run, "data", in_axes=(None, 0))
    return lambda params, x: mapped(params, x.reshape(8, 2, 16))


MAPS = {
    "shard_map": by_shard_map,
    "shard_map, unchecked": functools.partial(by_shard_map, check_vma=False),
    "pmap": by_pmap,
}


@pytest.mark.worlds
@cases("name", MAPS, fast=["shard_map"])
def test_inside_and_outside_of_what_maps_a_step_over_devices(name):
    def step(fun):
        def run(params, x):
            return jax.lax.pmean(jax.value_and_grad(fun)(params, x), "data")

        return MAPS[name](run)

    plain = step(mlp)(MLP, X)
    inside = step(jaxscale.autocast(mlp))
    outside = jaxscale.autocast(step(mlp))
    assert_near_by_norm(inside(MLP, X), plain, share=0.015)
    assert_near_by_norm(outside(MLP, X), plain, share=0.015)
    assert set(products(outside, MLP, X)) == {"float16"}


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

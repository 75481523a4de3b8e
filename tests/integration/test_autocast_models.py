"""`autocast` with models of other libraries, over devices, and what it costs."""

import collections
import functools

import casts
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxprs
import models
import numpy as np
import pytest
from compilations import COMPILED
from flax import nnx
from half_programs import equations, products
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import avals, cases

import jaxscale
from jaxscale._autocast import table
from jaxscale._jax import programs
from jaxscale.diagnostics._trace import places

pytestmark = pytest.mark.standard_promotion

# The largest share of what Flax' own float16 keeps: by default, and with `half_carries`.
KEPT = {
    "transformer, unrolled": (0.83, 0.83),
    "transformer, scanned and remat": (1.21, 0.75),
    "ResNet with batch norm": (0.54, 0.54),
}


@cases("kind", KEPT, fast=["transformer, scanned and remat"])
def test_a_model_keeps_as_much_as_one_written_in_float16(kind):
    task = models.MODELS[kind]("laptop")
    params, batch = jax.eval_shape(task.init), task.batch(0)

    def kept(loss_fn):
        return jaxprs.residual_bytes(lambda params: loss_fn(params, batch), params)

    expected, plain = kept(casts.flax_dtype(task)), kept(casts.float32(task))
    for cast, share in zip((casts.autocast, casts.half_carries), KEPT[kind], strict=True):
        assert kept(cast(task)) <= min(share * expected, 0.95 * plain)


class Layers(nn.Module):
    """Layers with biases, and one kind of operation after each."""

    kind: str
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = AFTER[self.kind](nn.Dense(64, dtype=self.dtype)(x))
        return nn.Dense(8, dtype=self.dtype)(x)


def gated(x):
    one, other = jnp.split(x, 2, -1)
    return one * nn.silu(other)


def normalized(x):
    return nn.gelu(nn.LayerNorm(use_scale=False, use_bias=False, dtype=x.dtype)(x))


def scanned(x):
    weights = jnp.ones((4, 64, 64), x.dtype)
    return jax.lax.scan(lambda x, w: (x, nn.gelu(x @ w)), x, weights)[1].sum(0)


AFTER = {
    **{name: getattr(nn, name) for name in ("relu", "gelu", "tanh", "softplus")},
    "dropped": lambda x: jnp.where(jnp.arange(64) % 7 > 0, nn.relu(x) / 0.9, 0.0),
    "gated": gated,
    "normalized": normalized,
    "scanned": scanned,
    "named": lambda x: nn.gelu(checkpoint_name(x, "sum")),
    "residual": lambda x: x + nn.Dense(64, dtype=x.dtype)(nn.relu(x)),
}


@cases("kind", AFTER, fast=["gated"])
def test_layers_with_biases_keep_no_more_than_those_written_in_float16(kind):
    x = jnp.ones((64, 64))
    params = Layers(kind).init(jax.random.key(0), x)

    def kept(dtype, wrap):
        model = Layers(kind, dtype)
        loss_fn = wrap(lambda params: jnp.sum(model.apply(params, x).astype(jnp.float32) ** 2))
        kept = jax.eval_shape(lambda params: jax.vjp(loss_fn, params)[1], params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))

    assert kept(jnp.float32, jaxscale.autocast) <= 1.02 * kept(jnp.float16, lambda fun: fun)


@cases("kind", models.MODELS, fast=["transformer, scanned and remat"])
def test_lines_and_scopes_are_those_of_the_model_and_the_program_grows_by_half_at_most(kind):
    task = models.MODELS[kind]("tiny")
    params, batch = jax.eval_shape(task.init), task.batch(0)

    def found(fun):
        where = collections.Counter()

        def visit(jaxpr, around):
            for eqn in jaxpr.eqns:
                for each in programs(eqn):
                    visit(each, (*around, eqn))
                if eqn.primitive.name in table.PRODUCTS | {"tanh", "exp", "rsqrt", "log"}:
                    line = places.lines(eqn, around)[0]
                    where[eqn.primitive.name, str(line), places.layer(eqn, around)] += 1

        traced = [jax.make_jaxpr(each)(params, batch) for each in (fun, jax.grad(fun))]
        visit(traced[0], ())
        return where, [len(list(equations(jaxpr))) for jaxpr in traced]

    (expected, before), (actual, after) = found(casts.float32(task)), found(casts.autocast(task))
    assert sum(expected.values()) >= 16
    assert any("Dense" in layer for _, _, layer in expected)
    assert set(actual) == set(expected)
    # Operations in float32 between products may be computed more than once.
    assert all(actual[key] >= number for key, number in expected.items())
    assert all(np.divide(after, before) <= 1.5)


class Network(nnx.Module):
    """It changes itself as it runs: batch statistics, the dropout's keys and a counter."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)
        self.shared = self.first
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


IMAGES = jnp.asarray(np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32))


def nnx_loss(model, x):
    return jnp.mean((model(x) - 1.0) ** 2)


@cases("jit", [nnx.jit, lambda fun: fun], fast=[nnx.jit])
def test_an_nnx_module_is_changed_in_place(jit):
    plain, cast = Network(), Network()
    for _ in range(2):
        loss, gradients = jit(nnx.value_and_grad(nnx_loss))(plain, IMAGES)
        ours = jit(nnx.value_and_grad(jaxscale.autocast(nnx_loss)))(cast, IMAGES)
        np.testing.assert_allclose(ours[0], loss, rtol=2e-3)
        assert jax.tree.structure(ours[1]) == jax.tree.structure(gradients)
    assert cast.calls[...] == 2
    assert cast.shared is cast.first
    stats = (jax.tree.leaves(nnx.state(model, nnx.BatchStat)) for model in (cast, plain))
    for a, b in zip(*stats, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4)
    keys, expected = (jax.tree.leaves(nnx.state(m, nnx.RngState)) for m in (cast, plain))
    assert list(map(str, keys)) == list(map(str, expected))


@pytest.mark.slow
def test_a_module_or_a_method_is_a_function_too():
    plain, cast = Network(), Network()
    lora = nnx.LoRALinear(8, 4, lora_rank=2, rngs=nnx.Rngs(0))  # it holds a class of variables
    for fun, same in ((cast, plain), (cast.__call__, plain), (nnx.clone(lora), lora)):
        expected = same(IMAGES)
        np.testing.assert_allclose(jaxscale.autocast(fun)(IMAGES), expected, rtol=0.02, atol=5e-3)
    assert cast.calls[...] == 2
    model = eqx.nn.MLP(8, 4, 16, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    assert products(jaxscale.autocast(model), IMAGES[0]) == [{"float16"}] * 3


@cases("jit", [jax.jit, nnx.jit], fast=[nnx.jit])
def test_a_module_from_outside_of_a_jit_is_read_and_stays_whole(jit):
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    expected = model(IMAGES)
    by_argument = jaxscale.autocast(lambda model, x: model(x))
    for fun in (jaxscale.autocast(model), lambda x: by_argument(model, x)):
        np.testing.assert_allclose(jit(fun)(IMAGES), expected, rtol=0.02, atol=5e-3)
    changing = Network()
    with pytest.raises(Exception, match="from a different trace level"):
        jit(jaxscale.autocast(changing))(IMAGES)
    assert changing(IMAGES).shape == (16, 4)


def test_full_precision_may_change_a_module_of_nnx_that_it_closes_over():
    model = Network()

    def loss_fn(model, x):
        part = jaxscale.full_precision(lambda x: model.norm(x))
        return jnp.mean(model.last(part(model.first(x))) ** 2)

    before = model.norm.mean[...]
    nnx.jit(nnx.grad(jaxscale.autocast(loss_fn)))(model, IMAGES)
    assert not np.array_equal(model.norm.mean[...], before)


class Mixed(nn.Module):
    """Layers that run as they are written, one of which keeps statistics."""

    @nn.compact
    def __call__(self, x):
        x = jaxscale.full_precision(nn.BatchNorm(use_running_average=False))(nn.Dense(8)(x))
        return jaxscale.full_precision(nn.Dense(4))(x)


def test_full_precision_takes_layers_of_linen():
    variables = Mixed().init(jax.random.key(0), IMAGES)

    def loss_fn(variables):
        outputs, _ = Mixed().apply(variables, IMAGES, mutable="batch_stats")
        return jnp.mean(outputs**2)

    cast = jaxscale.autocast(loss_fn)
    assert products(cast, variables) == [{"float16"}, {"float32"}]
    backward = products(jax.grad(cast), variables)
    assert backward.count({"float32"}) == 3
    assert len(backward) == 2 + 3  # the first layer needs no gradient of its inputs


def mlp(params, x, dtype=jnp.float32):
    params, x = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, x))
    h = jax.nn.gelu(x @ params["in"] + params["bias"])
    outputs = jax.nn.softmax(h @ params["out"]).astype(jnp.float32)
    return jnp.sum(outputs**2)  # float16 would flush those of a mean


MLP = {
    "in": jnp.linspace(-1.0, 1.0, 16 * 32).reshape(16, 32),
    "bias": jnp.zeros(32),
    "out": jnp.linspace(1.0, -1.0, 32 * 8).reshape(32, 8),
}
X = jnp.linspace(0.1, 1.0, 16 * 16).reshape(16, 16)


def assert_near(actual, expected, share=0.015):
    """Each leaf differs by a small share of its norm: single elements are sums that cancel."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= share * np.linalg.norm(b)


def test_gradients_are_nearer_than_those_of_a_model_written_in_float16():
    expected = jax.jit(jax.grad(mlp))(MLP, X)
    assert_near(jax.jit(jax.grad(jaxscale.autocast(mlp)))(MLP, X), expected, 0.01)
    by_hand = jax.jit(jax.grad(functools.partial(mlp, dtype=jnp.float16)))
    with pytest.raises(AssertionError):  # its softmax cancels in float16
        assert_near(by_hand(MLP, X), expected, 0.02)


def on_mesh(kind):
    """Two axes of devices, and where the parameters are on them."""
    specs = {"in": P(None, "model"), "bias": P("model"), "out": P("model")}
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    return mesh, {name: jax.device_put(MLP[name], NamedSharding(mesh, specs[name])) for name in MLP}


def test_arrays_stay_where_they_are():
    mesh, params = on_mesh(AxisType.Auto)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    plain = jax.jit(jax.value_and_grad(mlp))(params, x)
    cast = jax.jit(jax.value_and_grad(jaxscale.autocast(mlp)))(params, x)
    assert_near(cast, plain)
    for a, b in zip(jax.tree.leaves(cast), jax.tree.leaves(plain), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this version of JAX has no set_mesh")
def test_meshes_with_explicit_axes():
    mesh, params = on_mesh(AxisType.Explicit)

    def fun(params, x):
        h = jax.nn.gelu(x @ params["in"] + params["bias"])
        return jnp.mean(jnp.square(h.T @ x)), h

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P()))
        for given in (fun, jax.jit(fun)):
            cast = jaxscale.autocast(given)
            assert jax.typeof(cast(params, x)[1]) == jax.typeof(given(params, x)[1])
            assert products(cast, params, x) == [{"float16"}] * 2
            gradients = jax.jit(jax.grad(cast, has_aux=True))(params, x)
            assert avals(gradients) == avals(jax.jit(jax.grad(given, has_aux=True))(params, x))


def by_shard_map(check):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check}
    return lambda run: jax.jit(jax.shard_map(run, mesh=mesh, **specs))


MAPS = {
    "shard_map": (by_shard_map(True), X),
    "shard_map, unchecked": (by_shard_map(False), X),
    "pmap": (lambda run: jax.pmap(run, "data", in_axes=(None, 0)), X.reshape(8, 2, 16)),
}


@cases("name", MAPS, fast=["shard_map"])
def test_inside_and_outside_of_what_maps_a_step_over_devices(name):
    mapped, x = MAPS[name]

    def step(fun):
        return mapped(lambda p, x: jax.lax.pmean(jax.value_and_grad(fun)(p, x), "data"))

    plain = step(mlp)(MLP, x)
    for half in (step(jaxscale.autocast(mlp)), jaxscale.autocast(step(mlp))):
        assert_near(half(MLP, x), plain)
    assert set(map(str, products(half, MLP, x))) == {"{'float16'}"}


@pytest.mark.slow
def test_a_function_called_eagerly_compiles_once():
    layer = jax.jit(lambda x, w: jax.nn.gelu(x @ w))
    fun = jaxscale.autocast(lambda x, w: layer(layer(x, w), w))
    x, counts = jnp.ones((3, 3)), [len(COMPILED)]
    for _ in range(2):
        fun(x, x)
        counts.append(len(COMPILED))
    assert counts[0] < counts[1] == counts[2]

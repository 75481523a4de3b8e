"""`autocast` with models of other libraries, over devices, and what it costs."""

import collections
import contextlib
import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import COMPILED
from flax import nnx
from half_programs import primitives, products
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import avals, cases

import jaxscale
from jaxscale import _jax
from jaxscale._autocast import table
from jaxscale.diagnostics._trace import places

pytestmark = pytest.mark.standard_promotion

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 64)))


class Block(nn.Module):
    dtype: object

    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(h, h, mask=mask)
        h = nn.Dense(128, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(32, dtype=self.dtype)(nn.gelu(h)), None


class Transformer(nn.Module):
    kind: str  # whether its layers are unrolled or scanned, with or without remat
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 32, dtype=self.dtype)(tokens)
        mask, is_scanned = nn.make_causal_mask(tokens), "scanned" in self.kind
        block = (
            nn.remat(Block, prevent_cse=not is_scanned)
            if "remat" in self.kind
            else Block
        )
        if is_scanned:
            axes = {"variable_axes": {"params": 0}, "in_axes": nn.broadcast}
            block = nn.scan(block, split_rngs={"params": True}, length=2, **axes)
        for _ in range(1 if is_scanned else 2):
            x, _ = block(self.dtype)(x, mask)
        return nn.Dense(32, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


@functools.cache
def transformer(kind, dtype=jnp.float32):
    def loss_fn(params, tokens):
        logits = model.apply(params, tokens).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        )
        return jnp.mean(losses)

    model = Transformer(kind, dtype)
    return loss_fn, jax.jit(model.init)(jax.random.key(0), TOKENS)


kinds = cases(
    "kind", ["unrolled", "scanned", "remat", "scanned remat"], fast=["scanned remat"]
)


def residual_bytes(loss_fn, params, x=TOKENS):
    """The bytes that the forward pass keeps for the backward pass."""
    kept = jax.eval_shape(
        lambda params: jax.vjp(lambda p: loss_fn(p, x), params)[1], params
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


@kinds
def test_a_transformer_keeps_no_more_than_one_written_in_float16(kind):
    plain, params = transformer(kind)
    by_hand, _ = transformer(kind, jnp.float16)
    expected = residual_bytes(by_hand, params)
    ours = residual_bytes(jaxscale.autocast(plain), params)
    assert ours <= 1.1 * expected
    assert ours < residual_bytes(plain, params)
    # Without a scan there is nothing to carry, and a warning says so.
    nothing_to_carry = pytest.warns(
        UserWarning, match="carries nothing in half precision"
    )
    with contextlib.nullcontext() if "scanned" in kind else nothing_to_carry:
        half_carries = residual_bytes(
            jaxscale.autocast(plain, half_carries=True), params
        )
    assert half_carries <= (0.9 * expected if "scanned" in kind else ours)


class Layers(nn.Module):
    kind: str  # which operation is after each
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = AFTER[self.kind](nn.Dense(64, dtype=self.dtype)(x))
        return nn.Dense(8, dtype=self.dtype)(x)


NORM = functools.partial(nn.LayerNorm, use_scale=False, use_bias=False)
AFTER = {
    **{
        name: getattr(nn, name)
        for name in ("relu", "gelu", "tanh", "silu", "softplus", "elu")
    },
    "dropped": lambda x: jnp.where(jnp.arange(64) % 7 > 0, nn.relu(x) / 0.9, 0.0),
    "gated": lambda x: (lambda one, other: one * nn.silu(other))(*jnp.split(x, 2, -1)),
    "normalized": lambda x: nn.gelu(NORM(dtype=x.dtype)(x)),
    "named": lambda x: nn.gelu(checkpoint_name(x, "sum")),
    # Sums that are not rounded yet, and that calls begin with.
    "jit": lambda x: jax.jit(lambda x: nn.gelu(x) @ jnp.eye(64, dtype=x.dtype))(x),
    "remat": lambda x: jax.checkpoint(
        lambda x: nn.silu(x) @ jnp.eye(64, dtype=x.dtype)
    )(x),
    "residual": lambda x: x + nn.Dense(64, dtype=x.dtype)(nn.relu(x)),
}


@cases("kind", AFTER, fast=["gated"])
def test_layers_with_biases_keep_no_more_than_those_written_in_float16(kind):
    def loss_fn(params, x, dtype=jnp.float32):
        return jnp.sum(Layers(kind, dtype).apply(params, x).astype(jnp.float32) ** 2)

    x = jnp.ones((64, 64))
    params = Layers(kind).init(jax.random.key(0), x)
    by_hand = residual_bytes(functools.partial(loss_fn, dtype=jnp.float16), params, x)
    assert residual_bytes(jaxscale.autocast(loss_fn), params, x) <= 1.02 * by_hand


@kinds
def test_lines_and_scopes_are_those_of_the_model_and_there_are_half_more_at_most(kind):
    plain, params = transformer(kind)
    half = jaxscale.autocast(plain)
    # Tracing and compiling take as long as there are equations: `benchmarks/autocast.py`.
    for fun, cast in ((plain, half), (jax.grad(plain), jax.grad(half))):
        number = len(primitives(fun, params, TOKENS))
        assert len(primitives(cast, params, TOKENS)) <= 1.5 * number

    def found(jaxpr, around=()):
        for eqn in jaxpr.eqns:
            for inner in _jax.programs(eqn):
                yield from found(inner, (*around, eqn))
            if eqn.primitive.name in table.PRODUCTS | {"tanh", "exp", "rsqrt", "log"}:
                line = places.find_line(eqn, around)
                yield eqn.primitive.name, str(line), places.find_layer(eqn, around)

    jaxprs = (jax.make_jaxpr(fun)(params, TOKENS) for fun in (plain, half))
    expected, actual = map(collections.Counter, map(found, jaxprs))
    assert sum(expected.values()) >= 16
    assert set(actual) == set(expected)
    # Operations in float32 between products may be computed more than once.
    assert all(actual[key] >= number for key, number in expected.items())
    assert any("Dense" in layer or "Attention" in layer for *_, layer in expected)


class Network(nnx.Module):
    """It changes itself as it runs: batch statistics, the dropout's keys and a counter."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.last = (
            nnx.Linear(8, 16, rngs=rngs),
            nnx.Linear(16, 4, rngs=rngs),
        )
        self.norm, self.dropout = (
            nnx.BatchNorm(16, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
        )
        self.shared = self.first
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


IMAGES = jnp.asarray(
    np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
)


@cases("jit", [nnx.jit, lambda fun: fun], fast=[nnx.jit])
def test_an_nnx_module_is_changed_in_place(jit):
    def nnx_loss(model, x):
        return jnp.mean((model(x) - 1.0) ** 2)

    half, state = jaxscale.autocast(nnx_loss), jaxscale.DynamicLossScale().init()
    ours = jit(jaxscale.value_and_grad(half, state, transform=nnx.value_and_grad))
    theirs = jit(nnx.value_and_grad(nnx_loss))
    plain, cast = (Network() for _ in range(2))
    for _ in range(2):
        loss, gradients = theirs(plain, IMAGES)
        half_loss, half_gradients = ours(cast, IMAGES)
        np.testing.assert_allclose(half_loss, loss, rtol=2e-3)
        assert jax.tree.structure(half_gradients) == jax.tree.structure(gradients)
    assert cast.calls[...] == 2
    assert cast.shared is cast.first
    stats = (
        jax.tree.leaves(nnx.state(model, nnx.BatchStat)) for model in (cast, plain)
    )
    for a, b in zip(*stats, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4)
    keys, expected = (
        jax.tree.leaves(nnx.state(m, nnx.RngState)) for m in (cast, plain)
    )
    assert list(map(str, keys)) == list(map(str, expected))


@pytest.mark.slow
def test_a_module_or_a_method_is_a_function_too():
    plain, cast = (Network() for _ in range(2))
    # it holds a class of variables
    lora = nnx.LoRALinear(8, 4, lora_rank=2, rngs=nnx.Rngs(0))
    for fun, same in ((cast, plain), (cast.__call__, plain), (nnx.clone(lora), lora)):
        actual = jaxscale.autocast(fun)(IMAGES)
        np.testing.assert_allclose(actual, same(IMAGES), rtol=0.02, atol=5e-3)
    assert cast.calls[...] == 2
    model = eqx.nn.MLP(8, 4, 16, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    assert products(jaxscale.autocast(model), IMAGES[0]) == [{"float16"}] * 3


def hidden(params, x):
    return jax.nn.gelu(x @ params["in"] + params["bias"])


def mlp(params, x):
    outputs = jax.nn.softmax(hidden(params, x) @ params["out"])
    # float16 would flush those of a mean
    return jnp.sum(outputs.astype(jnp.float32) ** 2)


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
    def by_hand(*args):
        return mlp(*jax.tree.map(lambda a: a.astype(jnp.float16), args))

    expected, ours, theirs = (
        jax.jit(jax.grad(fun))(MLP, X) for fun in (mlp, jaxscale.autocast(mlp), by_hand)
    )
    assert_near(ours, expected, 0.01)
    with pytest.raises(AssertionError):  # its softmax cancels in float16
        assert_near(theirs, expected, 0.02)


SHARDED = {"in": P(None, "model"), "bias": P("model"), "out": P("model")}
LAYOUTS = {
    "data parallel": ({"in": P(), "bias": P(), "out": P()}, P(("data", "model"))),
    "sharded": (SHARDED, P("data")),
}
if hasattr(jax, "set_mesh"):  # since JAX 0.7
    LAYOUTS["explicit"] = SHARDED | {"out": P()}, P()


@cases("layout", LAYOUTS, fast=["sharded"])
def test_arrays_stay_where_they_are(layout):
    axis_type = AxisType.Explicit if layout == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    places = jax.tree.map(functools.partial(NamedSharding, mesh), LAYOUTS[layout])
    args = jax.device_put((MLP, X), places)
    with jax.set_mesh(mesh) if layout == "explicit" else contextlib.nullcontext():
        for fun in (mlp, jax.jit(mlp)):
            both = fun, jaxscale.autocast(fun)
            plain, cast = (jax.jit(jax.value_and_grad(f))(*args) for f in both)
            assert_near(cast, plain)
            assert avals(cast) == avals(plain)
            for a, b in zip(jax.tree.leaves(cast), jax.tree.leaves(plain), strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            assert products(jaxscale.autocast(fun), *args) == [{"float16"}] * 2
        assert avals(jaxscale.autocast(hidden)(*args)) == avals(hidden(*args))


@cases("check_vma", [True, False, None], fast=[True])
def test_inside_and_outside_of_what_maps_a_step_over_devices(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    x = X.reshape(8, 2, 16) if check_vma is None else X

    def step(fun):
        def run(params, x):
            return jax.lax.pmean(jax.value_and_grad(fun)(params, x), "data")

        if check_vma is None:
            return jax.pmap(run, "data", in_axes=(None, 0))
        return jax.jit(jax.shard_map(run, mesh=mesh, **specs))

    plain = step(mlp)(MLP, x)
    for half in (step(jaxscale.autocast(mlp)), jaxscale.autocast(step(mlp))):
        assert_near(half(MLP, x), plain)
    assert set(map(str, products(half, MLP, x))) == {"{'float16'}"}


@pytest.mark.slow
def test_a_function_called_eagerly_compiles_once():
    layer = jax.jit(lambda x, w: jax.nn.gelu(x @ w))
    fun = jaxscale.autocast(lambda x, w: layer(layer(x, w), w))
    x, seen = jnp.ones((3, 3)), [len(COMPILED)]
    for _ in range(2):
        fun(x, x)
        seen.append(len(COMPILED))
    assert seen[0] < seen[1] == seen[2]


@cases("jit", [jax.jit, nnx.jit], fast=[nnx.jit])
def test_a_module_from_outside_of_a_jit_is_read_and_stays_whole(jit):
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    by_argument = jaxscale.autocast(lambda model, x: model(x))
    for fun in (jaxscale.autocast(model), lambda x: by_argument(model, x)):
        np.testing.assert_allclose(
            jit(fun)(IMAGES), model(IMAGES), rtol=0.02, atol=5e-3
        )
    changing = Network()
    with pytest.raises(Exception, match="from a different trace level"):
        jit(jaxscale.autocast(changing))(IMAGES)
    assert changing(IMAGES).shape == (16, 4)


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jaxscale.full_precision(nn.BatchNorm(use_running_average=False))(
            nn.Dense(8)(x)
        )
        return jaxscale.full_precision(nn.Dense(4))(x)


def test_full_precision_takes_layers_of_linen():
    model = Mixed()
    variables = model.init(jax.random.key(0), IMAGES)

    def loss_fn(params, x):
        outputs, updated = model.apply(
            variables | {"params": params}, x, mutable="batch_stats"
        )
        return jnp.mean(outputs**2), updated

    cast = jaxscale.autocast(loss_fn)
    assert products(cast, variables["params"], IMAGES) == [{"float16"}, {"float32"}]
    backward = products(jax.grad(cast, has_aux=True), variables["params"], IMAGES)
    # The first layer needs no gradient of its inputs.
    assert sorted(map(str, backward)) == ["{'float16'}"] * 2 + ["{'float32'}"] * 3


def test_full_precision_may_change_a_module_of_nnx_that_it_closes_over():
    model = Network()

    def loss_fn(model, x):
        part = jaxscale.full_precision(lambda x: model.norm(x))
        return jnp.mean(model.last(part(model.first(x))) ** 2)

    before = model.norm.mean[...]
    nnx.jit(nnx.grad(jaxscale.autocast(loss_fn)))(model, IMAGES)
    assert not np.array_equal(model.norm.mean[...], before)

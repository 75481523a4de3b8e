"""Many devices, one verdict: of parameters laid out by `jit` and by `shard_map`, and its cost."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from following import Following
from half_programs import WRAPPERS
from hosts import under
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import assert_same_bits, cases, pairs, spread, step
from training import amplified

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_all_devices_skip_the_step_that_one_of_them_overflows_in():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))
    tx = jaxscale.skip_nonfinite(optax.sgd(1.0))
    params = jax.device_put(jnp.ones(8), split)
    grads = jax.device_put(jnp.ones(8).at[5].set(jnp.inf), split)
    kept, state = jax.jit(lambda *args: step(tx, *args))(params, tx.init(params), grads)
    np.testing.assert_array_equal(kept, np.ones(8))
    assert state.total_notfinite == 1


DEVICES = np.array(jax.devices("cpu"))
LINE = Mesh(DEVICES, ("data",))
BOTH = ("data", "model")
GRID = Mesh(DEVICES.reshape(2, 4), BOTH)
SHARDED = P("data")
PARAMS = {
    "in": np.linspace(-1, 1, 16 * 32, dtype=np.float32).reshape(16, 32),
    "bias": np.zeros(32, np.float32),
    "out": np.linspace(1, -1, 32 * 8, dtype=np.float32).reshape(32, 8),
}
X = np.linspace(0.1, 1, 16 * 16, dtype=np.float32).reshape(16, 16)
HOT_X = X.copy()
HOT_X[13] *= 16  # of one device alone


def loss_fn(params, x):
    hidden = x.astype(jnp.float16) @ params["in"].astype(jnp.float16)
    hidden = jax.nn.relu(hidden + params["bias"].astype(jnp.float16))
    outputs = hidden @ params["out"].astype(jnp.float16)
    return mean_square(outputs.astype(jnp.float32))


def mean_square(x):
    return jnp.mean(x**2)


def assert_same_on_host(actual, expected):
    assert_same_bits(jax.device_get(actual), jax.device_get(expected))


def laid_out(tree, spec):
    """The layout of arrays that are divided over devices, and of scalars and keys."""
    return jax.tree.map(lambda leaf: spec if jnp.size(leaf) >= 8 else P(), tree)


def over_devices(fun, in_specs, out_specs, **options):
    mapped = jax.shard_map(
        fun, mesh=LINE, in_specs=in_specs, out_specs=out_specs, **options
    )
    return jax.jit(mapped)


# Whole runs, whose numbers are exact in any order of sums: where one device ends, all end. The
# layouts of the parameters and of the optimizer's state.
DIVISIONS = {
    "replicated": (P(), P()),
    "FSDP": (P(BOTH), P(BOTH)),
    "ZeRO-1": (P(), P(BOTH)),
    "tensor parallel": (P(None, BOTH), P(None, BOTH)),
    "sharded twice": (P("data", "model"), P("data", "model")),
}
EXACT = optax.sgd(2.0**-8, momentum=1.0)
ALL_OPTIONS = {
    "max_norm": 2.0**10,
    "track_leaves": True,
    "check_updates": True,
    "spikes": jaxscale.SpikeRule(window=4),
}
EVERYTHING = jaxscale.loss_scaled(
    jaxscale.compact_state(EXACT), Following(), **ALL_OPTIONS
)
# Each optimizer, and the dtype of its parameters.
RUNS = {
    "skip_nonfinite": (jaxscale.skip_nonfinite(EXACT), jnp.float32),
    "loss_scaled": (jaxscale.loss_scaled(EXACT), jnp.float32),
    "everything": (EVERYTHING, jnp.float32),
    "multi_steps": (jaxscale.multi_steps(EVERYTHING, 2), jnp.float32),
    "remainders": (jaxscale.master_weights(EVERYTHING), jnp.bfloat16),
    "copies": (jaxscale.master_weights(EXACT, "float32"), jnp.float16),
    "at random": (jaxscale.stochastic_rounding(EXACT), jnp.bfloat16),
}
SIGNS = jnp.asarray(np.random.default_rng(0).integers(-1, 2, (8, 64)), jnp.float32)
# An overflow of one device, and a bad loss of another.
BATCHES = [
    (SIGNS, 1.0),
    (SIGNS, jnp.inf),
    (SIGNS.at[5, 3].set(jnp.nan), 1.0),
    (-SIGNS, 1.0),
    *[(SIGNS, 1.0)] * 2,
]


def exact_loss(params, x, factor):
    """The gradient of the last bias is multiplied by a factor."""
    products = params["w"].astype(jnp.float32) * jnp.sum(x, axis=0)
    bias = params["b"].astype(jnp.float32)
    last = jnp.where(jnp.arange(64) == 63, bias, 0.0)
    return jnp.sum(products) + jnp.sum(bias) + amplified(jnp.sum(last), factor)


def by_update(tx, params, state, *batch):
    loss, grads = jaxscale.value_and_grad(exact_loss, state)(params, *batch)
    return step(tx, params, state, grads, value=loss)


def by_train_step(tx, params, state, *batch):
    return jaxscale.train_step(exact_loss, tx)(params, state, *batch)[:2]


def run_divided(name, way, division, mesh):
    """The end of a run whose arrays lie on a mesh, or on one device without one."""
    tx, dtype = RUNS[name]
    numbers = jnp.arange(64.0 * 64).reshape(64, 64) % 128 / 128 + 1
    params = {"w": numbers.astype(dtype), "b": jnp.ones(64, dtype)}
    carry = params, tx.init(params)
    batches = BATCHES
    options = {}
    if mesh is not None:

        def on_mesh(tree, spec):
            def place(leaf):
                axes = spec[-leaf.ndim :] if leaf.size >= 64 else ()
                return jax.device_put(leaf, NamedSharding(mesh, P(*axes)))

            return jax.tree.map(place, tree)

        carry = tuple(map(on_mesh, carry, DIVISIONS[division]))
        batches = [(on_mesh(x, P(BOTH)), factor) for x, factor in BATCHES]
        options["out_shardings"] = jax.tree.map(lambda leaf: leaf.sharding, carry)
    one_step = jax.jit(functools.partial(way, tx), donate_argnums=(0, 1), **options)
    for batch in batches:
        carry = one_step(*carry, *batch)
    assert one_step._cache_size() == 1
    return jax.device_get(carry)


@cases(
    "name, way, division, kind",
    pairs(
        RUNS, [by_update, by_train_step], DIVISIONS, [AxisType.Auto, AxisType.Explicit]
    ),
    fast=[
        ("skip_nonfinite", by_train_step, "ZeRO-1", AxisType.Explicit),
        ("loss_scaled", by_update, "ZeRO-1", AxisType.Auto),
    ],
)
def test_a_run_ends_where_that_on_one_device_ends(name, way, division, kind):
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        params, state = run_divided(name, way, division, mesh)
    expected, expected_state = run_divided(name, way, division, None)
    assert state.total_notfinite == 2
    assert state.total_notfinite_loss == 1
    assert_same_bits((params, state), (expected, expected_state))


# Retries: one device overflows, and all go round together.
def hot(scale=2.0**24, **kwargs):
    policy = jaxscale.DynamicLossScale(init_scale=scale, growth_interval=3)
    return jaxscale.loss_scaled(optax.adam(0.1), policy, **kwargs)


def averaged(fun, **kwargs):
    """Differentiates on each device, and averages over all."""

    def value_and_grad(*args):
        value, grads = jax.value_and_grad(fun, **kwargs)(*args)
        return value, jax.lax.pmean(grads, "data")

    return value_and_grad


def by_jit(train_step, kind=AxisType.Auto):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    places = NamedSharding(mesh, P()), None, NamedSharding(mesh, SHARDED)
    return under(mesh, jax.jit(train_step, in_shardings=places))


by_shard_map = functools.partial(
    over_devices, in_specs=(P(), P(), SHARDED), out_specs=P()
)
unchecked = functools.partial(by_shard_map, check_vma=False)
# An output whose type names its sharding.
WITH_OUTPUT = {
    "loss_fn": lambda params, x: (loss_fn(params, x), x * 2),
    "has_aux": True,
}


def hide_and_average(grads):
    """A hook that hides what one of the devices got."""
    return jax.lax.pmean(jax.tree.map(jnp.nan_to_num, grads), "data")


# How gradients are averaged, with the axis that the optimizer knows. A hook brings its own.
BY_TRANSFORM = {"transform": averaged}
BY_HOOK = {"on_grads": hide_and_average}
WAYS = {
    "jit": (by_jit, WITH_OUTPUT, None),
    "shard_map": (by_shard_map, BY_TRANSFORM, "data"),
    "shard_map, unchecked": (unchecked, BY_TRANSFORM, "data"),
    "shard_map, hook": (by_shard_map, BY_HOOK, None),
    "shard_map, unchecked, hook": (unchecked, BY_HOOK, None),
    "explicit mesh": (
        functools.partial(by_jit, kind=AxisType.Explicit),
        WITH_OUTPUT,
        None,
    ),
}


every_way = cases("way", WAYS, fast=["shard_map, hook"], shared=True)
BAD_X = X.copy()
BAD_X[13, 12] = np.inf  # on one device, where all weights are positive


@functools.cache
def step_over_devices(way, retries):
    """One step from `PARAMS`, by a batch and the first scale."""
    run, options, axis_name = WAYS[way]
    arguments = {"loss_fn": loss_fn, "tx": hot(axis_name=axis_name), "retries": retries}
    train_step = jaxscale.train_step(**(arguments | options))
    compiled = run(lambda *args: train_step(*args)[:2])
    return lambda x, scale: compiled(PARAMS, hot(scale).init(PARAMS), x)


@pytest.mark.worlds
@every_way
def test_all_skip_together_without_retries_and_go_round_together_with_them(way):
    _, skipped = step_over_devices(way, retries=0)(HOT_X, 2.0**24)
    assert skipped.total_notfinite == 1
    again = step_over_devices(way, retries=30)
    params, state = again(HOT_X, 2.0**24)
    assert state.total_notfinite == 0
    assert state.total_notfinite_loss == 0
    assert state.total_retries > 0
    fitting_scale = 2.0 ** (24 - int(state.total_retries))
    expected, fitting = again(HOT_X, fitting_scale)
    assert fitting.total_retries == 0
    assert_same_on_host(params, expected)
    # But for the hysteresis tracker, which the search has spent.
    assert_same_on_host(state.scaling[:2], fitting.scaling[:2])


@pytest.mark.worlds
@every_way
@cases("retries", [0, 30], fast=[30])
def test_a_bad_loss_on_one_device_is_not_repeated_on_any(way, retries):
    kept, state = step_over_devices(way, retries)(BAD_X, 2.0**24)
    assert state.total_retries == 0
    assert state.total_notfinite_loss == 1
    assert_same_on_host(kept, PARAMS)


def test_devices_whose_parameters_differ_are_told_to_pass_the_axis():
    tx = hot()

    def loss_of_bias(bias, x):
        return loss_fn(PARAMS | {"bias": bias}, x)

    def step_of_one(bias, x):
        step = jaxscale.train_step(loss_of_bias, tx, retries=3)
        _, _, loss = step(bias, tx.init(bias), x)
        return loss[None]

    run = over_devices(step_of_one, (SHARDED, SHARDED), SHARDED)
    message = r"train_step\(retries=3\).*'data' may.*axis_name='data'"
    with pytest.raises(ValueError, match=message):
        run(jnp.ones(8 * 32), X)


# How many all-reduces the verdict costs, counted in the compiled program.
LEAVES = {f"w{i}": np.ones((8 * (1 + i % 3), 16), np.float32) for i in range(12)}


def all_reduces(fun, *args):
    """The number of operands of each all-reduce of a program whose arguments are laid out."""
    specs = laid_out(args, P(BOTH))
    args = jax.device_put(
        args, jax.tree.map(functools.partial(NamedSharding, GRID), specs)
    )
    text = jax.jit(fun).lower(*args).compile().as_text()
    calls = re.findall(r" all-reduce(?:-start)?\((.*?)\), ", text)
    return [operands.count("%") for operands in calls]


def combines():
    """Returns whether this XLA makes one all-reduce of two independent ones."""
    return len(all_reduces(lambda x, y: (x.sum(), y.sum()), X, X + 1)) == 1


def squares(params):
    return sum(jnp.sum(leaf**2) for leaf in params.values())


def all_reduces_of_update(tx):
    return all_reduces(functools.partial(step, tx), LEAVES, tx.init(LEAVES), LEAVES)


POLICIES = {"dynamic": jaxscale.DynamicLossScale(), "following": Following()}


@pytest.mark.worlds
@cases("policy", POLICIES, fast=["dynamic"])
def test_the_verdict_costs_one_all_reduce(policy):
    assert all_reduces_of_update(optax.adamw(1e-3)) == []
    tx = jaxscale.loss_scaled(optax.adamw(1e-3), POLICIES[policy])
    reduced = all_reduces_of_update(tx)
    assert sum(reduced) == len(LEAVES)  # one flag a leaf
    if combines():
        assert len(reduced) == 1
    else:
        # XLA for GPUs and TPUs makes the flags one before, and older versions for CPUs join
        # nothing at all, be it sums of gradients or flags.
        assert len(reduced) == len(LEAVES)


@pytest.mark.slow
@cases("policy", POLICIES)
def test_in_a_whole_step_the_verdict_travels_with_the_gradients(policy):
    tx = jaxscale.loss_scaled(optax.adamw(1e-3), POLICIES[policy])
    before = all_reduces(jax.value_and_grad(squares), LEAVES)
    reduced = all_reduces(jaxscale.train_step(squares, tx), LEAVES, tx.init(LEAVES))
    assert sum(reduced) - sum(before) == len(LEAVES)  # one flag a leaf
    added = len(reduced) - len(before)
    if policy == "following":
        assert added <= 1  # maxima travel by themselves
    elif combines():
        assert added <= 0  # sums travel together where XLA joins what is alike
    else:
        assert added <= len(LEAVES)


@pytest.mark.worlds
@cases(
    "policy, tracked",
    itertools.product(POLICIES, [False, True]),
    fast=[("dynamic", False), ("following", True)],
)
def test_in_shard_map_a_whole_step_reduces_one_pair_of_flags(policy, tracked):
    tx = jaxscale.loss_scaled(
        optax.identity(), POLICIES[policy], axis_name=BOTH, track_leaves=tracked
    )

    def update(params, state, grads, loss):
        return step(tx, params, state, grads, value=loss)

    args = LEAVES, tx.init(LEAVES), LEAVES, jnp.array(1.0)
    specs = laid_out(args, P(BOTH))
    mapped = jax.shard_map(update, mesh=GRID, in_specs=specs, out_specs=specs[:2])
    # The gradients', or those of each leaf, and the loss's; of the largest gradient, its bits.
    assert all_reduces(mapped, *args) == [1]


# Meshes as `jax.make_mesh` makes them since JAX 0.9: their axes are Explicit, and the sharding of
# an array is part of its type.
WEIGHTS = {
    "in": np.linspace(-1, 1, 512, dtype=np.float32).reshape(16, 32),
    "out": np.full((32, 16), 1 / 32, np.float32),
}
REPLICATED = {"in": P(), "out": P()}
TENSOR_PARALLEL = {"in": P(None, "model"), "out": P("model", None)}


def mlp_outputs(w, x):
    return jax.nn.gelu(x @ w["in"]) @ w["out"]


def mlp(w, x):
    return mean_square(mlp_outputs(w, x))


def tensor_parallel(w, x):
    hidden = jax.nn.gelu(x @ w["in"])
    outputs = jnp.einsum("bh,ho->bo", hidden, w["out"], out_sharding=P("data", None))
    return mean_square(outputs)


def resharded(w, x):
    hidden = jax.sharding.reshard(x @ w["in"], P("data", None))
    return mean_square(hidden @ w["out"])


def scan_of_remat(w, x):
    layer = jax.checkpoint(lambda x, _: (x + mlp_outputs(w, x), None))
    outputs, _ = jax.lax.scan(layer, x, None, length=3)
    return mean_square(outputs)


def likelihood(w, x):
    hidden = jnp.tanh(x @ w["in"])
    return -jnp.mean(jax.nn.log_softmax(hidden @ w["out"])[:, 0])


def looked_up(w, x):
    rows = jnp.arange(8) % 16
    taken = w["in"].at[rows].get(out_sharding=P(None, None))
    return mean_square(taken @ w["out"]) + mlp(w, x)


def ruled(w, x):
    @jax.custom_vjp
    def product(x, y):
        return x @ y

    def backward(kept, g):
        x, y = kept
        # JAX asks where a sum over a sharded dimension is to be.
        return g @ y.T, jnp.matmul(x.T, g, out_sharding=P(None, None))

    product.defvjp(lambda x, y: (x @ y, (x, y)), backward)
    return mean_square(product(jax.nn.relu(x @ w["in"]), w["out"]))


def mapped_mean(loss, w, x):
    """The mean of the losses of all devices along one axis, the other being XLA's."""

    def mean(w, x):
        return jax.lax.pmean(loss(w, x), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.shard_map(mean, axis_names={"data"}, **specs)(w, x)


def in_shard_map(w, x):
    return mapped_mean(mlp, w, x)


def remat_in_shard_map(w, x):
    return mapped_mean(jax.checkpoint(mlp), w, x)


EXPLICIT = {
    mlp: REPLICATED,
    scan_of_remat: REPLICATED,
    likelihood: REPLICATED,
    looked_up: REPLICATED,
    ruled: REPLICATED,
    in_shard_map: REPLICATED,
    remat_in_shard_map: REPLICATED,
    tensor_parallel: TENSOR_PARALLEL,
    resharded: TENSOR_PARALLEL,
}


@pytest.fixture
def explicit_mesh():
    mesh = jax.make_mesh((4, 2), BOTH)
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)
    with jax.set_mesh(mesh):
        yield mesh


def place_explicit(fun, mesh):
    """The weights of a function and a batch, where the mesh has them."""
    specs = EXPLICIT[fun], P("data", None)
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    return jax.device_put((WEIGHTS, X), shardings)


@pytest.mark.worlds
@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="axes are not Explicit by default"
)
@cases(
    "fun, way",
    spread(list(EXPLICIT), list(WRAPPERS), times=1),
    fast=[
        (tensor_parallel, "autocast"),
        (remat_in_shard_map, "scale_backward of autocast"),
        (looked_up, "autocast of scale_backward"),
    ],
)
def test_on_a_mesh_with_explicit_axes_gradients_come_close_and_shardings_stay(
    fun, way, explicit_mesh
):
    w, x = place_explicit(fun, explicit_mesh)
    wrapped = WRAPPERS[way](fun)
    expected = jax.jit(jax.value_and_grad(fun))(w, x)
    actual = jax.jit(jax.value_and_grad(wrapped))(w, x)
    # of the same shardings, too
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01 * float(jnp.abs(b).max()))

    tx = jaxscale.loss_scaled(optax.adam(1e-3))
    train_step = jax.jit(jaxscale.train_step(wrapped, tx))
    new_w, _, loss = train_step(w, tx.init(w), x)
    assert jax.tree.map(jax.typeof, new_w) == jax.tree.map(jax.typeof, w)
    assert float(loss) == float(actual[0])

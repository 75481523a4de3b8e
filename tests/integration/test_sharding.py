"""Many devices, one verdict: of parameters laid out by `jit` and by `shard_map`, and its cost."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hosts import under
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import assert_same_bits, cases, fused_step, step

import jaxscale

pytestmark = pytest.mark.standard_promotion

DEVICES = np.array(jax.devices("cpu"))
LINE = Mesh(DEVICES, ("data",))
GRID = Mesh(DEVICES.reshape(2, 4), BOTH := ("data", "model"))
SHARDED = P("data")
PARAMS = {
    "in": jnp.linspace(-1.0, 1.0, 16 * 32).reshape(16, 32),
    "bias": jnp.zeros(32),
    "out": jnp.linspace(1.0, -1.0, 32 * 8).reshape(32, 8),
}
X = jnp.linspace(0.1, 1.0, 16 * 16).reshape(16, 16)
HOT_X = X.at[13].multiply(16.0)  # of one device alone


def loss_fn(params, x):
    hidden = x.astype(jnp.float16) @ params["in"].astype(jnp.float16)
    hidden = jax.nn.relu(hidden + params["bias"].astype(jnp.float16))
    return jnp.mean(
        (hidden @ params["out"].astype(jnp.float16)).astype(jnp.float32) ** 2
    )


def is_equal_on_all(tree):
    """Whether each array is the same on all devices."""
    parts = [
        [x.data for x in leaf.addressable_shards] for leaf in jax.tree.leaves(tree)
    ]
    return all(
        len(x) == 8 and len({np.asarray(one).tobytes() for one in x}) == 1
        for x in parts
    )


def over_devices(fun, in_specs, out_specs, **check):
    return jax.jit(
        jax.shard_map(fun, mesh=LINE, in_specs=in_specs, out_specs=out_specs, **check)
    )


named = functools.partial(jaxscale.loss_scaled, axis_name="data")
AGREEING = {
    "clipped": named(optax.adam(0.1), max_norm=1.0),
    "tracked": named(optax.adam(0.1), track_leaves=True),
    "window": jaxscale.multi_steps(named(optax.sgd(0.1)), 2, drop="window"),
    "named inside": jaxscale.loss_scaled(
        jaxscale.skip_nonfinite(optax.sgd(1.0), axis_name="data")
    ),
    "named outside": named(jaxscale.multi_steps(optax.sgd(1.0), 1)),
}


@cases(
    "name, check, fused",
    itertools.product(AGREEING, [True, False], [True, False]),
    fast=[("clipped", True, True), ("tracked", False, False)],
)
def test_shard_map_over_sharded_parameters_agrees(name, check, fused):
    tx, params = AGREEING[name], {"a": jnp.ones(16), "b": jnp.ones(8)}
    state = tx.init(params)
    specs = SHARDED, jax.tree.map(lambda leaf: SHARDED if leaf.ndim else P(), state)
    one_device = functools.partial(fused_step if fused else step, tx)
    run = over_devices(one_device, (*specs, SHARDED), specs, check_vma=check)
    good = {"a": params["a"].at[4:6].set([3, 4]), "b": params["b"] * 0}
    params, state = run(params, state, good)
    # the largest norm of all devices, each of which has two of `a`
    if name == "clipped":
        assert is_equal_on_all(state.grad_norm)
        assert state.grad_norm == 5.0
    # An overflow on device 2, and another on device 5.
    bad = {"a": good["a"].at[5].set(jnp.nan), "b": good["b"].at[5].set(jnp.inf)}
    kept, after = run(params, state, bad)
    assert_same_bits(jax.device_get(kept), jax.device_get(params))
    assert is_equal_on_all([leaf for leaf in jax.tree.leaves(after) if not leaf.ndim])
    assert (after.total_notfinite, after.scaling.loss_scale) == (1, 2.0**14)
    assert name != "tracked" or after.nonfinite_leaves == {"a": True, "b": True}


LAYOUTS = {
    # name: the layout of the batch, and of the parameters
    "data parallel": (P(BOTH), P(), P(), P()),
    "fully sharded": (P(BOTH), P(BOTH), P(BOTH), P(BOTH)),
    "tensor parallel": (P(), P(None, BOTH), P(BOTH), P(BOTH)),
    "sharded twice": (P("data"), P("data", "model"), P("model"), P("model", "data")),
}
TX = jaxscale.loss_scaled(
    optax.adamw(1e-2), jaxscale.DynamicLossScale(init_scale=2.0**8)
)
PLACES = {"in": (3, 17), "bias": (9,), "out": (31, 5)}


def pushed_step(params, state, x, push):
    loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, x)
    return step(TX, params, state, jax.tree.map(jnp.add, grads, push), value=loss)


def placed(tree, specs):
    return jax.device_put(
        tree, jax.tree.map(lambda spec: NamedSharding(GRID, spec), specs)
    )


@cases(
    "layout, leaf", itertools.product(LAYOUTS, PLACES), fast=[("sharded twice", "in")]
)
def test_a_step_over_devices_is_the_step_on_one_and_all_skip_together(layout, leaf):
    batch, *specs = LAYOUTS[layout]
    specs = dict(zip(PARAMS, specs, strict=True))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    params, x, push = placed(PARAMS, specs), placed(X, batch), placed(zeros, specs)
    state = jax.tree.map(  # the scalars on all devices, the moments as they lie
        lambda leaf: leaf if leaf.ndim else placed(leaf, P()), TX.init(params)
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    compiled = jax.jit(lambda *args: pushed_step(*args), donate_argnums=(0, 1))

    def stepped(params, state, x, push):
        new_params, new_state = compiled(
            *jax.tree.map(jnp.copy, (params, state)), x, push
        )
        assert is_equal_on_all(new_state._replace(inner_state=None))
        for name, value in new_params.items():
            assert value.sharding.is_equivalent_to(shardings[name], value.ndim)
        return new_params, new_state

    expected, expected_state = jax.jit(pushed_step)(PARAMS, TX.init(PARAMS), X, zeros)
    params, state = stepped(params, state, x, push)
    # to rounding: sums over devices have another order
    for name, value in params.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-4)
    assert_same_bits(*jax.device_get((state.scaling, expected_state.scaling)))
    assert state.step_applied
    for bad_x, bad_push, scale, bad_losses in (
        # An inf on one device, and a NaN in one example.
        (x, push | {leaf: push[leaf].at[PLACES[leaf]].set(jnp.inf)}, 2.0**7, 0),
        (x.at[11, 2].set(jnp.nan), push, 2.0**8, 1),
    ):
        kept, after = stepped(params, state, bad_x, bad_push)
        assert_same_bits(*jax.device_get((kept, params)))
        assert_same_bits(*jax.device_get((after.inner_state, state.inner_state)))
        assert (after.scaling.loss_scale, after.total_notfinite) == (scale, 1)
        assert after.total_notfinite_loss == bad_losses
    assert compiled._cache_size() == 1


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


def by_pmap(train_step):
    mapped = jax.pmap(
        train_step, "data", devices=list(DEVICES), in_axes=(None, None, 0)
    )

    def run(params, state, x):
        outputs = mapped(params, state, x.reshape(8, 2, 16))
        assert is_equal_on_all(outputs)
        return jax.tree.map(lambda leaf: leaf[0], outputs)

    return run


by_shard_map = functools.partial(
    over_devices, in_specs=(P(), P(), SHARDED), out_specs=P()
)
unchecked = functools.partial(by_shard_map, check_vma=False)
# An output whose type names its sharding.
WITH_OUTPUT = {
    "loss_fn": lambda params, x: (loss_fn(params, x), x * 2),
    "has_aux": True,
}
# How gradients are averaged, with the axis that the optimizer knows. A hook brings its own, and
# hides what one of the devices got.
BY_TRANSFORM, HIDDEN = (
    {"transform": averaged},
    functools.partial(jax.tree.map, jnp.nan_to_num),
)
BY_HOOK = {"on_grads": lambda grads: jax.lax.pmean(HIDDEN(grads), "data")}
WAYS = {
    "jit": (by_jit, WITH_OUTPUT, None),
    "shard_map": (by_shard_map, BY_TRANSFORM, "data"),
    "shard_map, unchecked": (unchecked, BY_TRANSFORM, "data"),
    "pmap": (by_pmap, BY_TRANSFORM, "data"),
    "shard_map, hook": (by_shard_map, BY_HOOK, None),
    "shard_map, unchecked, hook": (unchecked, BY_HOOK, None),
    "pmap, hook": (by_pmap, BY_HOOK, None),
    "pmap, found": (by_pmap, BY_TRANSFORM, None),
    "explicit mesh": (
        functools.partial(by_jit, kind=AxisType.Explicit),
        WITH_OUTPUT,
        None,
    ),
}


@cases("way", WAYS, fast=["jit", "shard_map, hook"])
def test_all_go_round_together(way):
    run, options, axis_name = WAYS[way]

    def trained(retries):
        given = {"loss_fn": loss_fn, "tx": hot(axis_name=axis_name), "retries": retries}
        train_step = jaxscale.train_step(**(given | options))
        return run(lambda *args: train_step(*args)[:2])

    once, again = trained(0), trained(30)
    assert once(PARAMS, hot().init(PARAMS), HOT_X)[1].total_notfinite == 1
    bad_x = X.at[13, 12].set(jnp.inf)  # where all weights are positive
    if "hook" in way:  # before anything that would wait for ever if they did not agree
        assert once(PARAMS, hot(1.0).init(PARAMS), bad_x)[1].total_notfinite_loss == 1
    params, state = again(PARAMS, hot().init(PARAMS), HOT_X)
    assert (state.total_notfinite, state.total_notfinite_loss) == (0, 0)
    assert state.total_retries > 0
    scale = 2.0 ** (24 - int(state.total_retries))
    expected, fitting = again(PARAMS, hot(scale).init(PARAMS), HOT_X)
    assert fitting.total_retries == 0
    # But for the hysteresis tracker, which the search has spent.
    pairs = (params, state.scaling[:2]), (expected, fitting.scaling[:2])
    assert_same_bits(*jax.device_get(pairs))
    # A bad loss on one device is not repeated on any.
    kept, state = again(PARAMS, hot().init(PARAMS), bad_x)
    assert (state.total_retries, state.total_notfinite_loss) == (0, 1)
    assert_same_bits(*jax.device_get((kept, PARAMS)))


def test_devices_that_might_part_are_told_to_pass_the_axis():
    """Those whose parameters differ, or whose losses do; with it a bad loss counts once."""
    train_step = jaxscale.train_step(loss_fn, hot(), retries=3)
    specs = {"in_specs": (SHARDED, P(), SHARDED), "out_specs": SHARDED}
    own = over_devices(
        lambda b, *args: train_step(PARAMS | {"bias": b}, *args)[2][None], **specs
    )
    with pytest.raises(
        ValueError, match=r"train_step\(retries=3\).*'data' may.*axis_name='data'"
    ):
        own(jnp.ones(8 * 32), hot().init(PARAMS), X)

    def judged(axis_name):
        update = functools.partial(
            hot(axis_name=axis_name).update, PARAMS, params=PARAMS
        )
        run = over_devices(
            lambda s, loss: update(s, value=loss[0])[1], (P(), SHARDED), P()
        )
        return run(hot().init(PARAMS), jnp.ones(8).at[3].set(jnp.inf))

    with pytest.raises(ValueError, match=r"pass `axis_name='data'`"):
        judged(None)
    state = judged("data")
    assert (state.total_notfinite_loss, state.scaling.loss_scale) == (1, 2.0**24)


# How many all-reduces the verdict costs, counted in the compiled program.
LEAVES = {f"w{i}": jnp.ones((8 * (1 + i % 3), 16)) for i in range(12)}


def laid_out(tree):
    """The layout of arrays that are divided over all devices, and of scalars."""
    return jax.tree.map(lambda leaf: P(BOTH) if jnp.ndim(leaf) else P(), tree)


def all_reduces(fun, *args):
    """The operands of each all-reduce of a program whose arguments are laid out."""
    text = jax.jit(fun).lower(*placed(args, laid_out(args))).compile().as_text()
    found = re.findall(r" all-reduce(?:-start)?\((.*?)\), ", text)
    return [operands.count("%") for operands in found]


def combines():
    """Whether this XLA makes one all-reduce of two that do not depend on each other."""
    return len(all_reduces(lambda x, y: (x.sum(), y.sum()), X, X + 1)) == 1


def squares(params):
    return sum(jnp.sum(leaf**2) for leaf in params.values())


@cases(
    "policy, whole",
    itertools.product(["dynamic", "adaptive"], [False, True]),
    fast=[("dynamic", False)],
)
def test_the_verdict_costs_one_all_reduce(policy, whole):
    bare, tx = optax.adamw(1e-3), jaxscale.loss_scaled(optax.adamw(1e-3), policy)
    if whole:
        before = all_reduces(jax.value_and_grad(squares), LEAVES)
        found = all_reduces(jaxscale.train_step(squares, tx), LEAVES, tx.init(LEAVES))
        # Sums travel together, where XLA joins what is alike; maxima by themselves.
        most = 1 if policy == "adaptive" else 0 if combines() else len(LEAVES)
    else:
        before = all_reduces(
            functools.partial(step, bare), LEAVES, bare.init(LEAVES), LEAVES
        )
        found = all_reduces(
            functools.partial(step, tx), LEAVES, tx.init(LEAVES), LEAVES
        )
        assert before == []
        # XLA for GPUs and TPUs makes the flags one before, and older versions for CPUs join
        # nothing at all, be it sums of gradients or flags.
        most = 1 if combines() else len(LEAVES)
    assert sum(found) - sum(before) == len(LEAVES)  # one flag a leaf travels in it
    assert len(found) - len(before) <= most
    assert whole or len(found) == most


@cases("policy, tracked", itertools.product(["dynamic", "adaptive"], [False, True]))
def test_in_shard_map_a_whole_step_reduces_one_pair_of_flags(policy, tracked):
    tx = jaxscale.loss_scaled(
        optax.identity(), policy, axis_name=BOTH, track_leaves=tracked
    )
    args = LEAVES, tx.init(LEAVES), LEAVES, jnp.array(1.0)
    specs = laid_out(args)
    run = functools.partial(
        jax.shard_map, mesh=GRID, in_specs=specs, out_specs=specs[:2]
    )
    reduced = all_reduces(run(lambda *args: step(tx, *args[:3], value=args[3])), *args)
    # The gradients', or those of each leaf, and the loss's; of the largest gradient, its bits.
    assert reduced == [1]


# Meshes as `jax.make_mesh` makes them since JAX 0.9: their axes are Explicit, and the sharding of
# an array is part of its type.
WEIGHTS = {
    "in": jnp.linspace(-1, 1, 512).reshape(16, 32),
    "out": jnp.ones((32, 16)) / 32.0,
}
REPLICATED = {"in": P(), "out": P()}
TENSOR_PARALLEL = {"in": P(None, "model"), "out": P("model", None)}


def mean_square(y):
    return jnp.mean(y**2)


def mlp(w, x):
    return mean_square(jax.nn.gelu(x @ w["in"]) @ w["out"])


def tensor_parallel(w, x):
    hidden = jax.nn.gelu(x @ w["in"])
    outputs = jnp.einsum("bh,ho->bo", hidden, w["out"], out_sharding=P("data", None))
    return mean_square(outputs)


def resharded(w, x):
    return mean_square(jax.sharding.reshard(x @ w["in"], P("data", None)) @ w["out"])


def scan_of_remat(w, x):
    layer = jax.checkpoint(lambda x, _: (x + jax.nn.gelu(x @ w["in"]) @ w["out"], None))
    return mean_square(jax.lax.scan(layer, x, None, length=3)[0])


def likelihood(w, x):
    return -jnp.mean(jax.nn.log_softmax(jnp.tanh(x @ w["in"]) @ w["out"])[:, 0])


def looked_up(w, x):
    taken = w["in"].at[jnp.arange(8) % 16].get(out_sharding=P(None, None))
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


def in_shard_map(w, x):
    def each(w, x):
        return jax.lax.pmean(mlp(w, x), "data")

    return jax.shard_map(
        each, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )(w, x)


def remat_in_shard_map(w, x):
    def each(w, x):
        return jax.lax.pmean(jax.checkpoint(mlp)(w, x), "data")

    return jax.shard_map(
        each, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )(w, x)


EXPLICIT = {
    fun.__name__: (fun, REPLICATED)
    for fun in (mlp, scan_of_remat, likelihood, looked_up)
}
EXPLICIT |= {
    fun.__name__: (fun, REPLICATED) for fun in (ruled, in_shard_map, remat_in_shard_map)
}
EXPLICIT |= {
    fun.__name__: (fun, TENSOR_PARALLEL) for fun in (tensor_parallel, resharded)
}
WRAPPERS = {
    "autocast": jaxscale.autocast,
    "scale_backward": jaxscale.scale_backward,
    "scale_backward of autocast": lambda fun: jaxscale.scale_backward(
        jaxscale.autocast(fun)
    ),
    "autocast of scale_backward": lambda fun: jaxscale.autocast(
        jaxscale.scale_backward(fun)
    ),
}


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="axes are not Explicit by default"
)
@cases(
    "name, way",
    itertools.product(EXPLICIT, WRAPPERS),
    fast=[
        ("tensor_parallel", "autocast"),
        ("remat_in_shard_map", "scale_backward of autocast"),
        ("looked_up", "autocast of scale_backward"),
    ],
)
def test_meshes_with_explicit_axes(name, way):
    fun, specs = EXPLICIT[name]
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    assert mesh.axis_types == (AxisType.Explicit,) * 2
    with jax.set_mesh(mesh):
        w = {
            key: jax.device_put(x, NamedSharding(mesh, specs[key]))
            for key, x in WEIGHTS.items()
        }
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
        expected = jax.jit(jax.value_and_grad(fun))(w, x)
        actual = jax.jit(jax.value_and_grad(WRAPPERS[way](fun)))(w, x)
        tx = jaxscale.loss_scaled(optax.adam(1e-3))
        after, _, loss = jax.jit(jaxscale.train_step(WRAPPERS[way](fun), tx))(
            w, tx.init(w), x
        )
    assert float(loss) == float(actual[0])
    pairs = [*zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)]
    for a, b in pairs:
        assert jax.typeof(a) == jax.typeof(b)  # with its sharding
        np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01 * float(jnp.abs(b).max()))
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, w)

"""Many devices, one verdict."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tables import assert_same_bits, cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

DEVICES = jax.devices("cpu")
MESH = Mesh(np.array(DEVICES), ("data",))
REPLICATED, SHARDED = PartitionSpec(), PartitionSpec("data")
PARAMS = {"w": jnp.ones(16), "b": jnp.zeros(())}
X = jnp.linspace(0.1, 1.0, 16 * 8).reshape(16, 8)


def shards(array):
    return [np.asarray(shard.data).tolist() for shard in array.addressable_shards]


def is_equal_on_all(array):
    return len(set(map(str, shards(array)))) == 1  # as text, where NaN is NaN


AGREEING = {
    "clipped": jaxscale.loss_scaled(optax.adam(0.1), axis_name="data", max_norm=1.0),
    "tracked": jaxscale.loss_scaled(optax.adam(0.1), axis_name="data", track_leaves=True),
    "window": jaxscale.multi_steps(
        jaxscale.loss_scaled(optax.sgd(0.1), axis_name="data"), 2, drop="window"
    ),
    "named inside": jaxscale.loss_scaled(jaxscale.skip_nonfinite(optax.sgd(1.0), axis_name="data")),
    "named outside": jaxscale.loss_scaled(
        jaxscale.multi_steps(optax.sgd(1.0), 1), axis_name="data"
    ),
}


@cases(
    "name, check, fused",
    itertools.product(AGREEING, [True, False], [True, False]),
    fast=[("clipped", True, True), ("tracked", False, False)],
)
def test_shard_map_over_sharded_parameters_agrees(name, check, fused):
    tx, params = AGREEING[name], {"a": jnp.ones(16), "b": jnp.ones(8)}
    state = tx.init(params)
    specs = jax.tree.map(lambda leaf: SHARDED if leaf.ndim else REPLICATED, state)

    def one_device(params, state, grads):
        if fused:
            return jaxscale.apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    options = {"in_specs": (SHARDED, specs, SHARDED), "out_specs": (SHARDED, specs)}
    run = jax.jit(jax.shard_map(one_device, mesh=MESH, check_vma=check, **options))
    good = {"a": params["a"].at[4:6].set([3, 4]), "b": params["b"] * 0}
    params, state = run(params, state, good)
    if name == "clipped":  # the largest norm of all devices, each of which has two of `a`
        assert shards(state.grad_norm) == [5.0] * 8
    # An overflow on device 2, and another on device 5.
    bad = {"a": good["a"].at[5].set(jnp.nan), "b": good["b"].at[5].set(jnp.inf)}
    kept, after = run(params, state, bad)
    assert_same_bits(jax.device_get(kept), jax.device_get(params))
    assert all(leaf.ndim or is_equal_on_all(leaf) for leaf in jax.tree.leaves(after))
    assert (after.total_notfinite, after.scaling.loss_scale) == (1, 2.0**14)
    assert name != "tracked" or after.nonfinite_leaves == {"a": True, "b": True}


def test_a_loss_that_differs_among_devices_needs_the_axis():
    def run(axis_name):
        tx = jaxscale.loss_scaled(optax.sgd(0.1), axis_name=axis_name)

        def one_device(state, loss):
            return tx.update(PARAMS, state, PARAMS, value=loss[0])[1]

        specs = {"in_specs": (REPLICATED, SHARDED), "out_specs": REPLICATED}
        mapped = jax.jit(jax.shard_map(one_device, mesh=MESH, **specs))
        return mapped(tx.init(PARAMS), jnp.ones(8).at[3].set(jnp.inf))

    with pytest.raises(ValueError, match=r"pass `axis_name='data'`"):
        run(None)
    state = run("data")
    assert (state.total_notfinite_loss, state.scaling.loss_scale) == (1, 2.0**15)


# Retries: one device overflows, and all go round together.

HOT_X = X.at[13].multiply(64.0)  # of one device alone


def half_loss(params, x):
    outputs = x.astype(jnp.float16) @ params["w"][:8].astype(jnp.float16)
    return jnp.mean((outputs.astype(jnp.float32) + params["b"] - 1) ** 2)


def hot(scale=2.0**24, **kwargs):
    policy = jaxscale.DynamicLossScale(init_scale=scale, growth_interval=3)
    return jaxscale.loss_scaled(optax.adam(0.1), policy, **kwargs)


def averaged(fun, **kwargs):
    """Differentiates on each device, and averages over all."""
    differentiated = jax.value_and_grad(fun, **kwargs)

    def value_and_grad(*args):
        value, grads = differentiated(*args)
        return value, jax.lax.pmean(grads, "data")

    return value_and_grad


def hidden(grads):
    """The mean over all devices, whatever one of them got."""
    return jax.lax.pmean(jax.tree.map(jnp.nan_to_num, grads), "data")


# How gradients are averaged, with the axis that the optimizer knows: a hook brings its own.
BY_TRANSFORM, BY_HOOK = ({"transform": averaged}, "data"), ({"on_grads": hidden}, None)


def by_jit(retries, kind=AxisType.Auto):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    use_mesh = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh

    def with_output(params, x):  # one whose type names its sharding
        return half_loss(params, x), x * 2

    step = jax.jit(jaxscale.train_step(with_output, hot(), has_aux=True, retries=retries))

    def run(params, state, x):
        with use_mesh(mesh):
            x = jax.device_put(x, NamedSharding(mesh, SHARDED))
            params = jax.device_put(params, NamedSharding(mesh, REPLICATED))
            return jax.device_get(step(params, state, x)[:2])

    return run


def by_shard_map(retries, way=BY_TRANSFORM, **check):
    tx = hot(axis_name=way[1])
    step = jaxscale.train_step(half_loss, tx, retries=retries, **way[0])
    specs = {"in_specs": (REPLICATED, REPLICATED, SHARDED), "out_specs": REPLICATED}
    return jax.jit(jax.shard_map(lambda *args: step(*args)[:2], mesh=MESH, **specs, **check))


def by_pmap(retries, way=BY_TRANSFORM):
    tx = hot(axis_name=way[1])
    step = jaxscale.train_step(half_loss, tx, retries=retries, **way[0])
    mapped = jax.pmap(step, axis_name="data", devices=DEVICES, in_axes=(None, None, 0))

    def run(params, state, x):
        outputs = mapped(params, state, x.reshape(8, 2, 8))[:2]
        for leaf in jax.tree.leaves(outputs):
            assert len({np.asarray(part).tobytes() for part in leaf}) == 1
        return jax.tree.map(lambda leaf: leaf[0], outputs)

    return run


WAYS = {
    "jit": by_jit,
    "shard_map": by_shard_map,
    "shard_map, unchecked": functools.partial(by_shard_map, check_vma=False),
    "pmap": by_pmap,
    "shard_map, hook": functools.partial(by_shard_map, way=BY_HOOK),
    "shard_map, unchecked, hook": functools.partial(by_shard_map, way=BY_HOOK, check_vma=False),
    "pmap, hook": functools.partial(by_pmap, way=BY_HOOK),
    "pmap, found": functools.partial(by_pmap, way=(BY_TRANSFORM[0], None)),
    "explicit mesh": functools.partial(by_jit, kind=AxisType.Explicit),
}


@cases("way", WAYS, fast=["jit", "shard_map, hook"])
def test_all_go_round_together(way):
    once, again = WAYS[way](0), WAYS[way](30)
    assert once(PARAMS, hot().init(PARAMS), HOT_X)[1].total_notfinite == 1
    if "hook" in way:  # before anything that would wait for ever if they did not agree
        bad = once(PARAMS, hot(1.0).init(PARAMS), X.at[13, 2].set(jnp.inf))[1]
        assert bad.total_notfinite_loss == 1
    params, state = again(PARAMS, hot().init(PARAMS), HOT_X)
    assert (state.total_notfinite, state.total_notfinite_loss) == (0, 0)
    assert state.total_retries > 0
    scale = 2.0 ** (24 - int(state.total_retries))
    expected, fitting = again(PARAMS, hot(scale).init(PARAMS), HOT_X)
    assert fitting.total_retries == 0
    assert_same_bits(*jax.device_get((params, expected)))
    # But for the hysteresis tracker, which the search has spent.
    assert_same_bits(*jax.device_get((state.scaling[:2], fitting.scaling[:2])))
    # A bad loss on one device is not repeated on any.
    kept, state = again(PARAMS, hot().init(PARAMS), X.at[13, 2].set(jnp.inf))
    assert (state.total_retries, state.total_notfinite_loss) == (0, 1)
    assert_same_bits(*jax.device_get((kept, PARAMS)))


def test_devices_that_might_part_are_told_so():
    step = jaxscale.train_step(half_loss, hot(), retries=3)

    def one_device(params, state, w, x):
        # Parameters that differ among devices, and no axis name.
        return step(params | {"w": w}, state, x)[2][None]

    specs = {"in_specs": (REPLICATED, REPLICATED, SHARDED, SHARDED), "out_specs": SHARDED}
    run = jax.shard_map(one_device, mesh=MESH, **specs)
    with pytest.raises(ValueError, match=r"train_step\(retries=3\).*'data' may.*axis_name='data'"):
        run(PARAMS, hot().init(PARAMS), jnp.ones(128), X)

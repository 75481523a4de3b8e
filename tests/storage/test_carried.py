"""Half-precision parameters in populations, loops, on devices and in the front ends."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import assert_same_bits, cases, fused_step

import jaxscale
import jaxscale.flax
import jaxscale.nnx

pytestmark = pytest.mark.standard_promotion


def test_a_mask_may_be_a_module():
    """A tree of bools as `eqx.tree_at` makes it is an MLP, which can be called."""
    mlp = eqx.nn.MLP(8, 1, 16, 1, dtype=jnp.bfloat16, key=jax.random.key(0))
    params = eqx.filter(mlp, eqx.is_inexact_array)
    everything = jax.tree.map(lambda _: True, params)
    mask = eqx.tree_at(lambda tree: tree.layers[0].weight, everything, False)
    tx = jaxscale.master_weights(optax.sgd(0.1), mask=mask)
    remainders = tx.init(params).weights.remainders
    assert remainders.layers[0].weight is None
    assert len(jax.tree.leaves(remainders)) == len(jax.tree.leaves(params)) - 1


WRAPPERS = {
    "remainder": jaxscale.master_weights,
    "float32": functools.partial(jaxscale.master_weights, storage="float32"),
    "random": jaxscale.stochastic_rounding,
    "remainder, compact": lambda tx: jaxscale.master_weights(
        jaxscale.compact_state(tx)
    ),
    "random, compact": lambda tx: jaxscale.stochastic_rounding(
        jaxscale.compact_state(tx)
    ),
}
RANDOM = [name for name in WRAPPERS if "random" in name]

rng = np.random.default_rng(1)
PARAMS = {
    "w": jnp.asarray(rng.standard_normal((64, 128)), jnp.bfloat16),
    "h": jnp.asarray(rng.standard_normal(64), jnp.float16),
}
# exact sums, whatever their order is
GRADS = {
    "w": jnp.asarray(rng.integers(-8, 8, (64, 128)), jnp.float32),
    "h": jnp.asarray(rng.integers(-8, 8, 64), jnp.float32),
}


def make(wrapper, **options):
    return jaxscale.loss_scaled(WRAPPERS[wrapper](optax.adamw(1e-3)), **options)


def step_of(tx):
    return functools.partial(fused_step, tx)


@pytest.mark.worlds
@cases("wrapper", WRAPPERS, fast=["remainder", "random, compact"])
def test_it_compiles_once_and_a_loop_does_the_same(wrapper):
    tx = make(wrapper)
    step = jax.jit(step_of(tx), donate_argnums=(0, 1))
    params, state = jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS)
    types = jax.tree.map(jax.typeof, state)
    for _ in range(3):
        params, state = step(params, state, GRADS)
    assert step._cache_size() == 1
    assert jax.tree.map(jax.typeof, state) == types

    def body(carry, _):
        return step_of(tx)(*carry, GRADS), None

    (looped, _), _ = jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), length=3)
    assert_same_bits(looped, params)


@pytest.mark.worlds
@cases("wrapper", RANDOM, fast=["random, compact"])
def test_members_of_a_population_draw_differently(wrapper):
    tx = make(wrapper)
    population = jax.tree.map(lambda p: jnp.stack([p] * 3), PARAMS)
    state = jax.vmap(tx.init)(population)
    keys = np.asarray(state.weights.key)
    assert len(np.unique(keys, axis=0)) == 3
    step = jax.vmap(step_of(tx), in_axes=(0, 0, None))
    first, _ = jax.jit(step)(population, state, GRADS)
    for member in (1, 2):
        assert (first["w"][member] != first["w"][0]).mean() > 0.2


@pytest.mark.worlds
@cases("wrapper", RANDOM, fast=["random, compact"])
def test_members_of_a_sweep_draw_differently_by_their_seeds(wrapper):
    """They start from the same weights, so that nothing else tells them apart."""

    def train(rate, seed):
        inner = optax.sgd(rate, momentum=0.9)
        if "compact" in wrapper:
            inner = jaxscale.compact_state(inner, seed=seed)
        tx = jaxscale.loss_scaled(jaxscale.stochastic_rounding(inner, seed=seed))
        return step_of(tx)(PARAMS, tx.init(PARAMS), GRADS)[0]

    sweep = jax.jit(jax.vmap(train))
    ends = sweep(jnp.full(3, 0.01), jnp.array([0, 1, 1]))
    assert (ends["w"][1] != ends["w"][0]).mean() > 0.2
    assert_same_bits(ends["w"][2], ends["w"][1])
    assert_same_bits(train(0.01, 1)["w"], train(0.01, jnp.int32(1))["w"])


# Devices.

DEVICES = np.array(jax.devices("cpu")).reshape(4, 2)


def take_steps(wrapper, params, grads):
    tx = make(wrapper, axis_name="data")
    state = tx.init(params)
    for _ in range(2):
        params, state = step_of(tx)(params, state, grads)
    return params


@pytest.mark.worlds
@cases("wrapper", WRAPPERS, fast=["remainder"])
def test_parameters_that_are_split_over_devices_are_not_exchanged(wrapper):
    """But for the verdict, a few numbers. `test_sharding.py` compares the bits."""
    mesh = Mesh(DEVICES, ("data", "model"))
    shardings = {"w": NamedSharding(mesh, P("data", "model"))}
    shardings["h"] = NamedSharding(mesh, P("model"))
    tx = make(wrapper)
    params, grads = jax.device_put((PARAMS, GRADS), (shardings, shardings))
    step = jax.jit(step_of(tx)).lower(params, tx.init(params), grads)
    program = step.compile().as_text()
    assert "all-gather" not in program
    assert "all-to-all" not in program


MESH = Mesh(DEVICES[:, 0], ("data",))


@pytest.mark.worlds
@cases(
    "wrapper, checked",
    [(name, flag) for name in WRAPPERS for flag in (True, False)],
    fast=[("remainder", True), ("random, compact", False)],
)
def test_replicas_stay_equal(wrapper, checked):
    def body(params, grads):
        if checked:  # so that gradients vary, until they are averaged
            grads = jax.tree.map(
                lambda g: g * (1 + jax.lax.axis_index("data") % 2), grads
            )
            grads = jax.lax.pmean(grads, "data")
        params = take_steps(wrapper, params, grads)
        return jax.tree.map(lambda p: p[None], params)

    run_all = jax.shard_map(
        body,
        mesh=MESH,
        in_specs=(P(), P()),
        out_specs=P("data"),
        check_vma=checked,
    )
    for leaf in jax.tree.leaves(jax.jit(run_all)(PARAMS, GRADS)):
        assert (leaf == leaf[:1]).all()


@pytest.mark.worlds
@cases("wrapper", RANDOM, fast=["random, compact"])
def test_shards_draw_differently(wrapper):
    params = {"w": jnp.concatenate([PARAMS["w"][:16]] * 4), "h": PARAMS["h"]}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1.0), params)
    specs = {"w": P("data"), "h": P()}
    body = functools.partial(take_steps, wrapper)
    run_all = jax.shard_map(body, mesh=MESH, in_specs=(specs, specs), out_specs=specs)
    shards = jax.jit(run_all)(params, grads)["w"].reshape(4, 16, 128)
    for index in (1, 2, 3):
        assert (shards[index] != shards[0]).mean() > 0.2


# Front ends.


@cases("storage", ["remainder", "float32"])
def test_a_step_may_donate_what_was_made_of_a_checkpoint(storage):
    checkpoint = {name: leaf.astype(jnp.float32) for name, leaf in PARAMS.items()}
    params = PARAMS | {"f": jnp.ones(3)}
    checkpoint["f"] = jnp.ones(3)
    tx = jaxscale.master_weights(optax.sgd(0.1), storage)
    half, state = jaxscale.with_master_params(tx.init(params), checkpoint)
    step = jax.jit(step_of(tx), donate_argnums=(0, 1))
    step(half, state, GRADS | {"f": jnp.ones(3)})
    assert not any(leaf.is_deleted() for leaf in checkpoint.values())


@pytest.mark.worlds
@cases("wrapper", ["remainder", "float32"], fast=["remainder"])
def test_nnx_starts_from_float32_parameters(wrapper):
    model = nnx.Linear(8, 16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tx = WRAPPERS[wrapper](optax.adamw(1e-3))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32) * 1.001, params)
    params, opt_state = jaxscale.with_master_params(optimizer.opt_state, wide)
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    now = nnx.state(model, nnx.Param)
    assert {leaf.dtype for leaf in jax.tree.leaves(now)} == {jnp.dtype("bfloat16")}
    masters = jaxscale.master_params(optimizer.opt_state, now)
    assert_same_bits(jax.tree.leaves(masters), jax.tree.leaves(wide))
    optimizer.update(model, jax.tree.map(jnp.ones_like, now))


class Strict:
    """Parameters whose class takes bfloat16 arrays and nothing else, such as None or integers."""

    def __init__(self, w, b):
        for leaf in (w, b):
            if getattr(leaf, "dtype", None) not in (jnp.bfloat16, jnp.float32):
                raise TypeError(leaf)
        self.w, self.b = w, b


jax.tree_util.register_pytree_with_keys(
    Strict,
    lambda node: (
        (
            (jax.tree_util.GetAttrKey("w"), node.w),
            (jax.tree_util.GetAttrKey("b"), node.b),
        ),
        None,
    ),
    lambda _, children: Strict(*children),
)


@pytest.mark.worlds
@cases("wrapper", WRAPPERS, fast=["remainder", "random"])
def test_a_class_that_looks_at_its_children_learns(wrapper):
    params = Strict(PARAMS["w"], jnp.ones(64, jnp.bfloat16))
    grads = Strict(GRADS["w"], GRADS["h"])
    tx = WRAPPERS[wrapper](optax.sgd(1e-3))
    step = jax.jit(step_of(tx))
    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state, grads)
    masters = jaxscale.master_params(state, params)
    assert masters.w.dtype == jnp.float32
    if wrapper == "remainder":
        assert_same_bits(jaxscale.with_master_params(state, masters)[0].w, params.w)


def masters(mask, storage="remainder"):
    return jaxscale.master_weights(optax.adam(1e-3), storage, mask=mask)


LEAVES = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.full(4, 0.3, jnp.bfloat16)}
LEAVES |= {"c": jnp.ones(4, jnp.float16)}
FROZEN = {"a": True, "b": False, "c": True}
# The optimizer of a run, and the one that goes on with it.
CHANGED = {
    "unfrozen": (masters(FROZEN), masters(None)),
    "frozen": (masters(None), masters(FROZEN)),
    "storage": (masters(FROZEN), masters(FROZEN, "float32")),
    "both": (masters(None), masters(FROZEN, "float32")),
}


@cases("name", CHANGED)
def test_the_way_that_is_named_after_a_change_keeps_all_bits(name):
    old_tx, tx = CHANGED[name]
    params, old = LEAVES, old_tx.init(LEAVES)
    for _ in range(3):
        grads = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1), params)
        params, old = jaxscale.apply_gradients(old_tx, grads, old, params)
    names = {"jaxscale": jaxscale, "old_tx": old_tx, "tx": tx, "params": params}
    names["state_dict"] = jaxscale.to_state_dict(old)
    with pytest.raises(ValueError, match="`mask` or the `storage`") as error:
        jaxscale.from_state_dict(tx.init(params), names["state_dict"])
    for line in re.findall(r"`([^`]* = [^`]*\))`", str(error.value)):
        exec(line, names)
    state = names["opt_state"]
    assert_same_bits(state.inner_state, old.inner_state)
    expected = jaxscale.master_params(old, params)
    actual = jaxscale.master_params(state, params)
    if name in ("frozen", "both"):  # what is left out keeps no bits beside it
        del expected["b"], actual["b"]
    assert_same_bits(actual, expected)
    jaxscale.apply_gradients(tx, grads, state, params)

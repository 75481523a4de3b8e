"""Parameters laid out over eight devices by ``jit``: one verdict, and what it costs."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tables import assert_same_bits, cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

DEVICES = np.array(jax.devices("cpu")).reshape(2, 4)
MESH = Mesh(DEVICES, ("data", "model"))
PARAMS = {
    "in": jnp.linspace(-1.0, 1.0, 16 * 32).reshape(16, 32),
    "bias": jnp.zeros(32),
    "out": jnp.linspace(1.0, -1.0, 32 * 8).reshape(32, 8),
}
X = jnp.linspace(0.1, 1.0, 16 * 16).reshape(16, 16)
P = PartitionSpec
BOTH = ("data", "model")
LAYOUTS = {
    # name: the layout of the batch, and of the parameters
    "data parallel": (P(BOTH), {"in": P(), "bias": P(), "out": P()}),
    "fully sharded": (P(BOTH), {"in": P(BOTH), "bias": P(BOTH), "out": P(BOTH)}),
    "tensor parallel": (P(), {"in": P(None, BOTH), "bias": P(BOTH), "out": P(BOTH)}),
    "sharded twice": (
        P("data"),
        {"in": P("data", "model"), "bias": P("model"), "out": P("model", "data")},
    ),
}
TX = jaxscale.loss_scaled(optax.adamw(1e-2), jaxscale.DynamicLossScale(init_scale=2.0**8))


def loss_fn(params, x):
    hidden = x.astype(jnp.float16) @ params["in"].astype(jnp.float16)
    hidden = jax.nn.relu(hidden + params["bias"].astype(jnp.float16))
    return jnp.mean((hidden @ params["out"].astype(jnp.float16)).astype(jnp.float32) ** 2)


@jax.jit
def train_step(params, opt_state, x, push):
    loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, x)
    grads = jax.tree.map(jnp.add, grads, push)
    updates, opt_state = TX.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def placed(tree, specs):
    return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs))


def start(layout):
    batch, specs = LAYOUTS[layout]
    params = placed(PARAMS, specs)
    everywhere = NamedSharding(MESH, P())
    state = jax.tree.map(  # the scalars on all devices, the moments as they lie
        lambda leaf: leaf if leaf.ndim else jax.device_put(leaf, everywhere), TX.init(params)
    )
    push = placed(jax.tree.map(jnp.zeros_like, PARAMS), specs)
    return params, state, placed(X, batch), push


def assert_devices_agree(state):
    for value in jax.tree.leaves(state._replace(inner_state=None)):
        assert len({str(np.asarray(shard.data)) for shard in value.addressable_shards}) == 1
        assert len(value.sharding.device_set) == 8


PLACES = {"in": (3, 17), "bias": (9,), "out": (31, 5)}


@cases("layout, leaf", itertools.product(LAYOUTS, PLACES), fast=[("sharded twice", "in")])
def test_a_step_over_devices_is_the_step_on_one_and_all_skip_together(layout, leaf):
    params, state, x, push = start(layout)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    step = jax.jit(lambda *args: train_step(*args), donate_argnums=(0, 1))

    def stepped(params, state, x, push):
        new_params, new_state = step(*jax.tree.map(jnp.copy, (params, state)), x, push)
        assert_devices_agree(new_state)
        for name, value in new_params.items():
            assert value.sharding.is_equivalent_to(shardings[name], value.ndim)
        return new_params, new_state

    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    expected, expected_state = train_step(PARAMS, TX.init(PARAMS), X, zeros)
    params, state = stepped(params, state, x, push)
    # To rounding: sums over devices have another order.
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
    assert step._cache_size() == 1


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


def stepped(tx):
    """A step of an optimizer."""

    def step(grads, state, params, **extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def combines():
    """Whether this XLA makes one all-reduce of two that do not depend on each other."""
    return len(all_reduces(lambda x, y: (x.sum(), y.sum()), X, X + 1)) == 1


@cases("policy", ["dynamic", "adaptive"], fast=["dynamic"])
def test_the_verdict_costs_one_all_reduce(policy):
    bare = optax.adamw(1e-3)
    assert all_reduces(stepped(bare), LEAVES, bare.init(LEAVES), LEAVES) == []
    tx = jaxscale.loss_scaled(bare, policy)
    found = all_reduces(stepped(tx), LEAVES, tx.init(LEAVES), LEAVES)
    # One flag a leaf travels in it. XLA for GPUs and TPUs makes them one before, and older
    # versions for CPUs join nothing at all, be it sums of gradients or flags.
    assert sum(found) == len(LEAVES)
    assert len(found) == (1 if combines() else len(LEAVES))


@pytest.mark.slow
def test_in_a_whole_step_the_verdict_travels_with_the_loss():
    def loss_fn(params):
        return sum(jnp.sum(leaf**2) for leaf in params.values())

    bare = all_reduces(jax.value_and_grad(loss_fn), LEAVES)
    for policy in ("dynamic", "adaptive"):
        tx = jaxscale.loss_scaled(optax.sgd(1e-3), policy)
        found = all_reduces(jaxscale.train_step(loss_fn, tx), LEAVES, tx.init(LEAVES))
        assert sum(found) - sum(bare) == len(LEAVES)
        # Sums travel together, where XLA joins what is alike; maxima by themselves.
        apart = 0 if combines() else len(LEAVES)
        assert len(found) - len(bare) <= (1 if policy == "adaptive" else apart)


@cases("policy, tracked", itertools.product(["dynamic", "adaptive"], [False, True]))
def test_in_shard_map_a_whole_step_reduces_one_pair_of_flags(policy, tracked):
    tx = jaxscale.loss_scaled(optax.identity(), policy, axis_name=BOTH, track_leaves=tracked)
    args = LEAVES, tx.init(LEAVES), LEAVES, jnp.array(1.0)
    specs = laid_out(args)
    run = jax.shard_map(
        lambda *args: stepped(tx)(*args[:3], value=args[3]),
        mesh=MESH,
        in_specs=specs,
        out_specs=specs[:2],
    )
    # The gradients', or those of each leaf, and the loss's; of the largest gradient, its bits.
    assert all_reduces(run, *args) == [1]

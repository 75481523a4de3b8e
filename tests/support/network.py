"""A small float16 network with all that a bad batch could spoil, on one device and on eight."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from faults import GRADIENT, INPUT, Fault, finite, passed_back, spoil
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import jaxscale
import jaxscale.flax

AXIS = "data"
REPLICATED, SHARDED = PartitionSpec(), PartitionSpec(AXIS)
CHECK = "check_vma" if "check_vma" in jax.shard_map.__kwdefaults__ else "check_rep"


@functools.cache
def digits():
    """Images and labels."""
    images, labels = load_digits(return_X_y=True)
    return (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32), labels.astype(np.int32)


class Net(nn.Module):
    """Two convolutions with batch normalization; a fault may be put into what flows back."""

    @nn.compact
    def __call__(self, images, fault):
        x = images
        for layer, features in enumerate((8, 16)):
            x = nn.Conv(features, (3, 3), (2, 2), dtype=jnp.float16)(x)
            x = passed_back(x, fault.only_if(fault.leaf % 3 == layer))
            x = nn.relu(nn.BatchNorm(False, momentum=0.9, dtype=jnp.float16)(x))
        x = nn.Dense(10, dtype=jnp.float16)(x.reshape(len(x), -1))
        return passed_back(x, fault.only_if(fault.leaf % 3 == 2)).astype(jnp.float32)


class State(jaxscale.flax.TrainState):
    """With the statistics of batch normalization, and an average of the parameters."""

    batch_stats: Any
    ema: Any


def create(tx):
    """The state before the first step."""
    nowhere = Fault(*[jnp.int32(0)] * 6)
    variables = jax.jit(Net().init)(jax.random.key(0), digits()[0][:1], nowhere)
    return State.create(apply_fn=Net().apply, tx=tx, ema=variables["params"], **variables)


def kept(state):
    """What a bad batch must leave no trace in: all but the scale and the counters."""
    return state.params, state.opt_state.inner_state, state.step, state.batch_stats, state.ema


def train_step(state, images, labels, fault, *, micro_batches=1, axis_name=None):
    """The next state, and what is to be seen of it."""

    def differentiate(batch_stats, images, labels, fault):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": batch_stats}
            logits, mutated = state.apply_fn(variables, images, fault, mutable="batch_stats")
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), mutated["batch_stats"]

        images = spoil(images, fault, INPUT)
        value_and_grad = jaxscale.value_and_grad(loss_fn, state, has_aux=True)
        (loss, batch_stats), grads = value_and_grad(state.params)
        if axis_name:  # but not of the loss: each device has its own
            batch_stats, grads = jax.lax.pmean((batch_stats, grads), axis_name)
        return batch_stats, loss, spoil(grads, fault, GRADIENT)

    def accumulate(carry, batch):
        batch_stats, total = carry
        images, labels, i = batch
        here = fault.only_if(fault.micro_batch == i)
        batch_stats, loss, grads = differentiate(batch_stats, images, labels, here)
        return (batch_stats, jax.tree.map(jnp.add, total, grads)), loss

    if axis_name:
        fault = fault.only_if(fault.device == jax.lax.axis_index(axis_name))
    if micro_batches == 1:
        batch_stats, loss, grads = differentiate(state.batch_stats, images, labels, fault)
    else:
        batches = [x.reshape(micro_batches, -1, *x.shape[1:]) for x in (images, labels)]
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        (batch_stats, total), losses = jax.lax.scan(
            accumulate, (state.batch_stats, zeros), (*batches, jnp.arange(micro_batches))
        )
        loss, grads = losses.mean(), jax.tree.map(lambda g: g / micro_batches, total)
    ema = optax.incremental_update(state.params, state.ema, 0.01)
    state = state.apply_gradients(grads=grads, value=loss, batch_stats=batch_stats, ema=ema)
    return state, {"finite": finite(state), "loss": loss, **jaxscale.metrics(state)}


def same_bits(first, second):
    """Whether two states are the same in what must not change."""

    def bits(leaf):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32) if is_float else leaf

    same = jax.tree.map(lambda a, b: jnp.all(bits(a) == bits(b)), kept(first), kept(second))
    return jnp.stack(jax.tree.leaves(same)).all()


# Each of these compiles a step and a comparison of states, and places the first state.


def on_one_device(step, same_bits, state):
    return jax.jit(step), jax.jit(same_bits), state


def mesh():
    return Mesh(np.array(jax.devices("cpu")), (AXIS,))


def in_eighths(leaf):
    """In shards along the last axis that eight devices can share."""
    axes = [axis for axis, size in enumerate(leaf.shape) if size % 8 == 0]
    return PartitionSpec(*[None] * axes[-1], AXIS) if axes else REPLICATED


def under_jit(step, same_bits, state):
    """With the batch in shards, and all that is trained and divides into eighths."""
    of_state = jax.tree.map(lambda leaf: NamedSharding(mesh(), in_eighths(leaf)), state)
    batch, rest = (NamedSharding(mesh(), spec) for spec in (SHARDED, REPLICATED))
    step = jax.jit(
        step, in_shardings=(of_state, batch, batch, rest), out_shardings=(of_state, rest)
    )
    return step, jax.jit(same_bits), jax.device_put(state, of_state)


def on_each_device(step, same_bits, state):
    """In `shard_map`: each device has its own parameters, and sees its own part of the batch."""

    def mapped(fun, in_specs, out_specs):
        # Unchecked, as a fault on one device makes the replicas differ: nearly.
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.jit(jax.shard_map(fun, mesh=mesh(), **specs, **{CHECK: False}))

    def step_of_one(state, images, labels, fault):
        state, seen = step(state, images, labels, fault, axis_name=AXIS)
        return state, jax.tree.map(lambda x: x[None], seen)

    return (
        mapped(step_of_one, (REPLICATED, SHARDED, SHARDED, REPLICATED), (REPLICATED, SHARDED)),
        mapped(lambda *states: same_bits(*states)[None], REPLICATED, SHARDED),
        jax.device_put(state, NamedSharding(mesh(), REPLICATED)),
    )


def disagreements(state):
    """What is not the same on all devices that have it: lines of text, hopefully none."""
    return [
        f"{jax.tree_util.keystr(path)} is not the same on all devices"
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if leaf.is_fully_replicated
        and len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) > 1
    ]

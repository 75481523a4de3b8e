"""Each form of many devices ends where one device ends, leaf by leaf and device by device.

The forms are `shard_map` with and without types, and `pmap`. In each of them a device has its own
part of the batch, and so its own loss, and `axis_name` says that the devices decide together.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tables import cases, pairs
from training import amplified

import jaxscale
from jaxscale._jax import vary

pytestmark = pytest.mark.standard_promotion


def test_devices_skip_the_step_that_one_of_them_overflows_in():
    tx = jaxscale.skip_nonfinite(optax.sgd(1.0), axis_name="d")

    def step(params, grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return params + updates

    mesh = Mesh(np.array(jax.devices("cpu")[:2]), "d")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    for grads, expected in (([0.5, 1.0], [0.5, 0]), ([0.5, jnp.inf], [1, 1])):
        params = jax.jit(mapped)(jnp.ones(2), jnp.array(grads))
        np.testing.assert_array_equal(params, expected)


COUNT = 4
DEVICES = jax.devices("cpu")[:COUNT]
MESH = Mesh(np.array(DEVICES), ("d",))
SHARDED = P("d")

# Each device has two examples. Their sizes differ, and so do losses and gradients.
SIZES = np.array([1, 4, 0.5, 2], np.float32).repeat(2)[:, None]
X = SIZES * np.linspace(-1, 1, 8 * 4, dtype=np.float32).reshape(8, 4)
Y = SIZES[:, 0] * np.linspace(1, 3, 8, dtype=np.float32)
# What the gradients of each example are multiplied by.
ONES = np.ones(8, np.float32)
# One of them stands out.
SIZES_OF_BATCHES = (1.0, 0.5, 0.75, 1.5, 40.0, 1.0, 0.5, 1.0)
GOOD = [(X * np.float32(size), Y, ONES) for size in SIZES_OF_BATCHES]
# One device has an overflow, or a bad loss.
OVERFLOW = X, Y, ONES.copy()
OVERFLOW[2][5] = np.inf
BAD_LOSS = X.copy(), Y, ONES
BAD_LOSS[0][2, 1] = np.nan
BATCHES = [*GOOD[:2], OVERFLOW, BAD_LOSS, *GOOD[2:]]


def mean_loss(weights, batch):
    x, y, factors = batch
    return amplified(jnp.mean((x @ weights - y) ** 2), jnp.max(factors))


# How parameters lie. A layout makes the loss and the gradients of a device, and of them all.
class Layout(NamedTuple):
    params: Any
    split: frozenset  # the names of those of which each device has a part
    loss_of_one: Callable  # of the parameters and the batch that a device has
    average: Callable  # the gradients of a device, to those of its parameters
    loss_of_all: Callable


def average_all(grads):
    return jax.lax.pmean(grads, "d")


def scatter_average(grads):
    whole = grads["w"]
    return {"w": jax.lax.psum_scatter(whole, "d", tiled=True) / COUNT}


def average_shared(grads):
    shared = jax.lax.pmean(grads["shared"], "d")
    return {"shared": shared, "expert": grads["expert"] / COUNT}


def loss_of_experts(params, batch):
    """The mean over devices, each of which has an expert of its own."""
    losses = []
    for device in range(COUNT):
        own = slice(2 * device, 2 * device + 2)
        part = {"shared": params["shared"], "expert": params["expert"][device][None]}
        losses.append(loss_of_expert(part, [rows[own] for rows in batch]))
    return sum(losses) / COUNT


def loss_of_expert(params, batch):
    return mean_loss(params["shared"] + params["expert"][0], batch)


def loss_of_whole(params, batch):
    return mean_loss(params["w"], batch)


START = jnp.array([0.5, -0.25, 0.125, 1.0])
LAYOUTS = {
    "replicated": Layout(
        {"w": START}, frozenset(), loss_of_whole, average_all, loss_of_whole
    ),
    "train_step": Layout(
        {"w": START}, frozenset(), loss_of_whole, average_all, loss_of_whole
    ),
    "ZeRO": Layout(
        {"w": START}, frozenset("w"), loss_of_whole, scatter_average, loss_of_whole
    ),
    "experts": Layout(
        {"shared": START, "expert": jnp.outer(jnp.arange(4.0), START)},
        frozenset(["expert"]),
        loss_of_expert,
        average_shared,
        loss_of_experts,
    ),
}


def whole_params(layout, params):
    """Returns the parameters from which a device computes its loss."""
    if layout is LAYOUTS["ZeRO"]:
        return {"w": jax.lax.all_gather(params["w"], "d", tiled=True)}
    return jax.tree.map(lambda leaf: vary(leaf, ["d"]), params)


def step_of_one(layout, tx, params, state, batch):
    """A step of one device, which gives the optimizer its own loss."""

    def differentiate(loss_fn, **kwargs):
        def value_and_grad(params, batch):
            used = whole_params(layout, params)
            value, grads = jax.value_and_grad(loss_fn, **kwargs)(used, batch)
            return value, layout.average(grads)

        return value_and_grad

    if layout is LAYOUTS["train_step"]:
        train_step = jaxscale.train_step(
            layout.loss_of_one, tx, transform=differentiate
        )
        return train_step(params, state, batch)[:2]
    loss, grads = differentiate(layout.loss_of_one)(params, batch)

    def value_fn(params):
        return jax.lax.pmean(layout.loss_of_one(params, batch), "d")

    return update(tx, params, state, grads, loss, value_fn)


def update(tx, params, state, grads, loss, value_fn):
    extra = {"value": loss, "grad": grads, "value_fn": value_fn}
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def train_on_one(layout, tx, batches=BATCHES):
    """The run to compare with: `jit` on one device."""

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(layout.loss_of_all)(params, batch)
        value_fn = functools.partial(layout.loss_of_all, batch=batch)
        return update(tx, params, state, grads, loss, value_fn)

    return train(step, layout.params, tx, batches)


def train(step, params, tx, batches):
    state = tx.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    for leaf in jax.tree.leaves((params, state)):
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            alike([shard.data for shard in leaf.addressable_shards])
    return params, state


def specs_of(layout, tree):
    """The layout of parameters, and of moments and sums, which lie as parameters do."""
    shapes = [layout.params[name].shape for name in layout.split]
    return jax.tree.map(lambda leaf: SHARDED if leaf.shape in shapes else P(), tree)


def train_in_shard_map(layout, tx, check, batches=BATCHES):
    params = layout.params
    specs = specs_of(layout, (params, tx.init(params)))
    step = functools.partial(step_of_one, layout, tx)
    mapped = jax.shard_map(
        step,
        mesh=MESH,
        in_specs=(*specs, SHARDED),
        out_specs=specs,
        check_vma=check,
    )
    return train(jax.jit(mapped), params, tx, batches)


def train_in_pmap(layout, tx, batches=BATCHES):
    params = layout.params
    specs = specs_of(layout, (params, tx.init(params)))
    step = functools.partial(step_of_one, layout, tx)
    axes = jax.tree.map(lambda spec: 0 if spec == SHARDED else None, specs)
    mapped = jax.pmap(step, "d", devices=DEVICES, in_axes=(*axes, 0))

    def split(leaf, spec):
        return leaf.reshape(COUNT, -1, *leaf.shape[1:]) if spec == SHARDED else leaf

    def join(leaf, spec):
        return leaf.reshape(-1, *leaf.shape[2:]) if spec == SHARDED else alike(leaf)

    def run(params, state, batch):
        trees = jax.tree.map(split, (params, state), specs)
        batch = jax.tree.map(lambda leaf: split(leaf, SHARDED), batch)
        return jax.tree.map(join, mapped(*trees, batch), specs)

    return train(run, params, tx, batches)


def alike(copies):
    """One of some copies, which are the same bit for bit."""
    first, *others = np.asarray(copies)
    for other in others:
        np.testing.assert_array_equal(other, first)
    return first


FORMS = {
    "shard_map": functools.partial(train_in_shard_map, check=True),
    "shard_map, unchecked": functools.partial(train_in_shard_map, check=False),
    "pmap": train_in_pmap,
}
RULE = jaxscale.SpikeRule(window=6, min_history=3)
PLATEAU = optax.contrib.reduce_on_plateau(patience=1, factor=0.5, cooldown=1)
SGD = optax.sgd(0.01)
OPTIMIZERS = {
    "adam": functools.partial(jaxscale.loss_scaled, optax.adam(0.1)),
    "max_norm": functools.partial(jaxscale.skip_nonfinite, SGD, max_norm=0.5),
    "no skips": functools.partial(
        jaxscale.loss_scaled, SGD, None, max_norm=0.5, skip_nonfinite=False
    ),
    "spikes": functools.partial(jaxscale.skip_nonfinite, SGD, spikes=RULE),
    "multi_steps": lambda **options: jaxscale.multi_steps(
        jaxscale.loss_scaled(SGD, max_norm=0.5, **options), 2
    ),
    "named inside": lambda **options: jaxscale.loss_scaled(
        jaxscale.skip_nonfinite(SGD, **options)
    ),
    "named outside": functools.partial(
        jaxscale.loss_scaled, jaxscale.multi_steps(SGD, 1), track_leaves=True
    ),
    "polyak_sgd": functools.partial(jaxscale.skip_nonfinite, optax.polyak_sgd(0.1)),
    "reduce_on_plateau": functools.partial(
        jaxscale.loss_scaled, optax.chain(SGD, PLATEAU)
    ),
    "multi_steps, reduce_on_plateau": lambda **options: jaxscale.multi_steps(
        jaxscale.loss_scaled(optax.chain(SGD, PLATEAU), **options), 2
    ),
    "lbfgs": functools.partial(
        jaxscale.skip_nonfinite,
        optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(4)),
    ),
}


# These compute something from all parameters, and see those of one device alone.
MIXING = {"polyak_sgd", "lbfgs"}
# These need the norm of all gradients, which takes types if devices have parts of them.
BY_NORM = {"max_norm", "no skips", "spikes", "multi_steps"}


def is_equal_to_one(form, layout, name):
    if layout == "train_step":
        return name != "lbfgs"  # which needs more than the loss
    if not LAYOUTS[layout].split:
        return True
    return name not in MIXING and (form == "shard_map" or name not in BY_NORM)


@functools.cache
def end_on_one(layout, name):
    return train_on_one(LAYOUTS[layout], OPTIMIZERS[name](), batches_for(name))


def batches_for(name):
    # Later steps of a search would make much of little that is rounded.
    return {"lbfgs": BATCHES[:3], "no skips": GOOD}.get(name, BATCHES)


@pytest.mark.worlds
@cases(
    "form, layout, name",
    pairs(FORMS, LAYOUTS, OPTIMIZERS, where=is_equal_to_one),
    fast=[
        ("shard_map", "experts", "max_norm"),
        ("shard_map", "ZeRO", "multi_steps"),
        ("shard_map, unchecked", "replicated", "multi_steps, reduce_on_plateau"),
        ("pmap", "train_step", "polyak_sgd"),
    ],
)
def test_many_devices_end_where_one_ends(form, layout, name):
    tx = OPTIMIZERS[name](axis_name="d")
    actual = FORMS[form](LAYOUTS[layout], tx, batches=batches_for(name))

    def assert_close(leaf, other):
        np.testing.assert_allclose(leaf, other, rtol=2e-4, atol=1e-5)

    jax.tree.map(assert_close, actual, end_on_one(layout, name))


@pytest.mark.worlds
def test_bad_batches_and_the_one_that_stands_out_are_skipped_and_the_plateau_is_seen():
    """So that the rows above are no runs in which nothing happens."""
    _, state = end_on_one("replicated", "spikes")
    assert state.spikes.total_spikes == 1
    assert state.total_notfinite == 2
    assert state.total_notfinite_loss == 1
    _, state = end_on_one("replicated", "reduce_on_plateau")
    assert state.inner_state[1].scale < 1


def clip_by_largest_part(layout, grads):
    """The gradients of all devices, clipped to 0.5 by the largest norm that one of them has."""
    norms = []
    for device in range(COUNT):
        squares = 0.0
        for name, grad in grads.items():
            part = np.split(grad, COUNT)[device] if name in layout.split else grad
            squares += np.sum(np.square(part))
        norms.append(np.sqrt(squares))
    return jax.tree.map(lambda grad: grad * 0.5 / max(norms), grads)


@pytest.mark.worlds
@cases(
    "form, layout, name",
    pairs(
        ["shard_map, unchecked", "pmap"], ["ZeRO", "experts"], ["max_norm", "no skips"]
    ),
    fast=[("pmap", "experts", "max_norm"), ("pmap", "ZeRO", "no skips")],
)
def test_without_types_all_clip_by_the_largest_norm_of_a_device(form, layout, name):
    """So copies stay copies, which `train` sees."""
    layout = LAYOUTS[layout]
    FORMS[form](layout, OPTIMIZERS[name](axis_name="d"), batches=GOOD)
    start = layout.params
    tx = OPTIMIZERS[name](axis_name="d")
    params, _ = FORMS[form](layout, tx, batches=BATCHES[:1])
    grads = jax.grad(layout.loss_of_all)(start, BATCHES[0])
    clipped = clip_by_largest_part(layout, jax.device_get(grads))
    for name, leaf in params.items():
        expected = start[name] - 0.01 * clipped[name]
        np.testing.assert_allclose(leaf, expected, rtol=1e-6)


# What types can tell, an error says before the copies of a parameter part.
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), SGD)
PARTING = {
    "a norm of the optimizer's own": (
        "experts",
        jaxscale.skip_nonfinite(CLIPPED, axis_name="d"),
        r"the update at shared differs among the devices along 'd'.*pass `max_norm`",
    ),
    "a state made from all parameters": (
        "ZeRO",
        jaxscale.skip_nonfinite(optax.contrib.prodigy(), axis_name="d"),
        r"its state at \S+ differs among the devices along 'd'.*use `jit`",
    ),
    "a verdict of one device": (
        "experts",
        jaxscale.skip_nonfinite(SGD),
        r"gradients vary along 'd', and that at shared does not.*`axis_name='d'`",
    ),
    "a norm of one device": (
        "experts",
        jaxscale.loss_scaled(SGD, None, max_norm=0.5, skip_nonfinite=False),
        r"gradients vary along 'd', and that at shared does not.*`axis_name='d'`",
    ),
    "a loss of one device": (
        "replicated",
        jaxscale.multi_steps(SGD, 2),
        r"value=\.\.\.\)` varies along 'd'.*`axis_name='d'`",
    ),
    "a loss of one device, without a window": (
        "replicated",
        jaxscale.loss_scaled(SGD),
        r"pass `axis_name='d'`",
    ),
}


@pytest.mark.parametrize("name", PARTING)
def test_copies_that_would_part_are_an_error(name):
    layout, tx, message = PARTING[name]
    with pytest.raises(ValueError, match=message):
        train_in_shard_map(LAYOUTS[layout], tx, check=True)


def keep_loss():
    """An optimizer whose state varies before the first step, or only after it."""

    def init(params):
        return {"loss": jnp.zeros(()), "first": params["w"][0]}

    def update(updates, state, params=None, *, value, **extra_args):
        return updates, {"loss": value, "first": jnp.zeros(())}

    return optax.GradientTransformationExtraArgs(init, update)


LABELS = {"w": "trained", "base": "frozen"}


@pytest.mark.parametrize("frozen", [{}, {"base": jnp.ones(4)}], ids=["all", "some"])
def test_devices_with_runs_of_their_own_need_no_axis(frozen):
    """Each has its parameters, and clips, skips and counts by itself."""
    inner = optax.chain(SGD, keep_loss())
    if frozen:
        parts = {"trained": inner, "frozen": optax.set_to_zero()}
        inner = optax.partition(parts, LABELS)
    tx = jaxscale.multi_steps(jaxscale.loss_scaled(inner, max_norm=0.5), 2)
    sizes = jnp.array([1.0, jnp.nan, 0.1, 3.0])

    def run(params, size):
        state = tx.init(params)
        for factor in (1.0, 3.0):
            grads = {"w": params["w"] * size * factor}
            grads |= {name: params[name] * jnp.inf for name in frozen}
            updates, state = tx.update(grads, state, params, value=size[0])
            params = optax.apply_updates(params, updates)
        return params, state.total_notfinite[None], state.grad_norm[None]

    mapped = jax.shard_map(run, mesh=MESH, in_specs=SHARDED, out_specs=SHARDED)
    start = {"w": jnp.ones(4)} | frozen
    params, notfinite, norms = jax.jit(mapped)(start, sizes)
    steps = 0.01 * np.minimum(2 * sizes, 0.5)
    np.testing.assert_allclose(params["w"], 1 - jnp.nan_to_num(steps), rtol=1e-6)
    assert notfinite.tolist() == [0, 2, 0, 0]
    np.testing.assert_allclose(norms, [2, 0, 0.2, 6], rtol=1e-6)

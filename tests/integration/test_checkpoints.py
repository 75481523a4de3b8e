"""A run that is saved and restored goes on with the same bits, as if it had never stopped."""

import functools
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from bad_input import assert_says
from compilations import COMPILED
from flax import serialization
from flax.training import train_state
from following import Following
from tables import (
    INNERS,
    PARAMS,
    assert_same_bits,
    avals,
    cases,
    gradients,
    spoiled,
    spread,
    step,
    wide,
)

import jaxscale
import jaxscale.flax
from jaxscale import presets

pytestmark = pytest.mark.standard_promotion


def test_a_saved_state_has_its_scale_and_counters():
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    params = jnp.ones(2)
    _, state = tx.update(jnp.array([jnp.inf, 0.0]), tx.init(params), params)
    saved = jaxscale.to_state_dict(state)
    restored = jaxscale.from_state_dict(tx.init(params), saved)
    assert restored.scaling.loss_scale == 2.0**14
    assert restored.total_notfinite == 1


ADAM = INNERS["adam"]
NOISY = "noisy"  # an optimizer whose state holds a typed PRNG key
DYNAMIC = jaxscale.DynamicLossScale(growth_interval=2)
OPTIMIZERS = {
    "dynamic": jaxscale.loss_scaled(ADAM, DYNAMIC),
    "following": jaxscale.loss_scaled(ADAM, Following()),
    "deepspeed": jaxscale.loss_scaled(ADAM, presets.deepspeed(scale_window=3)),
    "no scale": jaxscale.skip_nonfinite(ADAM),
    "accumulated": jaxscale.multi_steps(jaxscale.loss_scaled(ADAM), 2),
    "accumulated, no scale": jaxscale.multi_steps(ADAM, 2),
    "remainders": jaxscale.master_weights(ADAM),
    "copies": jaxscale.master_weights(jaxscale.loss_scaled(ADAM), "float32"),
    "rounded at random": jaxscale.stochastic_rounding(jaxscale.compact_state(ADAM)),
}
for name in ("multi_steps", "inject_hyperparams", "masked", NOISY):
    OPTIMIZERS[name] = jaxscale.loss_scaled(INNERS[name])
GRADS = gradients(5, 8)
for bad in (2, 5, 6):
    GRADS[bad] = spoiled(GRADS[bad], jnp.inf)


class State(jaxscale.flax.TrainState):
    batch_stats: Any


class Training(NamedTuple):
    """A run that is saved in the middle.

    That is amid a streak of finite steps, and amid a window of `MultiSteps`.
    """

    first: Any  # the state to begin from, and to restore into
    advance: Callable[[Any, Any], Any]  # the compiled step


@functools.cache
def training(case):
    if case == "train_state":
        trees = {"params": PARAMS, "batch_stats": {"mean": jnp.zeros(3)}}
        first = State.create(apply_fn=None, tx=OPTIMIZERS["dynamic"], **trees)

        def apply(state, grads):
            stats = {"mean": 0.9 * state.batch_stats["mean"] + grads["w"]}
            return state.apply_gradients(grads=grads, batch_stats=stats)

        return Training(first, jax.jit(apply))

    tx = OPTIMIZERS[case]
    first = PARAMS, tx.init(PARAMS)
    return Training(first, jax.jit(lambda tree, grads: step(tx, *tree, grads)))


def from_orbax(path, tree, *target):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "saved", tree)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path / "saved", *target)


def from_msgpack(tree):
    return serialization.msgpack_restore(serialization.msgpack_serialize(tree))


def equinox(tree, fresh, path):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, fresh)


def pickled(tree, fresh, path):
    # Of the leaves, as the functions in a TrainState cannot be pickled.
    leaves = pickle.loads(pickle.dumps(jax.tree.leaves(tree)))
    return jax.tree.unflatten(jax.tree.structure(fresh), leaves)


read = jaxscale.from_state_dict
write = jaxscale.to_state_dict


def flax_bytes(tree, fresh, path):
    return serialization.from_bytes(fresh, serialization.to_bytes(tree))


WAYS = {
    "dict_in_msgpack": lambda tree, fresh, path: read(fresh, from_msgpack(write(tree))),
    "dict_in_orbax": lambda tree, fresh, path: read(
        fresh, from_orbax(path, write(tree))
    ),
    "equinox": equinox,
    "flax_bytes": flax_bytes,
    "flax_dict": lambda tree, fresh, path: read(
        fresh, serialization.to_state_dict(tree)
    ),
    "orbax": lambda tree, fresh, path: from_orbax(path, tree, fresh),
    "pickled": pickled,
    "raw_orbax": lambda tree, fresh, path: read(fresh, from_orbax(path, tree)),
}
LACK_KEYS = ("equinox", "flax_bytes")
RESTORED = [
    ("train_state", "raw_orbax"),
    *spread([name for name in OPTIMIZERS if name != NOISY], list(WAYS)),
    *spread([NOISY, "train_state"], [way for way in WAYS if way not in LACK_KEYS]),
]


@pytest.mark.worlds
@cases(
    "case, way",
    RESTORED,
    fast=[("train_state", "raw_orbax")],
)
def test_a_restored_run_goes_on_as_if_it_had_never_stopped(case, way, tmp_path):
    first, advance = training(case)
    if way == "orbax":  # which restores to devices
        first = jax.device_put(first, jax.devices()[0])
    middle = len(GRADS) // 2
    after = GRADS[middle:]
    saved = functools.reduce(advance, GRADS[:middle], first)
    restored = WAYS[way](saved, first, tmp_path)
    assert_same_bits(restored, saved)
    assert avals(restored) == avals(saved)

    num_compiled = len(COMPILED)
    end = functools.reduce(advance, after, restored)
    assert len(COMPILED) == num_compiled
    expected = functools.reduce(advance, after, saved)
    assert_same_bits(end, expected)


@pytest.mark.parametrize("way", LACK_KEYS)
def test_some_formats_refuse_typed_keys(way, tmp_path):
    first, _ = training(NOISY)
    with pytest.raises(Exception, match=r"key|leaf"):
        WAYS[way](first, first, tmp_path)


# A run begun with a bare optimizer goes on with a wrapped one, and the other way round.

GOOD = gradients(0, 6)


def trained(tx, opt_state, params, grads):
    for grad in grads:
        # A bare optimizer is given the dtypes that `loss_scaled` would make.
        params, opt_state = jaxscale.apply_gradients(tx, wide(grad), opt_state, params)
    return params, opt_state


WIDE = wide(PARAMS)


@pytest.mark.worlds
@cases("inner", [name for name in INNERS if name != "multi_steps"], fast=["momentum"])
def test_a_run_goes_on_as_if_nothing_had_changed(inner):
    bare = INNERS[inner]
    wrapped = jaxscale.loss_scaled(bare)
    expected = trained(bare, bare.init(WIDE), WIDE, GOOD)
    begun, old = trained(bare, bare.init(WIDE), WIDE, GOOD[:2])
    for carry in (
        lambda fresh, state: state,
        lambda fresh, state: read(fresh, write(state)),
    ):
        fresh = wrapped.init(WIDE)
        opt_state = fresh._replace(inner_state=carry(fresh.inner_state, old))
        params, opt_state = trained(wrapped, opt_state, begun, GOOD[2:4])
        opt_state = carry(bare.init(WIDE), opt_state.inner_state)
        assert_same_bits(trained(bare, opt_state, params, GOOD[4:]), expected)


BARE = optax.adam(0.1)
WRAPPED = jaxscale.loss_scaled(BARE)
REPLACE = "tx.init(params)._replace(inner_state=state)"
ONE_ALONE = (
    "ValueError: in the target: {}; only  ... : {} ... If only one  ... "
    '`target._replace(inner_state= ... "inner_state"'
)


def flax_state(tx, cls):
    return cls.create(apply_fn=None, params=WIDE, tx=tx)


def step_with_a_bare_state():
    jaxscale.train_step(lambda p: p["w"].sum(), WRAPPED)(WIDE, BARE.init(WIDE))


def apply_with_a_bare_state():
    state = flax_state(WRAPPED, jaxscale.flax.TrainState)
    state.replace(opt_state=BARE.init(WIDE)).apply_gradients(grads=GOOD[0])


def read_a_bare_state():
    read({"opt": WRAPPED.init(WIDE)}, write({"opt": BARE.init(WIDE)}))


def read_a_wrapped_state():
    read(BARE.init(WIDE), write(WRAPPED.init(WIDE)))


WRONG = {
    "a bare state for a training step": (
        step_with_a_bare_state,
        f"TypeError: train_step ... {REPLACE}",
    ),
    "a bare state in a TrainState": (
        apply_with_a_bare_state,
        f"TypeError: got tuple. To go on with ... {REPLACE}",
    ),
    "a saved bare state": (
        read_a_bare_state,
        ONE_ALONE.format("/opt/scaling, /opt/inner_state,  ... ", "/opt/0"),
    ),
    "a saved wrapped state": (
        read_a_wrapped_state,
        ONE_ALONE.format("/0", "/ ... /inner_state"),
    ),
}


@cases("name", WRONG)
def test_who_has_the_other_state_is_told_how_to_go_on(name):
    assert_says(*WRONG[name])


@jax.jit
def update(state):
    return state.apply_gradients(grads=wide(GOOD[0]))


def in_our_window(tx):
    return jaxscale.multi_steps(jaxscale.loss_scaled(tx), 2)


LOST = r"made \d+ steps.*only \d+.*was not restored.*_replace\(inner_state="
# An optimizer, what wraps it, and how many micro-batches it takes for a step.
WINDOWS = {
    "one": (BARE, jaxscale.loss_scaled, 1),
    "one, without a count": (INNERS["momentum"], jaxscale.loss_scaled, 1),
    "two of Optax": (optax.MultiSteps(BARE, 2), jaxscale.loss_scaled, 2),
    "four of Optax": (optax.MultiSteps(BARE, 4), jaxscale.loss_scaled, 4),
    "two of ours": (BARE, in_our_window, 2),
}


@pytest.mark.worlds
@pytest.mark.filterwarnings("error:`check`")
@cases("window", WINDOWS, fast=["four of Optax"])
def test_a_lost_optimizer_is_seen_as_long_as_it_is_certain_and_no_other(window):
    inner, wrap, every = WINDOWS[window]
    fresh = flax_state(wrap(inner), jaxscale.flax.TrainState)
    state = fresh
    if wrap is jaxscale.loss_scaled:  # a run with the bare optimizer, which is adopted
        bare = optax.GradientTransformation(inner.init, inner.update)
        old = flax_state(bare, train_state.TrainState)
        for _ in range(2 * every + 1):
            old = update(old)
        adopted = fresh.opt_state._replace(inner_state=old.opt_state)
        state = fresh.replace(step=old.step, params=old.params, opt_state=adopted)
    for _ in range(6 * every):
        jaxscale.check(state)
        state = update(state)
    lost = fresh.replace(step=state.step)
    for _ in range(every):
        with pytest.raises(UserWarning, match=LOST):
            jaxscale.check(lost)
        lost = update(lost)

"""The state of a loss scale: how it is found in a tree, and how it is saved."""

import collections
import copy
import dataclasses
import functools
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from following import Following
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tables import assert_same_bits, avals, cases, stack

import jaxscale
import jaxscale.flax
from jaxscale import presets


def test_a_state_that_was_saved_goes_on():
    tx = jaxscale.loss_scaled(optax.sgd(0.1), 8)
    grads = jnp.ones(2)
    _, state = tx.update(grads, tx.init(grads))
    saved = jaxscale.to_state_dict(state)
    assert saved["total_steps"] == 1
    assert jaxscale.from_state_dict(tx.init(grads), saved).total_steps == 1


STATE = jaxscale.FixedLossScale(2.0**10).init()


# A loss scale state is found by its type, because a field called `loss_scale` proves nothing: a
# model's parameters may have one, what a loop carries for its log, and states of users' policies.
# Of these states `OwnState` is marked, and is found anywhere. `UnmarkedState` is found only where
# its place says what it is: as the `scaling` of a `LossScaledState`.

Model = collections.namedtuple("Model", "loss_scale")
Carry = collections.namedtuple(
    "Carry", "opt_state loss_scale growth_tracker hysteresis_tracker"
)
UnmarkedState = collections.namedtuple("UnmarkedState", "loss_scale")


class OwnState(NamedTuple):
    is_loss_scale_state = True

    loss_scale: jax.Array
    steps: tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Own(jaxscale.LossScale):
    start: Any

    def init(self):
        return self.start

    adjust = update = None  # only its state is looked at


FOUR = jnp.array(4.0)
NAMED = [Model(jnp.array(2.0)), {"head": (jnp.ones(3), Model(jnp.ones(1)))}]
SCALINGS = {
    "dynamic": jaxscale.DynamicLossScale(init_scale=4.0),
    "following": Following(init_scale=4.0),
    "marked": Own(OwnState(FOUR, (FOUR, FOUR))),
    "unmarked": Own(UnmarkedState(FOUR)),
}
TRANSFORMS = {
    "scale": lambda tree: jaxscale.scale(tree, jnp.ones(2)),
    "unscale": lambda tree: jaxscale.unscale(tree, jnp.ones(2)),
    "value_and_grad": lambda tree: jaxscale.value_and_grad(jnp.sum, tree)(jnp.ones(2)),
    "grad": lambda tree: jaxscale.grad(jnp.sum, tree)(jnp.ones(2)),
}
CALLS = TRANSFORMS | {"metrics": jaxscale.metrics}


@pytest.mark.standard_promotion
@cases("scaling", SCALINGS, fast=["dynamic", "unmarked"])
def test_a_state_is_found_by_its_type_wherever_it_is(scaling):
    params = NAMED
    of_four = STATE._replace(loss_scale=FOUR)
    tx = jaxscale.loss_scaled(optax.adam(0.1), SCALINGS[scaling])
    opt_state = tx.init(params)
    window_state = optax.MultiSteps(tx, 2).init(params)
    trees = [
        (params, opt_state, {"log": Model(jnp.ones(9))}),
        {"model": params, "opt": [optax.chain(optax.identity(), tx).init(params)]},
        Carry(
            opt_state=opt_state,
            loss_scale=jnp.array(99.0),
            growth_tracker=jnp.array(1),
            hysteresis_tracker=jnp.array(2),
        ),
        jaxscale.flax.TrainState.create(apply_fn=None, params=params, tx=tx),
    ]
    for tree in [*trees, window_state]:
        for function in CALLS.values():
            assert_same_bits(function(tree), function(opt_state))
    alone = [opt_state]
    # An unmarked state is known by its place alone.
    if scaling != "unmarked":
        carry = Carry(NAMED, opt_state.scaling, FOUR, FOUR)
        alone += [opt_state.scaling, carry]
    for tree in alone:
        for function in TRANSFORMS.values():
            assert_same_bits(function(tree), function(of_four))
        assert jaxscale.metrics(tree)["loss_scale"] == 4
    for tree in trees:
        jaxscale.check(tree)
    with pytest.warns(UserWarning, match="inside of another one"):
        jaxscale.check(window_state)


OPT_STATE = jaxscale.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))


@cases("call", CALLS)
def test_a_tree_must_hold_exactly_one_state(call):
    pair = [OPT_STATE, {"d": OPT_STATE}]
    for tree, found in (
        (NAMED, "none in"),
        (pair, r"2, at \[0\], \[1\]\['d'\]\. Pass"),
    ):
        message = rf"`{call}` needs .* exactly one .*, got {found}"
        with pytest.raises(ValueError, match=message):
            CALLS[call](tree)


@cases("call", TRANSFORMS, fast=["grad"])
def test_a_population_is_scaled_under_vmap_alone(call):
    members = stack(*[OPT_STATE] * 4)
    message = rf"`{call}\(.*shape \(4,\): call it under `jax\.vmap`"
    with pytest.raises(ValueError, match=message):
        TRANSFORMS[call](members)
    together = jax.vmap(TRANSFORMS[call])(members)
    assert_same_bits(together, stack(*[TRANSFORMS[call](OPT_STATE)] * 4))


# The state dictionary: what is in it, and how those of other versions are read.

PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5, jnp.bfloat16)}
POLICY = jaxscale.DynamicLossScale(growth_interval=2)
TX = jaxscale.loss_scaled(optax.sgd(0.5, momentum=0.5), POLICY)
FRESH = TX.init(PARAMS)

f32, i32 = np.float32, np.int32
# What version 1 wrote after a good step, an overflow, a good step, and one with a loss of inf. Each
# number differs from that in `FRESH`, so that a default would show. Never change it: later versions
# must read it.
VERSION_1 = {
    "version": 1,
    "scaling": {
        "loss_scale": f32(16384),
        "growth_tracker": i32(1),
        "hysteresis_tracker": i32(0),
    },
    "inner_state": {
        "0": {"trace": {"b": f32(-1.5), "w": np.array([2, 3], f32)}},
        "1": {},
    },
    "step_applied": np.bool_(False),
    "notfinite_count": i32(1),
    "total_notfinite": i32(2),
    "total_notfinite_loss": i32(1),
    "total_steps": i32(4),
    "nonfinite_leaves": None,
}
# What is written now: the same, with the fields that came later.
WRITTEN = VERSION_1 | {"spikes": None, "grad_norm": None, "weights": None}
WRITTEN |= dict.fromkeys(("total_retries", "total_exhausted", "backoff_count"), i32(0))
# `skip_rate` is the mean of so few steps: here an overflow and a bad loss.
WRITTEN |= {"skip_rate": f32(2 / 4), "row_notfinite_loss": i32(1)}
# The two later fields that those steps changed: read from version 1, they have their defaults.
LATER = {name: getattr(FRESH, name) for name in ("skip_rate", "row_notfinite_loss")}


def saved(**changes):
    return copy.deepcopy(VERSION_1) | changes


@functools.cache
def trained():
    state = FRESH
    # The loss of a step, and its gradients.
    for loss, w, b in [
        (1, [2.0, 4], 1),
        (1, [np.inf, 0], 1),
        (1, [1.0, 1], -2),
        (np.inf, [1.0, 1], 1),
    ]:
        grads = {"w": jnp.array(w), "b": jnp.array(b, jnp.bfloat16)}
        _, state = TX.update(grads, state, PARAMS, value=jnp.float32(loss))
    return state


def test_version_1_is_written():
    state_dict = jaxscale.to_state_dict(trained())
    np.testing.assert_allclose(state_dict["skip_rate"], WRITTEN["skip_rate"], rtol=1e-6)
    assert_same_bits(state_dict | {"skip_rate": WRITTEN["skip_rate"]}, WRITTEN)
    del state_dict["version"]
    assert {type(leaf) for leaf in jax.tree.leaves(state_dict)} == {np.ndarray}


def test_bits_beside_parameters_are_written_as_version_2():
    """Readers of version 1 would drop them."""
    for wrap, version in ((jaxscale.master_weights, 2), (jaxscale.skip_nonfinite, 1)):
        tx = wrap(optax.sgd(0.1))
        saved_state = jaxscale.to_state_dict({"opt_state": tx.init(PARAMS)})
        assert saved_state["version"] == version


# A tree of every kind of container, and what is saved of it.
CONTAINERS = {
    "l": [jnp.ones(1), (None, 2.5)],
    "none": None,
    "empty": optax.EmptyState(),
    "t": (),
    "ints": {3: jnp.ones(1, jnp.bfloat16)},
    "key": jax.random.key(7),
}
SAVED_CONTAINERS = {
    "version": 1,
    "l": {"0": np.ones(1, f32), "1": {"0": None, "1": np.float64(2.5)}},
    "none": None,
    "empty": {},
    "t": {},
    "ints": {"3": np.ones(1, jnp.bfloat16)},
    "key": np.array([0, 7], np.uint32),
}
# Orbax has lists where there were lists and tuples, and None for what is empty.
ORBAX_CONTAINERS = SAVED_CONTAINERS | {
    "l": [np.ones(1, f32), [None, 2.5]],
    "empty": None,
    "key": CONTAINERS["key"],
}


def test_containers_are_written_by_key_and_index():
    assert_same_bits(jaxscale.to_state_dict(CONTAINERS), SAVED_CONTAINERS)


@pytest.mark.device
@pytest.mark.parametrize(
    "state_dict", [SAVED_CONTAINERS, ORBAX_CONTAINERS], ids=["as written", "by Orbax"]
)
def test_containers_are_read(state_dict):
    zeros = jax.tree.map(lambda x: x * 0, CONTAINERS | {"key": None})
    fresh = zeros | {"key": jax.random.key(0)}
    assert_same_bits(jaxscale.from_state_dict(fresh, state_dict), CONTAINERS)


# States of earlier and later versions.

OURS = [name for name in jaxscale.LossScaledState._fields if name != "inner_state"]
MISSING = {"nothing": [], "all": OURS} | {name: [name] for name in OURS}


@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("as_none", [False, True])
def test_what_is_missing_takes_its_default_and_nothing_else_is_lost(name, as_none):
    state_dict = saved(born_later=np.ones(3), nested={"later": np.ones(3)})
    state_dict["scaling"]["born_later"] = np.ones(3)
    defaults = {}
    for field in MISSING[name]:
        defaults[field] = getattr(FRESH, field)
        state_dict.pop(field, None)  # `VERSION_1` lacks the later fields
        if as_none:
            state_dict[field] = None
    restored = jaxscale.from_state_dict(FRESH, state_dict)
    assert_same_bits(restored, trained()._replace(**LATER | defaults))
    assert avals(restored) == avals(FRESH)


POLICIES = {
    "noop": jaxscale.NoOpLossScale(),
    "dynamic": jaxscale.DynamicLossScale(),
}


@cases("origin, to", itertools.product(POLICIES, POLICIES))
def test_a_run_can_change_its_policy(origin, to):
    old = POLICIES[origin].init()
    fresh = POLICIES[to].init()
    common = {}
    # The 1 of a policy that does not scale is no scale.
    if "noop" not in (origin, to):
        old = jax.tree.map(lambda leaf: leaf + 1, old)
        for name in set(old._fields) & set(fresh._fields):
            common[name] = getattr(old, name)
    restored = jaxscale.from_state_dict(fresh, jaxscale.to_state_dict(old))
    assert_same_bits(restored, fresh._replace(**common))


def state_after(tx, *grads):
    """The state after steps with some gradients, or with one of 1 and a loss that is inf."""
    state = tx.init(PARAMS)
    for value in grads:
        loss = None
        if value == "bad loss":
            value = 1.0
            loss = jnp.float32(jnp.inf)
        updates = {"w": jnp.array([value, 1.0]), "b": jnp.array(1, jnp.bfloat16)}
        _, state = tx.update(updates, state, PARAMS, value=loss)
    return state


LOW = jaxscale.DynamicLossScale(init_scale=2.0)
# The policy of the run that was saved, its gradients, and the scale that is restored, or `None` if
# it had none, so that the new policy starts with its own. A scale of 1 counts as none, unless the
# state shows that its policy moves: the last step was an overflow, or a good step is counted.
WITHOUT_SCALE = {
    "no scaling": (None, [1.0, 1.0], None),
    "no scaling, and no step": (None, [], None),
    "no scaling, with a bad step": (None, [1.0, np.nan, 1.0], None),
    # An overflow may have lowered a scale to 1, but a bad loss never does.
    "no scaling, and a bad loss": (None, [1.0, "bad loss"], None),
    "fixed at 1": (1.0, [1.0], None),
    "fixed at 2": (2.0, [1.0], 2.0),
    "down to 1, just now": (LOW, [1.0, np.inf], 1.0),
    "at the floor": (LOW, [np.inf, np.inf], 1.0),
    "down to 1, and a good step": (LOW, [np.inf, 1.0], 1.0),
}


@cases("name", WITHOUT_SCALE, fast=["no scaling, and a bad loss", "at the floor"])
def test_no_scale_is_restored_where_none_was_saved(name):
    policy, grads, scale = WITHOUT_SCALE[name]
    state = state_after(jaxscale.loss_scaled(optax.sgd(0.5), policy), *grads)
    fresh = jaxscale.loss_scaled(optax.sgd(0.5)).init(PARAMS)
    if scale is None:
        scale = fresh.scaling.loss_scale
    for write in (jaxscale.to_state_dict, serialization.to_state_dict):
        restored = jaxscale.from_state_dict(fresh, write(state))
        assert restored.scaling.loss_scale == scale
        assert restored.total_steps == len(grads)
        restored = jaxscale.from_state_dict({"opt": fresh}, write({"opt": state}))
        assert restored["opt"].scaling.loss_scale == scale


GROWING = jaxscale.loss_scaled(
    optax.sgd(0.5), jaxscale.DynamicLossScale(growth_interval=1)
)


def starting_outside(init_scale, **bounds):
    """Only the moves of the scale are clamped, not its start."""
    policy = presets.PresetLossScale(init_scale=init_scale, clamp="moves", **bounds)
    return jaxscale.loss_scaled(optax.sgd(0.5), policy)


STARTS_ABOVE = starting_outside(2.0**30, max_scale=2.0**20)
STARTS_BELOW = starting_outside(2.0**-30, min_scale=2.0**-20)
NO_FLOOR = jaxscale.loss_scaled(optax.sgd(0.5), presets.torch())
FIXED = jaxscale.loss_scaled(optax.sgd(0.5), 128)
NEVER_SKIPS = jaxscale.loss_scaled(optax.sgd(0.5), 128, skip_nonfinite=False)
# The restored scale, what gradients of a step are multiplied by, and the scale after it.
RESTORED = {
    "far above, good": (GROWING, 2.0**40, 1.0, 2.0**24),
    "above, as it may start there": (STARTS_ABOVE, 2.0**30, 1.0, 2.0**30),
    "far below, without a floor": (NO_FLOOR, 2.0**-40, 1.0, 2.0**-40),
    "below, as it may start there": (STARTS_BELOW, 2.0**-30, 1.0, 2.0**-30),
    "fixed, good": (FIXED, 2.0**15, 1.0, 128),
    "fixed, bad": (FIXED, 2.0**15, jnp.inf, 128),
    "fixed, never skips": (NEVER_SKIPS, 2.0**15, 1.0, 128),
}


def with_scale(state, scale):
    return state._replace(scaling=state.scaling._replace(loss_scale=jnp.float32(scale)))


@pytest.mark.worlds
@cases("name", RESTORED)
def test_a_scale_that_a_policy_never_has_is_replaced_before_a_step(name):
    tx, scale, factor, expected = RESTORED[name]
    state = with_scale(tx.init(PARAMS), scale)
    grads = jax.tree.map(lambda leaf: leaf * factor, PARAMS)
    _, next_state = jax.jit(tx.update)(grads, state, PARAMS)
    assert next_state.scaling.loss_scale == expected
    assert avals(next_state) == avals(state)


# The optimizer, a scale that is restored, and a loss that overflows at that scale alone.
CORRECTED = {
    "above the largest": (GROWING, 2.0**40, 1e-4),
    "of another fixed policy": (FIXED, 2.0**15, 10.0),
    "NaN": (GROWING, jnp.nan, 1e-4),
}


@cases("name", CORRECTED)
@pytest.mark.parametrize("retries", [0, 3])
def test_a_whole_step_corrects_the_scale_first_so_that_no_batch_is_lost(name, retries):
    tx, scale, size = CORRECTED[name]

    def loss_fn(params):
        return jnp.sum(params["w"].astype(jnp.float16).astype(jnp.float32) * size)

    if tx is FIXED:
        retries = 0
    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=retries))
    params = {"w": jnp.ones(2)}
    _, state, _ = step(params, with_scale(tx.init(params), scale))
    assert (state.step_applied, state.total_retries) == (True, 0)


Foreign = collections.namedtuple("Foreign", "scaling extra")
# Keys without a default, so that it is an error if one is missing: those in what is not ours, and a
# few of ours, such as the one of the optimizer's state.
WINDOW = jaxscale.multi_steps(optax.adam(0.1), 2).init(PARAMS)
TRAIN_STATE = jaxscale.flax.TrainState.create(apply_fn=None, params=PARAMS, tx=TX)
BOTH = {"params": PARAMS, "opt_state": FRESH}
TREES = {
    "/params/w": BOTH,
    "/opt_state": BOTH,
    "/inner_state": FRESH,
    "/inner_state/0/trace/w": FRESH,
    "/inner_state/inner_opt_state": WINDOW,
    "/inner_state/counted": WINDOW,
    "/extra": Foreign(FRESH.scaling, jnp.ones(2)),
    "/step": TRAIN_STATE,
}
# Of these, the keys in states of ours. There an unknown key may come from a later version, so it is
# ignored.
OF_OURS = ["/inner_state", "/inner_state/inner_opt_state", "/inner_state/counted"]


@pytest.mark.parametrize("path", TREES)
def test_a_renamed_key_that_has_no_default_is_named(path):
    state_dict = parent = jaxscale.to_state_dict(TREES[path])
    # Rename the last key of the path.
    above, _, last = path.rpartition("/")
    for name in above.split("/")[1:]:
        parent = parent[name]
    parent["renamed"] = parent.pop(last)
    unknown = "none" if path in OF_OURS else f"{above}/renamed"
    message = rf"in the target: {path}; only in the dictionary: {unknown}\."
    with pytest.raises(ValueError, match=message):
        jaxscale.from_state_dict(TREES[path], state_dict)


# Numbers take the dtype of the target, and must keep their value.

DTYPES = [
    *("bool", "int8", "uint8", "int32", "uint32"),
    *("float16", "bfloat16", "float32", "complex64"),
]
WIDE = [*DTYPES, "int64", "uint64", "float64", "complex128"]
NUMBERS = [
    *(0.0, -0.0, 1.0, -1.0, 0.5, 0.1, 200.0, 2.0**24 + 1, 2.0**31, 2.0**63),
    *(1e-8, 7e4, 3e38, 1e300, np.inf, -np.inf, np.nan),
]
# The Python type for each NumPy kind of dtype; that of bfloat16 is "V", void.
KINDS = {"b": bool, "i": int, "u": int, "f": float, "V": float, "c": complex}


def numbers_of(kinds):
    """The numbers in all dtypes of some kinds."""
    for dtype, number in itertools.product(map(np.dtype, WIDE), NUMBERS):
        if KINDS[dtype.kind] in kinds:
            with np.errstate(all="ignore"):
                yield np.array(number).astype(dtype)


dtypes = cases("dtype", DTYPES, fast=["bool", "uint8", "bfloat16"])


@dtypes
def test_a_number_is_cast_if_that_keeps_its_value(dtype):
    target = {"x": jnp.zeros((), dtype)}
    dtype = target["x"].dtype
    kind = KINDS[dtype.kind]
    for value in numbers_of({kind}):
        with np.errstate(all="ignore"):
            cast = value.astype(dtype)
        # As Python numbers, which compare exactly.
        is_kept = kind(cast[()]) == kind(value[()]) or np.isnan(value)
        if is_kept:
            restored = jaxscale.from_state_dict(target, {"x": value})
            assert_same_bits(restored, {"x": cast})
        else:
            got = f"{value.dtype}: {value[()]} would become {cast[()]}."
            message = f"at /x must be {dtype}, got {got}"
            with pytest.raises(ValueError, match=re.escape(message)):
                jaxscale.from_state_dict(target, {"x": value})


@dtypes
def test_a_number_of_another_kind_is_not_cast(dtype):
    target = {"x": jnp.zeros((), dtype)}
    kind = KINDS[target["x"].dtype.kind]
    for value in numbers_of(set(KINDS.values()) - {kind}):
        message = f"at /x must be {dtype}, got {value.dtype}: {value.ravel()}."
        with pytest.raises(TypeError, match=re.escape(message)):
            jaxscale.from_state_dict(target, {"x": value})


DEVICES = jax.devices("cpu")
MESH = Mesh(np.array(DEVICES), ("data",))
split = functools.partial(
    jax.device_put, device=NamedSharding(MESH, PartitionSpec("data"))
)
LEAVES = {  # each a function that makes a leaf from a number
    "uncommitted": lambda n: jnp.full(3, n, jnp.float32),
    "on a device": lambda n: jax.device_put(jnp.full(3, n), DEVICES[5]),
    "sharded": lambda n: split(jnp.full(16, n, jnp.float32)),
    "weak scalar": lambda n: jnp.asarray(float(n)),
    "weak and sharded": lambda n: split(jnp.broadcast_to(jnp.asarray(n), (8,))),
    "key": jax.random.key,
    "another key": functools.partial(jax.random.key, impl="rbg"),
    "sharded keys": lambda n: split(jax.random.split(jax.random.key(n), 8)),
    "NumPy": lambda n: np.full(3, n, np.float64),
    "NumPy scalar": np.float32,
    "int": int,
    "float": lambda n: n + 0.1,
    "complex number": lambda n: n + 0.1j,
}


@cases("name", LEAVES, fast=["sharded", "weak scalar", "sharded keys", "float"])
def test_a_leaf_comes_back_as_the_targets_or_as_a_type_says(name):
    make = LEAVES[name]
    leaf = make(7)
    targets = [make(0)]
    if isinstance(leaf, jax.Array):
        targets.append(type_of(leaf))
    dictionaries = [jaxscale.to_state_dict([leaf])]
    if isinstance(leaf, jax.Array):  # by Orbax, maybe from other devices
        dictionaries.append({"0": jax.device_put(leaf, DEVICES[1])})
    for target, saved_leaf in itertools.product(targets, dictionaries):
        (restored,) = jaxscale.from_state_dict([target], saved_leaf)
        assert type(restored) is type(leaf)
        assert_same_bits(restored, leaf)
        if isinstance(leaf, jax.Array):
            assert avals(restored) == avals(leaf)
            assert restored.committed == leaf.committed
            assert restored.sharding == leaf.sharding


def type_of(leaf):
    """The type of an array, with its sharding if it is committed to that."""
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=leaf.sharding if leaf.committed else None,
        weak_type=aval.weak_type,
    )


def test_a_population_is_restored_into_types():
    """Fields that were not saved have their defaults in each member."""
    members = jax.vmap(TX.init)(stack(PARAMS, PARAMS, PARAMS))
    state_dict = jaxscale.to_state_dict(members)
    del state_dict["skip_rate"]
    target = jax.eval_shape(lambda: members)
    assert_same_bits(jaxscale.from_state_dict(target, state_dict), members)


def test_a_dictionary_is_a_copy():
    """Donating the state leaves the dictionary intact, and writing to that the restored state."""
    state = jax.tree.map(jnp.copy, trained())
    state_dict = jaxscale.to_state_dict(state)
    restored = jaxscale.from_state_dict(FRESH, state_dict)
    doubled = jax.jit(lambda tree: jax.tree.map(jnp.add, tree, tree), donate_argnums=0)
    doubled(state)
    assert state.total_steps.is_deleted()
    assert_same_bits(state_dict, jaxscale.to_state_dict(trained()))
    for leaf in jax.tree.leaves(state_dict["inner_state"]):
        leaf[...] = 0
    assert_same_bits(restored, trained())

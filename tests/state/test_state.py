"""The state of a loss scale: how it is found in a tree, and how it is saved."""

import collections
import copy
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tables import assert_same_bits, avals, cases

import jaxscale
import jaxscale.flax
from jaxscale import presets

STATE = jaxscale.FixedLossScale(2.0**10).init()


# What a loss scale is looked for in: by type, as a name says nothing. Parameters have that name,
# what a loop carries for its log, and states of policies of one's own, of which one is marked.

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
    "logmax": presets.LogMaxLossScale(init_scale=4.0),
    "marked": Own(OwnState(FOUR, (FOUR, FOUR))),
    "unmarked": Own(UnmarkedState(FOUR)),
}
CALLS = {
    "scale": lambda tree: jaxscale.scale(tree, jnp.ones(2)),
    "unscale": lambda tree: jaxscale.unscale(tree, jnp.ones(2)),
    "value_and_grad": lambda tree: jaxscale.value_and_grad(jnp.sum, tree)(jnp.ones(2)),
    "grad": lambda tree: jaxscale.grad(jnp.sum, tree)(jnp.ones(2)),
    "metrics": jaxscale.metrics,
}


@pytest.mark.standard_promotion
@cases("scaling", SCALINGS, fast=["dynamic", "unmarked"])
def test_a_state_is_found_by_its_type_wherever_it_is(scaling):
    params = NAMED
    tx = jaxscale.loss_scaled(optax.adam(0.1), SCALINGS[scaling])
    opt_state = tx.init(params)
    trees = [
        (params, opt_state, {"log": Model(jnp.ones(9))}),
        {"model": params, "opt": [optax.chain(optax.identity(), tx).init(params)]},
        optax.MultiSteps(tx, 2).init(params),
        Carry(opt_state, jnp.array(99.0), jnp.array(1), jnp.array(2)),
        jaxscale.flax.TrainState.create(apply_fn=None, params=params, tx=tx),
    ]
    # One that is not marked is known by its place alone.
    bare = [opt_state.scaling, Carry(params, opt_state.scaling, FOUR, FOUR)]
    for call, function in CALLS.items():
        expected = function(opt_state)
        for tree in trees:
            assert_same_bits(function(tree), expected)
        for tree in [opt_state] + bare * (scaling != "unmarked"):
            if call == "metrics":
                assert function(tree)["loss_scale"] == 4
            else:
                assert_same_bits(
                    function(tree), function(STATE._replace(loss_scale=FOUR))
                )
    for tree in trees:
        jaxscale.check(tree)


OPT_STATE = jaxscale.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
NOT_FOUND = [
    (NAMED, "none in"),
    (optax.adam(0.1).init(NAMED), "none in"),
    (Carry(NAMED, FOUR, FOUR, FOUR), "none in"),
    (
        UnmarkedState(FOUR),
        r"none in .*`class UnmarkedState`, write `is_loss_scale_state = True`",
    ),
    ([OPT_STATE, {"d": OPT_STATE}], r"2, at \[0\], \[1\]\['d'\]\. Pass"),
    (
        Carry((OPT_STATE, STATE), STATE, FOUR, FOUR),
        r"3, at .*\[0\], .*\[1\], \.loss_scale\. Pass",
    ),
    ({"a": SCALINGS["marked"].init(), "b": STATE}, r"2, at \['a'\], \['b'\]\. Pass"),
]


@cases("call", CALLS)
def test_a_name_is_not_a_state_and_one_of_several_is_not_chosen(call):
    for tree, found in NOT_FOUND:
        with pytest.raises(
            ValueError, match=rf"`{call}` needs .* exactly one .*, got {found}"
        ):
            CALLS[call](tree)


@cases("call", list(CALLS)[:4], fast=["grad"])
def test_a_population_is_scaled_under_vmap_alone(call):
    members = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), OPT_STATE)
    with pytest.raises(
        ValueError, match=rf"`{call}\(.*shape \(4,\): call it under `jax\.vmap`"
    ):
        CALLS[call](members)
    alone = CALLS[call](OPT_STATE)
    expected = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), alone)
    assert_same_bits(jax.vmap(CALLS[call])(members), expected)


# The state dictionary: what is in it, and what is read from those of other versions.

PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5, jnp.bfloat16)}
POLICY = jaxscale.DynamicLossScale(growth_interval=2)
TX = jaxscale.loss_scaled(optax.sgd(0.5, momentum=0.5), POLICY)
FRESH = TX.init(PARAMS)

f32, i32 = np.float32, np.int32
# What version 1 wrote after a good step, an overflow, a good step, and one of a loss of inf:
# no number is that of `FRESH`. A later version reads it as it stands here.
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
    **{
        "step_applied": np.bool_(False),
        "notfinite_count": i32(1),
        "total_notfinite": i32(2),
    },
    **{"total_notfinite_loss": i32(1), "total_steps": i32(4), "nonfinite_leaves": None},
}
# Fields that came later.
WRITTEN = VERSION_1 | {"spikes": None, "grad_norm": None}
WRITTEN |= dict.fromkeys(("total_retries", "total_exhausted", "backoff_count"), i32(0))
# One overflow in 1000, another step, and a bad loss.
WRITTEN |= {"skip_rate": f32(0.001 * 0.999**2 + 0.001), "row_notfinite_loss": i32(1)}
LATER = {name: getattr(FRESH, name) for name in ("skip_rate", "row_notfinite_loss")}


def saved(**changes):
    return copy.deepcopy(VERSION_1) | changes


@functools.cache
def trained():
    state = FRESH
    steps = [
        (1, [2.0, 4], 1),
        (1, [np.inf, 0], 1),
        (1, [1.0, 1], -2),
        (np.inf, [1.0, 1], 1),
    ]
    for value, w, b in steps:
        grads = {"w": jnp.array(w), "b": jnp.array(b, jnp.bfloat16)}
        _, state = TX.update(grads, state, PARAMS, value=jnp.float32(value))
    return state


def test_version_1_is_written():
    state_dict = jaxscale.to_state_dict(trained())
    np.testing.assert_allclose(state_dict["skip_rate"], WRITTEN["skip_rate"], rtol=1e-6)
    assert_same_bits(state_dict | {"skip_rate": WRITTEN["skip_rate"]}, WRITTEN)
    del state_dict["version"]
    assert {type(leaf) for leaf in jax.tree.leaves(state_dict)} == {np.ndarray}


def rename_as_in_version_0_1():
    state_dict = saved(grads_finite=VERSION_1["step_applied"])
    del state_dict["step_applied"]
    del state_dict["version"]
    return state_dict


@pytest.mark.parametrize(
    "state_dict",
    [VERSION_1, rename_as_in_version_0_1()],
    ids=["version 1", "jaxscale 0.1"],
)
def test_earlier_versions_are_read(state_dict):
    restored = jaxscale.from_state_dict(FRESH, state_dict)
    assert_same_bits(restored, trained()._replace(**LATER))
    assert avals(restored) == avals(FRESH)


# The names of their fields are those in checkpoints: for good.
TRACKERS = "growth_tracker hysteresis_tracker"
OF_TOLERANCE = "growth_tracker steps_since_change overflows_since_backoff"
OF_LOGMAX = "x_hat slow_x_hat xsquared_hat b1_correction b2_correction"
OF_WINDOW = "growth_tracker window_index window_up_count window_down_count"
OF_ADAPTIVE = "peak level crest finite_steps held_steps overflows"
POLICIES = {
    "noop": (jaxscale.NoOpLossScale(), TRACKERS),
    "dynamic": (jaxscale.DynamicLossScale(), TRACKERS),
    "fairseq": (presets.fairseq(), OF_TOLERANCE),
    "logmax": (presets.openseq2seq_logmax(), OF_LOGMAX),
    "adaptive": (jaxscale.AdaptiveLossScale(), OF_ADAPTIVE),
    "gradual": (presets.chainer(), "steps_since_backoff overflows"),
    "window": (presets.WindowLossScale(), OF_WINDOW),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policys_state_is_written_by_the_names_of_version_1(name):
    policy, others = POLICIES[name]
    state = policy.init()
    names = ["loss_scale", *others.split()]
    assert list(jaxscale.to_state_dict(state)) == ["version", *names]
    numbers = [np.full((), i, leaf.dtype) for i, leaf in enumerate(state, 1)]
    restored = jaxscale.from_state_dict(state, dict(zip(names, numbers, strict=True)))
    # The type of `NoOpLossScale`'s state says that its scale is 1.
    assert list(map(float, restored)) == ([1, 0, 0] if name == "noop" else numbers)


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


@pytest.mark.parametrize(
    "state_dict", [SAVED_CONTAINERS, ORBAX_CONTAINERS], ids=["as written", "by Orbax"]
)
def test_containers_are_read(state_dict):
    zeros = jax.tree.map(lambda x: x * 0, CONTAINERS | {"key": None})
    fresh = zeros | {"key": jax.random.key(0)}
    assert_same_bits(jaxscale.from_state_dict(fresh, state_dict), CONTAINERS)


# States of earlier and later versions.

OURS = set(jaxscale.LossScaledState._fields) - {"inner_state"}


def test_what_is_missing_takes_its_default_and_nothing_else_is_lost():
    sets = ({}, OURS, *({name} for name in OURS))
    for lost, as_none in itertools.product(sets, [False, True]):
        state_dict = saved(born_later=np.ones(3), nested={"later": np.ones(3)})
        state_dict["scaling"]["born_later"] = np.ones(3)
        for name in lost:
            state_dict[name] = None
            if not as_none:
                del state_dict[name]
        restored = jaxscale.from_state_dict(FRESH, state_dict)
        lost_fields = {name: getattr(FRESH, name) for name in lost}
        expected = trained()._replace(**LATER | lost_fields)
        assert_same_bits(restored, expected)
        assert avals(restored) == avals(FRESH)


@cases(
    "origin, to",
    itertools.product(POLICIES, POLICIES),
    fast=[("dynamic", "adaptive"), ("fairseq", "dynamic"), ("logmax", "noop")],
)
def test_a_run_can_change_its_policy(origin, to):
    old_policy, _ = POLICIES[origin]
    new_policy, _ = POLICIES[to]
    old = jax.tree.map(lambda leaf: leaf + 1, old_policy.init())
    expected = new_policy.init()
    restored = jaxscale.from_state_dict(expected, jaxscale.to_state_dict(old))
    if to != "noop":
        common = set(old._fields) & set(expected._fields)
        expected = expected._replace(**{name: getattr(old, name) for name in common})
    assert_same_bits(restored, expected)


def state_after(tx, *grads):
    state = tx.init(PARAMS)
    for value in grads:
        updates = {"w": jnp.array([value, 1.0]), "b": jnp.array(1, jnp.bfloat16)}
        _, state = tx.update(updates, state, PARAMS)
    return state


LOW = jaxscale.DynamicLossScale(init_scale=2.0)
TO = {"dynamic": jaxscale.DynamicLossScale(), "adaptive": jaxscale.AdaptiveLossScale()}
# The policy of the run that was saved, its gradients, and the scale that is restored, or `None` if
# it had none, so that the new policy starts with its own.
WITHOUT_SCALE = {
    "no scaling": (None, [1.0, 1.0], None),
    "no scaling, and no step": (None, [], None),
    "no scaling, with a bad step": (None, [1.0, np.nan, 1.0], None),
    "fixed at 1": (1.0, [1.0], None),
    "fixed at 2": (2.0, [1.0], 2.0),
    "down to 1, just now": (LOW, [1.0, np.inf], 1.0),
    "at the floor": (LOW, [np.inf, np.inf], 1.0),
    "down to 1, and a good step": (LOW, [np.inf, 1.0], 1.0),
}


@cases(
    "name, to",
    itertools.product(WITHOUT_SCALE, TO),
    fast=[("no scaling", "dynamic"), ("at the floor", "dynamic")],
)
def test_no_scale_is_restored_where_none_was_saved(name, to):
    policy, grads, scale = WITHOUT_SCALE[name]
    state = state_after(jaxscale.loss_scaled(optax.sgd(0.5), policy), *grads)
    fresh = jaxscale.loss_scaled(optax.sgd(0.5), TO[to]).init(PARAMS)
    if scale is None:
        scale = fresh.scaling.loss_scale
    by_jaxscale = jaxscale.to_state_dict(state)
    without_version = {
        key: value for key, value in by_jaxscale.items() if key != "version"
    }
    for state_dict in (
        by_jaxscale,
        serialization.to_state_dict(state),
        without_version,
    ):
        restored = jaxscale.from_state_dict(fresh, state_dict)
        assert restored.scaling.loss_scale == scale
        assert restored.total_steps == len(grads)
    nested = jaxscale.from_state_dict(
        {"opt": fresh}, jaxscale.to_state_dict({"opt": state})
    )
    assert nested["opt"].scaling.loss_scale == scale


def test_a_bad_loss_is_no_overflow_that_a_scale_came_down_by():
    tx = jaxscale.loss_scaled(optax.sgd(0.5), None)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.float32(jnp.inf))
    assert (state.total_notfinite, state.total_notfinite_loss) == (1, 1)
    fresh = jaxscale.loss_scaled(optax.sgd(0.5), POLICY).init(PARAMS)
    restored = jaxscale.from_state_dict(fresh, jaxscale.to_state_dict(state))
    assert restored.scaling.loss_scale == fresh.scaling.loss_scale


@cases("to", TO)
def test_no_scale_is_restored_of_a_policy_alone_that_scaled_nothing(to):
    state = jaxscale.NoOpLossScale().init()
    fresh = TO[to].init()
    assert_same_bits(
        jaxscale.from_state_dict(fresh, jaxscale.to_state_dict(state)), fresh
    )


# The restored scale, whether the step is good, and the scale after it.
HIGH = {
    "far above, good": (2.0**40, True, 2.0**24),
    "far above, bad": (2.0**40, False, 2.0**23),
    "inf": (jnp.inf, True, 2.0**24),
    "the largest": (2.0**24, True, 2.0**24),
    "below": (2.0**23, True, 2.0**24),
}


def with_scale(state, scale):
    return state._replace(scaling=state.scaling._replace(loss_scale=jnp.float32(scale)))


@cases("name", HIGH)
def test_a_scale_above_the_largest_of_a_policy_is_lowered_to_it(name):
    scale, is_good, expected = HIGH[name]
    tx = jaxscale.loss_scaled(
        optax.sgd(0.5), jaxscale.DynamicLossScale(growth_interval=1)
    )
    state = with_scale(tx.init(PARAMS), scale)
    grads = PARAMS
    if not is_good:
        grads = jax.tree.map(lambda leaf: leaf * jnp.inf, PARAMS)
    _, next_state = jax.jit(tx.update)(grads, state, PARAMS)
    assert next_state.scaling.loss_scale == expected
    assert avals(next_state) == avals(state)


def test_a_whole_step_lowers_the_scale_first_so_that_no_batch_is_lost():
    def loss_fn(params):
        return jnp.sum(params["w"].astype(jnp.float16).astype(jnp.float32) * 1e-4)

    tx = jaxscale.loss_scaled(
        optax.sgd(0.5), jaxscale.DynamicLossScale(growth_interval=1)
    )
    step = jax.jit(jaxscale.train_step(loss_fn, tx))
    params = {"w": jnp.ones(2)}
    _, state, _ = step(params, with_scale(tx.init(params), 2.0**40))
    assert state.step_applied


def test_a_policy_that_may_start_above_its_largest_scale_is_left_there():
    above = presets.PresetLossScale(
        init_scale=2.0**30, max_scale=2.0**20, clamp="moves"
    )
    tx = jaxscale.loss_scaled(optax.sgd(0.5), above)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert state.scaling.loss_scale == 2.0**30


Foreign = collections.namedtuple("Foreign", "scaling extra")
# In what is not ours, and in the optimizer's state, nothing is missing unnoticed.
WINDOW = jaxscale.multi_steps(optax.adam(0.1), 2).init(PARAMS)
TRAIN_STATE = jaxscale.flax.TrainState.create(apply_fn=None, params=PARAMS, tx=TX)
BOTH = {"params": PARAMS, "opt_state": FRESH}
TREES = [
    (BOTH, "/params/w"),
    (BOTH, "/opt_state"),
    (FRESH, "/inner_state"),
    (FRESH, "/inner_state/0/trace/w"),
    (WINDOW, "/inner_state/inner_opt_state"),
    (WINDOW, "/inner_state/counted"),
    (Foreign(FRESH.scaling, jnp.ones(2)), "/extra"),
    (TRAIN_STATE, "/step"),
]


# Each field that holds the state of another optimizer has a row above.
OF_OTHERS = {
    n
    for cls in vars(jaxscale).values()
    for n in getattr(cls, "_fields", ())
    if "_state" in n
}


@pytest.mark.parametrize(("tree", "where"), TREES, ids=[where for _, where in TREES])
def test_elsewhere_missing_and_unknown_keys_are_named(tree, where):
    assert sorted(OF_OTHERS) == ["inner_opt_state", "inner_state"]
    state_dict = parent = jaxscale.to_state_dict(tree)
    _, *parents, last = where.split("/")
    for name in parents:
        parent = parent[name]
    parent["renamed"] = parent.pop(last)
    unknown = "/".join(["", *parents, "renamed"])
    if where.startswith("/inner_state") and len(parents) < 2:
        unknown = "none"  # beside it an unknown key is one of a later version
    message = rf"in the target: {where}; only in the dictionary: {unknown}\."
    with pytest.raises(ValueError, match=message):
        jaxscale.from_state_dict(tree, state_dict)


ERRORS = [
    (
        FRESH,
        saved(version=2),
        ValueError,
        "from 1 to 1, got 2. If a later .* upgrade jaxscale",
    ),
    (FRESH, saved(version=0), ValueError, "from 1 to 1, got 0"),
    (FRESH, {"opt_state": {"w": np.ones(2)}}, ValueError, "dictionary: /opt_state"),
    (
        FRESH.scaling,
        VERSION_1,
        ValueError,
        "target: /loss_scale, /growth_tracker, .* /inner_state",
    ),
    (
        TX.init({}),
        VERSION_1,
        ValueError,
        "target: none; only in the dictionary: /inner_state",
    ),
    (
        FRESH,
        saved(total_steps=i32([4, 4])),
        ValueError,
        r"/total_steps must be .* \(\), got \(2,",
    ),
    (
        FRESH,
        saved(total_steps=f32(4)),
        TypeError,
        "/total_steps must be int32, got float32: .4",
    ),
    (
        FRESH,
        saved(total_steps=2**40),
        ValueError,
        "int32, got int64: 1099511627776 would become 0",
    ),
    (
        FRESH,
        saved(total_steps={"a": 4}),
        TypeError,
        "at /total_steps must have .* Array.*got dict",
    ),
    (
        FRESH,
        saved(scaling=f32(4)),
        TypeError,
        "at /scaling must have .*LossScaleState, got float",
    ),
    (FRESH, 4, TypeError, "must be a dict, got int"),
    (VERSION_1, FRESH, TypeError, "got what was saved as `target`: pass it second"),
    (
        {"f": jnp.sin},
        {"f": 1},
        TypeError,
        r"\(target\)` at /f must be an array.*pass only its ar",
    ),
    ({"version": 1}, {"version": 1}, ValueError, r"\(target\)` must be .*, got dict"),
    (jnp.ones(2), {}, ValueError, r"\(target\)` must be a container.*, got ArrayImpl"),
    (
        {"w": f32(1)},
        {"w": 0.1},
        ValueError,
        "float32, got float64: 0.1 would become 0.1000",
    ),
]


UNSAVED = [
    (jnp.ones(2), ValueError, "a container .*, got ArrayImpl"),
    ({"version": 3}, ValueError, 'version.* Pass {"state": ...}'),
    ({"a": ["text"]}, TypeError, "at /a/0 must be an array or a number, .*got 'text'"),
]
TRACED = [
    jaxscale.to_state_dict,
    lambda state: jaxscale.from_state_dict(FRESH, {"inner_state": state.inner_state}),
    lambda state: jaxscale.from_state_dict(state, VERSION_1),
]


def test_what_is_wrong_is_named():
    for target, state_dict, error, message in ERRORS:
        with pytest.raises(error, match=f"^`from_state_dict.*{message}"):
            jaxscale.from_state_dict(target, state_dict)
    for tree, error, message in UNSAVED:
        with pytest.raises(error, match=rf"^`to_state_dict\(tree\)`.*{message}"):
            jaxscale.to_state_dict(tree)
    for function in TRACED:
        with pytest.raises(TypeError, match=r"outside of `jit`"):
            jax.jit(function)(FRESH)


# Numbers: as the target has them, and exactly so.

DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int32",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
]
WIDE = [*DTYPES, "int64", "uint64", "float64", "complex128"]
NUMBERS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    0.1,
    200.0,
    2.0**24 + 1,
    2.0**31,
    2.0**63,
    1e-8,
    7e4,
]
NUMBERS += [3e38, 1e300, np.inf, -np.inf, np.nan]
# The type of Python that holds each number of a dtype; NumPy calls bfloat16 void.
KINDS = {"b": bool, "i": int, "u": int, "f": float, "V": float, "c": complex}


@cases("dtype", DTYPES, fast=["bool", "uint8", "bfloat16"])
def test_a_number_is_cast_if_one_of_its_kind_is_equal(dtype):
    target = {"x": jnp.zeros((), dtype)}
    dtype = target["x"].dtype
    kind = KINDS[dtype.kind]
    for origin, number in itertools.product(map(np.dtype, WIDE), NUMBERS):
        with np.errstate(all="ignore"):
            value = np.array(number).astype(origin)
            cast = value.astype(dtype) if KINDS[origin.kind] is kind else None
        if cast is None:
            with pytest.raises(TypeError, match=f"at /x must be {dtype}, got {origin}"):
                jaxscale.from_state_dict(target, {"x": value})
        elif kind(cast[()]) == kind(value[()]) or np.isnan(value):
            assert_same_bits(jaxscale.from_state_dict(target, {"x": value})["x"], cast)
        else:
            with pytest.raises(
                ValueError, match=f"at /x must be {dtype}, got {origin}.*would"
            ):
                jaxscale.from_state_dict(target, {"x": value})


SPLIT = NamedSharding(
    Mesh(np.array(jax.devices("cpu")), ("data",)), PartitionSpec("data")
)
LEAVES = {  # each of a number
    "uncommitted": lambda n: jnp.full(3, n, jnp.float32),
    "on a device": lambda n: jax.device_put(jnp.full(3, n), jax.devices("cpu")[5]),
    "sharded": lambda n: jax.device_put(jnp.full(16, n, jnp.float32), SPLIT),
    "weak scalar": lambda n: jnp.asarray(float(n)),
    "weak and sharded": lambda n: jax.device_put(
        jnp.broadcast_to(jnp.asarray(n), (8,)), SPLIT
    ),
    "key": lambda n: jax.random.key(n),
    "another key": lambda n: jax.random.key(n, impl="rbg"),
    "sharded keys": lambda n: jax.device_put(
        jax.random.split(jax.random.key(n), 8), SPLIT
    ),
    "NumPy": lambda n: np.full(3, n, np.float64),
    "NumPy scalar": lambda n: np.float32(n),
    "int": lambda n: n,
    "float": lambda n: n + 0.1,
    "complex number": lambda n: n + 0.1j,
}


@cases("name", LEAVES, fast=["sharded", "weak scalar", "sharded keys", "float"])
def test_a_leaf_comes_back_as_the_targets(name):
    make = LEAVES[name]
    leaf = make(7)
    restored = jaxscale.from_state_dict([make(0)], jaxscale.to_state_dict([leaf]))[0]
    assert type(restored) is type(leaf)
    assert_same_bits(restored, leaf)
    if isinstance(leaf, jax.Array):
        assert avals(restored) == avals(leaf)
        assert (restored.committed, restored.sharding) == (
            leaf.committed,
            leaf.sharding,
        )


def test_a_dictionary_is_a_copy():
    # What steps donate, and what is done to a dictionary, does not reach the other.
    state = jax.tree.map(jnp.copy, trained())
    state_dict = jaxscale.to_state_dict(state)
    restored = jaxscale.from_state_dict(FRESH, state_dict)
    jax.jit(lambda state: jax.tree.map(lambda x: x + x, state), donate_argnums=0)(state)
    assert state.total_steps.is_deleted()
    assert_same_bits(state_dict, jaxscale.to_state_dict(trained()))
    for leaf in jax.tree.leaves(state_dict["inner_state"]):
        leaf[...] = 0
    assert_same_bits(restored, trained())

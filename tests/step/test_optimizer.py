"""Laws of the optax wrapper: over policies, inner optimizers, dtypes and ways to run."""

import contextlib
import copy
import functools
import itertools
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tables
from tables import (
    INNERS,
    PARAMS,
    assert_same_bits,
    avals,
    cases,
    fused_step,
    half,
    pairs,
    step,
    wide,
)
from training import x64

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_an_overflow_halves_the_scale_and_moves_no_parameter():
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    params = jnp.array(1.0)
    updates, state = tx.update(jnp.array(jnp.inf), tx.init(params), params)
    assert (params + updates, state.scaling.loss_scale) == (1, 2.0**14)
    updates, state = tx.update(jnp.array(1.0), state, params)
    assert (params + updates, state.total_notfinite) == (0.5, 1)


GOOD = tables.gradients(0, 5)
BADS = list(map(tables.spoiled, tables.gradients(1, 3), tables.BAD.values()))
MIXED = [GOOD[0], BADS[0], GOOD[1], GOOD[2], BADS[1], BADS[2], GOOD[3], GOOD[4]]
IS_BAD = [False, True, False, False, True, True, False, False]

DYNAMIC = tables.POLICIES["dynamic"]
OPTIONS = {"max_norm": 1e9, "track_leaves": True, "check_updates": True}
SPIKES = {"spikes": jaxscale.SpikeRule(window=8)}
# The policy, and further arguments of `loss_scaled`.
WRAPPERS = {name: (policy, {}) for name, policy in tables.POLICIES.items()}
WRAPPERS["everything"] = tables.POLICIES["following"], OPTIONS | SPIKES
# How half-precision parameters are kept, with an option each.
KEPT = {
    "remainders": jaxscale.master_weights,
    "copies": functools.partial(jaxscale.master_weights, storage="float32"),
    "at random": jaxscale.stochastic_rounding,
}
for name, option in zip(KEPT, itertools.cycle(OPTIONS), strict=False):
    WRAPPERS[name] = DYNAMIC, {option: OPTIONS[option]}
OTHERS = {  # with more arguments, or other types
    "adamw": optax.adamw(1e-2),
    "half_moments": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "lbfgs": optax.lbfgs(),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "reduce_on_plateau": optax.chain(
        optax.adam(1e-2),
        optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=1),
    ),
}


@jax.custom_vjp
def loss_with_gradients(params, grads):
    """A loss of 0, whose gradients are whatever is asked for."""
    return jnp.zeros((), jnp.float32)


def _scaled(grads, seed):
    return jax.tree.map(lambda grad: grad * seed.astype(grad.dtype), grads), None


loss_with_gradients.defvjp(
    lambda params, grads: (loss_with_gradients(params, grads), grads), _scaled
)


def by_train_step(tx, params, state, grads):
    train_step = jaxscale.train_step(loss_with_gradients, tx)
    params, state, _ = train_step(params, state, grads)
    return params, state


def by_train_state(tx, params, state, grads, **extra_args):
    fields = {"step": 0, "apply_fn": None, "params": params, "opt_state": state}
    train_state = jaxscale.flax.TrainState(tx=tx, **fields)
    after = train_state.apply_gradients(grads=grads, extra_args=extra_args)
    return after.params, after.opt_state


def by_vmap(tx, params, state, grads, **extra_args):
    """The step of the only member of a population."""

    def step_of_member(*carry):
        return fused_step(tx, *carry, **extra_args)

    population = tables.stack((params, state, grads))
    stepped = jax.vmap(step_of_member)(*population)
    return tables.member(stepped, 0)


WAYS = {
    "update": step,
    "apply": fused_step,
    "eager": step,
    "accelerator": step,
    "train_step": by_train_step,
    "TrainState": by_train_state,
    "vmap": by_vmap,
}
# A wrapper, an inner optimizer, a way to run, and the dtype that parameters and gradients are
# cast to: here none.
FAST_AS_THEY_ARE = [
    ("dynamic", "adam", "eager", None),
    ("dynamic", "noisy", "accelerator", None),
    ("remainders", "momentum", "train_step", None),
    ("at random", "momentum", "vmap", None),
]


def may_meet(wrapper, inner, way, dtype):
    """Returns whether an optimizer bears the options: around one that accumulates none clips."""
    _, options = WRAPPERS[wrapper]
    return inner != "multi_steps" or "max_norm" not in options


meet = half(WRAPPERS, INNERS)
AS_THEY_ARE = pairs(
    WRAPPERS,
    INNERS,
    WAYS,
    [None],
    where=may_meet,
    among=lambda wrapper, inner, *_: meet(wrapper, inner),
)
AS_THEY_ARE += [row for row in FAST_AS_THEY_ARE if row not in AS_THEY_ARE]
# Rows with a dtype. Their steps get the loss as `value`.
CAST = [
    *(("dynamic", inner, "apply", "bfloat16") for inner in OTHERS),
    *(("dynamic", inner, "update", "float16") for inner in list(OTHERS)[1:4]),
    # On accelerators both sides of the selection are computed: a line search runs on a bad step.
    *(("dynamic", inner, "accelerator", "float32") for inner in list(OTHERS)[2:]),
    *(
        ("dynamic", "adamw", *row)
        for row in product(["update", "apply"], ("complex64", "float64"))
    ),
    ("dynamic", "lbfgs", "update", "float64"),
]
FAST_CAST = [("dynamic", "adamw", "update", "complex64")]
ROW = "wrapper, inner, way, dtype"
every_row = cases(
    ROW, AS_THEY_ARE + CAST, fast=FAST_AS_THEY_ARE + FAST_CAST, shared=True
)


class Trained(NamedTuple):
    """Two runs of a row: the parameters and the state before the first step and after each."""

    mixed: list[Any]
    good: list[Any]
    num_traces: int
    num_selections: int  # how often the form for accelerators was taken


def value_fn(params):
    value = 0
    for leaf in jax.tree.leaves(params):
        squares = jnp.sum(jnp.abs(leaf) ** 2)
        value += squares.astype(jnp.promote_types(squares.dtype, jnp.float32))
    return value


def in_dtype(tree, dtype):
    """A tree in a dtype, with both parts if that is complex."""
    if dtype is None:
        return tree
    factor = 1 + 0.5j if dtype == "complex64" else 1
    return jax.tree.map(lambda leaf: (leaf * factor).astype(dtype), tree)


def enable_dtype(dtype):
    """Returns a context in which arrays of a dtype can be made."""
    return x64() if dtype == "float64" else contextlib.nullcontext()


@functools.cache
def train(wrapper, inner, way, dtype):
    """Trains on good and bad gradients, and on the good ones alone."""
    policy, options = WRAPPERS[wrapper]
    tx = jaxscale.loss_scaled((INNERS | OTHERS)[inner], policy, **options)
    if wrapper in KEPT:
        tx = KEPT[wrapper](tx)
    traces = []
    selections = []

    def one_step(params, state, grads):
        traces.append(None)
        extra_args = {}
        if dtype is not None:
            extra_args["value"] = value_fn(params)
        if inner == "lbfgs":
            extra_args |= {"grad": grads, "value_fn": value_fn}
        return WAYS[way](tx, params, state, grads, **extra_args)

    def select(*stored, cpu, default):
        if not stored:  # the gradients are what a CPU would store
            selections.append(None)
        return default(*stored)

    if way != "eager":
        one_step = jax.jit(one_step, donate_argnums=(0, 1))

    def run(sequence):
        params = in_dtype(PARAMS, dtype)
        history = [(params, tx.init(params))]
        for grads in sequence:
            if dtype is not None:
                grads = in_dtype(grads, jnp.promote_types(dtype, jnp.float32))
            history.append(one_step(*jax.tree.map(jnp.copy, history[-1]), grads))
        return history

    with pytest.MonkeyPatch.context() as patch, enable_dtype(dtype):
        if way == "accelerator":  # compiles for the CPU what other machines get
            patch.setattr(jax.lax, "platform_dependent", select)
        mixed, good = run(MIXED), run(GOOD)
    return Trained(mixed, good, num_traces=len(traces), num_selections=len(selections))


@pytest.mark.device
@every_row
def test_bad_steps_leave_no_trace(wrapper, inner, way, dtype):
    """A bad step changes the scale and the counters alone, and no type.

    So a run ends with the bits of one on its good steps.
    """
    policy, options = WRAPPERS[wrapper]
    adjust = jax.jit(policy.adjust)
    trained = train(wrapper, inner, way, dtype)

    def kept(carry):
        params, state = carry
        return params, state.inner_state, state.weights

    assert_same_bits(kept(trained.mixed[-1]), kept(trained.good[-1]))
    with enable_dtype(dtype):
        assert jaxscale.all_finite(kept(trained.mixed[-1]))
    pairs_of_bad = itertools.compress(itertools.pairwise(trained.mixed), IS_BAD)
    for before, after in pairs_of_bad:
        assert_same_bits(kept(after), kept(before))
        (_, state), (_, new_state) = before, after
        assert_same_bits(new_state.spikes, state.spikes)
        assert_same_bits(new_state.scaling, adjust(state.scaling, jnp.array(False)))
        assert not new_state.step_applied
        assert new_state.total_notfinite == state.total_notfinite + 1
        if "max_norm" in options:
            assert new_state.grad_norm == jnp.inf
    for after in trained.mixed + trained.good:
        assert avals(after) == avals(trained.good[0])
    if way != "eager":
        assert trained.num_traces == 1
    # The rows for accelerators did take their form, and the others did not.
    assert trained.num_selections == (way == "accelerator")


# Rounding at random leads to other parameters.
TO_NEAREST = [row for row in AS_THEY_ARE if "at random" not in row]


@cases(ROW, TO_NEAREST, fast=FAST_AS_THEY_ARE[:-1], shared=True)
def test_a_good_step_is_that_of_the_inner_optimizer_in_float32(
    wrapper, inner, way, dtype
):
    tx = INNERS[inner]
    params = wide(PARAMS)
    updates, inner_state = tx.update(wide(GOOD[0]), tx.init(params), params)
    expected = jax.tree.leaves((optax.apply_updates(PARAMS, updates), inner_state))
    params, state = train(wrapper, inner, way, dtype).good[1]
    leaves = jax.tree.leaves((params, state.inner_state))
    if way == "eager":
        assert_same_bits(leaves, expected)
    else:  # in another program products and sums may be contracted differently
        tables.assert_close(leaves, expected)


@cases(ROW, CAST, fast=FAST_CAST, shared=True)
def test_parameters_of_every_dtype_are_trained_by_moments_in_float32_or_wider(
    wrapper, inner, way, dtype
):
    good = train(wrapper, inner, way, dtype).good
    start, _ = good[0]
    params, state = good[-1]
    for name, leaf in params.items():
        assert not jnp.array_equal(leaf, start[name]), name
    least_bits = max(32, jnp.finfo(dtype).bits)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.inner_state):
        # One of the optimizers asks for moments in half precision.
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and inner != "half_moments":
            assert jnp.finfo(leaf.dtype).bits >= least_bits, path


class Recorder:
    """Keeps what an optimizer that changes nothing was called with."""

    def __init__(self):
        self.calls = []

    def update(self, updates, state, params=None, **extra_args):
        self.calls.append((updates, params, extra_args))
        return updates, state

    def update_with_loss(self, updates, state, params=None, *, loss=None, **extra_args):
        return self.update(updates, state, params, loss=loss, **extra_args)


def wrap_update(update):
    """A wrapped optimizer without a state, given its update."""
    return jaxscale.loss_scaled(
        optax.GradientTransformationExtraArgs(lambda _: (), update)
    )


def test_the_inner_optimizer_sees_float32_and_extra_arguments_untouched():
    recorder = Recorder()
    tx = wrap_update(recorder.update)
    extra_args = {"value": jnp.array(3.0), "value_fn": jnp.sum, "other": {"a": "text"}}
    # The parameters by keyword, as `optax.MultiSteps` passes them.
    tx.update(PARAMS, tx.init(PARAMS), params=PARAMS, **extra_args)
    ((updates, params, received),) = recorder.calls
    assert avals(updates) == avals(wide(PARAMS))
    assert_same_bits(params, wide(PARAMS))
    assert received.keys() == extra_args.keys()
    for name, argument in extra_args.items():
        assert received[name] is argument


@cases("name", ["value", "loss"])
def test_a_loss_may_have_either_name(name):
    """An optimizer gets it by the name that it takes, and a bad one says nothing of the scale."""
    recorder = Recorder()
    tx = wrap_update(recorder.update_with_loss)
    start = tx.init(PARAMS)
    tx.update(PARAMS, start, PARAMS, **{name: jnp.array(3.0)}, other=1)
    _, _, received = recorder.calls[-1]
    assert received == {"loss": 3.0, "value": 3.0, "other": 1}
    _, state = tx.update(PARAMS, start, PARAMS, **{name: jnp.array(jnp.nan)})
    assert state.total_notfinite_loss == 1
    assert_same_bits(state.scaling, start.scaling)


def test_an_inner_optimizer_that_takes_no_loss_gets_none():
    def update(updates, state, params=None, *, value_fn=None, other=None):
        return updates, state

    own = optax.GradientTransformationExtraArgs(lambda _: (), update)
    extra_args = {"value_fn": jnp.sum, "other": {"a": "text"}}
    # With a loss, each `update` would raise an error.
    loss = {"value": jnp.array(3.0)}
    for tx, more in (
        (jaxscale.loss_scaled(own), extra_args),
        (jaxscale.skip_nonfinite(jaxscale.compact_state(own)), extra_args),
        (jaxscale.multi_steps(own, 1), extra_args),
        (jaxscale.loss_scaled(optax.identity()), {}),
    ):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, **loss, **more)


def test_weakly_typed_states_and_parameters_do_not_compile_twice():
    # As `optax.contrib.reduce_on_plateau` once had it: Python numbers in the first state.
    def init(params):
        return 0, 1.0, jnp.asarray(1.0)

    def update(updates, state, params=None):
        return -0.5 * updates, state

    tx = jaxscale.loss_scaled(optax.GradientTransformation(init, update))
    compiled_step = jax.jit(functools.partial(fused_step, tx))
    params = jnp.asarray(1.0)
    start = tx.init(params)
    moved, state = compiled_step(params, start, jnp.asarray(1.0))
    assert moved == 0.5
    assert avals(state) == avals(start)
    kept, _ = compiled_step(params, state, jnp.asarray(jnp.nan))
    assert kept == 1
    assert compiled_step._cache_size() == 1


def test_the_optimizer_is_an_ordinary_value():
    # A GradientTransformation is a NamedTuple, so a tree, which Flax NNX takes apart.
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    ones = jnp.ones(2)
    for same in (jax.tree.map(lambda leaf: leaf, tx), copy.deepcopy(tx), tx._replace()):
        params, _ = fused_step(same, ones, same.init(ones), ones)
        assert params.tolist() == [0.5, 0.5]
        assert type(same) is optax.GradientTransformationExtraArgs


HALVES = ["bfloat16", "float16"]


@cases(
    "dtype, way", product(HALVES, [step, fused_step]), fast=[("float16", fused_step)]
)
def test_the_sum_of_parameter_and_update_is_rounded_once(dtype, way):
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(4096)
    params = numbers.astype(dtype)
    small_numbers = rng.standard_normal(4096) * 2.0**-9
    grads = np.float32(small_numbers)
    tx = jaxscale.loss_scaled(optax.scale(-1.0))
    start = jnp.asarray(params)
    state = tx.init(start)
    moved, _ = way(tx, start, state, jnp.asarray(grads))
    # By NumPy in float32, without a product, so without a fused multiply-add.
    wide_params = params.astype(np.float32)
    once = (wide_params - grads).astype(dtype)
    rounded_updates = (-grads).astype(dtype)
    wide_updates = rounded_updates.astype(np.float32)
    twice = (wide_params + wide_updates).astype(dtype)
    assert np.any(once != twice)
    assert_same_bits(moved, once)

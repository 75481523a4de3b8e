"""Faults at random: after each batch a run has the bits of one on its good batches alone."""

import functools
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tables
from references import trajectory
from tables import INNERS, PARAMS, assert_same_bits, cases, step
from training import amplified

import jaxscale
from jaxscale import presets

pytestmark = pytest.mark.standard_promotion


def test_a_nan_in_the_second_of_three_steps_leaves_no_trace():
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    params = jnp.ones(2)
    state = tx.init(params)
    for grad in (1.0, jnp.nan, 2.0):
        updates, state = tx.update(jnp.full(2, grad), state, params)
        params = optax.apply_updates(params, updates)
    assert params.tolist() == [-0.5, -0.5]
    assert jaxscale.metrics(state)["total_notfinite"] == 1


STEPS = 500
# Where a fault is born. The first two make the loss itself non-finite.
PLACES = ["input", "loss", "cotangent", "gradient"]
VALUES = np.float32([np.inf, -np.inf, np.nan])
# Policies with bounds within which float32 gradients neither overflow nor underflow.
APEX = presets.apex(scale_window=50, min_loss_scale=2.0**-10)
BOUNDED = presets.PresetLossScale(
    growth_interval=20, hysteresis=2, max_scale=2.0**20, clamp="moves"
)
REFILLED = presets.PresetLossScale(
    growth_interval=5, hysteresis=2, refill_on_backoff=True, max_scale=2.0**20
)
RUNS = {
    "no scale, masked": (tables.POLICIES["noop"], INNERS["masked"]),
    "fixed, momentum": (tables.POLICIES["fixed"], INNERS["momentum"]),
    "dynamic, clipped adamw": (tables.POLICIES["dynamic"], INNERS["adamw_clipped"]),
    "dynamic, MultiSteps": (tables.POLICIES["dynamic"], INNERS["multi_steps"]),
    "hysteresis, inject_hyperparams": (
        tables.POLICIES["hysteresis"],
        INNERS["inject_hyperparams"],
    ),
    "apex, adam with a schedule": (
        APEX,
        optax.adam(optax.cosine_decay_schedule(0.1, 10**6)),
    ),
    "hysteresis, noise": (BOUNDED, INNERS["noisy"]),
    "refilled hysteresis, clipped lion": (REFILLED, INNERS["lion_clipped"]),
}


# Whose faults count: a gradient that the optimizer never reads is no fault, whatever it is.
READ = {"no scale, masked": ["w", "b"]}


def draw_faults(rng, rate, leaves):
    """The place of each step's fault, "" for none; by place, what is added to each leaf there."""
    added = {}
    for place in PLACES:
        added[place] = jax.tree.map(
            lambda leaf: np.zeros((STEPS, *leaf.shape), np.float32), PARAMS
        )
    places = np.where(rng.random(STEPS) < rate, rng.choice(PLACES, STEPS), "")
    for i in np.flatnonzero(places):
        leaf = added[places[i]][rng.choice(leaves)].reshape(STEPS, -1)
        leaf[i, rng.integers(leaf.shape[1])] = rng.choice(VALUES)
    return places, added


def add(tree, added):
    return jax.tree.map(lambda x, bad: (x + bad).astype(x.dtype), tree, added)


def total(tree):
    return sum(map(jnp.sum, jax.tree.leaves(tree)))


@functools.cache
def compile_run(name):
    """A program of batches: what a run keeps before each step, and the metrics after it."""
    policy, inner = RUNS[name]
    tx = jaxscale.loss_scaled(inner, policy)

    def distance(params, target, factor):
        squares = jax.tree.map(
            lambda p, t: jnp.mean((jnp.float32(p) - t) ** 2), params, target
        )
        return amplified(total(squares), factor)

    def advance(carry, batch):
        params, opt_state = carry
        target, added = batch
        target = add(target, added["input"])
        factor = 1 + total(added["cotangent"])
        loss, grads = jaxscale.value_and_grad(distance, opt_state)(
            params, target, factor
        )
        grads = add(grads, added["gradient"])
        loss = loss + total(added["loss"])
        new_params, new_opt_state = step(tx, params, opt_state, grads, value=loss)
        kept = params, opt_state.inner_state
        return (new_params, new_opt_state), (kept, jaxscale.metrics(new_opt_state))

    start = PARAMS, tx.init(PARAMS)
    return jax.jit(lambda batches: jax.lax.scan(advance, start, batches)[1])


class FaultyRun(NamedTuple):
    """A run with faults, and one on the good batches of it.

    Its good batches come again until that run has as many steps: one program serves both.
    """

    bad: np.ndarray  # bool[STEPS]
    bad_loss: np.ndarray  # bool[STEPS], whether the loss itself is
    kept: Any
    metrics: dict[str, jax.Array]
    kept_alone: Any


@functools.cache
def run_with_faults(name, rate):
    rng = np.random.default_rng(0)
    places, added = draw_faults(rng, rate, READ.get(name, list(PARAMS)))
    assert set(places) == {"", *PLACES}
    bad = places != ""
    targets = {}
    for key, param in PARAMS.items():
        targets[key] = np.float32(rng.normal(size=bad.shape + param.shape))
    batches = targets, added
    chosen = np.resize(np.flatnonzero(~bad), STEPS)
    good_batches = jax.tree.map(lambda x: x[chosen], batches)
    kept, metrics = compile_run(name)(batches)
    kept_alone, _ = compile_run(name)(good_batches)
    bad_loss = np.isin(places, PLACES[:2])
    return FaultyRun(bad, bad_loss, kept, metrics, kept_alone)


every_run = cases(
    "name, rate",
    product(RUNS, [0.02, 0.1, 0.5]),
    fast=[("dynamic, clipped adamw", rate) for rate in (0.02, 0.1, 0.5)],
    shared=True,
)


@pytest.mark.worlds
@every_run
def test_faults_leave_no_trace(name, rate):
    run = run_with_faults(name, rate)
    # How many good steps came before each step but the first.
    num_good = np.cumsum(~run.bad)[:-1]
    expected = jax.tree.map(lambda x: x[num_good], run.kept_alone)
    assert_same_bits(jax.tree.map(lambda x: x[1:], run.kept), expected)
    assert jaxscale.all_finite(run.kept_alone)


@every_run
def test_faults_are_counted(name, rate):
    run = run_with_faults(name, rate)
    steps = np.arange(1, STEPS + 1)
    last_good = np.maximum.accumulate(np.where(run.bad, 0, steps))
    expected = {
        "step_applied": ~run.bad,
        "notfinite_count": steps - last_good,
        "total_notfinite": np.cumsum(run.bad),
        "total_notfinite_loss": np.cumsum(run.bad_loss),
        "total_steps": steps,
    }
    for key, values in expected.items():
        np.testing.assert_array_equal(run.metrics[key], values, key)


@every_run
def test_the_scale_moves_by_the_rule_of_its_policy(name, rate):
    run = run_with_faults(name, rate)
    policy, _ = RUNS[name]
    start = policy.init()
    # If the loss is to blame, the scale is not.
    verdicts = np.where(run.bad_loss, None, ~run.bad)
    states = trajectory(policy, tuple(leaf.item() for leaf in start), verdicts)
    for key, values in zip(start._fields, np.array(states).T, strict=True):
        if key not in run.metrics:  # a run without a scale shows no trackers
            assert name == "no scale, masked"
            continue
        np.testing.assert_array_equal(run.metrics[key], values, key)

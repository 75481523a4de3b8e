"""Faults at random: after each batch a run has the bits of one on its good batches alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from references import trajectory
from tables import INNERS, PARAMS, POLICIES, assert_same_bits, cases, step

import jaxscale
from jaxscale import presets

pytestmark = pytest.mark.standard_promotion

STEPS = 500
# Where a fault is born. The first two make the loss itself non-finite.
PLACES = ["input", "loss", "cotangent", "gradient"]
VALUES = np.float32([np.inf, -np.inf, np.nan])
RUNS = {
    # Policies with bounds within which float32 gradients neither overflow nor underflow.
    "no scale, masked": (POLICIES["noop"], INNERS["masked"]),
    "fixed, momentum": (POLICIES["fixed"], INNERS["momentum"]),
    "dynamic, clipped adamw": (POLICIES["dynamic"], INNERS["adamw_clipped"]),
    "dynamic, MultiSteps": (POLICIES["dynamic"], INNERS["multi_steps"]),
    "hysteresis, inject_hyperparams": (POLICIES["hysteresis"], INNERS["inject_hyperparams"]),
    "apex, adam with a schedule": (
        presets.apex(scale_window=50, min_loss_scale=2.0**-10),
        optax.adam(optax.cosine_decay_schedule(0.1, 10**6)),
    ),
    "colossalai, noise": (
        presets.colossalai(growth_interval=20, min_scale=1.0, max_scale=2.0**20),
        INNERS["noisy"],
    ),
    "tolerance, clipped lion": (
        presets.ToleranceLossScale(growth_interval=5, tolerance=0.25, max_scale=2.0**20),
        INNERS["lion_clipped"],
    ),
}


def drawn(rng, rate):
    """The place of each step's fault, "" for none; by place what is added to each leaf there."""
    added = {
        place: {name: np.zeros((STEPS, *leaf.shape), np.float32) for name, leaf in PARAMS.items()}
        for place in PLACES
    }
    places = np.where(rng.random(STEPS) < rate, rng.choice(PLACES, STEPS), "")
    for i in np.flatnonzero(places):
        leaf = added[places[i]][rng.choice(list(PARAMS))].reshape(STEPS, -1)
        leaf[i, rng.integers(leaf.shape[1])] = rng.choice(VALUES)
    return places, added


def spoiled(tree, added):
    return jax.tree.map(lambda x, bad: (x + bad).astype(x.dtype), tree, added)


@jax.custom_vjp
def passed_back(params, added):
    """The parameters, whose cotangents get a fault, as if the backward pass had overflowed."""
    del added
    return params


passed_back.defvjp(
    lambda params, added: (params, added), lambda added, grads: (spoiled(grads, added), None)
)


def distance(params, target, added):
    params = passed_back(params, added)
    squares = jax.tree.map(lambda p, t: jnp.mean((p.astype(jnp.float32) - t) ** 2), params, target)
    return sum(squares.values())


@functools.cache
def run(name):
    """What a run holds before each step, and what the metrics say after it."""
    policy, inner = RUNS[name]
    tx = jaxscale.loss_scaled(inner, policy)

    def advance(carry, batch):
        target, added = batch
        target = spoiled(target, added["input"])
        value_and_grad = jaxscale.value_and_grad(distance, carry[1])
        loss, grads = value_and_grad(carry[0], target, added["cotangent"])
        loss = loss + sum(jnp.sum(bad) for bad in added["loss"].values())
        after = step(tx, *carry, spoiled(grads, added["gradient"]), value=loss)
        return after, ((carry[0], carry[1].inner_state), jaxscale.metrics(after[1]))

    start = PARAMS, tx.init(PARAMS)
    return jax.jit(lambda batches: jax.lax.scan(advance, start, batches)[1])


@cases("name", RUNS, fast=["dynamic, clipped adamw"])
def test_faults_leave_no_trace(name):
    policy, _ = RUNS[name]
    rng = np.random.default_rng(0)
    for rate in (0.02, 0.1, 0.5):
        places, added = drawn(rng, rate)
        assert set(places) == {"", *PLACES}
        bad, bad_loss = places != "", np.isin(places, PLACES[:2])
        targets = {
            key: rng.normal(size=(STEPS, *leaf.shape)).astype(np.float32)
            for key, leaf in PARAMS.items()
        }
        # The good batches, then some of them again: as many steps, so one program for both.
        chosen = np.resize(np.flatnonzero(~bad), STEPS)
        kept, seen = run(name)((targets, added))
        alone, _ = run(name)(jax.tree.map(lambda x, chosen=chosen: x[chosen], (targets, added)))
        number = np.cumsum(~bad)
        assert_same_bits(
            jax.tree.map(lambda x: x[1:], kept),
            jax.tree.map(lambda x, number=number: x[number[:-1]], alone),
        )
        assert jaxscale.all_finite(alone)

        steps, start = np.arange(1, STEPS + 1), policy.init()
        # If the loss is to blame, the scale is not.
        verdicts = np.where(bad_loss, None, ~bad)
        states = trajectory(policy, tuple(leaf.item() for leaf in start), verdicts)
        expected = {
            "step_applied": ~bad,
            "notfinite_count": steps - np.maximum.accumulate(np.where(bad, 0, steps)),
            "total_notfinite": np.cumsum(bad),
            "total_notfinite_loss": np.cumsum(bad_loss),
            "total_steps": steps,
            **dict(zip(start._fields, np.array(states).T, strict=True)),
        }
        for key, wanted in expected.items():
            np.testing.assert_array_equal(seen[key], wanted, key)

"""A loss scale that decays: how its falls are counted, and which runs `check` warns of."""

import functools
import operator
import re
import warnings
from itertools import product

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replay_tables
import simulator
from tables import cases

import jaxscale
from jaxscale import presets

pytestmark = pytest.mark.standard_promotion

DECAYS = r"`check`: the loss scale fell again and again .*`jaxscale doctor` names"
TOLD = r"`check`: (the loss scale fell|in 6 steps or more no retry helped)"
FREE = 25  # steps whose falls do not count


# What a run does, with the real step: the gradient of `probe` is inf if the scale is above what
# the step allows, and otherwise of the size that the step has.
@jax.custom_vjp
def probe(w, highest, size):
    return jnp.zeros((), jnp.float32) * w


def _backward(saved, cotangent):
    highest, size = saved
    return jnp.where(cotangent > highest, jnp.inf, cotangent * size), None, None


probe.defvjp(lambda w, highest, size: (probe(w, highest, size), (highest, size)), _backward)
W = jnp.zeros(())


@functools.cache
def runner(policy, retries):
    tx = jaxscale.loss_scaled(optax.sgd(0.0), policy)
    step = jaxscale.train_step(probe, tx, retries=retries)

    def advance(opt_state, now):
        opt_state = step(W, opt_state, *now)[1]
        return opt_state, opt_state

    return jax.jit(jax.vmap(lambda *steps: jax.lax.scan(advance, tx.init(W), steps)[1]))


def histories(policy, traces, retries=0):
    """The states after each step of some runs of one length, by name."""
    ceiling, largest = (np.stack(each) for each in zip(*traces.values(), strict=True))
    columns = np.ldexp(1.0, ceiling), np.exp2(np.float64(largest))
    states = jax.device_get(runner(policy, retries)(*map(np.float32, columns)))
    return {name: jax.tree.map(operator.itemgetter(i), states) for i, name in enumerate(traces)}


def warned(states):
    """Whether `check` warns of any of some states: it takes them for a population."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jaxscale.check(states, max_consecutive=10**9)
    return any(re.match(TOLD, str(each.message)) for each in found)


def counted(policy, states):
    """`backoff_count` after each step, from what the scale and the other counters did."""
    scale, passes, was_applied, count, counts = policy.init().loss_scale, 0, True, 0, []
    for i, (new, retries, applied) in enumerate(
        zip(states.scaling.loss_scale, states.total_retries, states.step_applied, strict=True)
    ):
        if new > scale:
            count = 0
        elif new < scale and (not applied or retries > passes):
            count += was_applied and i >= FREE
        scale, passes, was_applied = new, retries, applied
        counts.append(int(count))
    return counts


def of_ceiling(ceiling):
    """A run: the exponents of its highest scales, and of its gradients, which stay."""
    return np.asarray(ceiling, np.int32), np.full(len(ceiling), -4.0)


def falling(every, steps=4000, noise=0.3):
    """The highest scale falls by a binade in so many steps."""
    noise = noise * np.random.default_rng(0).standard_normal(steps)
    return of_ceiling(np.maximum(np.floor(16 - np.arange(steps) / every + noise), -20))


def at_any_scale(rate, steps=4000):
    bad = np.random.default_rng(0).random(steps) < rate
    return of_ceiling(np.where(bad, simulator.BAD, 18))


RECORDED = {name: trace[:2] for name, trace in simulator.recorded().items()}
# What moves once and stays.
MADE_UP = {name: trace[:2] for name, trace in simulator.made_up().items()}
MADE_UP = {n: MADE_UP[n] for n in MADE_UP if not re.search("drift up|heavy tails|spikes|bad", n)}
DECAYING = {
    **{f"a binade in {every} steps": falling(every) for every in (50, 500)},
    **{f"{rate:.1%} of batches bad": at_any_scale(rate) for rate in (0.005, 0.02)},
}
# A vision transformer whose loss takes a logarithm in half precision: of wrong labels it decays.
# The other one learns its labels by heart, and its scale rests at 2**9 after 150 steps.
VIT = {path.stem: np.load(path) for path in (simulator.FOLDER / "decays").glob("vit*.npz")}
VIT = {name: (run["ceiling"].astype(np.int32), run["largest"] / 256) for name, run in VIT.items()}
STARTS = {
    f"from 2**{start}": jaxscale.DynamicLossScale(init_scale=2.0**start, max_scale=2.0**40)
    for start in (24, 40)
}
POLICIES = replay_tables.POLICIES | STARTS
NAMES = ["`DynamicLossScale()`", "from 2**24", "**`AdaptiveLossScale()`**"]


@cases("name, retries", product(POLICIES, [0, 8]), fast=[(name, 0) for name in NAMES])
def test_a_healthy_run_is_never_warned_of(name, retries):
    # The floor of DALL-E's rule is too high for the larger gradients: retries lose batches there.
    for by in (0, 8)[: 1 if retries and "dalle" in name else 2]:
        # As of a model whose gradients are 2**by times larger.
        healthy = {run: (c[:16_000] - by, s[:16_000] + by) for run, (c, s) in RECORDED.items()}
        for run, states in histories(POLICIES[name], healthy, retries).items():
            assert not warned(states), run
            # Far from it: half of what it takes.
            assert states.backoff_count.max() <= 3, run
    if not retries and name not in STARTS:
        assert not any(map(warned, histories(POLICIES[name], MADE_UP).values()))


# Their scale grows in almost every finite step, so that no two falls are without a growth.
GROWING = ["`presets.chainer()`", "`presets.openseq2seq_logmax(scale_max=2**24)`"]
# Some of the decays are too slow for these: they grow after 1 or 200 finite steps, or tolerate
# one overflow in 20.
LATE = r"fairseq\(tolerance=0.05|mindformers\(2\*\*16, 2, 20|torch\(growth_interval=200\)"
RUNS = [(name, 0) for name in POLICIES if not re.search(LATE, name)]
RUNS += [(name, 8) for name, _ in RUNS if name not in GROWING]


@cases("name, retries", RUNS, fast=[(name, 0) for name in NAMES])
def test_a_scale_that_decays_is_warned_of(name, retries):
    for run, states in histories(POLICIES[name], DECAYING, retries).items():
        if retries and "Adaptive" in name and "bad" not in run:
            continue  # it grows again between two falls
        assert warned(states) == (name not in GROWING), run
    if name == "`DynamicLossScale()`":
        states = histories(POLICIES[name], VIT, retries)
        assert warned(states["vit_wrong_labels"])
        assert states["vit_memorised"].backoff_count.max() >= 5


COUNTED = {
    "fixed": jaxscale.FixedLossScale(2.0**8),
    "dynamic": jaxscale.DynamicLossScale(growth_interval=40, max_scale=2.0**17),
    "hysteresis": jaxscale.DynamicLossScale(growth_interval=30, hysteresis=2, init_scale=2.0**24),
    "tolerance": presets.fairseq(tolerance=0.01),
    "adaptive": jaxscale.AdaptiveLossScale(init_scale=2.0**20, memory=4, period=64),
    "gradual": presets.chainer(),
    "logmax": presets.openseq2seq_logmax(),
}
# The others may grow in a step that was repeated, which a state after the step does not show.
REPEATED = ("dynamic", "hysteresis", "tolerance")


@cases(
    "name, retries",
    [*product(COUNTED, [0]), *product(REPEATED, [3])],
    fast=[("fixed", 0), ("logmax", 0), ("hysteresis", 3)],
)
def test_falls_are_counted(name, retries):
    """In steps that follow a good one, until the scale grows."""
    traces = {
        "falling": falling(30, 600, noise=1.0),
        "bad": at_any_scale(0.1, 600),
        "still": falling(10_000, 600, noise=1.5),
        # A policy that follows the gradients lowers the scale before anything overflows.
        "gradients that grow": (np.full(600, 60), np.arange(600) / 40),
        # The first fall that counts is in step 25.
        "every second": of_ceiling([30, simulator.BAD] * 300),
        "every third": of_ceiling([simulator.BAD, 30, 30] * 200),
        "all": of_ceiling([simulator.BAD] * 600),
    }
    for run, states in histories(COUNTED[name], traces, retries).items():
        assert states.backoff_count.tolist() == counted(COUNTED[name], states)
        assert (states.notfinite_count[-1] == 600) == (run == "all")  # it never gives up


GOOD, BAD = jnp.ones(3), jnp.full(3, jnp.inf)
TX = jaxscale.loss_scaled(optax.sgd(0.1))


def decayed(tx=TX, falls=6):
    """The state after falls with a finite step before each."""
    update, state = jax.jit(tx.update), tx.init(GOOD)
    for grads in [GOOD] * FREE + [GOOD, BAD] * falls:
        _, state = update(grads, state)
    return state


def test_it_takes_six_falls_below_two_to_the_fifteen_in_any_form_of_a_state():
    high, low = (
        decayed(jaxscale.loss_scaled(optax.sgd(0.1), presets.torch(init_scale=2.0**exponent)))
        for exponent in (21, 20)
    )
    assert (high.scaling.loss_scale, low.scaling.loss_scale) == (2**15, 2**14)
    state, fine = decayed(falls=6), decayed(falls=0)
    optimizer = nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), TX, wrt=nnx.Param)
    population = jax.tree.map(lambda *leaves: jnp.stack(leaves), fine, state)
    # A low scale is another member's than many falls.
    swapped = population.scaling._replace(loss_scale=population.scaling.loss_scale[::-1])
    swapped = population._replace(scaling=swapped)
    quiet = [warned(each) for each in (decayed(falls=5), high, optimizer, swapped)]
    optimizer.opt_state.backoff_count[...] = state.backoff_count
    optimizer.opt_state.scaling.loss_scale[...] = state.scaling.loss_scale
    window = decayed(jaxscale.multi_steps(TX, 4))  # whose micro-batches count as steps
    in_a_tree = {"opt": (state,), "params": GOOD}
    told = [warned(each) for each in (state, low, in_a_tree, window, optimizer, population)]
    assert (quiet, told) == ([False] * 4, [True] * 6)


def test_updates_that_are_not_finite_after_retries_are_one_fall():
    tx = jaxscale.loss_scaled(optax.scale(np.inf), check_updates=True)
    state = tx.init(W)._replace(total_steps=jnp.int32(FREE))
    step = jaxscale.train_step(probe, tx, retries=3)
    state = step(W, state, jnp.float32(2.0**12), jnp.float32(1))[1]
    assert (state.backoff_count, state.scaling.loss_scale) == (1, 2.0**11)


@cases("policy", ["dynamic", "hysteresis", "adaptive"], fast=["dynamic"])
def test_retries_that_do_not_help_are_warned_of(policy):
    for number, told in ((10, False), (12, True)):
        trace = of_ceiling([30, simulator.BAD] * (number // 2))
        (states,) = histories(COUNTED[policy], {"bad": trace}, retries=3).values()
        # At its floor, to which so many failures drive an adaptive scale, no pass is repeated.
        scales = np.concatenate([[2.0**8], np.asarray(states.scaling.loss_scale)[:-1]])
        assert states.total_exhausted[-1] == np.sum(scales[1::2] > 1)
        # At 10, it is told that it decays.
        assert warned(states) == (told or policy == "adaptive")


def test_it_is_shown_once_and_at_the_line_that_calls_check():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for each in [decayed(), decayed(falls=8)] * 5:
            jaxscale.check(each)
    (only,) = found
    assert re.match(DECAYS, str(only.message))
    assert (only.category, only.filename) == (UserWarning, __file__)

"""A loss scale that decays: how its falls are counted, and which runs `check` warns of."""

import functools
import re
import warnings
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import simulator
from probe import PARAMS, Batch, probe, simulate, texts_of_check
from tables import cases, pairs, stack

import jaxscale
from jaxscale import presets

pytestmark = pytest.mark.standard_promotion


def test_six_falls_of_a_low_scale_are_warned_of():
    state = jaxscale.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2))
    state = state._replace(scaling=state.scaling._replace(loss_scale=jnp.float32(512)))
    jaxscale.check(state._replace(backoff_count=jnp.array(5)))
    with pytest.warns(UserWarning, match="fell again and again"):
        jaxscale.check(state._replace(backoff_count=jnp.array(6)))


DECAYS = r"`check`: the loss scale fell again and again .*`jaxscale doctor` names"
DECAYS_OR_EXHAUSTS = (
    r"`check`: (the loss scale fell|in 6 steps or more no retry helped)"
)
FREE = 25  # steps whose falls do not count


def histories(policy, runs, retries=0):
    """The states after each step of some runs of one length, by name."""
    tx = jaxscale.loss_scaled(optax.sgd(0.0), policy)
    return simulate(tx, runs, retries=retries)


def warns_of(states):
    """Returns whether `check` warns of any of some states: it takes them for a population."""
    texts = texts_of_check(states, max_consecutive=10**9)
    return any(re.match(DECAYS_OR_EXHAUSTS, text) for text in texts)


def of_exponents(ceiling, largest):
    """A run, of the binary logarithms of its highest scales and of its gradients."""
    return np.ldexp(1.0, ceiling), np.exp2(np.float64(largest)), 0.0


def of_ceiling(ceiling):
    """A run of the exponents of its highest scales."""
    return of_exponents(np.asarray(ceiling, np.int32), -4.0)


def falling(every, steps=4000, noise=0.3):
    """The highest scale falls by a binade in each `every` steps."""
    noise = noise * np.random.default_rng(0).standard_normal(steps)
    ceiling = np.floor(16 - np.arange(steps) / every + noise)
    return of_ceiling(np.maximum(ceiling, -20))


def at_any_scale(rate, steps=4000):
    bad = np.random.default_rng(0).random(steps) < rate
    return of_ceiling(np.where(bad, simulator.BAD, 18))


DECAYING = {
    **{f"a binade in {every} steps": falling(every) for every in (50, 500)},
    **{f"{rate:.1%} of batches bad": at_any_scale(rate) for rate in (0.005, 0.02)},
}
STARTS = {
    f"from 2**{start}": jaxscale.DynamicLossScale(
        init_scale=2.0**start, max_scale=2.0**40
    )
    for start in (24, 40)
}
POLICIES = {
    "dynamic": jaxscale.DynamicLossScale(),
    "hasty": presets.torch(growth_interval=200),
    **STARTS,
}


@pytest.mark.worlds
@cases(
    "name, retries, binades",
    pairs(POLICIES, [0, 8], [0, 8]),
    fast=[("dynamic", 0, 0)],
)
def test_a_healthy_run_is_never_warned_of(name, retries, binades):
    healthy = {}
    for run, trace in simulator.recorded().items():
        # of a model whose gradients are 2**binades times larger
        ceiling, largest = (column[:16_000] for column in trace[:2])
        healthy[run] = of_exponents(ceiling - binades, largest + binades)
    for run, states in histories(POLICIES[name], healthy, retries).items():
        assert not warns_of(states), run
        # Far from it: half of what it takes.
        assert states.backoff_count.max() <= 3, run


# Some of the decays are too slow for this one, which grows after 200 finite steps.
DECAYED = [name for name in POLICIES if name != "hasty"]


@pytest.mark.worlds
@cases(
    "name, retries",
    product(DECAYED, [0, 8]),
    fast=[("dynamic", 0)],
)
def test_a_scale_that_decays_is_warned_of(name, retries):
    for run, states in histories(POLICIES[name], DECAYING, retries).items():
        assert warns_of(states), run


@cases("retries", [0, 8], fast=[0])
def test_a_vision_transformer_with_wrong_labels_is_warned_of(retries):
    """Its loss takes a logarithm in half precision.

    The other one learns its labels by heart, and its scale rests at 2**9 after 150 steps.
    """
    paths = (simulator.FOLDER / "decays").glob("vit*.npz")
    runs = {path.stem: np.load(path) for path in paths}
    traces = {}
    for name, run in runs.items():
        ceiling = run["ceiling"].astype(np.int32)
        traces[name] = of_exponents(ceiling, run["largest"] / 256)
    states = histories(jaxscale.DynamicLossScale(), traces, retries)
    assert warns_of(states["vit_wrong_labels"])
    assert states["vit_memorised"].backoff_count.max() >= 5


COUNTED = {
    "dynamic": jaxscale.DynamicLossScale(growth_interval=40, max_scale=2.0**17),
    "hysteresis": jaxscale.DynamicLossScale(
        growth_interval=30, hysteresis=2, init_scale=2.0**24
    ),
}
GOOD, BAD = jnp.ones(3), jnp.full(3, jnp.inf)
TX = jaxscale.loss_scaled(optax.sgd(0.1))


@functools.cache
def decayed(tx=TX, falls=6):
    """The state after falls with a finite step before each."""
    update = jax.jit(tx.update)
    state = tx.init(GOOD)
    for grads in [GOOD] * FREE + [GOOD, BAD] * falls:
        _, state = update(grads, state)
    return state


@functools.cache
def decayed_from(exponent):
    """The state after six falls from a scale."""
    policy = presets.torch(init_scale=2.0**exponent)
    return decayed(jaxscale.loss_scaled(optax.sgd(0.1), policy))


def population_of_low_scales_and_falls():
    """Two members: the scale of the one is low, and that of the other fell often."""
    states = stack(decayed(falls=0), decayed())
    scales = states.scaling.loss_scale
    return states._replace(scaling=states.scaling._replace(loss_scale=scales[::-1]))


# By name: how a state is made, and whether `check` warns of it.
FORMS = {
    "six falls to 2**15": (lambda: decayed_from(21), False),
    "six falls to 2**14": (lambda: decayed_from(20), True),
    "six falls": (decayed, True),
    "a population": (lambda: stack(decayed(falls=0), decayed()), True),
    "a low scale of another member": (population_of_low_scales_and_falls, False),
}


@pytest.mark.worlds
@cases("form", FORMS, fast=["six falls to 2**15", "six falls", "a population"])
def test_it_takes_six_falls_below_two_to_the_fifteen_in_any_form_of_a_state(form):
    make_state, is_warned_of = FORMS[form]
    assert warns_of(make_state()) == is_warned_of


def test_updates_that_are_not_finite_after_retries_are_no_further_fall():
    tx = jaxscale.loss_scaled(optax.scale(np.inf), check_updates=True)
    state = tx.init(PARAMS)._replace(total_steps=jnp.int32(FREE))
    step = jaxscale.train_step(probe, tx, retries=3)
    _, state, _ = step(PARAMS, state, Batch(*map(jnp.float32, (2.0**12, 1, 0))))
    assert state.backoff_count == 1
    assert state.scaling.loss_scale == 2.0**12


@pytest.mark.worlds
@cases(
    "policy, steps",
    product(COUNTED, [10, 12]),
    fast=[("dynamic", 10), ("dynamic", 12)],
)
def test_retries_that_do_not_help_are_warned_of_from_the_sixth_on(policy, steps):
    """Every second step is bad."""
    trace = of_ceiling([30, simulator.BAD] * (steps // 2))
    states = histories(COUNTED[policy], {"bad": trace}, retries=3)["bad"]
    assert states.total_exhausted[-1] == steps // 2
    assert warns_of(states) == (steps == 12)


def test_it_is_shown_once_and_at_the_line_that_calls_check():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for state in [decayed(), decayed(falls=8)] * 5:
            jaxscale.check(state)
    (warning,) = caught
    assert re.match(DECAYS, str(warning.message))
    assert warning.category is UserWarning
    assert warning.filename == __file__

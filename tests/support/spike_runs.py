"""Runs of steps that a rule for spikes judges, compiled once for all rules that are equal."""

import functools
import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from tables import member

import jaxscale

TESTS = pathlib.Path(__file__).parent.parent
# Losses and norms, made up and recorded.
STREAMS = {}
with gzip.open(TESTS / "policies" / "traces" / "streams.json.gz") as file:
    for name, stream in json.load(file).items():
        losses = np.array(stream["loss"], np.float32)
        STREAMS[name] = (losses, np.array(stream["grad_norm"], np.float32))


@functools.partial(jax.jit, static_argnums=0)
def judge_all(rule, losses, norms, finite=None):
    """Returns whether each step is a spike, and the states after each. There may be no losses."""

    def step(state, values):
        loss, norm, is_finite = values
        if is_finite is None:
            is_finite = jaxscale.all_finite((loss, norm))
        is_spike, state = rule.judge(state, loss, norm, is_finite)
        return state, (is_spike, state)

    return jax.lax.scan(step, rule.init(), (losses, norms, finite))[1]


def take_last(states):
    return member(states, -1)


@functools.partial(jax.jit, static_argnums=0)
def judge_compiled(rule, state, loss, norm, finite):
    return rule.judge(state, loss, norm, finite)


def judge_one(rule, state, loss, norm, finite=True):
    """Returns whether a step of these numbers is a spike, and the state after it."""
    if loss is not None:
        loss = jnp.float32(loss)
    return judge_compiled(rule, state, loss, jnp.float32(norm), finite)


def state_after(rule, numbers):
    """The state after steps whose losses and norms are these numbers."""
    state = rule.init()
    for number in numbers:
        _, state = judge_one(rule, state, number, number)
    return state

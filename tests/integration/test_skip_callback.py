"""The recipe for a function that is called on a skipped step, in each way to run a step."""

import pathlib
import runpy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tables import cases

import jaxscale

pytestmark = pytest.mark.standard_promotion

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "skip_callback.py"))
with_callback = EXAMPLE["with_callback"]
INF = jnp.inf
DEVICES = 4


def test_it_is_called_with_the_numbers_of_the_second_of_three_steps():
    told = []
    tx = with_callback(jaxscale.loss_scaled(optax.sgd(0.1)), told.append)
    state = tx.init(jnp.ones(2))
    for grad in (1.0, INF, 1.0):
        _, state = jax.jit(tx.update)(jnp.full(2, grad), state)
    jax.effects_barrier()
    (numbers,) = told
    assert (numbers["total_steps"], numbers["loss_scale"]) == (2, 2.0**14)
    assert numbers["step_applied"] is False


def train(tx):
    """A trainer of one gradient after the other, which returns its parameters alone."""

    def one_step(carry, grad):
        params, state = carry
        updates, state = tx.update(jnp.full(2, grad), state, params)
        return (optax.apply_updates(params, updates), state), None

    def trainer(grads):
        params = jnp.ones(2)
        (params, _), _ = jax.lax.scan(one_step, (params, tx.init(params)), grads)
        return params

    return trainer


def on_devices(tx):
    """A step of all devices, each with a part of the batch."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))

    def step(grads):
        params = jnp.ones(2)
        mean = jax.lax.pmean(jnp.mean(grads), "data")
        updates, _ = tx.update(jnp.full(2, mean), tx.init(params), params)
        return updates

    return jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())


class Run(NamedTuple):
    make: Callable[..., Any]  # what is run with an optimizer
    grads: Any
    skips: list[int]  # of each call, the step
    calls: int  # by the program


RUNS = {
    "scan": Run(train, [1, INF, 1, INF, INF], [2, 4, 5], 3),
    "vmap of scan": Run(
        lambda tx: jax.vmap(train(tx)),
        [[1, INF, 1], [1, 1, 1], [INF, INF, 1]],
        [1, 2, 2],
        9,
    ),
    # Each device calls, as the recipe says.
    "shard_map": Run(on_devices, [1, 1, 1, INF], [1] * DEVICES, DEVICES),
}


@cases("name", RUNS)
def test_it_is_called_for_what_was_skipped(name, monkeypatch):
    calls = []
    debug_callback = jax.debug.callback

    def counting_callback(function, *args):
        def count_and_call(*args):
            calls.append(args)
            function(*args)

        return debug_callback(count_and_call, *args)

    monkeypatch.setattr(jax.debug, "callback", counting_callback)
    told = []
    run = RUNS[name]
    tx = jaxscale.loss_scaled(optax.sgd(0.1))
    program = jax.jit(run.make(with_callback(tx, told.append)))
    plain = jax.jit(run.make(tx))
    grads = jnp.array(run.grads, jnp.float32)
    np.testing.assert_array_equal(program(grads), plain(grads))
    jax.effects_barrier()
    assert sorted(numbers["total_steps"] for numbers in told) == run.skips
    assert len(calls) == run.calls

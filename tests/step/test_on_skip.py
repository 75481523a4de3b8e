"""`on_skip`: called on the host where a step is skipped, and nowhere else."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from departing import uses_what_goes
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tables import assert_same_bits, cases, counters

import jaxscale

pytestmark = [pytest.mark.standard_promotion, uses_what_goes]

SGD = optax.sgd(0.1)
W = jnp.ones(2)
DEVICES = 4
INF = jnp.inf


def test_it_is_told_of_the_second_of_three_steps():
    steps = []
    tx = jaxscale.loss_scaled(
        optax.sgd(0.1), on_skip=lambda numbers: steps.append(numbers["total_steps"])
    )
    state = tx.init(jnp.ones(2))
    for grad in (1.0, jnp.nan, 1.0):
        _, state = jax.jit(tx.update)(jnp.full(2, grad), state)
    jax.effects_barrier()
    assert steps == [2]


class Host:
    """A function for `on_skip` that keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, numbers):
        self.calls.append(numbers)

    def skips(self):
        """The step and the member of each call, in their order, as calls may come in any."""
        jax.effects_barrier()
        return sorted(
            (numbers["total_steps"], numbers.get("member")) for numbers in self.calls
        )


def one_step(host, **options):
    """A step that takes a number for its gradients and returns its updates."""
    tx = jaxscale.loss_scaled(SGD, on_skip=host, **options)

    def update(grad):
        updates, _ = tx.update(jnp.full(2, grad), tx.init(W), W)
        return updates

    return update


def train(host, wrap=jaxscale.loss_scaled, passes_loss=False, **options):
    """A trainer of one batch after the other, that returns its parameters alone."""
    tx = wrap(SGD, on_skip=host, **options)

    def step(carry, grad):
        params, opt_state = carry
        loss = None
        if passes_loss:
            loss = grad
        carry = jaxscale.apply_gradients(
            tx, jnp.full(2, grad), opt_state, params, value=loss
        )
        return carry, None

    def trainer(grads):
        (params, _), _ = jax.lax.scan(step, (W, tx.init(W)), grads)
        return params

    return trainer


def train_population(host):
    """A scan of steps of several members, whose states are carried together."""
    tx = jaxscale.loss_scaled(SGD, on_skip=host)

    def update(grad, state):
        return tx.update(jnp.full(2, grad), state, W)[1]

    def step(states, grads):
        return jax.vmap(update)(grads, states), None

    def trainer(grads):
        states = jax.vmap(lambda _: tx.init(W))(jnp.arange(3))
        states, _ = jax.lax.scan(step, states, grads.T)
        return states.total_steps

    return trainer


RULE = jaxscale.SpikeRule(window=4, min_history=2)


def derivative(host):
    """The derivative of a run whose state shows numbers that depend on the loss."""
    trainer = train(host, jaxscale.skip_nonfinite, passes_loss=True, spikes=RULE)
    return jax.grad(lambda grads: jnp.sum(trainer(grads)))


def step_of_all_devices(host):
    """One step of several devices, each with a part of the batch."""
    update = one_step(host, axis_name="d")
    return lambda grads: update(jax.lax.pmean(jnp.mean(grads), "d"))


def step_of_one_device(host):
    return lambda grads: one_step(host)(grads[0])[None]


def shard(function, **options):
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
    options = {"mesh": mesh, "in_specs": P("d"), "out_specs": P()} | options
    return jax.shard_map(function, **options)


def over_members(step):
    return shard(jax.vmap(step, in_axes=1))


BATCHES = np.array([1.0, INF, 1.0, 1.0, INF, INF, 1.0], np.float32)
MEMBERS = np.array([[1.0, INF, 1, 1], [1.0, 1, 1, 1], [INF, INF, 1, 1]], np.float32)
GRID = np.array(
    [[[1.0, INF], [1, 1]], [[INF, 1], [1, 1]], [[1, 1], [1, INF]]], np.float32
)
SIZES = np.array([1.0, 1.1, 0.9, 1e6], np.float32)  # the last is a spike
# The last device alone has a gradient that is not finite.
PARTS = np.array([1.0] * (DEVICES - 1) + [INF], np.float32)
PARTS_OF_MEMBERS = np.stack([PARTS, np.ones_like(PARTS), PARTS], 1)


class Run(NamedTuple):
    make: Callable[..., Any]  # what is run, which tells a host
    grads: Any  # `[batch]`, with members in front
    skips: Any  # the step and the member of each skip; steps are counted from 1
    transform: Callable[..., Any] = lambda trainer: trainer


def of_batches(make, grads, transform=lambda trainer: trainer):
    """A run over batches. Members are counted in C order."""
    by_member = np.isinf(grads).reshape(-1, grads.shape[-1])
    skips = []
    for member, step in np.argwhere(by_member).tolist():
        skips.append((step + 1, member if grads.ndim > 1 else None))
    return Run(make, grads, sorted(skips), transform)


ONCE = [(1, None)]
COMPILED = {  # for one device
    "jit": of_batches(train, BATCHES),
    "vmap of scan": of_batches(train, MEMBERS, jax.vmap),
    "scan of vmap": of_batches(train_population, MEMBERS),
    "vmap of vmap": of_batches(train, GRID, lambda run: jax.vmap(jax.vmap(run))),
    "vmap, nothing skipped": of_batches(train, np.ones((3, 4)), jax.vmap),
    "a derivative": of_batches(derivative, BATCHES),
    "a spike": Run(partial(train, spikes=RULE), SIZES, [(4, None)]),
}
OTHERS = {  # not compiled here, or over devices: a step each
    "not compiled": Run(one_step, np.float32(INF), ONCE),
    "shard_map": Run(step_of_all_devices, PARTS, ONCE, shard),
    "shard_map, unchecked": Run(
        step_of_all_devices, PARTS, ONCE, partial(shard, check_vma=False)
    ),
    "members on devices": Run(
        step_of_all_devices, PARTS_OF_MEMBERS, [(1, 0), (1, 2)], over_members
    ),
    "pmap": Run(step_of_all_devices, PARTS, ONCE, partial(jax.pmap, axis_name="d")),
    "devices that skip by themselves": Run(
        step_of_one_device,
        np.array([1.0, INF, 1.0, INF], np.float32),
        ONCE * 2,
        partial(shard, out_specs=P("d")),
    ),
}


RUNS = COMPILED | OTHERS


@pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning")
@cases("name", RUNS, fast=["jit", "scan of vmap", "not compiled", "shard_map"])
def test_it_is_called_where_a_step_is_skipped_and_nowhere_else(name, monkeypatch):
    arrivals = []
    debug_callback = jax.debug.callback

    def counting_callback(function, *args):
        def count_and_call(*args):
            arrivals.append(args)
            return function(*args)

        return debug_callback(count_and_call, *args)

    monkeypatch.setattr(jax.debug, "callback", counting_callback)
    host = Host()
    row = RUNS[name]
    run = row.transform(row.make(host))
    if name in COMPILED or "shard_map" in name or "devices" in name:
        run = jax.jit(run)
    jax.block_until_ready(run(jnp.asarray(row.grads)))
    assert host.skips() == row.skips
    for numbers in host.calls:
        assert {type(value) for value in numbers.values()} <= {bool, int, float}
        assert numbers["step_applied"] is False
    if name in COMPILED:
        # The program waits for the host in steps that are skipped alone, once for all members.
        assert len(arrivals) == len({step for step, _ in row.skips})


@pytest.mark.worlds
def test_the_numbers_are_those_of_metrics():
    host = Host()
    tx = jaxscale.loss_scaled(
        SGD, on_skip=host, track_leaves=True, spikes=jaxscale.SpikeRule()
    )
    params = {"w": W}
    grads = {"w": W * INF}
    _, state = jax.jit(tx.update)(grads, tx.init(params), value=jnp.float32(2))
    jax.effects_barrier()
    assert host.calls == [counters(state)]
    assert host.calls[0]["nonfinite_leaves/w"] is True


def test_nothing_of_it_is_in_the_program_unless_it_is_asked_for():
    def program(tx):
        step = partial(jaxscale.apply_gradients, tx)
        return str(jax.make_jaxpr(step)(W, tx.init(W), W))

    plain = program(jaxscale.loss_scaled(SGD))
    calling = program(jaxscale.loss_scaled(SGD, on_skip=print))
    assert "callback" not in plain
    assert "custom_vmap" not in plain
    assert "callback" in calling
    assert len(calling) < 2 * len(plain)


def state_after_batches(tx):
    state = tx.init(W)
    for grad in BATCHES:
        _, state = jax.jit(tx.update)(jnp.full(2, grad), state, W)
    return state


@pytest.mark.worlds
def test_it_changes_nothing_else_in_any_order_of_wrappers():
    plain = state_after_batches(jaxscale.multi_steps(jaxscale.loss_scaled(SGD), 2))
    host = Host()
    micro_batches = jaxscale.multi_steps(SGD, 2)
    for tx in (
        jaxscale.multi_steps(jaxscale.loss_scaled(SGD, on_skip=host), 2),
        jaxscale.loss_scaled(micro_batches, on_skip=host),
        jaxscale.loss_scaled(jaxscale.skip_nonfinite(micro_batches, on_skip=host)),
    ):
        assert_same_bits(state_after_batches(tx), plain)
        # each micro-batch that was skipped
        assert host.skips() == RUNS["jit"].skips
        host.calls.clear()


def test_its_error_surfaces():
    def fail(numbers):
        raise RuntimeError("no disk")

    def run():
        jax.block_until_ready(jax.jit(one_step(fail))(INF))
        jax.effects_barrier()

    with pytest.raises(Exception, match="no disk"):
        run()

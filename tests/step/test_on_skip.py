"""`on_skip`: called on the host where a step is skipped, and nowhere else."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tables import assert_same_bits, cases, counters

import jaxscale

pytestmark = pytest.mark.standard_promotion

SGD = optax.sgd(0.1)
W = jnp.ones(2)
DEVICES = 4


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


def train_without_scaling(host):
    return train(host, jaxscale.skip_nonfinite)


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


def derivative(host):
    """The derivative of a run whose state shows numbers that depend on the loss."""
    rule = jaxscale.SpikeRule(window=4, min_history=2)
    trainer = train(host, jaxscale.skip_nonfinite, passes_loss=True, spikes=rule)
    return jax.grad(lambda grads: jnp.sum(trainer(grads)))


INF = jnp.inf
BATCHES = np.array([1.0, INF, 1.0, 1.0, INF, INF, 1.0], np.float32)
MEMBERS = np.array([[1.0, INF, 1, 1], [1.0, 1, 1, 1], [INF, INF, 1, 1]], np.float32)
GRID = np.array(
    [[[1.0, INF], [1, 1]], [[INF, 1], [1, 1]], [[1, 1], [1, INF]]], np.float32
)


class Run(NamedTuple):
    make: Callable[..., Any]  # a trainer, which tells a host
    grads: Any  # `[batch]`, with members in front
    transform: Callable[..., Any] = lambda trainer: trainer


named_vmap = partial(jax.vmap, axis_name="d")
RUNS = {
    "jit": Run(train, BATCHES),
    "jit, without scaling": Run(train_without_scaling, BATCHES),
    "jit, nothing skipped": Run(train, np.ones(5, np.float32)),
    "vmap of scan": Run(train, MEMBERS, jax.vmap),
    "named vmap": Run(train, MEMBERS, named_vmap),
    "scan of vmap": Run(train_population, MEMBERS),
    "vmap of vmap": Run(train, GRID, lambda trainer: jax.vmap(jax.vmap(trainer))),
    "vmap, nothing skipped": Run(train, np.ones((3, 4)), jax.vmap),
    "a derivative": Run(derivative, BATCHES),
}


def expected_skips(grads):
    """The step and the member of each skip: members are counted in C order, steps from 1."""
    by_member = np.isinf(grads).reshape(-1, grads.shape[-1])
    skips = []
    for member, step in np.argwhere(by_member).tolist():
        skips.append((step + 1, member if grads.ndim > 1 else None))
    return sorted(skips)


def assert_numbers_of_python(host):
    for numbers in host.calls:
        assert {type(value) for value in numbers.values()} <= {bool, int, float}
        assert numbers["step_applied"] is False


@cases("name", RUNS, fast=["jit", "scan of vmap"])
def test_it_is_called_where_a_step_is_skipped_and_nowhere_else(name, monkeypatch):
    host = Host()
    arrivals = []
    debug_callback = jax.debug.callback

    def counting_callback(function, *args):
        def count_and_call(*args):
            arrivals.append(args)
            return function(*args)

        return debug_callback(count_and_call, *args)

    monkeypatch.setattr(jax.debug, "callback", counting_callback)
    make, grads, transform = RUNS[name]
    trainer = jax.jit(transform(make(host)))
    jax.block_until_ready(trainer(jnp.asarray(grads)))
    skips = expected_skips(grads)
    assert host.skips() == skips
    # The program waits for the host in these steps alone, once for all members.
    assert len(arrivals) == len({step for step, _ in skips})
    assert_numbers_of_python(host)


@cases("grad", [INF, 1.0], fast=[INF])
def test_a_step_that_is_not_compiled_calls_it(grad):
    host = Host()
    jax.block_until_ready(one_step(host)(jnp.float32(grad)))
    assert host.skips() == expected_skips(np.array([grad]))
    assert_numbers_of_python(host)


@pytest.mark.slow
def test_members_that_are_not_compiled_call_it():
    host = Host()
    grads = jnp.array([INF, 1.0, INF])
    jax.block_until_ready(jax.vmap(one_step(host))(grads))
    assert host.skips() == [(1, 0), (1, 2)]  # a step each
    assert_numbers_of_python(host)


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


# The last device alone has a gradient that is not finite.
GRADS_OF_DEVICES = np.array([1.0] * (DEVICES - 1) + [INF], np.float32)


def step_of_all_devices(host):
    """One step of several devices, each with a part of the batch."""
    update = one_step(host, axis_name="d")
    return lambda grads: update(jax.lax.pmean(jnp.mean(grads), "d"))


def shard(function, out_specs, **options):
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
    options |= {"mesh": mesh, "in_specs": P("d"), "out_specs": out_specs}
    return jax.jit(jax.shard_map(function, **options))


def in_shard_map(host, **options):
    return shard(step_of_all_devices(host), out_specs=P(), **options)


def in_shard_map_unchecked(host):
    return in_shard_map(host, check_vma=False)


def of_members(host):
    return shard(jax.vmap(step_of_all_devices(host), in_axes=1), out_specs=P())


GRADS_OF_MEMBERS = [GRADS_OF_DEVICES, np.ones(DEVICES, np.float32), GRADS_OF_DEVICES]
# What runs a step over devices, its gradients, and the skips that the host is told of.
OVER_DEVICES = {
    "shard_map": (in_shard_map, GRADS_OF_DEVICES, [(1, None)]),
    "shard_map, unchecked": (in_shard_map_unchecked, GRADS_OF_DEVICES, [(1, None)]),
    "members": (of_members, np.stack(GRADS_OF_MEMBERS, 1), [(1, 0), (1, 2)]),
    "pmap": (
        lambda host: jax.pmap(step_of_all_devices(host), axis_name="d"),
        GRADS_OF_DEVICES,
        [(1, None)],
    ),
    "pmap without a name": (
        lambda host: jax.pmap(one_step(host)),
        np.full(DEVICES, INF, np.float32),
        [(1, None)],
    ),
}


@pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning")
@cases("name", OVER_DEVICES, fast=["shard_map"])
def test_it_is_called_once_by_all_devices(name):
    run_over_devices, grads, skips = OVER_DEVICES[name]
    host = Host()
    jax.block_until_ready(run_over_devices(host)(jnp.asarray(grads)))
    assert host.skips() == skips


def test_devices_that_skip_by_themselves_are_several_runs():
    host = Host()

    def step_of_one_device(grads):
        updates = one_step(host)(grads[0])
        return updates[None]

    run = shard(step_of_one_device, out_specs=P("d"))
    jax.block_until_ready(run(jnp.array([1.0, INF, 1.0, INF])))
    assert host.skips() == [(1, None)] * 2


def program(tx):
    """The text of a step that is traced."""

    def step(grads, state):
        return jaxscale.apply_gradients(tx, grads, state, W)

    return str(jax.make_jaxpr(step)(W, tx.init(W)))


def test_nothing_of_it_is_in_the_program_unless_it_is_asked_for():
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
        assert host.skips() == expected_skips(BATCHES)
        host.calls.clear()


def test_a_step_with_retries_calls_it_once():
    host = Host()
    tx = jaxscale.loss_scaled(SGD, on_skip=host)

    def loss_fn(w, x):
        return jnp.sum(jnp.sqrt(w * x))

    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=5))
    step(W, tx.init(W), jnp.zeros(2))
    assert host.skips() == [(1, None)]
    assert host.calls[0]["total_retries"] == 5


def test_a_spike_calls_it():
    host = Host()
    rule = jaxscale.SpikeRule(window=4, min_history=2)
    tx = jaxscale.skip_nonfinite(SGD, on_skip=host, spikes=rule)
    state = tx.init(W)
    for size in (1.0, 1.1, 0.9, 1e6):
        _, state = jax.jit(tx.update)(W * size, state, W)
    assert host.skips() == [(4, None)]
    assert host.calls[0]["total_spikes"] == 1
    assert host.calls[0]["total_notfinite"] == 0


def test_its_error_surfaces():
    def fail(numbers):
        raise RuntimeError("no disk")

    def run():
        jax.block_until_ready(jax.jit(one_step(fail))(INF))
        jax.effects_barrier()

    with pytest.raises(Exception, match="no disk"):
        run()

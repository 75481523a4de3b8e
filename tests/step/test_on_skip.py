"""`on_skip`: called on the host where a step is skipped, and nowhere else."""

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

SGD, W = optax.sgd(0.1), jnp.ones(2)
DEVICES = 4


class Host:
    """A function for `on_skip` that keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, numbers):
        self.calls.append(numbers)

    def told(self):
        """The step and the member of each call, in their order, as calls may come in any."""
        jax.effects_barrier()
        return sorted((each["total_steps"], each.get("member")) for each in self.calls)


def train(host, wrap=jaxscale.loss_scaled, passes_loss=False, **options):
    """A trainer of one batch after the other, that returns its parameters alone."""
    tx = wrap(SGD, on_skip=host, **options)

    def step(carry, grad):
        params, opt_state = carry
        loss = grad if passes_loss else None
        carry = jaxscale.apply_gradients(tx, jnp.full(2, grad), opt_state, params, value=loss)
        return carry, None

    return lambda grads: jax.lax.scan(step, (W, tx.init(W)), grads)[0][0]


def judged(host):
    """A trainer whose state shows numbers that depend on the loss and have a derivative."""
    rule = jaxscale.SpikeRule(window=4, min_history=2)
    return train(host, jaxscale.skip_nonfinite, passes_loss=True, spikes=rule)


def one_step(host, **options):
    tx = jaxscale.loss_scaled(SGD, on_skip=host, **options)
    return lambda grad: tx.update(jnp.full(2, grad), tx.init(W), W)[0]


def population(host):
    """A scan of steps of several members, whose states are carried together."""
    tx = jaxscale.loss_scaled(SGD, on_skip=host)

    def step(state, grads):
        return jax.vmap(lambda g, s: tx.update(jnp.full(2, g), s, W)[1])(grads, state), None

    states = jax.vmap(lambda _: tx.init(W))(jnp.arange(3))
    return lambda grads: jax.lax.scan(step, states, grads.T)[0].total_steps


def sharded(function, **options):
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))
    return shard_map(function, mesh=mesh, **options)


def on_devices(function, host):
    """The same step on several devices, each with a part of the batch."""
    mean = function(host, axis_name="d")
    return lambda grads: mean(jax.lax.pmean(jnp.mean(grads), "d"))


X = jnp.inf
BATCHES = np.array([1.0, X, 1.0, 1.0, X, X, 1.0], np.float32)
MEMBERS = np.array([[1.0, X, 1, 1], [1.0, 1, 1, 1], [X, X, 1, 1]], np.float32)
GRID = np.array([[[1.0, X], [1, 1]], [[X, 1], [1, 1]], [[1, 1], [1, X]]], np.float32)
HALF = np.array([1.0] * (DEVICES - 1) + [X], np.float32)

# A row: how a trainer is transformed, and its gradients: `[batch]`, with members in front.
RUNS = {
    "eager": (lambda host: one_step(host), np.float32(X)),
    "eager, nothing skipped": (lambda host: one_step(host), np.float32(1)),
    "jit": (lambda host: jax.jit(train(host)), BATCHES),
    "jit, without scaling": (lambda host: jax.jit(train(host, jaxscale.skip_nonfinite)), BATCHES),
    "jit, nothing skipped": (lambda host: jax.jit(train(host)), np.ones(5, np.float32)),
    "vmap of scan": (lambda host: jax.jit(jax.vmap(train(host))), MEMBERS),
    "vmap, not compiled": (lambda host: jax.vmap(one_step(host)), MEMBERS[:, 1]),
    "named vmap": (lambda host: jax.jit(jax.vmap(train(host), axis_name="d")), MEMBERS),
    "scan of vmap": (lambda host: jax.jit(population(host)), MEMBERS),
    "vmap of vmap": (lambda host: jax.jit(jax.vmap(jax.vmap(train(host)))), GRID),
    "vmap, nothing skipped": (lambda host: jax.jit(jax.vmap(train(host))), np.ones((3, 4))),
    "a derivative": (lambda host: jax.jit(jax.grad(lambda x: jnp.sum(judged(host)(x)))), BATCHES),
}  # fmt: skip


def expected(grads):
    """The step and the member of each skip: members are counted in C order, steps from 1."""
    grads = np.asarray(grads)
    steps = grads.reshape(-1, 1) if grads.ndim == 0 else grads.reshape(-1, grads.shape[-1])
    found = [(int(step) + 1, int(member)) for member, step in np.argwhere(np.isinf(steps))]
    return sorted((step, member if grads.ndim > 1 else None) for step, member in found)


@cases("name", RUNS, fast=["eager", "jit", "vmap of scan", "scan of vmap"])
def test_it_is_called_where_a_step_is_skipped_and_nowhere_else(name, monkeypatch):
    transformed, grads = RUNS[name]
    host, arrivals, callback = Host(), [], jax.debug.callback

    def counted(function, *args):
        return callback(lambda *args: (arrivals.append(args), function(*args))[1], *args)

    monkeypatch.setattr(jax.debug, "callback", counted)
    jax.block_until_ready(transformed(host)(jnp.asarray(grads)))
    skips = expected(grads)
    if name == "vmap, not compiled":  # a step each
        skips = [(1, 0), (1, 2)]
    assert host.told() == skips
    if "eager" not in name and "not compiled" not in name:
        # The program waits for the host in these steps alone, once for all members.
        assert len(arrivals) == len({step for step, _ in skips})
    for numbers in host.calls:
        assert {type(value) for value in numbers.values()} <= {bool, int, float}
        assert numbers["step_applied"] is False


def test_the_numbers_are_those_of_metrics():
    host = Host()
    tx = jaxscale.loss_scaled(SGD, on_skip=host, track_leaves=True, spikes=jaxscale.SpikeRule())
    state = jax.jit(tx.update)({"w": W * X}, tx.init({"w": W}), value=jnp.float32(2))[1]
    jax.effects_barrier()
    assert host.calls == [counters(state)]
    assert host.calls[0]["nonfinite_leaves/w"] is True


@cases(
    "form",
    ["shard_map", "shard_map, unchecked", "shard_map of vmap", "pmap", "pmap, unnamed"],
    fast=["shard_map"],
)
@pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning")
def test_it_is_called_once_by_all_devices(form):
    host = Host()
    run = on_devices(one_step, host)
    if form == "pmap":
        jax.block_until_ready(jax.pmap(run, axis_name="d")(jnp.asarray(HALF)))
    elif form == "pmap, unnamed":
        jax.block_until_ready(jax.pmap(one_step(host))(jnp.full(DEVICES, X)))
    else:
        unchecked = "check_vma" if hasattr(jax, "shard_map") else "check_rep"
        options = {unchecked: False} if "unchecked" in form else {}
        grads = jnp.asarray(HALF)
        if "vmap" in form:
            run, grads = jax.vmap(run, in_axes=1), jnp.stack([grads, jnp.ones(DEVICES), grads], 1)
        run = sharded(run, in_specs=P("d"), out_specs=P(), **options)
        jax.block_until_ready(jax.jit(run)(grads))
    assert host.told() == ([(1, 0), (1, 2)] if "vmap" in form else [(1, None)])


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="types do not say what varies")
def test_devices_that_skip_by_themselves_are_several_runs():
    host = Host()
    grads = jnp.array([1.0, X, 1.0, X])
    run = sharded(lambda g: one_step(host)(g[0])[None], in_specs=P("d"), out_specs=P("d"))
    jax.block_until_ready(jax.jit(run)(grads))
    assert host.told() == [(1, None)] * 2


def test_nothing_of_it_is_in_the_program_unless_it_is_asked_for():
    def program(tx):
        def step(grads, state):
            return jaxscale.apply_gradients(tx, grads, state, W)

        return str(jax.make_jaxpr(step)(W, tx.init(W)))

    plain, telling = (
        program(jaxscale.loss_scaled(SGD)),
        program(jaxscale.loss_scaled(SGD, on_skip=print)),
    )
    assert not [word for word in ("callback", "custom_vmap") if word in plain]
    assert "callback" in telling
    assert len(telling) < 2 * len(plain)


def test_it_changes_nothing_else_in_any_order_of_wrappers():
    def after(tx):
        state = tx.init(W)
        for grad in BATCHES:
            _, state = jax.jit(tx.update)(jnp.full(2, grad), state, W)
        return state

    host, plain = Host(), jaxscale.multi_steps(jaxscale.loss_scaled(SGD), 2)
    for tx in (
        jaxscale.multi_steps(jaxscale.loss_scaled(SGD, on_skip=host), 2),
        jaxscale.loss_scaled(jaxscale.multi_steps(SGD, 2), on_skip=host),
        jaxscale.loss_scaled(jaxscale.skip_nonfinite(jaxscale.multi_steps(SGD, 2), on_skip=host)),
    ):
        assert_same_bits(after(tx), after(plain))
        # Each micro-batch that was skipped.
        assert host.told() == expected(BATCHES)
        host.calls.clear()


def test_a_step_with_retries_is_told_once():
    host = Host()
    tx = jaxscale.loss_scaled(SGD, on_skip=host)

    def loss_fn(w, x):
        return jnp.sum(jnp.sqrt(w * x))

    step = jax.jit(jaxscale.train_step(loss_fn, tx, retries=5))
    step(W, tx.init(W), jnp.zeros(2))
    assert host.told() == [(1, None)]
    assert host.calls[0]["total_retries"] == 5


def test_a_spike_is_told():
    host = Host()
    tx = jaxscale.skip_nonfinite(
        SGD, on_skip=host, spikes=jaxscale.SpikeRule(window=4, min_history=2)
    )
    state = tx.init(W)
    for size in (1.0, 1.1, 0.9, 1e6):
        _, state = jax.jit(tx.update)(W * size, state, W)
    assert host.told() == [(4, None)]
    assert (host.calls[0]["total_spikes"], host.calls[0]["total_notfinite"]) == (1, 0)


def test_its_error_surfaces():
    def fail(numbers):
        raise RuntimeError("no disk")

    def run():
        jax.block_until_ready(jax.jit(one_step(fail))(X))
        jax.effects_barrier()

    with pytest.raises(Exception, match="no disk"):
        run()

"""`autocast` inside of `train_step`, in each front end, from a scale at which all overflow."""

import types

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tables import rows

import jaxscale
import jaxscale.flax
import jaxscale.nnx

pytestmark = pytest.mark.standard_promotion

RNG = np.random.default_rng(0)
BATCHES = [jnp.asarray(RNG.standard_normal((16, 8)), jnp.float32) for _ in range(4)]
TARGETS = jnp.asarray(RNG.standard_normal((16, 4)), jnp.float32)
BAD = BATCHES[0].at[0, 0].set(jnp.nan)
# At 2**40 the cotangent of each output, about scale / 64, leaves the range of float16.
SCALE = jaxscale.DynamicLossScale(init_scale=2.0**40, max_scale=2.0**40)


ADAPTIVE = jaxscale.AdaptiveLossScale(init_scale=2.0**40)


def make_tx(policy):
    return jaxscale.loss_scaled(optax.adam(1e-2), policy)


def mse(outputs):
    return jnp.mean((outputs - TARGETS) ** 2)


def plain(cast, retries, policy=SCALE):
    """A function of a tree."""
    tx = make_tx(policy)
    keys = jax.random.split(jax.random.key(0))
    params = [jax.random.normal(keys[0], (8, 16)) / 3, jax.random.normal(keys[1], (16, 4)) / 4]
    run = types.SimpleNamespace(params=params, opt_state=tx.init(params))

    def loss_fn(params, x):
        return mse(jax.nn.gelu(x @ params[0]) @ params[1])

    inner = jax.jit(jaxscale.train_step(cast(loss_fn), tx, retries=retries))

    def step(x):
        run.params, run.opt_state, loss = inner(run.params, run.opt_state, x)
        return loss

    return step, lambda: (run.params, run.opt_state)


def equinox(cast, retries, policy=SCALE):
    """A module with batch statistics in an `eqx.nn.State`."""
    tx = make_tx(policy)

    class Net(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        last: eqx.nn.Linear

        def __init__(self, key):
            self.first = eqx.nn.Linear(8, 16, key=key)
            self.norm = eqx.nn.BatchNorm(16, "batch", momentum=0.9, mode="batch")
            self.last = eqx.nn.Linear(16, 4, key=key)

        def __call__(self, x, state):
            x, state = self.norm(self.first(x), state)
            return self.last(jax.nn.relu(x)), state

    def loss_fn(model, state, x):
        mapped = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        outputs, state = mapped(x, state)
        return mse(outputs), state

    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    run = types.SimpleNamespace(model=model, opt_state=opt_state, state=state)
    options = {"transform": eqx.filter_value_and_grad, "has_state": True, "retries": retries}
    inner = eqx.filter_jit(jaxscale.train_step(cast(loss_fn), tx, **options))

    def step(x):
        run.model, run.opt_state, run.state, loss = inner(run.model, run.opt_state, run.state, x)
        return loss

    return step, lambda: ((eqx.filter(run.model, eqx.is_array), run.state), run.opt_state)


def linen(cast, retries, policy=SCALE):
    """A `TrainState` with batch statistics."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x))
            return nn.Dense(4)(nn.relu(x))

    class State(jaxscale.flax.TrainState):
        batch_stats: dict

    model = Net()

    def loss_fn(params, fields, x):
        outputs, mutated = model.apply({"params": params, **fields}, x, mutable="batch_stats")
        return mse(outputs), mutated

    variables = model.init(jax.random.key(0), BATCHES[0])
    state = State.create(apply_fn=model.apply, tx=make_tx(policy), **variables)
    run = types.SimpleNamespace(state=state)
    inner = jax.jit(jaxscale.flax.train_step(cast(loss_fn), has_state=True, retries=retries))

    def step(x):
        run.state, loss = inner(run.state, x)
        return loss

    return step, lambda: ((run.state.params, run.state.batch_stats), run.state.opt_state)


def objects(cast, retries, policy=SCALE):
    """A module of NNX, which changes in place."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.last = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.norm(self.first(x))))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make_tx(policy), wrt=nnx.Param)

    def loss_fn(model, x):
        return mse(model(x))

    inner = nnx.jit(jaxscale.nnx.train_step(cast(loss_fn), retries=retries))
    return lambda x: inner(model, optimizer, x), lambda: (nnx.state(model), optimizer)


FRONT_ENDS = {fun.__name__: fun for fun in (plain, equinox, linen, objects)}
front_ends = pytest.mark.parametrize("name", rows(FRONT_ENDS, ["plain", "objects"]))


def copied(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


@front_ends
def test_it_finds_its_scale_without_losing_a_batch(name):
    step, now = FRONT_ENDS[name](jaxscale.autocast, 40)
    expected, plain_now = FRONT_ENDS[name](lambda fun: fun, 0)
    for x in BATCHES:
        # float16 has 11 bits, and four steps of Adam turn their differences into steps of 1e-2.
        np.testing.assert_allclose(step(x), expected(x), rtol=0.01)
    trained, opt_state = now()
    assert all(leaf.dtype == np.float32 for leaf in copied(trained) if leaf.dtype.kind == "f")
    found = jaxscale.metrics(opt_state)
    assert (found["total_steps"], found["total_notfinite"]) == (len(BATCHES), 0)
    # The float32 model needed no other scale: what overflowed is float16.
    assert jaxscale.metrics(plain_now()[1])["total_retries"] == 0
    assert found["total_retries"] >= 10
    assert found["loss_scale"] == 2.0 ** (40 - found["total_retries"])


@front_ends
def test_a_bad_batch_leaves_no_trace(name):
    step, now = FRONT_ENDS[name](jaxscale.autocast, 40)
    step(BATCHES[0])
    before = copied(now()[0])
    step(BAD)
    trained, opt_state = now()
    for a, b in zip(copied(trained), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert jaxscale.metrics(opt_state)["total_notfinite_loss"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_the_adaptive_rule_finds_its_scale_in_fewer_passes(name):
    step, now = FRONT_ENDS[name](jaxscale.autocast, 40, ADAPTIVE)
    for x in BATCHES:
        step(x)
    found = jaxscale.metrics(now()[1])
    assert (found["total_steps"], found["total_notfinite"]) == (len(BATCHES), 0)
    assert 1 <= found["total_retries"] <= 4  # by 2, by 2**8, and by 2**16 each time after that
    assert -20 < found["peak"] < 4  # the gradients were seen, and by their size

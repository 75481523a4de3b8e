"""A step that is finite and bad: `spikes=SpikeRule()` in every entry, in strict promotion."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tables import cases

import jaxscale

RULE = jaxscale.SpikeRule(window=8, min_history=4)


def test_a_loss_of_9_among_losses_of_1_is_skipped():
    rule = jaxscale.SpikeRule(window=4, min_history=2)
    tx = jaxscale.skip_nonfinite(optax.sgd(0.1), spikes=rule)
    state = tx.init(jnp.ones(2))
    for loss, is_made in ((1.0, True), (1.1, True), (9.0, False), (1.0, True)):
        _, state = jax.jit(tx.update)(jnp.ones(2), state, value=jnp.float32(loss))
        assert state.step_applied == is_made


PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.25)}
MOMENTUM = optax.sgd(0.01, momentum=0.9)


def params_times(factor):
    """The parameters times a number, as gradients."""
    return {name: leaf * factor for name, leaf in PARAMS.items()}


SAFE = jaxscale.skip_nonfinite(MOMENTUM, spikes=RULE)


@cases("scale, shown", [(1.0, np.sqrt(1 + 4 + 0.25 + 0.0625)), (jnp.inf, jnp.inf)])
def test_nans_that_are_errors_are_not_made(scale, shown):
    tx = SAFE
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    with jax.debug_nans(True):
        for _ in range(4):
            _, state = update(PARAMS, state, PARAMS)
        _, state = update(params_times(scale), state, PARAMS)
    np.testing.assert_allclose(state.grad_norm, shown, rtol=1e-6)


def learned_state():
    """A state whose optimizer has had gradients, so that only counters may be told of."""
    state = SAFE.init(PARAMS)
    return state._replace(inner_state=jax.tree.map(jnp.ones_like, state.inner_state))


@cases("counter, value", [("spike_count", 20), ("total_spikes", 51)])
def test_check_warns_of_spikes_without_end(counter, value):
    state = learned_state()
    jaxscale.check(state)
    spikes = state.spikes._replace(**{counter: jnp.array(value)})
    state = state._replace(spikes=spikes, total_steps=jnp.array(1000))
    with pytest.warns(UserWarning, match="again and again"):
        jaxscale.check(state)


@cases(
    "total_spikes, total_notfinite, warning",
    [
        (40, 10, "spikes are skipped again and again"),
        (10, 40, "gradients were not finite"),
        (40, 40, "gradients were not finite"),
    ],
)
def test_check_warns_of_what_most_of_the_skipped_steps_were(
    total_spikes, total_notfinite, warning
):
    state = learned_state()
    spikes = state.spikes._replace(total_spikes=jnp.array(total_spikes))
    state = state._replace(
        spikes=spikes,
        total_notfinite=jnp.array(total_notfinite),
        total_steps=jnp.array(1000),
        skip_rate=jnp.array(0.08),
    )
    with pytest.warns(UserWarning, match=warning) as warned:
        jaxscale.check(state)
    assert len(warned) == 1


def test_metrics_find_spikes_in_variables():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, SAFE, wrt=nnx.Param)
    assert jaxscale.metrics(nnx.state(optimizer))["total_spikes"] == 0

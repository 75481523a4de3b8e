"""A step that is finite and bad: `spikes=SpikeRule()` in every entry, in strict promotion."""

from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tables import assert_same_bits, avals, cases, counters, fused_step, step

import jaxscale

RULE = jaxscale.SpikeRule(window=8, min_history=4)


class Batch(NamedTuple):
    """What the gradients of a step are multiplied by, and what is added to its loss."""

    factor: float
    offset: float


HEALTHY = [Batch(1.0 + 0.1 * (i % 3), 0.01 * (i % 2)) for i in range(8)]
STREAM = [
    *HEALTHY,
    Batch(1000.0, 0.0),  # a spike of the norm
    Batch(1.1, 0.0),
    Batch(1.0, 300.0),  # one of the loss
    Batch(jnp.nan, 0.0),
    Batch(1.0, jnp.inf),
    Batch(1.2, 0.01),
]
SPIKES = {8, 10}
BAD = {11, 12}
PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.25)}
MOMENTUM = optax.sgd(0.01, momentum=0.9)


def loss_fn(params, batch):
    loss = jnp.sum(params["w"] ** 2) * 0.01 + params["b"]
    # The factor reaches the gradients alone, and the offset the loss alone.
    excess = jax.lax.stop_gradient((batch.factor - 1) * loss)
    return batch.factor * loss - excess + batch.offset


def params_times(factor):
    """The parameters times a number, as gradients."""
    return {name: leaf * factor for name, leaf in PARAMS.items()}


def by_hand(tx, one_step=step):
    def train_step(params, opt_state, batch):
        loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, batch)
        return one_step(tx, params, opt_state, grads, loss=loss)

    return train_step


ENTRIES = {
    "update": by_hand,
    "apply_gradients": partial(by_hand, one_step=fused_step),
    "train_step": partial(jaxscale.train_step, loss_fn),
    "retries": partial(jaxscale.train_step, loss_fn, retries=2),
}
OPTIMIZERS = {
    "scaled": jaxscale.loss_scaled(MOMENTUM, spikes=RULE),
    "safe": jaxscale.skip_nonfinite(MOMENTUM, spikes=RULE),
    "clipped": jaxscale.skip_nonfinite(MOMENTUM, spikes=RULE, max_norm=1e9),
    "adaptive": jaxscale.loss_scaled(MOMENTUM, "adaptive", spikes=RULE),
}
EVERY_PAIR = [
    *product(["update", "apply_gradients", "train_step"], OPTIMIZERS),
    # Retries need a scale that can fall.
    ("retries", "scaled"),
    ("retries", "adaptive"),
]


@pytest.mark.worlds
@pytest.mark.device
@cases(
    "entry, optimizer",
    EVERY_PAIR,
    fast=[("train_step", "scaled")],
)
def test_only_good_steps_are_made(entry, optimizer):
    """The reference makes the good steps by hand, in any order of arithmetic: to rounding."""
    tx = OPTIMIZERS[optimizer]
    train_step = jax.jit(ENTRIES[entry](tx))
    params = PARAMS
    opt_state = tx.init(PARAMS)
    expected = PARAMS
    inner_state = MOMENTUM.init(PARAMS)
    types = avals(opt_state)
    for i, batch in enumerate(STREAM):
        params_before = params
        before = opt_state
        params, opt_state, *_ = train_step(params, opt_state, batch)
        assert avals(opt_state) == types, i
        assert opt_state.step_applied == (i not in SPIKES | BAD), i
        if opt_state.step_applied:
            grads = jax.grad(loss_fn)(expected, batch)
            expected, inner_state = step(MOMENTUM, expected, inner_state, grads)
        else:
            assert_same_bits(params, params_before)
            assert_same_bits(opt_state.inner_state, before.inner_state)
        if i in SPIKES:  # says nothing about the scale, whose growth also waits
            assert_same_bits(opt_state.scaling, before.scaling)
        if i in BAD:  # enters no window
            assert_same_bits(opt_state.spikes, before.spikes)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), params, expected)
    metrics = counters(opt_state)
    assert metrics["total_spikes"] == len(SPIKES)
    assert metrics["total_notfinite"] == len(BAD)
    for name in ("norm_threshold", "loss_threshold", "grad_norm"):
        assert np.isfinite(metrics[name]), name


WRAPPERS = {"scaled": jaxscale.loss_scaled, "safe": jaxscale.skip_nonfinite}
OVERFLOWING = 1e20  # its square is not finite
SIZES = [OVERFLOWING, 1.0, *[OVERFLOWING] * 21]


@pytest.mark.worlds
@pytest.mark.standard_promotion  # Adam raises a float to a power that is an integer
@cases("one_step", [step, fused_step], fast=[step])
@cases("wrapper", WRAPPERS, fast=["scaled"])
def test_gradients_whose_squares_overflow_never_reach_adams_moments(wrapper, one_step):
    tx = WRAPPERS[wrapper](optax.adam(0.01), spikes=RULE)
    compiled_step = jax.jit(partial(one_step, tx))
    params = PARAMS
    opt_state = tx.init(PARAMS)
    loss = jnp.float32(1)
    for i, size in enumerate(SIZES):
        params_before = params
        before = opt_state
        grads = params_times(size)
        params, opt_state = compiled_step(params, opt_state, grads, value=loss)
        assert opt_state.step_applied == (size != OVERFLOWING), i
        if size == OVERFLOWING:
            assert jnp.isinf(opt_state.grad_norm), i
            assert_same_bits(opt_state.scaling, before.scaling)
            assert_same_bits(params, params_before)
            assert_same_bits(opt_state.inner_state, before.inner_state)
        assert jnp.isfinite(opt_state.spikes.grad_norms).all(), i
    metrics = counters(opt_state)
    assert metrics["total_spikes"] == 22
    assert metrics["total_norm_overflows"] == 22
    assert metrics["spike_count"] == 21
    assert metrics["total_notfinite"] == 0


@pytest.mark.worlds
@cases("optimizer", OPTIMIZERS, fast=["scaled"])
def test_a_step_without_gradients_is_made_and_not_judged(optimizer):
    tx = OPTIMIZERS[optimizer]
    compiled_step = jax.jit(partial(step, tx))
    params = PARAMS
    opt_state = tx.init(PARAMS)
    for factor, offset in HEALTHY:
        grads = params_times(factor)
        loss = jnp.float32(offset)
        params, opt_state = compiled_step(params, opt_state, grads, value=loss)
    zeros = params_times(0.0)
    loss = jnp.float32(1e6)
    params_after, after = compiled_step(params, opt_state, zeros, value=loss)
    assert after.step_applied
    assert after.total_steps == opt_state.total_steps + 1
    assert_same_bits(after.spikes, opt_state.spikes)
    assert (params_after["w"] != params["w"]).all()  # by its momentum


@pytest.mark.worlds
def test_micro_batches_are_judged_one_by_one():
    tx = jaxscale.multi_steps(OPTIMIZERS["safe"], 2)
    train_step = jax.jit(by_hand(tx))
    params = PARAMS
    opt_state = tx.init(PARAMS)
    for i, batch in enumerate(STREAM[:10]):
        params, opt_state = train_step(params, opt_state, batch)
        assert opt_state.step_applied == (i not in SPIKES), i
    assert opt_state.inner_state.gradient_step == 5
    assert counters(opt_state)["total_spikes"] == 1


@pytest.mark.worlds
def test_the_mean_loss_of_all_devices_is_judged():
    tx = jaxscale.skip_nonfinite(MOMENTUM, spikes=RULE, axis_name="d")

    def train(last_loss):
        """Six steps, in the last of which the second device has another loss than -1."""
        state = tx.init(PARAMS)
        loss = jnp.float32(-1)
        for size in (1.0, 1.1, 0.9, 1.0, 1.1):
            _, state = tx.update(params_times(size), state, PARAMS, value=loss)
        loss = jnp.where(jax.lax.axis_index("d") == 1, last_loss, loss)
        _, state = tx.update(PARAMS, state, PARAMS, value=loss)
        return state.step_applied, state.spikes.loss_threshold

    run = jax.jit(jax.vmap(train, axis_name="d", in_axes=None, axis_size=2))
    applied, _ = run(-1.0)
    assert applied.tolist() == [True, True]
    applied, threshold = run(5.0)
    assert applied.tolist() == [False, False]
    assert threshold[0] == threshold[1]
    assert -1 <= threshold[0] < 0


@cases("scale, shown", [(1.0, np.sqrt(1 + 4 + 0.25 + 0.0625)), (jnp.inf, jnp.inf)])
def test_nans_that_are_errors_are_not_made(scale, shown):
    tx = OPTIMIZERS["safe"]
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    with jax.debug_nans(True):
        for _ in range(4):
            _, state = update(PARAMS, state, PARAMS)
        _, state = update(params_times(scale), state, PARAMS)
    np.testing.assert_allclose(state.grad_norm, shown, rtol=1e-6)


def learned_state():
    """A state whose optimizer has had gradients, so that only counters may be told of."""
    state = OPTIMIZERS["safe"].init(PARAMS)
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
    optimizer = nnx.Optimizer(model, OPTIMIZERS["safe"], wrt=nnx.Param)
    assert jaxscale.metrics(nnx.state(optimizer))["total_spikes"] == 0

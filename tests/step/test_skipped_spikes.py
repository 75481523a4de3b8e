"""A step that is finite and bad: `spikes=SpikeRule()` in every entry, in strict promotion."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tables import assert_same_bits, avals, cases, counters, fused_step, step

import jaxscale

RULE = jaxscale.SpikeRule(window=8, min_history=4)
# For each step, what its gradients are multiplied by, and what is added to its loss.
STREAM = [
    *((1.0 + 0.1 * (i % 3), 0.01 * (i % 2)) for i in range(8)),
    (1000.0, 0.0),  # a spike of the norm
    (1.1, 0.0),
    (1.0, 300.0),  # one of the loss
    (jnp.nan, 0.0),
    (1.0, jnp.inf),
    (1.2, 0.01),
]
SPIKES, BAD = {8, 10}, {11, 12}
PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(0.25)}
MOMENTUM = optax.sgd(0.01, momentum=0.9)


def loss_fn(params, batch):
    factor, offset = batch
    loss = jnp.sum(params["w"] ** 2) * 0.01 + params["b"]
    # The factor reaches the gradients alone, and the offset the loss alone.
    return factor * loss - jax.lax.stop_gradient((factor - 1) * loss) + offset


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
JUDGED = {
    "scaled": jaxscale.loss_scaled(MOMENTUM, spikes=RULE),
    "safe": jaxscale.skip_nonfinite(MOMENTUM, spikes=RULE),
    "clipped": jaxscale.skip_nonfinite(MOMENTUM, spikes=RULE, max_norm=1e9),
    "adaptive": jaxscale.loss_scaled(MOMENTUM, "adaptive", spikes=RULE),
}
SCALED = [("retries", "scaled"), ("retries", "adaptive")]  # whose scale can fall


@cases(
    "entry, wrapper",
    [*product(list(ENTRIES)[:3], JUDGED), *SCALED],
    fast=[("update", "safe"), ("train_step", "scaled"), ("retries", "adaptive")],
)
def test_only_good_steps_are_made(entry, wrapper):
    """The reference makes the good steps by hand, in any order of arithmetic: to rounding."""
    tx = JUDGED[wrapper]
    train_step, params, opt_state = jax.jit(ENTRIES[entry](tx)), PARAMS, tx.init(PARAMS)
    expected, inner_state, types = PARAMS, MOMENTUM.init(PARAMS), avals(opt_state)
    for i, batch in enumerate(STREAM):
        before = opt_state
        new, opt_state, *_ = train_step(params, opt_state, batch)
        assert avals(opt_state) == types
        assert opt_state.step_applied == (i not in SPIKES | BAD), i
        if opt_state.step_applied:
            grads = jax.grad(loss_fn)(expected, batch)
            expected, inner_state = step(MOMENTUM, expected, inner_state, grads)
        else:
            assert_same_bits((new, opt_state.inner_state), (params, before.inner_state))
        if i in SPIKES:  # says nothing about the scale, and its growth waits, too
            assert_same_bits(opt_state.scaling, before.scaling)
        if i in BAD:  # enters no window
            assert_same_bits(opt_state.spikes, before.spikes)
        params = new
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), params, expected)
    seen = counters(opt_state)
    assert (seen["total_spikes"], seen["total_notfinite"]) == (len(SPIKES), len(BAD))
    assert np.isfinite([seen["norm_threshold"], seen["loss_threshold"], seen["grad_norm"]]).all()


WRAPS = {"scaled": jaxscale.loss_scaled, "safe": jaxscale.skip_nonfinite}


@pytest.mark.standard_promotion  # Adam raises a float to a power that is an integer
@cases("one_step", [step, fused_step], fast=[step])
@cases("wrap", WRAPS, fast=["scaled"])
def test_gradients_whose_squares_overflow_never_reach_adams_moments(wrap, one_step):
    tx = WRAPS[wrap](optax.adam(0.01), spikes=RULE)
    params, opt_state = PARAMS, tx.init(PARAMS)
    run = jax.jit(partial(one_step, tx))
    for i, size in enumerate([1e20, 1.0, 1e20, *[1e20] * 20]):
        grads = {name: leaf * size for name, leaf in PARAMS.items()}
        before = opt_state
        new, opt_state = run(params, opt_state, grads, value=jnp.float32(1))
        assert opt_state.step_applied == (size == 1)
        if size > 1:
            assert jnp.isinf(opt_state.grad_norm)
            assert_same_bits(opt_state.scaling, before.scaling)
            assert_same_bits((new, opt_state.inner_state), (params, before.inner_state))
        assert jnp.isfinite(opt_state.spikes.grad_norms).all(), i
        params = new
    seen = counters(opt_state)
    assert (seen["total_spikes"], seen["total_norm_overflows"]) == (22, 22)
    assert (seen["spike_count"], seen["total_notfinite"]) == (21, 0)


@cases("wrapper", JUDGED, fast=["scaled"])
def test_a_step_without_gradients_is_made_and_not_judged(wrapper):
    tx = JUDGED[wrapper]
    params, opt_state = PARAMS, tx.init(PARAMS)
    run = jax.jit(partial(step, tx))
    for factor, offset in STREAM[:8]:
        grads = {name: leaf * factor for name, leaf in PARAMS.items()}
        params, opt_state = run(params, opt_state, grads, value=jnp.float32(offset))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    new, after = run(params, opt_state, zeros, value=jnp.float32(1e6))
    assert after.step_applied
    assert after.total_steps == opt_state.total_steps + 1
    assert_same_bits(after.spikes, opt_state.spikes)
    assert (new["w"] != params["w"]).all()  # by its momentum


def test_micro_batches_are_judged_one_by_one():
    tx = jaxscale.multi_steps(JUDGED["safe"], 2)
    train_step, params, opt_state = jax.jit(by_hand(tx)), PARAMS, tx.init(PARAMS)
    for i, batch in enumerate(STREAM[:10]):
        params, opt_state = train_step(params, opt_state, batch)
        assert opt_state.step_applied == (i not in SPIKES)
    assert opt_state.inner_state.gradient_step == 5
    assert counters(opt_state)["total_spikes"] == 1


def test_a_loss_is_judged_by_the_largest_of_all_devices():
    tx = jaxscale.skip_nonfinite(MOMENTUM, spikes=RULE, axis_name="d")

    def one(last):
        state = tx.init(PARAMS)
        for i, size in enumerate((1.0, 1.1, 0.9, 1.0, 1.1, 1.0)):
            grads = {name: leaf * size for name, leaf in PARAMS.items()}
            value = jnp.where(jax.lax.axis_index("d") == 1, last if i == 5 else -1.0, -1.0)
            _, state = tx.update(grads, state, PARAMS, value=value)
        return state.step_applied, state.spikes.loss_threshold

    run = jax.jit(jax.vmap(one, axis_name="d", in_axes=None, axis_size=2))
    assert run(-1.0)[0].tolist() == [True, True]
    applied, threshold = run(5.0)
    assert applied.tolist() == [False, False]
    assert -1 <= threshold[0] == threshold[1] < 0


def test_nans_that_are_errors_are_not_made():
    tx, norm = JUDGED["safe"], np.sqrt(1 + 4 + 0.25 + 0.0625)
    state = tx.init(PARAMS)
    with jax.debug_nans(True):
        for scale, shown in [*[(1.0, norm)] * 5, (jnp.inf, jnp.inf)]:
            grads = {name: leaf * scale for name, leaf in PARAMS.items()}
            _, state = jax.jit(tx.update)(grads, state, PARAMS)
            np.testing.assert_allclose(state.grad_norm, shown, rtol=1e-6)


def test_check_tells_of_spikes_without_end():
    tx = JUDGED["safe"]
    state = tx.init(PARAMS)
    jaxscale.check(state)
    in_variables = nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    assert jaxscale.metrics(nnx.state(in_variables))["total_spikes"] == 0
    for fields in ({"spike_count": 20}, {"total_spikes": 51}):
        spikes = state.spikes._replace(**{k: jnp.array(v) for k, v in fields.items()})
        with pytest.warns(UserWarning, match="again and again"):
            jaxscale.check(state._replace(spikes=spikes, total_steps=jnp.array(1000)))

"""What the counters say, on the device and on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale

pytestmark = pytest.mark.standard_promotion

TX = jaxscale.loss_scaled(optax.adam(0.1))
BAD = jnp.full(3, jnp.nan)


def after(steps, grads=BAD, tx=TX, **extra):
    state = tx.init(jnp.zeros(3))
    for _ in range(steps):
        _, state = tx.update(grads, state, **extra)
    return state


def test_metrics_of_a_loss_scale_alone():
    assert set(jaxscale.metrics(jaxscale.DynamicLossScale().init())) == {
        "loss_scale",
        "growth_tracker",
        "hysteresis_tracker",
    }


def test_metrics_work_inside_jit_and_are_scalars():
    state = after(2)
    inside = jax.jit(jaxscale.metrics)({"opt": (state,), "params": jnp.zeros(3)})
    outside = jaxscale.metrics(state)
    assert set(inside) == set(outside)
    for name, value in outside.items():
        assert (value.shape, inside[name]) == ((), value)
    assert (outside["notfinite_count"], outside["grads_finite"]) == (2, False)


def test_check_is_silent_while_training_makes_progress():
    jaxscale.check(after(5, jnp.ones(3)), max_consecutive=0)
    jaxscale.check({"opt": after(3)}, max_consecutive=3)
    recovered = TX.update(jnp.ones(3), after(9))[1]
    jaxscale.check(recovered, max_consecutive=0)


def test_check_gives_the_numbers_and_blames_the_backward_pass():
    with pytest.raises(jaxscale.LossScaleStuckError) as error:
        jaxscale.check(after(4, value=jnp.array(1.0)), max_consecutive=3)
    message = str(error.value)
    assert "4 steps in a row were skipped (4 of 4 in all, 0 of them" in message
    assert "the loss scale is 2048.0" in message
    assert "jax.debug_infs(True)" in message


def test_check_blames_the_forward_pass_where_the_loss_is_not_finite():
    with pytest.raises(jaxscale.LossScaleStuckError) as error:
        jaxscale.check(after(4, value=jnp.array(jnp.nan)), max_consecutive=3)
    assert "4 of them with a non-finite loss" in str(error.value)
    assert "no loss scale can help" in str(error.value)


def test_check_reports_the_worst_of_a_population():
    states = jax.tree.map(lambda *xs: jnp.stack(xs), after(1), after(7), after(3))
    with pytest.raises(jaxscale.LossScaleStuckError, match="7 steps in a row"):
        jaxscale.check(states, max_consecutive=5)


def test_check_by_default_lets_a_scale_come_down_all_the_way():
    top = jaxscale.loss_scaled(optax.sgd(0.1), jaxscale.DynamicLossScale(init_scale=2.0**24))
    jaxscale.check(after(24, tx=top))
    with pytest.raises(jaxscale.LossScaleStuckError):
        jaxscale.check(after(51, tx=top))


def test_check_reads_numpy_states_of_a_checkpoint():
    state = jax.tree.map(np.asarray, after(7))
    with pytest.raises(jaxscale.LossScaleStuckError, match="7 steps"):
        jaxscale.check(state, max_consecutive=5)


def test_the_advice_finds_where_an_overflow_is_born():
    @jax.jit
    def step(w, state):
        grads = jaxscale.grad(lambda w: jnp.sum(jnp.sqrt(w)), state)(w)
        updates, state = TX.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    for w in (jnp.ones(3), jnp.zeros(3)):
        _, state = step(w, TX.init(w))
        with jax.debug_infs(True):  # inside `jit` the skip hides it
            step(w, TX.init(w))
        with jax.disable_jit(), jax.debug_infs(True):
            if state.grads_finite:
                step(w, TX.init(w))
            else:
                with pytest.raises(FloatingPointError):
                    step(w, TX.init(w))

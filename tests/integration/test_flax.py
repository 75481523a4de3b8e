"""TrainState: every field is kept on a skipped step, or named as an exception."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state
from overflowing import BAD_LOSS, GOOD, OVERFLOW, loss_fn
from tables import INNERS, PARAMS, assert_same_bits, avals, cases, gradients, spoiled

import jaxscale
import jaxscale.flax

pytestmark = pytest.mark.standard_promotion

GRADS = gradients(0, 4)


class State(jaxscale.flax.TrainState):
    batch_stats: Any
    ema: Any
    key: jax.Array


def create(cls=State, tx=INNERS["adam"], **fields):
    params = jax.tree.map(jnp.copy, PARAMS)  # as tests donate them
    return cls.create(apply_fn=None, params=params, tx=jaxscale.loss_scaled(tx), **fields)


def with_fields():
    stats, ema = {"mean": jnp.zeros(2), "count": jnp.array(3)}, jax.tree.map(jnp.copy, PARAMS)
    return create(batch_stats=stats, ema=ema, key=jax.random.key(0))


def advance(state, grads, **kwargs):
    return state.apply_gradients(
        grads=grads,
        batch_stats={"mean": state.batch_stats["mean"] + jnp.nan, "count": jnp.array(4)},
        ema=optax.incremental_update(state.params, state.ema, 0.1),
        key=jax.random.split(state.key, 1)[0],
        **kwargs,
    )


@cases("names", [None, tuple, iter])
def test_a_skipped_step_keeps_every_field_but_those_that_are_opted_out(names):
    options = {"always_replace": names(["key"])} if names else {}
    state = jax.jit(advance)(with_fields(), GRADS[0])
    assert (state.step, state.batch_stats["count"]) == (1, 4)
    kept = jax.jit(functools.partial(advance, **options))(state, spoiled(GRADS[1], jnp.inf))
    expected = state.replace(key=jax.random.split(state.key, 1)[0]) if names else state
    assert_same_bits(*(s.replace(opt_state=s.opt_state.inner_state) for s in (kept, expected)))
    assert (kept.opt_state.total_notfinite, kept.opt_state.total_steps) == (1, 2)


def test_it_applies_what_flax_applies():
    ours, theirs = create(jaxscale.flax.TrainState), create(train_state.TrainState)
    for grads in GRADS:
        ours, theirs = (state.apply_gradients(grads=grads) for state in (ours, theirs))
    assert_same_bits(ours.params, theirs.params)
    assert ours.step == theirs.step == 4


def test_value_and_extra_arguments_are_forwarded():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    state, extra_args = create(jaxscale.flax.TrainState, tx), {"value_fn": jnp.sum}
    state = state.apply_gradients(grads=GRADS[0], value=jnp.array(jnp.nan), extra_args=extra_args)
    assert jnp.isnan(seen["value"])
    assert seen["value_fn"] is jnp.sum
    assert (state.step, state.opt_state.total_notfinite_loss) == (0, 1)


def test_the_step_returns_fields_and_outputs_and_never_changes_types():
    def train_loss(params, fields, x):
        """A loss with statistics that are NaN where the loss is."""
        loss, stats = loss_fn(params, x), fields["batch_stats"]
        stats = {"mean": stats["mean"] + 0 * loss, "count": stats["count"] + 1}
        fields = {"batch_stats": stats, "key": jax.random.split(fields["key"], 1)[0]}
        return loss, (fields, {"traced": x})

    options = {"has_state": True, "has_aux": True, "retries": 9, "always_replace": ("key",)}
    step = jax.jit(jaxscale.flax.train_step(train_loss, **options), donate_argnums=0)
    state, key = with_fields(), jax.random.key(0)
    types = avals(state)
    for batch in (GOOD, OVERFLOW, GOOD, BAD_LOSS, GOOD):
        state, (loss, aux) = step(state, batch)
        key = jax.random.split(key, 1)[0]
        assert_same_bits((state.key, aux["traced"]), (key, batch))
        assert avals(state) == types
        assert jnp.isfinite(loss) == jnp.isfinite(batch[0])
    assert (state.step, state.opt_state.total_notfinite) == (4, 1)
    assert state.opt_state.total_retries > 0
    assert state.batch_stats["count"] == 3 + 4

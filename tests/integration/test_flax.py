"""TrainState: every field is kept on a skipped step, or named as an exception."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state
from overflowing import BAD_LOSS, OVERFLOW
from overflowing import GOOD as FINE
from overflowing import loss_fn as half_loss
from tables import INNERS, PARAMS, assert_same_bits, avals, cases, gradients, spoiled

import jaxscale
import jaxscale.flax

pytestmark = pytest.mark.standard_promotion

GOOD = gradients(0, 4)


class State(jaxscale.flax.TrainState):
    batch_stats: Any
    ema: Any
    key: jax.Array


def create(cls=State, inner="adam"):
    params = jax.tree.map(jnp.copy, PARAMS)  # as tests donate them
    fields = {
        "batch_stats": {"mean": jnp.zeros(2), "count": jnp.array(3)},
        "ema": jax.tree.map(jnp.copy, params),
        "key": jax.random.key(0),
    }
    tx = jaxscale.loss_scaled(INNERS[inner])
    return cls.create(apply_fn=None, params=params, tx=tx, **(fields if cls is State else {}))


def advance(state, grads, **kwargs):
    return state.apply_gradients(
        grads=grads,
        batch_stats={"mean": state.batch_stats["mean"] + jnp.nan, "count": jnp.array(4)},
        ema=optax.incremental_update(state.params, state.ema, 0.1),
        key=jax.random.split(state.key, 1)[0],
        **kwargs,
    )


def test_a_skipped_step_keeps_every_replaced_field():
    state, step = create(), jax.jit(advance)
    state = step(state, GOOD[0])
    assert (state.step, state.batch_stats["count"]) == (1, 4)
    kept = step(state, spoiled(GOOD[1], jnp.inf))
    now = kept.replace(opt_state=kept.opt_state.inner_state)
    assert_same_bits(now, state.replace(opt_state=state.opt_state.inner_state))
    assert (kept.opt_state.total_notfinite, kept.opt_state.total_steps) == (1, 2)


@cases("names", [tuple, iter])
def test_a_field_can_be_opted_out(names):
    state = create(inner="sgd")
    step = jax.jit(lambda *args: advance(*args, always_replace=names(["key"])))
    kept = step(state, spoiled(GOOD[0], jnp.inf))
    assert kept.key == jax.random.split(state.key, 1)[0]
    assert_same_bits((kept.ema, kept.batch_stats), (state.ema, state.batch_stats))


def test_it_applies_what_flax_applies():
    ours, theirs = create(jaxscale.flax.TrainState), create(train_state.TrainState)
    for grads in GOOD:
        ours = ours.apply_gradients(grads=grads)
        theirs = theirs.apply_gradients(grads=grads)
    assert_same_bits(ours.params, theirs.params)
    assert ours.step == theirs.step == 4


def test_value_and_extra_arguments_are_forwarded():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    state = jaxscale.flax.TrainState.create(
        apply_fn=None, params=jnp.ones(2), tx=jaxscale.loss_scaled(tx)
    )
    state = state.apply_gradients(
        grads=jnp.ones(2), value=jnp.array(jnp.nan), extra_args={"value_fn": jnp.sum}
    )
    assert jnp.isnan(seen["value"])
    assert seen["value_fn"] is jnp.sum
    assert (state.step, state.opt_state.total_notfinite_loss) == (0, 1)


OTHER_FIELDS = [
    ("batch_stats", {"mean": jnp.zeros(2)}, ValueError),
    ("batch_stats", {"mean": jnp.zeros(3), "count": jnp.array(0)}, ValueError),
    ("batch_stats", {"mean": jnp.zeros(2, jnp.float16), "count": jnp.array(0)}, TypeError),
]


def test_a_field_that_changes_its_shape_is_named():
    for field, value, error in OTHER_FIELDS:
        with pytest.raises(error, match=rf"TrainState.apply_gradients\({field}=\.\.\.\)"):
            create().apply_gradients(grads=GOOD[0], **{field: value})


# The whole step


def train_loss(params, fields, x):
    """A loss with statistics that are NaN where the loss is."""
    loss, stats = half_loss(params, x), fields["batch_stats"]
    stats = {"mean": stats["mean"] + 0 * loss, "count": stats["count"] + 1}
    return loss, {"batch_stats": stats, "key": jax.random.split(fields["key"], 1)[0]}


def test_fields_and_outputs_are_returned_and_types_never_change():
    def loss_fn(params, fields, x):
        loss, fields = train_loss(params, fields, x)
        return loss, (fields, {"traced": x})

    options = {"has_state": True, "has_aux": True, "retries": 9, "always_replace": ("key",)}
    step = jax.jit(jaxscale.flax.train_step(loss_fn, **options), donate_argnums=0)
    state, key = create(), jax.random.key(0)
    types = avals(state)
    for batch in (FINE, OVERFLOW, FINE, BAD_LOSS, FINE):
        state, (loss, aux) = step(state, batch)
        key = jax.random.split(key, 1)[0]
        assert_same_bits(state.key, key)
        assert avals(state) == types
        assert_same_bits(aux["traced"], batch)
        assert jnp.isfinite(loss) == jnp.isfinite(batch[0])
    assert (state.step, state.opt_state.total_notfinite) == (4, 1)
    assert state.opt_state.total_retries > 0
    assert state.batch_stats["count"] == 3 + 4


STEP_ERRORS = {
    "an optimizer of other parameters": (lambda: jaxscale.flax.train_step(train_loss, has_state=True)(create().replace(params=PARAMS | {"w": jnp.ones(5)}), FINE), ValueError, r"flax\.train_step\(\.\.\.\)\(state\.opt_state=.*other parameters.*\(5,\) at .*got .*\(3"),
    "a hook that returns a field": (lambda: jaxscale.flax.train_step(lambda p, x: jnp.sum(p["w"]), after=lambda state: state.ema)(create(), FINE), TypeError, r"flax\.train_step\(after=\.\.\.\)`.*`TrainState` that it got.*got dict.*state\.replace"),
    "a hook that changes a shape": (lambda: jaxscale.flax.train_step(lambda p, x: jnp.sum(p["w"]), after=lambda state: state.replace(ema=jnp.ones(3)))(create(), FINE), ValueError, r"flax\.train_step\(after=\.\.\.\)` needs two trees.*\['ema'\]"),
    "Flax's own": (lambda: jaxscale.flax.train_step(train_loss)(train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=jaxscale.loss_scaled(optax.sgd(0.1))), FINE), TypeError, r"flax\.train_step.*`jaxscale\.flax\.TrainState`, got TrainState.*Flax's own"),
    "a state of an optimizer": (lambda: jaxscale.flax.train_step(train_loss)(create().opt_state, FINE), TypeError, r"flax\.train_step.*got LossScaledState"),
    "an unknown field": (lambda: jaxscale.flax.train_step(lambda p, f, x: (train_loss(p, f, x)[0], {"stats": 1}), has_state=True)(create(), FINE), ValueError, r"flax\.train_step\(loss_fn, has_state=True\).*got stats among.*: batch_stats, ema, key\."),
    "a collection instead of its field": (lambda: jaxscale.flax.train_step(lambda p, f, x: (train_loss(p, f, x)[0], f["key"]), has_state=True)(create(), FINE), TypeError, r"flax\.train_step\(loss_fn, has_state=True\).*a dict from the names.*Array.*batch_stats"),
    "a field of another dtype": (lambda: jaxscale.flax.train_step(lambda p, f, x: (train_loss(p, f, x)[0], {"batch_stats": f["batch_stats"] | {"count": jnp.array(4.0)}}), has_state=True)(create(), FINE), TypeError, r"flax\.train_step\(batch_stats=.*equal dtypes.*count"),
    "a field that is always replaced and not returned": (lambda: jaxscale.flax.train_step(lambda p, f, x: (train_loss(p, f, x)[0], {}), has_state=True, always_replace=("key",))(create(), FINE), ValueError, r"flax\.train_step\(always_replace=\.\.\.\)` got key among.*`loss_fn` must return"),
    "fields to replace, and no state": (lambda: jaxscale.flax.train_step(train_loss, always_replace=("key",)), ValueError, r"flax\.train_step\(always_replace=\('key',\)\)` needs has_state=True"),
    "no fields": (lambda: jaxscale.flax.train_step(lambda p, f, x: train_loss(p, f, x)[0], has_state=True)(create(), FINE), TypeError, r"flax\.train_step\(loss_fn, has_state=True\).*\(loss, state\), got an array"),
    "retries without a scale": (lambda: jaxscale.flax.train_step(train_loss, retries=1)(create().replace(tx=jaxscale.skip_nonfinite(optax.sgd(0.1))), FINE), ValueError, r"flax\.train_step\(retries=1\).*loss scale that can be lowered.*NoOpLossScale"),
}  # fmt: skip


@pytest.mark.parametrize("name", STEP_ERRORS)
def test_bad_input_of_a_training_step(name):
    call, error, message = STEP_ERRORS[name]
    with pytest.raises(error, match=message):
        call()

"""Laws of the training step of each front end: of a tree, Equinox, Linen and NNX."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from departing import uses_what_goes
from front_ends import BATCHES, FRONT_ENDS, PARAMS, STATS, averaged, loss_fn
from tables import assert_same_bits, avals, cases, pairs, spread

import jaxscale

pytestmark = [pytest.mark.standard_promotion, uses_what_goes]


def test_a_step_moves_parameters_and_a_nan_does_not():
    tx = jaxscale.loss_scaled(optax.sgd(0.5))
    step = jaxscale.train_step(lambda w, x: jnp.sum(w * x), tx)
    w = jnp.ones(2)
    state = tx.init(w)
    for x, expected in (([1.0, 2.0], [0.5, 0.0]), ([1.0, jnp.nan], [0.5, 0.0])):
        w, state, _ = step(w, state, jnp.array(x))
        np.testing.assert_array_equal(w, expected)


BAD = BATCHES[0].at[0, 0].set(jnp.nan)
# At 2**40 the cotangent of each output, about scale / 64, leaves the range of float16.
TOO_HIGH = 2.0**40


def from_scale(scale):
    """An optimizer that starts from a scale."""
    policy = jaxscale.DynamicLossScale(init_scale=scale, max_scale=TOO_HIGH)
    return jaxscale.loss_scaled(optax.adam(1e-2), policy)


TX = from_scale(TOO_HIGH)


@pytest.mark.device
@cases("name", FRONT_ENDS, fast=["plain"])
def test_it_trains_as_in_float32_whatever_the_scale_and_a_bad_batch_leaves_no_trace(
    name,
):
    traces = []

    def counted(params, stats, x):
        traces.append(x)
        return loss_fn(params, stats, x)

    run = FRONT_ENDS[name](TX, counted, jaxscale.autocast, retries=40)
    losses = [run.step(BATCHES[0])]
    metrics = run.metrics()
    retries = metrics["total_retries"]
    right_scale = TOO_HIGH / 2**retries
    assert retries >= 10
    assert metrics["loss_scale"] == right_scale
    # As if the scale had been the right one: the search costs no batch.
    tx = from_scale(right_scale)
    at_once = FRONT_ENDS[name](tx, cast=jaxscale.autocast, retries=40)
    at_once.step(BATCHES[0])
    assert at_once.metrics()["total_retries"] == 0
    before = jax.tree.map(jnp.copy, run.now())
    assert_same_bits(before, at_once.now())
    _, stats = before
    assert stats["count"] == 1

    assert not jnp.isfinite(run.step(BAD))
    assert_same_bits(run.now(), before)
    assert run.metrics()["total_notfinite_loss"] == 1

    losses += map(run.step, BATCHES[1:])
    params, stats = run.now()
    assert stats["count"] == len(BATCHES)
    assert run.metrics()["total_notfinite"] == 1
    assert len(traces) == 1
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}

    in_float32 = FRONT_ENDS[name](TX)
    expected = list(map(in_float32.step, BATCHES))
    # float16 has 11 bits, and four steps of Adam turn their differences into steps of 1e-2.
    np.testing.assert_allclose(losses, expected, rtol=0.01)
    # The float32 model needed no other scale: what overflowed is float16.
    assert in_float32.metrics()["total_notfinite"] == 0


@pytest.mark.worlds
@cases("name, judged", product(FRONT_ENDS, [0, 1]), fast=[("objects", 1)])
def test_statistics_may_have_a_say(name, judged):
    """Their NaN is kept while loss and gradients are finite, unless the loss says otherwise."""

    def loss(params, stats, x):
        value, _ = loss_fn(params, stats, jnp.nan_to_num(x))
        _, stats = loss_fn(params, stats, x)
        if judged:
            value = jnp.where(jaxscale.all_finite(stats), value, jnp.nan)
        return value, stats

    run = FRONT_ENDS[name](TX, loss)
    run.step(BAD)
    assert run.metrics()["step_applied"] != judged
    assert run.metrics()["loss_scale"] == TOO_HIGH
    params, stats = run.now()
    assert jaxscale.all_finite(stats) == judged
    if judged:
        assert_same_bits(params, PARAMS)
        assert_same_bits(stats, STATS)
    run.step(BATCHES[0])
    assert run.metrics()["step_applied"]


@pytest.mark.worlds
@cases(
    "name, window, retries",
    pairs(FRONT_ENDS, (1, 2), (0, 3)),
    fast=[("linen", 2, 3)],
)
def test_hooks_get_the_gradients_and_what_a_step_has_made(name, window, retries):
    tx = TX
    if window > 1:
        tx = jaxscale.multi_steps(TX, window)
    run = FRONT_ENDS[name](tx, hooks=True, retries=retries)
    expected = STATS
    num_steps = 0
    for x in (*BATCHES[:2], BAD, *BATCHES[2:]):
        before, _ = jax.tree.map(jnp.copy, run.now())
        run.step(x)
        params, stats = run.now()
        if not np.array_equal(params["last"], before["last"]):
            expected = averaged(params, expected)
            num_steps += 1
        np.testing.assert_allclose(stats["average"], expected["average"], rtol=1e-6)
        assert_same_bits(params["first"], PARAMS["first"])  # the hook froze it
    assert num_steps == len(BATCHES) // window
    assert stats["count"] == len(BATCHES)
    assert run.metrics()["total_notfinite"] == 1


def trained(name, tx, **options):
    """A run of a front end, after all batches."""
    run = FRONT_ENDS[name](tx, **options)
    for x in BATCHES:
        run.step(x)
    return run


@pytest.mark.worlds
@cases("name", ["plain", "equinox", "objects"], fast=["objects"])
def test_a_bare_optimizer_applies_every_step_and_is_warned_of_once(name):
    sgd = optax.sgd(0.1)
    with pytest.warns(UserWarning, match="is a bare optimizer") as caught:
        bare = trained(name, sgd)
    assert len(caught) == 1
    # Whoever says that it is meant gets no warning.
    meant = trained(name, jaxscale.loss_scaled(sgd, None, skip_nonfinite=False))
    assert_same_bits(meant.now(), bare.now())
    bare.step(BAD)
    params, _ = bare.now()
    assert not jaxscale.all_finite(params)


HALF = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
KEEP = [jaxscale.master_weights, jaxscale.stochastic_rounding]


@pytest.mark.worlds
@cases("name, keep", product(FRONT_ENDS, KEEP), fast=[("linen", KEEP[0])])
def test_half_precision_parameters_move_as_those_of_a_function_of_a_tree(name, keep):
    # Most of these steps alone are below half a unit of a weight.
    tx = jaxscale.loss_scaled(keep(optax.adam(3e-4)))
    params, _ = trained(name, tx, params=HALF).now()
    expected, _ = trained("plain", tx, params=HALF).now()
    assert avals(params) == avals(HALF)
    for key, leaf in params.items():
        np.testing.assert_allclose(*map(np.float32, (leaf, expected[key])), rtol=2**-6)
        assert np.mean(leaf != HALF[key]) > 0.25


def all_of(label):
    """A function that gives each parameter the same label."""
    return lambda params: jax.tree.map(lambda _: label, params)


def injected(tx):
    return optax.inject_hyperparams(lambda size: optax.chain(tx, optax.scale(size)))(
        1.0
    )


# Optimizers around another one.
AROUND = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1e3), tx),
    "named_chain": lambda tx: optax.named_chain(
        ("first", tx), ("last", optax.scale(1.0))
    ),
    "inject_hyperparams": injected,
    "masked": lambda tx: optax.masked(tx, all_of(True)),
    "flatten": optax.flatten,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 100),
    "partition": lambda tx: optax.partition({"all": tx}, all_of("all")),
}
INSIDE = r"inside of another one.*`loss_scaled\(outer\(inner\)\)`"


@pytest.mark.worlds
@cases(
    "name, around",
    spread(list(FRONT_ENDS), list(AROUND)),
    fast=[("plain", "flatten"), ("linen", "chain"), ("objects", "partition")],
)
def test_a_wrapper_around_the_wrapped_optimizer_is_told_how_to_be_written(name, around):
    wrap = AROUND[around]
    written_wrong = wrap(from_scale(2.0**10))
    # With retries there is no way but the right one.
    with pytest.raises(
        ValueError, match=r"inside of another.*loss_scaled\(outer\(inner"
    ):
        FRONT_ENDS[name](written_wrong, retries=1).step(BATCHES[0])
    policy = jaxscale.DynamicLossScale(init_scale=TOO_HIGH, max_scale=TOO_HIGH)
    written_right = jaxscale.loss_scaled(wrap(optax.adam(1e-2)), policy)
    run = FRONT_ENDS[name](written_right, cast=jaxscale.autocast, retries=40)
    run.step(BATCHES[0])
    assert run.metrics()["total_retries"] >= 10
    assert run.metrics()["total_notfinite"] == 0

    # Without, it trains alike.
    inside = FRONT_ENDS[name](written_wrong)
    with pytest.warns(UserWarning, match=INSIDE):
        inside.step(BATCHES[0])
    outermost = FRONT_ENDS[name](written_right)
    outermost.step(BATCHES[0])
    for x in BATCHES[1:]:
        inside.step(x)
        outermost.step(x)
    params, _ = inside.now()
    expected, _ = outermost.now()
    np.testing.assert_allclose(params["last"], expected["last"], rtol=1e-6)

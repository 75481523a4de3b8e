"""`max_norm`: clipping by optax's rule, with the norm from the pass that gives the verdict."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from following import Following
from tables import (
    assert_same_bits,
    avals,
    cases,
    fused_step,
    pairs,
    take_form_for_accelerators,
)

import jaxscale

pytestmark = pytest.mark.standard_promotion


def test_gradients_of_a_norm_of_5_are_clipped_to_1():
    tx = jaxscale.loss_scaled(optax.sgd(1.0), max_norm=1.0)
    grads = jnp.array([3.0, 4.0])
    updates, state = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_allclose(updates, [-0.6, -0.8], rtol=1e-6)
    assert state.grad_norm == 5


PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4),
    "half": jnp.ones(5, jnp.bfloat16),
    "phase": jnp.ones(2, jnp.complex64),
    "none": None,
}
SGD = optax.sgd(1.0)
MAX_NORM = 0.5


def norm_of(tree):
    """The norm in double precision."""
    leaves = [np.abs(np.complex128(leaf)) for leaf in jax.tree.leaves(tree)]
    return np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))


def gradients(seed, norm):
    """Gradients of a norm, with the shapes of PARAMS, in float32."""
    rng = np.random.default_rng(seed)

    def draw(param):
        return np.asarray(rng.standard_normal(param.shape), np.float32)

    grads = jax.tree.map(draw, PARAMS)
    grads["phase"] = grads["phase"] * np.complex64(1 + 0.5j)
    factor = np.float32(norm / norm_of(grads))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf * factor), grads)


def assert_near(actual, expected):
    """Two roundings more or less: one product by max_norm / norm here, there two operations."""
    close = functools.partial(np.testing.assert_allclose, rtol=3e-7)
    jax.tree.map(close, actual, expected)


skip_inside = jaxscale.skip_nonfinite(SGD, max_norm=7.0)
CLIPPED = {
    "dynamic": jaxscale.loss_scaled(SGD, max_norm=MAX_NORM),
    # also needs the largest gradient
    "following": jaxscale.loss_scaled(SGD, Following(), max_norm=MAX_NORM),
    "safe": jaxscale.skip_nonfinite(SGD, max_norm=MAX_NORM),
    "over": jaxscale.loss_scaled(skip_inside, max_norm=MAX_NORM),
    "off": jaxscale.loss_scaled(SGD, None, max_norm=MAX_NORM, skip_nonfinite=False),
}
WAYS = ["eager", "jit", "accelerator"]


def clip(norm, debug_nans, way, name):
    """The updates and the state after one step of an optimizer of `CLIPPED`."""
    tx = CLIPPED[name]
    update = tx.update
    if way != "eager":
        # A new function: JAX would take what it traced for this optimizer in another way.
        update = jax.jit(lambda *args: tx.update(*args))
    with pytest.MonkeyPatch.context() as patch, jax.debug_nans(debug_nans):
        if way == "accelerator":
            take_form_for_accelerators(patch)
        # On one device nothing is squared that was not asked for.
        if name == "following":
            patch.setattr(jax, "device_count", lambda: 1)
        return update(gradients(0, norm), tx.init(PARAMS), PARAMS)


@pytest.mark.worlds
@pytest.mark.device
@cases(
    "norm, debug_nans, way, name",
    pairs([0.0, 0.1, 3.0, 1e10], [False, True], WAYS, CLIPPED),
    fast=[
        (3.0, False, "accelerator" if name == "dynamic" else "jit", name)
        for name in CLIPPED
    ],
)
def test_it_is_what_optax_does_and_the_state_shows_the_norm(
    norm, debug_nans, way, name
):
    updates, state = clip(norm, debug_nans, way, name)
    bare = optax.chain(optax.clip_by_global_norm(MAX_NORM), SGD)
    expected, _ = bare.update(gradients(0, norm), bare.init(PARAMS), PARAMS)
    assert_near(updates, expected)
    assert state.step_applied
    if norm < MAX_NORM:  # small gradients keep their bits
        expected, _ = SGD.update(gradients(0, norm), SGD.init(PARAMS), PARAMS)
        assert_same_bits(updates, expected)
    shown = jaxscale.metrics(state)["grad_norm"]
    np.testing.assert_allclose(shown, norm, rtol=1e-6)
    assert avals(state) == avals(CLIPPED[name].init(PARAMS))


@pytest.mark.worlds
@pytest.mark.device
def test_an_infinite_gradient_makes_no_nan():
    tx = CLIPPED["safe"]
    grads = gradients(1, 2.0)
    state = tx.init(PARAMS)
    for name in ("w", "half", "phase"):
        bad_leaf = grads[name].at[-1].set(jnp.inf)
        with jax.debug_nans(True):  # which looks into each operation
            params, state = fused_step(tx, PARAMS, state, grads | {name: bad_leaf})
        assert_same_bits(params, PARAMS)
        assert state.grad_norm == jnp.inf, name


@pytest.mark.worlds
def test_the_norm_is_that_of_a_window():
    """Also where spikes are looked for, which asks for the norm of each micro-batch."""
    # Two micro-batches that cancel but for a part: what is clipped is their mean.
    first = gradients(2, 40.0)
    second = gradients(3, 30.0)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    clipped = CLIPPED["dynamic"]
    expected, _ = jax.jit(clipped.update)(mean, clipped.init(PARAMS), PARAMS)
    options = {"max_norm": MAX_NORM, "spikes": jaxscale.SpikeRule()}
    inside = jaxscale.loss_scaled(jaxscale.multi_steps(SGD, 2), **options)
    outside = jaxscale.multi_steps(jaxscale.loss_scaled(SGD, **options), 2)
    for tx in (outside, inside):
        update = jax.jit(tx.update)
        _, half_way = update(first, tx.init(PARAMS), PARAMS)
        assert half_way.grad_norm == 0  # no step yet
        updates, after = update(second, half_way, PARAMS)
        np.testing.assert_allclose(after.grad_norm, norm_of(mean), rtol=1e-6)
        assert_near(updates, expected)
        _, next_window = update(first, after, PARAMS)
        assert next_window.grad_norm == after.grad_norm


def linear_loss(params, extra):
    """A loss with gradients of norm 2, and a part that has none."""
    loss = extra
    for name, factor in gradients(6, 2.0).items():
        if factor is not None:
            loss += jnp.sum(jnp.real(jnp.conj(factor) * params[name]))
    return loss


def triple(grads):
    return jax.tree.map(lambda leaf: 3 * leaf, grads)


@pytest.mark.worlds
def test_the_norm_is_that_of_what_a_hook_made_and_of_a_loss_that_is_bad():
    tx = CLIPPED["dynamic"]
    params = PARAMS | {"half": jnp.ones(5)}
    start = tx.init(params)
    train_step = jax.jit(jaxscale.train_step(linear_loss, tx, on_grads=triple))
    for extra in (0.0, jnp.inf):
        _, state, _ = train_step(params, start, extra)
        np.testing.assert_allclose(state.grad_norm, 6.0, rtol=1e-6)
        assert state.step_applied == (extra == 0)

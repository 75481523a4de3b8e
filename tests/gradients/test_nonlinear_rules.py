"""A backward rule that is not linear sees scaled cotangents, and what to do about it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale


def test_a_rule_that_clips_sees_a_cotangent_that_is_eight_times_larger():
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
    state = jaxscale.FixedLossScale(8).init()
    assert jax.grad(clip)(1.0) == 1
    assert jaxscale.grad(clip, state)(1.0) == 1 / 8


SCALE = 2.0**10
SLOPE = 2.0**-20  # so that float16 asks for a scale
ROOM = 2.0**-13  # what gradients are to be clipped at


@jax.custom_vjp
def clip_gradient(bound, x):
    """As in JAX's documentation."""
    return x


def clip_gradient_fwd(bound, x):
    return x, bound


def clip_gradient_bwd(bound, g):
    return None, jnp.clip(g, -bound, bound)


clip_gradient.defvjp(clip_gradient_fwd, clip_gradient_bwd)


def loss_fn(w):
    """Has gradients of 2**-14 and 2**-10; the second is to be clipped."""
    slopes = jnp.array([2.0**6, 2.0**10], jnp.float16)
    return SLOPE * jnp.sum((w.astype(jnp.float16) * slopes).astype(jnp.float32))


def clipped_inside(w):
    return loss_fn(clip_gradient(ROOM, w))


W = jnp.array([1.0, 1.0])


def by_scale_backward(fun):
    return jax.grad(jaxscale.scale_backward(fun))(W)


def in_on_grads():
    """The gradients, as minus the step of a descent with rate 1."""
    tx = jaxscale.loss_scaled(optax.sgd(1.0), jaxscale.FixedLossScale(SCALE))
    step = jaxscale.train_step(
        lambda w, _: loss_fn(w), tx, on_grads=lambda grads: jnp.clip(grads, -ROOM, ROOM)
    )
    params, *_ = step(jnp.zeros(2), tx.init(jnp.zeros(2)), None)
    return -params


def outside_of_scale_backward():
    return jax.grad(lambda w: jaxscale.scale_backward(loss_fn)(clip_gradient(ROOM, w)))(
        W
    )


def test_a_rule_inside_of_scale_backward_clips_too_much():
    np.testing.assert_array_equal(by_scale_backward(loss_fn), [2.0**-14, 2.0**-10])
    assert (by_scale_backward(clipped_inside) < 2.0**-14).all()


@pytest.mark.parametrize("clip", [in_on_grads, outside_of_scale_backward])
def test_gradients_are_clipped_where_they_are_true(clip):
    np.testing.assert_array_equal(clip(), [2.0**-14, ROOM])

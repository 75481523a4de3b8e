"""`scale_backward` of functions that make or take refs: mutable arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases, spread, unchanged

import jaxscale


@pytest.mark.standard_promotion
def test_a_ref_in_a_loss_has_the_gradient_of_its_value():
    def loss(w):
        ref = jax.new_ref(jnp.zeros(2))
        ref[...] = (w.astype("float16") * 3).astype("float32")
        return 2.0**-30 * jnp.sum(ref[...])

    gradient = jax.grad(jaxscale.scale_backward(loss))(jnp.ones(2))
    np.testing.assert_array_equal(gradient, [3 * 2.0**-30, 3 * 2.0**-30])


rng = np.random.default_rng(0)
X = jnp.asarray(rng.standard_normal((8, 4)), jnp.float32)
W = jnp.asarray(rng.standard_normal((4, 4)) * 0.5, jnp.float32)
SMALL = 2.0**-30  # a loss that float16 flushes all gradients of


def layer(w, x, dtype):
    return jnp.tanh((x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32))


def overwritten(w, dtype):
    """A ref between the layers."""
    ref = jax.new_ref(X)
    for _ in range(2):
        ref[...] = layer(w, ref[...], dtype)
    return jnp.mean(ref[...] ** 2)


def total(w, dtype):
    """A ref that only the loss is added to, in float32."""
    ref = jax.new_ref(jnp.float32(0))
    ref[...] += jnp.mean(layer(w, X, dtype) ** 2)
    ref[...] += jnp.mean(layer(w, -X, dtype) ** 4)
    return ref[...]


def back_and_forth(w, dtype):
    """A ref that a loss is written to, which a product in half precision then reads."""
    ref = jax.new_ref(jnp.float32(0))
    ref[...] = jnp.mean(layer(w, X, dtype))
    shifted = layer(w, X + ref[...], dtype)
    ref[...] += jnp.mean(shifted**2)
    return ref[...]


def counted(w, dtype):
    """A ref without a derivative, that is read and written on both sides."""
    ref = jax.new_ref(jnp.int32(0))
    y = X
    for _ in range(2):
        ref[...] += 1
        y = layer(w, y, dtype) * ref[...].astype(jnp.float32)
    ref[...] += 1
    return jnp.mean(y**2) * ref[...].astype(jnp.float32)


def in_a_jit(w, dtype):
    ref = jax.new_ref(X)

    @jax.jit
    def apply(w):
        ref[...] = layer(w, ref[...], dtype)

    apply(w)
    apply(w)
    return jnp.mean(ref[...] ** 2)


def in_a_scan(w, dtype):
    ref = jax.new_ref(X)

    def body(carry, _):
        ref[...] = layer(w, ref[...], dtype)
        return carry, jnp.sum(ref[...])

    _, sums = jax.lax.scan(body, 0, length=2)
    return jnp.mean(ref[...] ** 2) + jnp.mean(sums**2)


def inside_a_called_function(w, dtype, called=jax.jit):
    @called
    def apply(w, x):
        ref = jax.new_ref(x)
        ref[...] = layer(w, ref[...], dtype)
        return jnp.sin(ref[...])

    return jnp.mean(apply(w, apply(w, X)) ** 2)


def inside_a_checkpoint(w, dtype):
    return inside_a_called_function(w, dtype, jax.checkpoint)


MODELS = [
    *(overwritten, total, back_and_forth, counted, in_a_jit, in_a_scan),
    *(inside_a_checkpoint, inside_a_called_function),
]
FORMS = {
    "alone": jaxscale.scale_backward,
    "checkpoint inside": lambda fun: jaxscale.scale_backward(jax.checkpoint(fun)),
    "checkpoint outside": lambda fun: jax.checkpoint(jaxscale.scale_backward(fun)),
    "jit inside": lambda fun: jaxscale.scale_backward(jax.jit(fun)),
    "under autocast": lambda fun: jaxscale.autocast(jaxscale.scale_backward(fun)),
    "without retries": lambda fun: jaxscale.scale_backward(fun, retries=0),
}


UNCHECKED = {inside_a_checkpoint: inside_a_called_function}  # the same, for any JAX


def differentiate(wrap, model, dtype):
    """The value and the gradient of a model."""
    loss = wrap(lambda w: SMALL * model(w, dtype))
    return jax.jit(jax.value_and_grad(loss))(W)


def assert_gradient_is(gradient, expected):
    assert jnp.linalg.norm(gradient - expected) < 2e-3 * jnp.linalg.norm(expected)


@pytest.mark.worlds
@pytest.mark.filterwarnings("ignore:`autocast`:UserWarning")
@cases(
    "model, form",
    spread(list(MODELS), list(FORMS)),
    fast=[(overwritten, "alone"), (inside_a_checkpoint, "alone")],
)
def test_gradients_are_those_of_float32_and_values_those_of_the_function(model, form):
    try:
        value, gradient = differentiate(FORMS[form], model, jnp.float16)
    except (NotImplementedError, TypeError):
        with pytest.raises((NotImplementedError, LookupError, TypeError)):
            differentiate(jax.checkpoint, model, jnp.float32)
        return  # JAX itself cannot
    unchecked = UNCHECKED.get(model, model)
    _, expected = differentiate(unchanged, unchecked, jnp.float32)
    np.testing.assert_allclose(value, SMALL * model(W, jnp.float16), rtol=1e-6)
    assert_gradient_is(gradient, expected)


def loss_that_writes(w, ref):
    y = layer(w, X, jnp.float16)
    ref[...] += jax.lax.stop_gradient(jnp.max(jnp.abs(y)))
    return SMALL * jnp.mean(y**2)


def grad_of_closure(w, ref):
    return jax.grad(jaxscale.scale_backward(lambda w: loss_that_writes(w, ref)))(w)


GRADIENTS = {
    "an argument": jax.grad(jaxscale.scale_backward(loss_that_writes)),
    "closed over": grad_of_closure,
}


@pytest.mark.worlds
@cases("name", GRADIENTS)
def test_a_ref_from_outside_is_written_once(name):
    ref = jax.new_ref(jnp.ones(()))
    gradient = jax.jit(GRADIENTS[name])(W, ref)
    largest = jnp.max(jnp.abs(layer(W, X, jnp.float16)))
    np.testing.assert_allclose(ref[...], 1 + largest, rtol=1e-6)
    expected = jax.grad(lambda w: SMALL * jnp.mean(layer(w, X, jnp.float32) ** 2))(W)
    assert_gradient_is(gradient, expected)

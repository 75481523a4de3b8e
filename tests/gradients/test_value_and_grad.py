"""Gradients: exact, unscaled by what scaled them, whatever differentiates."""

import inspect
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tables import assert_same_bits, cases, wide
from training import x64

import jaxscale

X = jax.random.normal(jax.random.key(0), (8, 5))
Y = jax.random.normal(jax.random.key(1), (8, 2))
MODEL = {
    "w": jax.random.normal(jax.random.key(2), (5, 16)),
    "v": jax.random.normal(jax.random.key(3), (16, 2)),
}


def at(exponent):
    scale = jnp.array(2.0**exponent, jnp.float32)
    return jaxscale.DynamicLossScale().init()._replace(loss_scale=scale)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def test_power_of_two_scaling_is_exact():
    def scaled(state):
        return jaxscale.value_and_grad(loss_fn, state)(MODEL, X, Y)

    compiled = jax.jit(scaled)
    for exponent in (-60, -1, 1, 15, 24, 60):
        assert_same_bits(compiled(at(exponent)), compiled(at(0)))
    assert_same_bits(scaled(at(15)), jax.value_and_grad(loss_fn)(MODEL, X, Y))


def test_the_loss_is_exact_and_cannot_overflow():
    for transform in (lambda f: f, jax.jit):
        step = transform(lambda s: jaxscale.value_and_grad(lambda w: 1e34 * w, s)(jnp.array(1.0)))
        assert_same_bits(step(at(12)), (jnp.float32(1e34), jnp.float32(1e34)))


def test_gradients_of_half_precision_come_back_float32_and_do_not_underflow():
    w = jnp.ones((), jnp.float16)

    def tiny(w):
        return (w * 2.0**-20).astype(jnp.float32) * 2.0**-10

    assert jax.grad(tiny)(w) == 0
    assert_same_bits(jaxscale.grad(tiny, at(15))(w), jnp.float32(2.0**-30))


@cases(
    "loss_scale, dtype",
    itertools.product([2.0**24, 40000.7, 2.0**-30, 2.0**-126], ["float16", "bfloat16", "float32"]),
    fast=[(2.0**24, "float16"), (2.0**-126, "bfloat16")],
)
def test_the_seed_is_a_number_of_the_dtype_of_the_loss(loss_scale, dtype):
    state = at(0)._replace(loss_scale=jnp.array(loss_scale, jnp.float32))
    loss, grad = jaxscale.value_and_grad(lambda w: w * 1, state)(jnp.array(0.5, dtype))
    assert loss.dtype == dtype
    assert_same_bits(grad, jnp.float32(1))  # neither inf nor 0, and divided by the same


def test_float64_and_complex_gradients_keep_their_dtype_and_their_parts():
    w = jnp.array(1.0 + 2.0j)
    grad = jaxscale.grad(lambda w: jnp.real(w * jnp.conj(w)), at(10))(w)
    assert_same_bits(grad, jax.grad(lambda w: jnp.real(w * jnp.conj(w)))(w))
    with x64():
        loss, grad = jaxscale.value_and_grad(lambda w: w * 3, at(10))(jnp.array(1.0))
        assert (loss.dtype, grad.dtype) == (jnp.float64, jnp.float64)


def test_signature_and_keyword_arguments_are_those_of_the_function():
    def keyword_loss(params, *, batch, power=2):
        """My loss."""
        return jnp.mean((params["w"] - batch) ** power)

    for differentiate in (jaxscale.value_and_grad, jaxscale.grad):
        differentiated = differentiate(keyword_loss, at(3))
        assert inspect.signature(differentiated) == inspect.signature(keyword_loss)
        assert differentiated.__doc__ == "My loss."
    loss, grads = jaxscale.value_and_grad(keyword_loss, at(3))(MODEL, batch=1.0, power=3)
    expected = jax.value_and_grad(keyword_loss)(MODEL, batch=1.0, power=3)
    assert_same_bits((loss, grads), expected)


@cases("argnums, has_aux", itertools.product([0, 1, (0, 2)], [False, True]), fast=[((0, 2), True)])
def test_it_mirrors_jax(argnums, has_aux):
    def fun(a, b, c):
        loss = jnp.sum(a["w"]) * jnp.sum(b) * c * a["n"].astype(jnp.float32)
        return (loss, {"aux": (b, None, "text")}) if has_aux else loss

    args = {"w": jnp.arange(3.0), "n": jnp.int32(2)}, jnp.ones(2), jnp.array(2.0)
    kwargs = {"has_aux": has_aux, "argnums": argnums, "allow_int": True}
    expected = jax.value_and_grad(fun, **kwargs)(*args)
    result = jaxscale.value_and_grad(fun, at(5), **kwargs)(*args)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    assert_same_bits(result[1], expected[1])
    grads = jaxscale.grad(fun, at(5), **kwargs)(*args)
    assert_same_bits(grads[0] if has_aux else grads, expected[1])


MLP = eqx.nn.MLP(5, 2, 4, 1, key=jax.random.key(0))
LIBRARIES = {
    "equinox": (MLP, eqx.filter_value_and_grad, eqx.filter_grad),
    "nnx": (nnx.Linear(5, 2, rngs=nnx.Rngs(0)), nnx.value_and_grad, nnx.grad),
}


@pytest.mark.standard_promotion
@cases("library, has_aux", itertools.product(LIBRARIES, [False, True]), fast=[("equinox", True)])
def test_a_transform_of_models_is_that_of_its_library(library, has_aux):
    model, *transforms = LIBRARIES[library]

    def fun(model, x):
        loss = jnp.mean(jax.vmap(model)(x) ** 2)
        return (loss, x) if has_aux else loss

    for ours, transform in zip((jaxscale.value_and_grad, jaxscale.grad), transforms, strict=True):
        expected = transform(fun, has_aux=has_aux)(model, X)
        result = ours(fun, at(5), transform=transform, has_aux=has_aux)(model, X)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for got, leaf in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert_same_bits(jnp.asarray(got), jnp.asarray(leaf))


# What a `transform` may map `jax.value_and_grad` or `jax.grad` over, for gradients by example.

DOUBLES = jnp.arange(1.0, 25.0).reshape(2, 4, 3) / 8


def vmapped(d, kind, axes=(0, 0)):
    """A `vmap` over examples, with the axes that losses and gradients come out along."""
    loss, grads = axes
    return jax.vmap(d, (None, 0), (loss, grads) if kind is jax.value_and_grad else (grads, loss))


def nested(axes):
    return lambda d, kind: vmapped(vmapped(d, kind), kind, axes)


def looped(d, kind):
    return lambda w, xs: jax.lax.map(lambda x: d(w, x), xs)


MAPS = {
    # name: (the examples, what maps a function over them)
    "examples": (DOUBLES[0], vmapped),
    "gradients last": (DOUBLES[0], lambda d, kind: vmapped(d, kind, (0, -1))),
    "no examples": (DOUBLES[0, :0], vmapped),
    "a loop": (DOUBLES[0], looped),
    "nested, losses transposed": (DOUBLES, nested((1, 0))),
    "nested, gradients transposed": (DOUBLES, nested((0, 1))),
}


@cases(
    "name, dtype", itertools.product(MAPS, ["float32", "float16"]), fast=[("examples", "float16")]
)
def test_gradients_by_example_are_those_of_jax(name, dtype):
    examples, mapped = MAPS[name]
    w, xs = jnp.array([1.0, -2.0, 0.5], dtype), examples.astype(dtype)

    def fun(w, x):
        return jnp.sum(w * x) / 8, jnp.sum(x)

    kinds = {jax.value_and_grad: jaxscale.value_and_grad, jax.grad: jaxscale.grad}
    for kind, ours in kinds.items():

        def by_example(fun, kind=kind, **kwargs):
            return mapped(kind(fun, **kwargs), kind)

        expected = wide(by_example(fun, has_aux=True)(w, xs))
        for state in (at(24), jaxscale.NoOpLossScale().init()):  # a float16 loss caps the first
            scaled = ours(fun, state, transform=by_example, has_aux=True)
            assert_same_bits(wide(jax.jit(scaled)(w, xs)), expected)


def test_losses_by_example_are_differentiated_by_their_own_rule():
    def fun(w, x):
        return jnp.sum(w * x) ** 2

    def by_example(fun, **kwargs):
        return vmapped(jax.value_and_grad(fun, **kwargs), jax.value_and_grad)

    w = jnp.array([1.0, -2.0, 0.5])
    scaled = jaxscale.value_and_grad(fun, at(10), transform=by_example)
    results = [
        jax.jvp(lambda w, f=f: f(w, DOUBLES[0]), (w,), (w,)) for f in (scaled, by_example(fun))
    ]
    assert_same_bits(*results)


def test_noop_adds_no_operation():
    noop = jaxscale.NoOpLossScale().init()
    scaled_grads = {"w": jnp.ones(2), "b": jnp.ones(2, jnp.complex64)}
    for function in (jaxscale.scale, jaxscale.unscale):
        assert not jax.make_jaxpr(function)(noop, scaled_grads).eqns


def test_the_loss_itself_is_not_multiplied():
    loss = jax.jit(lambda s, w: jaxscale.value_and_grad(lambda w: w * 3.0, s)(w)[0])
    text = loss.lower(at(5), jnp.array(1.0)).compile().as_text()
    assert text.count(" multiply(") == 1, text


def test_a_numpy_scalar_and_a_python_float_are_losses():
    for loss in (1.5, np.float32(1.5)):
        value, grad = jaxscale.value_and_grad(lambda w, loss=loss: loss, at(4))(jnp.ones(2))
        assert (value, grad.tolist()) == (1.5, [0, 0])

"""Gradients: exact, unscaled by what scaled them, whatever differentiates."""

import contextlib
import functools
import inspect
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tables import assert_same_bits, cases, spread, wide
from training import x64

import jaxscale


def test_a_gradient_that_float16_flushes_is_kept_in_float32():
    def loss_fn(w):
        return ((w * 2.0**-13) ** 2).astype(jnp.float32)

    scaling = jaxscale.DynamicLossScale().init()
    w = jnp.ones((), jnp.float16)
    assert jax.grad(loss_fn)(w) == 0
    loss, grad = jaxscale.value_and_grad(loss_fn, scaling)(w)
    assert (loss, grad, grad.dtype) == (0, 2.0**-25, jnp.float32)
    assert jaxscale.grad(loss_fn, scaling)(w) == grad


NORMAL = np.random.default_rng(0).standard_normal(168).astype(np.float32)
X, Y = jnp.asarray(NORMAL[:40].reshape(8, 5)), jnp.asarray(NORMAL[40:56].reshape(8, 2))
MODEL = {
    "w": jnp.asarray(NORMAL[56:136].reshape(5, 16)),
    "v": jnp.asarray(NORMAL[136:].reshape(16, 2)),
}
NOOP = jaxscale.NoOpLossScale().init()
SCALES = [2.0**24, 40000.7, 2.0**-30, 2.0**-126]
WIDENED = {"float16": "float32", "bfloat16": "float32"}
DTYPES = [*WIDENED, "float32", "float64"]
KINDS = (jax.value_and_grad, jaxscale.value_and_grad), (jax.grad, jaxscale.grad)


def at(exponent):
    scale = jnp.array(2.0**exponent, jnp.float32)
    return jaxscale.DynamicLossScale().init()._replace(loss_scale=scale)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


@pytest.mark.device
def test_power_of_two_scaling_is_exact():
    @jax.jit
    def evaluate(state):
        return jaxscale.value_and_grad(loss_fn, state)(MODEL, X, Y)

    expected = evaluate(at(0))
    for exponent in (-60, -1, 1, 15, 24, 60):
        assert_same_bits(evaluate(at(exponent)), expected)


def test_the_loss_is_never_multiplied():
    @jax.jit
    def evaluate(state, w):
        loss, _ = jaxscale.value_and_grad(lambda w: w * 3.0, state)(w)
        return loss

    text = evaluate.lower(at(5), jnp.array(1.0)).compile().as_text()
    assert text.count(" multiply(") == 1, text


@pytest.mark.device
@cases(
    "loss_scale, dtype",
    itertools.product(SCALES, DTYPES),
    fast=[(2.0**24, "float16"), (2.0**-126, "bfloat16"), (40000.7, "float64")],
)
def test_the_seed_is_a_number_of_the_dtype_of_the_loss(loss_scale, dtype):
    # All but float64 are tried in the mode that JAX has by default.
    with x64() if dtype == "float64" else contextlib.nullcontext():
        state = at(0)._replace(loss_scale=jnp.array(loss_scale, jnp.float32))
        w = jnp.array(0.5, dtype)
        loss, grad = jaxscale.value_and_grad(lambda w: w * 1, state)(w)
    assert loss.dtype == dtype
    # The seed is neither inf nor 0, and the gradient is divided by the same.
    assert_same_bits(grad, np.ones((), WIDENED.get(dtype, dtype)))


def of_numbers(a, b, c):
    return jnp.sum(a["w"]) * jnp.sum(b) * c * a["n"].astype(jnp.float32)


def of_model(model, x):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jnp.mean(jax.vmap(model)(x) ** 2)


JAX = jax.value_and_grad, jax.grad


def three_arguments():
    return {"w": jnp.arange(3.0), "n": jnp.int32(2)}, jnp.ones(2), jnp.array(2.0)


# Made when a test asks for them, as each compiles several programs.
def mlp_and_batch():
    return eqx.nn.MLP(5, 2, 4, 1, key=jax.random.key(0)), X


def linear_and_batch():
    return nnx.Linear(5, 2, rngs=nnx.Rngs(0)), X


LOSSES = {
    "network": (JAX, loss_fn, lambda: (MODEL, X, Y), {}),
    "complex": (
        JAX,
        lambda w: jnp.real(w * jnp.conj(w)),
        lambda: (jnp.array(1.0 + 2.0j),),
        {},
    ),
    "NumPy scalar": (JAX, lambda w: np.float32(1.5), lambda: (jnp.ones(2),), {}),
    "Python float": (JAX, lambda w: 1.5, lambda: (jnp.ones(2),), {}),
    "two": (JAX, of_numbers, three_arguments, {"argnums": (0, 2), "allow_int": True}),
    "equinox": (
        (eqx.filter_value_and_grad, eqx.filter_grad),
        of_model,
        mlp_and_batch,
        {},
    ),
    "nnx": ((nnx.value_and_grad, nnx.grad), of_model, linear_and_batch, {}),
}
FAST = ["network", "complex", "NumPy scalar", "Python float"]


@cases(
    "name, has_aux",
    itertools.product(LOSSES, [False, True]),
    fast=[("two", True), *((name, False) for name in FAST)],
)
def test_it_mirrors_what_differentiates(name, has_aux):
    transforms, loss, make_args, options = LOSSES[name]
    args = make_args()

    def fun(*args):
        if has_aux:
            return loss(*args), (args[-1], None, "text")
        return loss(*args)

    options = options | {"has_aux": has_aux}
    for (_, ours), transform in zip(KINDS, transforms, strict=True):
        expected = transform(fun, **options)(*args)
        result = ours(fun, at(5), transform=transform, **options)(*args)
        assert_same_bits(as_arrays(result), as_arrays(expected))


def as_arrays(tree):
    """A tree with arrays in the place of numbers, and nothing in that of the text."""

    def as_array(leaf):
        if isinstance(leaf, str):
            return ()
        return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)

    return jax.tree.map(as_array, tree)


def keyword_loss(params, *, batch, power=2):
    """My loss."""
    return jnp.mean((params["w"] - batch) ** power)


@cases("theirs, ours", KINDS)
def test_signature_and_keyword_arguments_are_those_of_the_function(theirs, ours):
    fun = ours(keyword_loss, at(3))
    assert inspect.signature(fun) == inspect.signature(keyword_loss)
    assert fun.__doc__ == "My loss."
    expected = theirs(keyword_loss)(MODEL, batch=1.0, power=3)
    assert_same_bits(fun(MODEL, batch=1.0, power=3), expected)


# What a `transform` may map `jax.value_and_grad` or `jax.grad` over, for gradients by example. Each
# takes the differentiated function, and which of both made it.
DOUBLES = jnp.asarray(np.arange(1, 25).reshape(2, 4, 3) / 8, jnp.float32)


def vmapped(fun, kind, axes=(0, 0)):
    """A `vmap` over examples, with the axes that losses and gradients come out along."""
    if kind is jax.grad:
        axes = axes[::-1]
    return jax.vmap(fun, (None, 0), axes)


def vmapped_twice(fun, kind, axes):
    return vmapped(vmapped(fun, kind), kind, axes)


def looped(fun, kind):
    return lambda w, xs: jax.lax.map(functools.partial(fun, w), xs)


# The examples, and what maps a function over them.
MAPS = {
    "examples": (DOUBLES[0], vmapped),
    "gradients last": (DOUBLES[0], functools.partial(vmapped, axes=(0, -1))),
    "no examples": (DOUBLES[0, :0], vmapped),
    "a loop": (DOUBLES[0], looped),
    "nested, gradients transposed": (
        DOUBLES,
        functools.partial(vmapped_twice, axes=(0, 1)),
    ),
}


def find_tangent(fun, w, xs):
    return jax.jvp(lambda w: fun(w, xs), (w,), (w,))


def call(fun, w, xs):
    return jax.jit(fun)(w, xs)


# What is compared, and in which dtype.
COMPARED = {
    "float32": (call, "float32"),
    "float16": (call, "float16"),
    "derivatives": (find_tangent, "float32"),
}


def squared_sum(w, x):
    return jnp.sum(w * x) ** 2 / 64, jnp.sum(x)


@pytest.mark.worlds
@cases("name, compared", spread(MAPS, COMPARED), fast=[("examples", "float16")])
def test_gradients_by_example_are_those_of_jax(name, compared):
    run, dtype = COMPARED[compared]
    examples, mapped = MAPS[name]
    w = jnp.array([1.0, -2.0, 0.5], dtype)
    xs = examples.astype(dtype)
    for kind, ours in KINDS:

        def by_example(fun, kind=kind, **kwargs):
            return mapped(kind(fun, **kwargs), kind)

        expected = run(by_example(squared_sum, has_aux=True), w, xs)
        for state in (at(24), NOOP):  # a float16 loss caps the first
            scaled = ours(squared_sum, state, transform=by_example, has_aux=True)
            result = run(scaled, w, xs)
            if compared == "derivatives":
                assert_same_bits(result, expected)
            else:
                assert_same_bits(wide(result), wide(expected))


def test_noop_adds_no_operation():
    scaled_grads = {"w": jnp.ones(2), "b": jnp.ones(2, jnp.complex64)}
    for function in (jaxscale.scale, jaxscale.unscale):
        assert not jax.make_jaxpr(function)(NOOP, scaled_grads).eqns

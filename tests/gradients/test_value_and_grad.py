"""Gradients: exact, unscaled by what scaled them, whatever differentiates."""

import contextlib
import functools
import inspect
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
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
NOOP = jaxscale.NoOpLossScale().init()
SCALES, DTYPES = [2.0**24, 40000.7, 2.0**-30, 2.0**-126], ["float16", "bfloat16"]
KINDS = (jax.value_and_grad, jaxscale.value_and_grad), (jax.grad, jaxscale.grad)


def at(exponent):
    scale = jnp.array(2.0**exponent, jnp.float32)
    return jaxscale.DynamicLossScale().init()._replace(loss_scale=scale)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def test_power_of_two_scaling_is_exact():
    compiled = jax.jit(
        lambda state: jaxscale.value_and_grad(loss_fn, state)(MODEL, X, Y)
    )
    for exponent in (-60, -1, 1, 15, 24, 60):
        assert_same_bits(compiled(at(exponent)), compiled(at(0)))


def test_the_loss_is_not_multiplied_and_cannot_overflow():
    def run(state):
        return jaxscale.value_and_grad(lambda w: 1e34 * w, state)(jnp.array(1.0))

    for step in (run, jax.jit(run)):
        assert_same_bits(step(at(12)), (jnp.float32(1e34), jnp.float32(1e34)))
    loss = jax.jit(lambda s, w: jaxscale.value_and_grad(lambda w: w * 3.0, s)(w)[0])
    text = loss.lower(at(5), jnp.array(1.0)).compile().as_text()
    assert text.count(" multiply(") == 1, text


def test_gradients_of_half_precision_come_back_float32_and_do_not_underflow():
    def tiny(w):
        return (w * 2.0**-20).astype(jnp.float32) * 2.0**-10

    assert jax.grad(tiny)(jnp.float16(1)) == 0
    assert_same_bits(jaxscale.grad(tiny, at(15))(jnp.float16(1)), jnp.float32(2.0**-30))


@cases(
    "loss_scale, dtype",
    itertools.product(SCALES, [*DTYPES, "float32", "float64"]),
    fast=[(2.0**24, "float16"), (2.0**-126, "bfloat16"), (40000.7, "float64")],
)
def test_the_seed_is_a_number_of_the_dtype_of_the_loss(loss_scale, dtype):
    with x64() if dtype == "float64" else contextlib.nullcontext():
        state = at(0)._replace(loss_scale=jnp.array(loss_scale, jnp.float32))
        loss, grad = jaxscale.value_and_grad(lambda w: w * 1, state)(
            jnp.array(0.5, dtype)
        )
        assert loss.dtype == dtype
        # Neither inf nor 0, and divided by the same.
        assert_same_bits(grad, jnp.ones((), "float32" if dtype in DTYPES else dtype))


def of_numbers(a, b, c):
    return jnp.sum(a["w"]) * jnp.sum(b) * c * a["n"].astype(jnp.float32)


def of_model(model, x):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jnp.mean(jax.vmap(model)(x) ** 2)


JAX = jax.value_and_grad, jax.grad
THREE = {"w": jnp.arange(3.0), "n": jnp.int32(2)}, jnp.ones(2), jnp.array(2.0)
MLP = eqx.nn.MLP(5, 2, 4, 1, key=jax.random.key(0))
LINEAR = nnx.Linear(5, 2, rngs=nnx.Rngs(0))
LOSSES = {
    "network": (JAX, loss_fn, (MODEL, X, Y), {}),
    "complex": (JAX, lambda w: jnp.real(w * jnp.conj(w)), (jnp.array(1.0 + 2.0j),), {}),
    "NumPy scalar": (JAX, lambda w: np.float32(1.5), (jnp.ones(2),), {}),
    "Python float": (JAX, lambda w: 1.5, (jnp.ones(2),), {}),
    "first": (JAX, of_numbers, THREE, {"argnums": 0, "allow_int": True}),
    "second": (JAX, of_numbers, THREE, {"argnums": 1}),
    "two": (JAX, of_numbers, THREE, {"argnums": (0, 2), "allow_int": True}),
    "equinox": ((eqx.filter_value_and_grad, eqx.filter_grad), of_model, (MLP, X), {}),
    "nnx": ((nnx.value_and_grad, nnx.grad), of_model, (LINEAR, X), {}),
}
FAST = ["network", "complex", "NumPy scalar", "Python float"]


@cases(
    "name, has_aux",
    itertools.product(LOSSES, [False, True]),
    fast=[("two", True), ("equinox", True), *((name, False) for name in FAST)],
)
def test_it_mirrors_what_differentiates(name, has_aux):
    transforms, loss, args, options = LOSSES[name]

    def fun(*args):
        return (loss(*args), (args[-1], None, "text")) if has_aux else loss(*args)

    for (_, ours), transform in zip(KINDS, transforms, strict=True):
        expected = transform(fun, has_aux=has_aux, **options)(*args)
        result = ours(fun, at(5), transform=transform, has_aux=has_aux, **options)(
            *args
        )
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for leaves in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
            if not isinstance(leaves[0], str):
                assert_same_bits(
                    *(x if hasattr(x, "dtype") else jnp.asarray(x) for x in leaves)
                )


def test_signature_and_keyword_arguments_are_those_of_the_function():
    def keyword_loss(params, *, batch, power=2):
        """My loss."""
        return jnp.mean((params["w"] - batch) ** power)

    for theirs, ours in KINDS:
        fun, expected = ours(keyword_loss, at(3)), theirs(keyword_loss)
        assert (inspect.signature(fun), fun.__doc__) == (
            inspect.signature(keyword_loss),
            "My loss.",
        )
        assert_same_bits(*(f(MODEL, batch=1.0, power=3) for f in (fun, expected)))


# What a `transform` may map `jax.value_and_grad` or `jax.grad` over, for gradients by example.
DOUBLES = jnp.arange(1.0, 25.0).reshape(2, 4, 3) / 8


def vmapped(d, kind, axes=(0, 0)):
    """A `vmap` over examples, with the axes that losses and gradients come out along."""
    return jax.vmap(d, (None, 0), axes if kind is jax.value_and_grad else axes[::-1])


def nested(axes):
    return lambda d, kind: vmapped(vmapped(d, kind), kind, axes)


MAPS = {
    # name: (the examples, what maps a function over them)
    "examples": (DOUBLES[0], vmapped),
    "gradients last": (DOUBLES[0], functools.partial(vmapped, axes=(0, -1))),
    "no examples": (DOUBLES[0, :0], vmapped),
    "a loop": (
        DOUBLES[0],
        lambda d, _: lambda w, xs: jax.lax.map(lambda x: d(w, x), xs),
    ),
    "nested, losses transposed": (DOUBLES, nested((1, 0))),
    "nested, gradients transposed": (DOUBLES, nested((0, 1))),
}


@cases(
    "name, dtype",
    itertools.product(MAPS, ["float32", "float16"]),
    fast=[("examples", "float16"), ("examples", "float32")],
)
def test_gradients_by_example_are_those_of_jax(name, dtype):
    examples, mapped = MAPS[name]
    w, xs = jnp.array([1.0, -2.0, 0.5], dtype), examples.astype(dtype)

    def fun(w, x):
        return jnp.sum(w * x) ** 2 / 64, jnp.sum(x)

    for kind, ours in KINDS:

        def by_example(fun, kind=kind, **kwargs):
            return mapped(kind(fun, **kwargs), kind)

        theirs = by_example(fun, has_aux=True)
        for state in (at(24), NOOP):  # a float16 loss caps the first
            scaled = ours(fun, state, transform=by_example, has_aux=True)
            assert_same_bits(wide(jax.jit(scaled)(w, xs)), wide(theirs(w, xs)))
            if dtype == "float32":  # and so are their derivatives
                pairs = [
                    jax.jvp(lambda w, f=f: f(w, xs), (w,), (w,))
                    for f in (scaled, theirs)
                ]
                assert_same_bits(*pairs)


def test_noop_adds_no_operation():
    scaled_grads = {"w": jnp.ones(2), "b": jnp.ones(2, jnp.complex64)}
    for function in (jaxscale.scale, jaxscale.unscale):
        assert not jax.make_jaxpr(function)(NOOP, scaled_grads).eqns

"""Gradients: exact, unscaled by what scaled them, whatever differentiates."""

import inspect
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tables import assert_same_bits, cases
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


def half_loss_fn(params, x, y):
    params, x = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), (params, x))
    output = jnp.tanh(x @ params["w"]) @ params["v"]
    return jnp.mean((output.astype(jnp.float32) - y) ** 2)


@jax.jit
def scaled(state, params):
    return jaxscale.value_and_grad(loss_fn, state)(params, X, Y)


def test_power_of_two_scaling_is_exact():
    expected = scaled(at(0), MODEL)
    for exponent in (-60, -1, 1, 15, 24, 60):
        assert_same_bits(scaled(at(exponent), MODEL), expected)
    eagerly = jaxscale.value_and_grad(loss_fn, at(15))(MODEL, X, Y)
    assert_same_bits(eagerly, jax.value_and_grad(loss_fn)(MODEL, X, Y))


@pytest.mark.standard_promotion
def test_parameters_after_many_steps_are_those_of_a_scale_of_1():
    policy = jaxscale.DynamicLossScale(init_scale=1, growth_interval=1)
    tx = jaxscale.loss_scaled(optax.adamw(1e-2), policy)

    @jax.jit
    def train_step(params, opt_state):
        loss, grads = jaxscale.value_and_grad(loss_fn, opt_state)(params, X, Y)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    grown = held = MODEL, tx.init(MODEL)
    for _ in range(50):  # growth on every step, up to 2**24; one program for both
        grown = train_step(*grown)
        held = train_step(held[0], optax.tree_utils.tree_set(held[1], loss_scale=jnp.float32(1)))
    assert grown[1].scaling.loss_scale == 2.0**24
    assert_same_bits((grown[0], grown[1].inner_state), (held[0], held[1].inner_state))


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
    itertools.product(
        [2.0**24, 2.0**15, 3.0, 40000.7, 2.0**-30, 2.0**-126], ["float16", "bfloat16", "float32"]
    ),
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
        loss = jnp.sum(a["w"]) * jnp.sum(b) * c
        return (loss, {"aux": (b, None, "text")}) if has_aux else loss

    args = ({"w": jnp.arange(3.0)}, jnp.ones(2), jnp.array(2.0))
    kwargs = {"has_aux": has_aux, "argnums": argnums}
    expected = jax.value_and_grad(fun, **kwargs)(*args)
    result = jaxscale.value_and_grad(fun, at(5), **kwargs)(*args)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    assert_same_bits(result[1], expected[1])
    grads = jaxscale.grad(fun, at(5), **kwargs)(*args)
    assert_same_bits(grads[0] if has_aux else grads, expected[1])


def test_integer_parameters_with_allow_int():
    def fun(params):
        return jnp.sum(params["w"] * params["n"].astype(jnp.float32))

    params = {"w": jnp.ones(2), "n": jnp.arange(2)}
    grads = jaxscale.grad(fun, at(5), allow_int=True)(params)
    assert grads["n"].dtype == jax.dtypes.float0
    assert grads["w"].tolist() == [0, 1]


LIBRARIES = {
    "equinox": (
        lambda: eqx.nn.MLP(5, 2, 4, 1, key=jax.random.key(0)),
        (eqx.filter_value_and_grad, eqx.filter_grad),
    ),
    "nnx": (lambda: nnx.Linear(5, 2, rngs=nnx.Rngs(0)), (nnx.value_and_grad, nnx.grad)),
}


@pytest.mark.standard_promotion
@cases(
    "library, has_aux",
    itertools.product(LIBRARIES, [False, True]),
    fast=[("equinox", True)],
)
def test_a_transform_of_models_is_that_of_its_library(library, has_aux):
    make, transforms = LIBRARIES[library]
    model = make()

    def fun(model, x):
        loss = jnp.mean(jax.vmap(model)(x) ** 2)
        return (loss, x) if has_aux else loss

    def plain(tree):
        return jax.tree.map(jnp.asarray, jax.tree.leaves(tree))

    for ours, transform in zip((jaxscale.value_and_grad, jaxscale.grad), transforms, strict=True):
        expected = transform(fun, has_aux=has_aux)(model, X)
        result = ours(fun, at(5), transform=transform, has_aux=has_aux)(model, X)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        assert_same_bits(plain(result), plain(expected))


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
    # name: (the examples, what maps a function over them, axes of the losses, and of gradients)
    "examples": (DOUBLES[0], vmapped, (0,), (0,)),
    "gradients last": (DOUBLES[0], lambda d, k: vmapped(d, k, (0, -1)), (0,), (-1,)),
    "no examples": (DOUBLES[0, :0], vmapped, (0,), (0,)),
    "one": (DOUBLES[0, :1], vmapped, (0,), (0,)),
    "a loop": (DOUBLES[0], looped, (0,), (0,)),
    "nested": (DOUBLES, nested((0, 0)), (0, 1), (0, 1)),
    "nested, losses transposed": (DOUBLES, nested((1, 0)), (1, 0), (0, 1)),
    "nested, gradients transposed": (DOUBLES, nested((0, 1)), (0, 1), (1, 0)),
}


@cases(
    "name, dtype", itertools.product(MAPS, ["float32", "float16"]), fast=[("examples", "float16")]
)
def test_gradients_by_example_are_those_of_a_loop(name, dtype):
    has_aux = dtype == "float16"
    examples, mapped, loss_axes, grad_axes = MAPS[name]
    examples = examples.astype(dtype)
    batch = examples.shape[: len(loss_axes)]
    w = jnp.array([1.0, -2.0, 0.5], dtype)

    def fun(w, x):
        loss = jnp.sum(w * x) / 8
        return (loss, jnp.sum(x)) if has_aux else loss

    def by_example(kind):
        return lambda fun, **kwargs: mapped(kind(fun, **kwargs), kind)

    @jax.jit
    def both(state, w, xs):
        return [
            ours(fun, state, transform=by_example(kind), has_aux=has_aux)(w, xs)
            for ours, kind in [
                (jaxscale.value_and_grad, jax.value_and_grad),
                (jaxscale.grad, jax.grad),
            ]
        ]

    def stacked(leaves, like, axes):
        array = np.array(leaves, like.dtype).reshape(*batch, *like.shape)
        return jnp.moveaxis(array, range(len(batch)), axes)

    for state in (at(24), jaxscale.NoOpLossScale().init()):  # a float16 loss caps the first
        of_one = jaxscale.value_and_grad(fun, state, has_aux=has_aux)
        loop = [of_one(w, x) for x in examples.reshape(-1, 3)]
        like = of_one(w, jnp.ones(3, dtype))
        losses = jax.tree.map(
            lambda leaf, *leaves: stacked(leaves, leaf, loss_axes), like[0], *(o[0] for o in loop)
        )
        grads = stacked([output[1] for output in loop], like[1], grad_axes)
        alone = (grads, losses[1]) if has_aux else grads
        assert jnp.isfinite(grads).all()
        assert_same_bits(both(state, w, examples), [(losses, grads), alone])


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
    ours = jax.make_jaxpr(lambda s, p: jaxscale.value_and_grad(loss_fn, s)(p, X, Y))(noop, MODEL)
    bare = jax.make_jaxpr(lambda s, p: jax.value_and_grad(loss_fn)(p, X, Y))(noop, MODEL)
    assert str(ours) == str(bare)
    scaled_grads = {"w": jnp.ones(2), "b": jnp.ones(2, jnp.complex64)}
    for function in (jaxscale.scale, jaxscale.unscale):
        assert not jax.make_jaxpr(function)(noop, scaled_grads).eqns


def test_the_loss_itself_is_not_multiplied():
    loss = jax.jit(lambda s, w: jaxscale.value_and_grad(lambda w: w * 3.0, s)(w)[0])
    text = loss.lower(at(5), jnp.array(1.0)).compile().as_text()
    assert text.count(" multiply(") == 1, text


def test_overwrites_of_fp8_are_neither_divided_nor_checked():
    params = {"params": jnp.ones(2), "_overwrite_with_gradient": jnp.ones(2)}
    grads = jaxscale.grad(lambda p: sum(jnp.sum(v) for v in p.values()), at(4))(params)
    assert grads["params"].tolist() == [1, 1]
    assert grads["_overwrite_with_gradient"].tolist() == [16, 16]  # as it came


def test_a_numpy_scalar_and_a_python_float_are_losses():
    for loss in (1.5, np.float32(1.5)):
        value, grad = jaxscale.value_and_grad(lambda w, loss=loss: loss, at(4))(jnp.ones(2))
        assert (value, grad.tolist()) == (1.5, [0, 0])

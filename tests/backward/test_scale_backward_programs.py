"""Programs that a split in two must leave as they are: effects, calls, and rules of functions."""

import functools
import itertools

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from half_programs import WRAPPERS, autocast_scaled, scaled_autocast
from jax.custom_derivatives import SymbolicZero
from scaled_networks import ACCURACY, HALF, PARAMS, X, cast_and_back, error, net, net32
from tables import assert_same_bits, cases, spread, unchanged

import jaxscale
from jaxscale import scale_backward


@pytest.mark.standard_promotion
def test_a_loss_that_prints_has_its_gradients(capfd):
    def loss(w):
        half = w.astype("float16")
        jax.debug.print("{}", half)
        return 2.0**-30 * jnp.sum(half.astype("float32"))

    gradient = jax.grad(jaxscale.scale_backward(loss))(jnp.ones(2))
    assert gradient.tolist() == [2.0**-30, 2.0**-30]


def classified(p, x):
    """A biased layer, and what is computed beside its loss."""
    return net32(p, x) @ p["w"][0] + p["b"][None]


# Equations without outputs, or with integers alone: each uses what a biased layer returns.


@jax.custom_jvp
def without_outputs(x):
    return ()


without_outputs.defjvp(lambda primals, tangents: ((), ()))


def with_signs(y):
    return jnp.sum(jnp.where(jnp.signbit(y), 0.0, y))


def with_print(y):
    jax.debug.print("{}", y.astype(HALF)[0, 0])
    return jnp.sum(y**2)


def with_custom_jvp(y):
    without_outputs(y.astype(HALF))
    return jnp.sum(y**2)


def with_jit_of_nothing(y):
    jax.jit(lambda y: None)(y.astype(HALF))
    return jnp.sum(y)


def with_jit_of_integers(y):
    return jnp.sum(y * jax.jit(lambda y: (y > 0) * 1)(y.astype(HALF)))


def with_print_in_checkpoint(y):
    @jax.checkpoint
    def print_first(y):
        jax.debug.print("{}", y[0, 0])
        return y

    return jnp.sum(print_first(cast_and_back(y)))


def with_print_in_a_branch(y):
    def print_first(y):
        jax.debug.print("{}", y[0])

    jax.lax.cond(y[0, 0] > 0, print_first, lambda y: None, y.astype(HALF))
    return jnp.sum(y)


LOSSES = [
    *(with_signs, with_print, with_print_in_checkpoint, with_print_in_a_branch),
    *(with_custom_jvp, with_jit_of_nothing, with_jit_of_integers),
]


def both_grads(around, loss):
    """The gradients of a loss with a wrapper of `WRAPPERS` around it, and without."""
    wrapped = WRAPPERS[around](loss)
    return jax.jit(jax.grad(wrapped))(PARAMS), jax.jit(jax.grad(loss))(PARAMS)


@pytest.mark.worlds
@pytest.mark.standard_promotion
@cases(
    "loss, around",
    spread(LOSSES, list(WRAPPERS)),
    fast=[
        (with_custom_jvp, "autocast of scale_backward"),
        (with_print, "scale_backward"),
    ],
)
def test_an_equation_without_outputs_is_one_like_others(loss, around, capfd):
    grads, expected = both_grads(around, lambda p: loss(classified(p, X)))
    assert error(grads, expected) < 2 * ACCURACY


@pytest.mark.worlds
def test_effects_happen_as_often_as_in_the_program_itself():
    effects = []

    def loss(p):
        y = classified(p, X)
        jax.debug.callback(lambda y: effects.append("half"), y.astype(HALF))
        jax.debug.callback(lambda y: effects.append("float32"), jnp.sum(y**2))
        return jnp.sum(y**2)

    for fun in (loss, scale_backward(loss), scale_backward(jaxscale.autocast(loss))):
        effects.clear()
        jax.block_until_ready(jax.jit(jax.value_and_grad(fun))(PARAMS))
        jax.effects_barrier()
        assert sorted(effects) == ["float32", "half"]


# A block that is called often.


def block(x, w, b):
    return x + jnp.tanh(x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32) + b[None]


def chain(layer, p, number):
    x = X + p["b"]
    for i in range(number):
        x = layer(x, p["w"][i % 3], p["b"])
    return jnp.mean(x**2)


def side_by_side(layer, p, number):
    return sum(jnp.mean(layer(X, p["w"][i % 3], p["b"]) ** 2) for i in range(number))


OFTEN = {
    "chain": (scale_backward, chain, jax.jit),
    "side by side": (scale_backward, side_by_side, jax.jit),
    "checkpoints": (scale_backward, chain, jax.checkpoint),
    "checkpoints side by side": (scale_backward, side_by_side, jax.checkpoint),
    "autocast inside": (scaled_autocast, chain, jax.jit),
    "autocast outside": (autocast_scaled, chain, jax.jit),
    "autocast outside, side by side": (autocast_scaled, side_by_side, jax.jit),
}


@pytest.mark.worlds
@pytest.mark.standard_promotion
@cases("name", OFTEN, fast=["chain", "checkpoints side by side"])
def test_a_block_that_is_called_often_stays_one_function(name):
    """So the program grows with the number of calls as it does without the boundary."""
    wrap, model, called = OFTEN[name]

    def make_programs(number, wrap):
        def loss(p):
            return model(called(block), p, number)

        grad = jax.grad(wrap(loss))
        lowered = jax.jit(grad).lower(PARAMS)
        text = lowered.as_text()
        jaxpr = jax.make_jaxpr(grad)(PARAMS)
        return {"jaxpr": str(jaxpr), "lowered": text}

    few = make_programs(4, wrap)
    many = make_programs(24, wrap)
    functions_in_few = few["lowered"].count("func.func")
    functions_in_many = many["lowered"].count("func.func")
    assert functions_in_few == functions_in_many
    plain_few = make_programs(4, unchanged)
    plain_many = make_programs(24, unchanged)
    for form in ("jaxpr", "lowered"):
        plain_growth = plain_many[form].count("\n") - plain_few[form].count("\n")
        growth = many[form].count("\n") - few[form].count("\n")
        assert growth < 2 * plain_growth, form


def test_many_gradients_of_a_block_make_a_program_at_most_six_times_as_long():
    """What is done with a gradient is a line for each, and a function for all of one type."""
    layers = [{"w": PARAMS["w"][0], "b": PARAMS["b"], "gain": PARAMS["b"]}] * 40

    @jax.jit
    def layer(x, p):
        mean = jnp.mean(x, -1, keepdims=True)
        rms = jnp.sqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + 1e-6)
        return x + jnp.tanh((x - mean) / rms @ p["w"] + p["b"][None]) * p["gain"][None]

    def loss(layers):
        x = X
        for p in layers:
            x = layer(x, p)
        return jnp.mean(x**2)

    def count_lines(loss):
        return jax.jit(jax.grad(loss)).lower(layers).as_text().count("\n")

    assert count_lines(scaled_autocast(loss)) <= 6 * count_lines(loss)


# A block that is wrapped by itself.


def rewrapped(layer):
    """Wraps a block anew in each call."""
    called = jax.jit(layer)
    return lambda *args: scale_backward(called)(*args)


# What wraps the block, and what is around it in the plain program.
ALONE = {
    "alone": (scale_backward, unchanged),
    "around a jit": (lambda layer: scale_backward(jax.jit(layer)), jax.jit),
    "in a jit": (lambda layer: jax.jit(scale_backward(layer)), jax.jit),
    "in a checkpoint": (
        lambda layer: jax.checkpoint(scale_backward(layer)),
        jax.checkpoint,
    ),
    "anew in each call": (rewrapped, jax.jit),
    "autocast inside": (lambda layer: scaled_autocast(jax.jit(layer)), jax.jit),
}


@pytest.mark.worlds
@pytest.mark.standard_promotion
@cases(
    "name, model",
    itertools.product(ALONE, [chain, side_by_side]),
    fast=[("around a jit", chain)],
)
def test_calls_of_a_wrapped_block_share_a_loop(name, model):
    """So the program has at most three times the lines that it has without the boundary."""
    wrap, plain = ALONE[name]

    def lower(layer, number):
        grad = jax.grad(functools.partial(model, layer, number=number))
        return jax.jit(grad).lower(PARAMS)

    text = lower(wrap(block), 50).as_text()
    assert text.count("stablehlo.while") == 1
    assert text.count("\n") <= 3 * lower(plain(block), 50).as_text().count("\n")
    grads, expected = (
        lower(layer, 3).compile()(PARAMS) for layer in (wrap(block), plain(block))
    )
    assert error(grads, expected) < ACCURACY


def times(number, **options):
    return scale_backward(lambda w: number * jnp.sum(cast_and_back(w)), **options)


TINY = 2.0**-40
# Functions that differ in one thing, and the number in their gradients.
DIFFERENT = {
    "a number": [(0.0, times(0.0)), (-0.0, times(-0.0)), (TINY, times(TINY))],
    "what they close over": [
        (number, times(jnp.float32(number))) for number in (0.5, 0.25)
    ],
    "their scales": [(1.0, times(1.0)), (np.nan, times(1.0, scale=TINY))],
    # one that overflows once
    "their retries": [
        (1.0, times(1.0, scale=2.0**18)),
        (np.inf, times(1.0, scale=2.0**18, retries=0)),
    ],
}


@pytest.mark.worlds
@cases("name", DIFFERENT)
def test_functions_that_differ_share_nothing(name):
    """Though they are called in one program, in the same line."""
    row = DIFFERENT[name]

    def loss(arrays):
        return sum(fun(w) for (_, fun), w in zip(row, arrays, strict=True))

    grads = jax.grad(loss)([jnp.ones(3)] * len(row))
    for (number, _), grad in zip(row, grads, strict=True):
        assert_same_bits(grad, jnp.full(3, number, jnp.float32))


# What is computed in float32 from half precision, for more half precision and for the loss.


def squashed(p):
    """The log-probability of a squashed action, of which one is almost 1, and its value.

    The derivative of the logarithm is huge where that of `tanh` is almost 0.
    """
    raw = X @ p["w"][0] + jnp.zeros((16, 8)).at[0, 0].set(5.0)
    action = jnp.tanh(raw)
    log_prob = -jnp.mean(jnp.log(1 - action**2 + 1e-7))
    value = jnp.mean(jnp.sin(action @ p["w"][1]) @ p["w"][2])
    return log_prob + 1e-4 * value


@pytest.mark.worlds
@cases("wrap", [scaled_autocast, autocast_scaled])
def test_cotangents_are_scaled_where_they_enter_half_precision(wrap):
    grads = jax.jit(jax.grad(wrap(squashed)))(PARAMS)
    expected = jax.grad(squashed)(PARAMS)
    for i in range(3):
        assert error(grads["w"][i], expected["w"][i]) < ACCURACY, i


# Derivatives that JAX knows to be zero.


@functools.partial(jax.custom_jvp)
def shifted(y, shift):
    return y + shift


@functools.partial(shifted.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    assert isinstance(tangents[1], SymbolicZero), "a shift has no derivative"
    return shifted(*primals), tangents[0]


@pytest.mark.worlds
def test_a_rule_after_the_boundary_sees_what_has_no_tangent():
    """Though the call that returns it returns something that has one, too."""
    layer = jax.jit(lambda p, x: (net(p, x), net(PARAMS, x)))

    def loss(p):
        return jnp.mean(shifted(*layer(p, X)) ** 2)

    assert (
        error(jax.grad(scale_backward(loss))(PARAMS), jax.grad(loss)(PARAMS)) < ACCURACY
    )


def looped(kind):
    """A loop of Equinox, a `custom_vjp` function that asks what has a derivative, over a batch.

    Its time is one number for the whole batch.
    """

    def fun(p, x):
        def body(carry):
            time, y = carry
            return time + 1, jnp.tanh(cast_and_back(y @ p["w"][0]) + p["b"])

        carry = jnp.float32(0), x
        return eqxi.while_loop(lambda c: c[0] < 3, body, carry, max_steps=4, kind=kind)

    def loss(p):
        time, y = jax.vmap(fun, (None, 0), (None, 0))(p, X)
        return jnp.mean(y**2) + 0 * jax.lax.stop_gradient(time)

    return loss


@pytest.mark.worlds
@pytest.mark.skipif(
    getattr(jax.config, "jax_custom_vjp3", False),
    reason="the loop of Equinox fails without jaxscale, too, under JAX_CUSTOM_VJP3",
)
@pytest.mark.standard_promotion
@cases("around", WRAPPERS, fast=["scale_backward", "autocast"])
def test_what_has_no_derivative_has_none_at_the_boundary_either(around):
    """JAX refuses a cotangent for what a batch shares, even one of zeros."""
    got, expected = both_grads(around, looped("checkpointed"))
    assert error(got["w"], expected["w"]) < ACCURACY

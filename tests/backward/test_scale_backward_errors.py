"""Wrong calls of `scale_backward`: a message names the argument, the value and the way out."""

import jax
import jax.numpy as jnp
import pytest
from bad_input import assert_says
from scaled_networks import HALF, PARAMS, X, loss_of, net, squared_grad_norm
from tables import cases

import jaxscale
from jaxscale import scale_backward


def test_the_error_of_forward_mode_names_the_way_out():
    scaled = scale_backward(lambda w: w * w)
    with pytest.raises(TypeError, match=r"forward mode .*Differentiate `fun` itself"):
        jax.jvp(scaled, (1.0,), (1.0,))


def differentiate_forward_in(transform):
    loss = transform(scale_backward(loss_of(net)))
    return lambda p: jax.jvp(loss, (p,), (p,))


def linearize_in_reverse():
    def of_tangent(p):
        return jax.linearize(scale_backward(loss_of(net)), p)[1](p)

    jax.grad(of_tangent)(PARAMS)


def differentiate_twice():
    jax.jit(jax.grad(squared_grad_norm(scale_backward(loss_of(net)))))(PARAMS)


def differentiate_by_a_half_parameter():
    params = PARAMS | {"b": PARAMS["b"].astype(HALF)}
    jax.grad(loss_of(scale_backward(net)))(params)


def differentiate_by_a_half_closure():
    def loss(p):
        model = scale_backward(lambda x: x @ p)
        return jnp.sum(model(X.astype(HALF)).astype(jnp.float32))

    jax.grad(loss)(jnp.ones((8, 8), HALF))


def differentiate_a_half_output():
    model = scale_backward(lambda p: {"y": net(p, X).astype(HALF)})
    jax.grad(lambda p: jnp.sum(model(p)["y"]))(PARAMS)


def differentiate_a_half_output_under_autocast():
    model = scale_backward(lambda p: net(p, X).astype(HALF))
    jax.grad(jaxscale.autocast(lambda p: jnp.sum(model(p))))(PARAMS)


FORWARD = {
    "forward mode": lambda: differentiate_forward_in(lambda fun: fun)(PARAMS),
    "forward mode in jit": lambda: jax.jit(differentiate_forward_in(jax.jit))(PARAMS),
    "forward mode in autocast": lambda: differentiate_forward_in(jaxscale.autocast)(
        PARAMS
    ),
    "forward mode in grad": lambda: jax.grad(
        lambda p: differentiate_forward_in(jax.checkpoint)(p)[1]
    )(PARAMS),
    "linearize in grad": linearize_in_reverse,
}
ERRORS = {
    "not a function": (
        lambda: scale_backward(PARAMS),
        "TypeError: scale_backward ... fun ... must be a function",
    ),
    "scale text": (
        lambda: scale_backward(net, "dynamic"),
        'ValueError: scale_backward ... must be "auto"',
    ),
    "scale 0": (
        lambda: scale_backward(net, 0),
        "ValueError: scale_backward ... scale= ... normal range",
    ),
    "scale array": (
        lambda: scale_backward(net, jnp.ones(())),
        "TypeError: scale_backward ... scale=",
    ),
    "retries": (
        lambda: scale_backward(net, retries=-1),
        "ValueError: scale_backward ... retries= ... -1",
    ),
    **{
        name: (fun, "TypeError: scale_backward ... forward mode ... jax.grad")
        for name, fun in FORWARD.items()
    },
    "second derivative": (
        differentiate_twice,
        "TypeError: scale_backward ... retries=2 ... retries=0",
    ),
    "float16 parameter": (
        differentiate_by_a_half_parameter,
        "TypeError: args[0]['b'], which is float16 ... cast them inside",
    ),
    "float16 closure": (
        differentiate_by_a_half_closure,
        "TypeError: scale_backward ... closes over, which is float16",
    ),
    "float16 output": (
        differentiate_a_half_output,
        "TypeError: output ['y'] is float16 ... astype(jnp.float32)",
    ),
    "float16 output under autocast": (
        differentiate_a_half_output_under_autocast,
        "TypeError: scale_backward ... output is float16",
    ),
}


@cases("name", ERRORS)
def test_errors_say_what_to_do(name):
    assert_says(*ERRORS[name])

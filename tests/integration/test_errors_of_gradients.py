"""Wrong calls of the functions that differentiate; operations that cannot be transformed."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from bad_input import SCALING, W, assert_says, without_return
from forged import forged
from tables import cases

import jaxscale
from jaxscale import diagnostics, grad, scale_backward, value_and_grad

NOT_SCALED = jaxscale.NoOpLossScale().init()


def half_loss(w):
    return jnp.sum(w.astype(jnp.float16))


def half_loss_of_product(w):
    return half_loss(jnp.stack([w, w]) @ jnp.stack([w, w], axis=1))


def half_model(w):
    return w.astype(jnp.float16)


def model_of_half_loss(w):
    return jnp.sum(scale_backward(half_model)(w))


def loss_from_half(w):
    return jnp.sum(w.astype(jnp.float16).astype(jnp.float32))


WITHOUT_RETRIES = scale_backward(loss_from_half, 8.0, retries=0, axis_name=("d",))


def loss_of_a_pair(pair):
    first, (second, third) = pair
    return jnp.sum(first * second * third)


def loss_and_output(w):
    return jnp.sum(w), w


def integer_loss(w):
    return jnp.int32(1)


def returns_its_argument(w):
    return w


def no_loss(w):
    return None


def another_transform(fun, has_aux):
    return returns_its_argument


CASES = {
    "no scale": (
        lambda: value_and_grad(jnp.sum, optax.adam(0.1).init(W)),
        (
            "ValueError: value_and_grad ... exactly one ... none in a tuple ... loss_scaled"
        ),
    ),
    "no scale at all": (
        lambda: grad(jnp.sum, None),
        "ValueError: grad ... none in a NoneType",
    ),
    "empty tree": (lambda: grad(jnp.sum, ()), "ValueError: none in a tuple"),
    "a policy": (
        lambda: grad(jnp.sum, jaxscale.DynamicLossScale()),
        "ValueError: none in a DynamicLossScale ... `init`",
    ),
    "swapped": (
        lambda: value_and_grad(SCALING, jnp.sum),
        "ValueError: function to differentiate comes first",
    ),
    "gradients alone": (
        lambda: value_and_grad(jnp.sum, SCALING, transform=jax.grad)(W),
        (
            "TypeError: value_and_grad(transform= ... (loss, grads) ... got "
            "gradients alone ... Pass `jax.value_and_grad`"
        ),
    ),
    "gradients of a pair alone": (
        lambda: value_and_grad(loss_of_a_pair, SCALING, transform=jax.grad)(
            (W, (W, W))
        ),
        "TypeError: value_and_grad(transform= ... got gradients alone",
    ),
    "gradients alone, at a scale of 1": (
        lambda: value_and_grad(jnp.sum, NOT_SCALED, transform=jax.grad)(W),
        "TypeError: value_and_grad(transform= ... got gradients alone",
    ),
    "gradients with the loss": (
        lambda: grad(jnp.sum, SCALING, transform=jax.value_and_grad)(W),
        (
            "TypeError: `grad(transform= ... got the loss as well ... Pass "
            "`jax.grad`, or call `jaxscale.value_and_grad`"
        ),
    ),
    "another transform": (
        lambda: grad(jnp.sum, SCALING, transform=another_transform)(W),
        (
            "TypeError: `grad(transform= ... differentiate as `jax.grad` ... got "
            "ArrayImpl"
        ),
    ),
    "traced gradients alone": (
        lambda: diagnostics.trace(jnp.sum, SCALING, transform=jax.grad)(W),
        "TypeError: trace(transform= ... got gradients alone",
    ),
    "loss is no scalar": (
        lambda: grad(returns_its_argument, SCALING)(W),
        "TypeError: grad(fun) ... float32[2] ... mean",
    ),
    "loss is an integer": (
        lambda: value_and_grad(integer_loss, SCALING)(W),
        "TypeError: int32[]",
    ),
    "loss is a pair": (
        lambda: grad(loss_and_output, SCALING)(W),
        "TypeError: tuple ... has_aux=True",
    ),
    "loss is missing": (lambda: grad(no_loss, SCALING)(W), "TypeError: NoneType"),
    "aux is missing": (
        lambda: grad(jnp.sum, SCALING, has_aux=True)(W),
        "TypeError: has_aux=True ... pair",
    ),
    "an axis for all_finite": (
        lambda: jaxscale.all_finite(W, axis_name="d"),
        "NameError: `axis_name='d'` ... leave it out",
    ),
    "a loss without return": (
        lambda: value_and_grad(without_return, SCALING)(W),
        (
            "TypeError: `value_and_grad(fun)` ... floating scalar, got NoneType. "
            "Does `fun` end without `return loss`"
        ),
    ),
    "scale_backward of a loss in half precision": (
        lambda: jax.grad(scale_backward(half_loss))(W),
        (
            "TypeError: `scale_backward(fun)`: the output is float16 ... Return it "
            "`.astype(jnp.float32)`.\n"
        ),
    ),
    "scale_backward of a model in half precision": (
        lambda: jax.grad(model_of_half_loss)(W),
        (
            "TypeError: Return it `.astype(jnp.float32)`, or let `fun` include the "
            "loss.\n"
        ),
    ),
    "autocast of scale_backward of a loss in half precision": (
        lambda: jax.grad(jaxscale.autocast(scale_backward(half_loss_of_product)))(W),
        (
            "TypeError: `scale_backward(fun)`: the output is float16 ... Return it "
            "`.astype(jnp.float32)`.\n"
        ),
    ),
    "scale_backward: an axis under jit": (
        lambda: jax.jit(jax.grad(scale_backward(loss_from_half, axis_name="d")))(W),
        (
            "NameError: `scale_backward(axis_name='d')` ... `shard_map` or `pmap` "
            "... none of that name. Under `jit` alone leave it out"
        ),
    ),
    "scale_backward: an axis under jit, no retries": (
        lambda: jax.jit(jax.grad(WITHOUT_RETRIES))(W),
        "NameError: `scale_backward(axis_name='d')` ... leave it out",
    ),
}


@pytest.mark.standard_promotion
@cases("name", CASES)
def test_bad_input(name):
    assert_says(*CASES[name])


class Transform(NamedTuple):
    """A transformation of a function, and a pattern for the way out that its error names."""

    wrap: Callable
    way_out: str


TRANSFORMS = {
    "autocast": Transform(jaxscale.autocast, "`jaxscale\\.full_precision`"),
    "scale_backward": Transform(scale_backward, "outside of the function"),
}
PROGRAM = jax.make_jaxpr(lambda x: jnp.tanh(x @ x))(jnp.ones((2, 2)))


class Strange(NamedTuple):
    """An operation in a form that JAX has not given it yet.

    Attributes:
      name: of the operation.
      params: its parameters.
      reason: what the error says about them, as a pattern.
    """

    name: str
    params: dict[str, Any]
    reason: str


STRANGE = {
    "autocast: a product without dimensions": Strange(
        "dot_general", {}, "KeyError: 'dimension_numbers'"
    ),
    "autocast: a product of no dimensions": Strange(
        "dot_general", {"dimension_numbers": None}, "TypeError: .*"
    ),
    "scale_backward: a product without dimensions": Strange(
        "dot_general", {}, "KeyError: 'dimension_numbers'"
    ),
    "scale_backward: a call that is placed nowhere": Strange(
        "jit", {"jaxpr": PROGRAM, "in_shardings": None}, "TypeError: .*"
    ),
    "scale_backward: a checkpoint without options": Strange(
        "remat2", {"jaxpr": PROGRAM.jaxpr}, "UnknownFormError: remat2"
    ),
}


@pytest.mark.filterwarnings("ignore:`autocast`:UserWarning")
@cases("name", STRANGE)
def test_an_operation_that_cannot_be_transformed_is_named_with_its_line(name):
    case = STRANGE[name]
    transform, _, _ = name.partition(":")
    wrap, way_out = TRANSFORMS[transform]
    strange = forged(case.name, case.params, jnp.tanh)

    @wrap
    def loss(w):
        return jnp.sum(jax.jit(lambda w: strange(w @ w))(w))

    with pytest.raises(TypeError) as raised:
        jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 2)))
    code = strange.__code__
    line = re.escape(f"{code.co_filename}:{code.co_firstlineno} (in `<lambda>`)")
    expected = (
        rf"`{transform}\(fun\)` cannot transform the operation `{case.name}` at {line}, .*"
        rf"\({case.reason}\)\. .*{way_out}.*JAX {jax.__version__}\."
    )
    message = str(raised.value)
    assert re.fullmatch(expected, message), message


@cases("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "error", [KeyError("key"), IndexError(), ValueError("no"), TypeError()]
)
def test_an_error_of_a_rule_of_the_user_is_left_alone(error, transform):
    def fail(*_):
        raise error

    product = jax.custom_jvp(lambda w: w @ w)
    product.defjvp(fail)

    @TRANSFORMS[transform].wrap
    def half_loss(w):
        return jnp.sum(jax.jit(product)(w.astype(jnp.float16))) * 1.0

    def loss(w):
        return half_loss(w).astype(jnp.float32)

    with pytest.raises(type(error)) as raised:
        jax.grad(loss)(jnp.ones((2, 2)))
    assert raised.value is error

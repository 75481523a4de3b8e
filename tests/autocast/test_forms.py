"""`autocast` and `scale_backward` do the same in JAX's old and new form of its autodiff.

`JAX_REMAT3`, `JAX_CUSTOM_VJP3` and `JAX_CUSTOM_JVP3` ask for the new form. All fast tests run in
either; here both are compared in one process.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import FLAGS, HAS_NEW_FORM, form
from half_programs import (
    PROGRAMS,
    WRAPPERS,
    W,
    X,
    assert_near_by_norm,
    equations,
    products,
)
from jax.ad_checkpoint import checkpoint_name
from tables import cases, spread

import jaxscale
from jaxscale._jax import jaxprs

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.skipif(not HAS_NEW_FORM, reason="this version of JAX has one form"),
]


def test_a_checkpointed_product_has_its_derivative_in_both_forms():
    def loss(w):
        return jnp.sum(jnp.full((2, 3), 2.0) @ w)

    grad = jax.grad(jaxscale.autocast(jax.checkpoint(loss)))
    for is_new in (False, True):
        with form(is_new):
            np.testing.assert_array_equal(grad(jnp.ones((3, 2))), np.full((3, 2), 4))


in_both_forms = pytest.mark.parametrize("is_new", [False, True])
POLICIES = {
    "nothing": None,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
}


def rematted(policy, prevent_cse=True):
    """The loss of three layers under `jax.checkpoint`, by their parameters."""

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=prevent_cse)
    def layer(x, w):
        return jnp.tanh(checkpoint_name(jax.nn.gelu(x @ w), "hidden") @ w.T)

    def loss(ws):
        x = X
        for w in ws[:3]:
            x = x + layer(x, w)
        return jnp.mean(x**2)

    return loss


@jax.custom_jvp
def squashed(x, w):
    return jnp.tanh(jnp.exp(x @ w) - 1.0)


@squashed.defjvp
def squashed_jvp(primals, tangents):
    """Its operations between the product and the tangent are in float32."""
    x, w = primals
    dx, dw = tangents
    weights = jax.nn.softmax(jnp.exp(x @ w))
    return squashed(x, w), weights * (dx @ w + x @ dw)


def ruled(ws):
    x = squashed(X @ ws[0], ws[1])
    return jnp.mean(squashed(x, ws[2]) @ ws[3])


@jax.jit
@functools.partial(jax.checkpoint, prevent_cse=(True, False))
def product_and_sum(x, w):
    outputs = (x @ w).astype(jnp.float32)
    return jnp.mean(outputs**2) * jnp.sum(w)


def in_parts(ws):
    """A `jit` and a `jax.checkpoint` that `scale_backward` divides."""
    return product_and_sum(X, ws[0]) + jnp.mean(squashed(X, ws[1]))


def loss_by_weights(name):
    """The loss of a program, by a part of its parameters."""
    fun, (_, *args) = PROGRAMS[name]

    def loss(ws):
        value, *_ = fun({"w": ws, "b": jnp.zeros(8)}, *args)
        return value

    return loss


BOTH = {name: rematted(policy) for name, policy in POLICIES.items()}
BOTH |= {"ruled": ruled, "in parts": in_parts, "pinned": rematted(None, (True, False))}
BOTH |= {name: loss_by_weights(name) for name in PROGRAMS}
AUTOCAST_INSIDE = "scale_backward of autocast"
FAST = [
    ("names", "autocast"),
    ("ruled", "autocast"),
    ("in parts", "autocast of scale_backward"),
    ("pinned", "autocast"),
]


class Differentiated(NamedTuple):
    """The value and the gradient of a loss, and the dtypes of the products of both passes."""

    value_and_grad: Any
    products: list[str]


def differentiate(loss, wrap, is_new):
    with form(is_new):
        value_and_grad = jax.value_and_grad(wrap(loss))
        result = jax.jit(value_and_grad)(W)
        return Differentiated(result, sorted(products(value_and_grad, W)))


@pytest.mark.worlds
@cases("name, wrap", spread(list(BOTH), list(WRAPPERS), times=1), fast=FAST)
def test_both_forms_have_the_same_products_and_gradients(name, wrap):
    loss = BOTH[name]
    transform = WRAPPERS[wrap]
    old = differentiate(loss, transform, is_new=False)
    new = differentiate(loss, transform, is_new=True)
    for a, b in zip(new.value_and_grad, old.value_and_grad, strict=True):
        largest = float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3 * largest)
    assert set(new.products) == set(old.products)
    # For others JAX derives the rules in another way. In JAX 0.11 its next form of remat computes
    # as much again as without `autocast`, and the other one computes less.
    if name in POLICIES and jax.__version_info__[:2] != (0, 11):
        if name == "dots_saveable" and wrap in ("autocast", AUTOCAST_INSIDE):
            # The next form does not ask this policy about products that `autocast` makes.
            assert len(new.products) > len(old.products)
        else:
            assert new.products == old.products


# JAX jits these, and derives one function of values and tangents from each.
ACTIVATIONS = {
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "where": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "relu": jax.nn.relu,
}


def layer_with_rule(activation):
    """A layer with a rule of its own, which is the derivative that JAX would take."""

    def layer(x, w):
        biased = x @ w + 0.1
        return activation(biased)

    ruled_layer = jax.custom_jvp(layer)
    ruled_layer.defjvp(functools.partial(jax.jvp, layer))
    return ruled_layer


ALONE = {flag: (flag,) for flag in FLAGS} | {"all": FLAGS}


@pytest.mark.worlds
@cases(
    "name, flags",
    spread(list(ACTIVATIONS), list(ALONE)),
    fast=[("silu", "jax_remat3"), ("clip", "all")],
)
def test_rules_around_activations_can_be_differentiated(name, flags):
    layer = layer_with_rule(ACTIVATIONS[name])

    def loss(ws):
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), layer(X, ws[0]), ws)
        return jnp.mean(x**2)

    with form(True, ALONE[flags]):
        actual = jax.jit(jax.grad(jaxscale.autocast(loss)))(W)
    with form(False):
        expected = jax.jit(jax.grad(jaxscale.autocast(loss)))(W)
    # In another order, the sums are rounded to half precision in another way.
    assert_near_by_norm(actual, expected, share=2e-3)


OF_OLD_FORM = {"remat2", "custom_jvp_call", "custom_vjp_call"}


def names_of_autodiff(fun, is_new):
    """The primitives of `jax.checkpoint` and of rules in a function, traced under the flags."""
    with form(is_new):
        program = jax.make_jaxpr(fun)(W[0])
    names = {eqn.primitive.name for eqn in equations(program)}
    return names & (OF_OLD_FORM | {jaxprs.OBJECT})


@jax.jit
def layer(x, w):
    return jax.nn.softmax(x @ w) @ w


@cases(
    "policy, is_mapped",
    itertools.product(POLICIES, [False, True]),
    fast=[("nothing", False), ("nothing", True)],
)
def test_both_forms_have_the_same_barriers_in_a_loop_of_rematerialized_layers(
    policy, is_mapped
):
    # A barrier around cotangents stores them: 756 MB more in a transformer on an H100.
    @functools.partial(jax.checkpoint, policy=POLICIES[policy], prevent_cse=False)
    def layer(x, w):
        return checkpoint_name(jax.nn.softmax(x @ w), "hidden") @ w.T

    def loss(ws):
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), X, ws)
        return jnp.sum(x)

    def loss_of_two(ws):
        return jnp.sum(jax.vmap(jaxscale.autocast(loss))(jnp.stack([ws, -ws])))

    fun = loss_of_two if is_mapped else jaxscale.autocast(loss)
    barriers = []
    for is_new in (False, True):
        with form(is_new):
            program = jax.make_jaxpr(jax.grad(fun))(W)
            names = [eqn.primitive.name for eqn in equations(program)]
        barriers.append(names.count("optimization_barrier"))
    assert barriers[0] == barriers[1]


def test_what_is_made_has_the_form_that_is_asked_for_now():
    """In one process the flags may change from call to call of the same function."""

    def two_layers(w):
        return jax.nn.relu(layer(layer(X, w), w))

    def loss(w):
        return jnp.sum(jaxscale.scale_backward(two_layers)(w))

    cast = jaxscale.autocast(loss)
    first = names_of_autodiff(cast, is_new=False)
    assert "custom_jvp_call" in first
    assert first <= OF_OLD_FORM
    assert names_of_autodiff(cast, is_new=True) == {jaxprs.OBJECT}
    assert names_of_autodiff(cast, is_new=False) == first
    assert names_of_autodiff(cast, is_new=True) == {jaxprs.OBJECT}


@pytest.mark.worlds
@pytest.mark.parametrize("was_new", [False, True])
def test_one_program_is_rewritten_under_the_flags_of_both_forms_in_turn(was_new):
    with form(was_new):
        traced = jax.jit(rematted(POLICIES["names"])).trace(W)
    plain_value, plain_gradient = jax.value_and_grad(rematted(None))(W)
    for is_new in (True, False):
        with form(is_new):
            value, gradient = jax.value_and_grad(jaxscale.autocast(traced))(W)
        np.testing.assert_allclose(value, plain_value, rtol=2e-2)
        np.testing.assert_allclose(gradient, plain_gradient, atol=2e-3)


def root(ws):
    """A fixed point, as of a deep equilibrium model, whose derivative is implicit."""
    w = ws[0] * 0.3

    def step(z):
        return jnp.tanh(z @ w + X) - z

    def tangent_solve(linear, y):
        def linear_of_vector(v):
            return jnp.ravel(linear(v.reshape(y.shape)))

        vector = jnp.ravel(y)
        matrix = jax.jacobian(linear_of_vector)(vector)
        return jnp.linalg.solve(matrix, vector).reshape(y.shape)

    def solve(fun, z):
        return jax.lax.fori_loop(0, 12, lambda _, z: z + fun(z), z)

    fixed_point = jax.lax.custom_root(step, jnp.zeros_like(X), solve, tangent_solve)
    return jnp.mean(fixed_point**2)


cast_root = jaxscale.autocast(root)


@in_both_forms
def test_a_custom_root_is_solved_in_half_precision_and_its_linear_system_in_float32(
    is_new,
):
    with form(is_new):
        assert products(cast_root, W) == ["float16"]
        # The linear system is that of the backward pass, whose `jnp.linalg.solve` has products.
        assert set(products(jax.grad(cast_root), W)) == {"float16", "float32"}
        marked = jaxscale.autocast(jaxscale.full_precision(root))
        assert "float16" not in products(marked, W)


def batched(fun):
    return lambda ws: jax.vmap(fun)(jnp.stack([ws, ws / 2]))


@pytest.mark.worlds
@in_both_forms
@cases("transform", [jax.grad, jax.jacfwd, batched], fast=[jax.grad])
def test_a_custom_root_is_transformed(transform, is_new):
    with form(is_new):
        expected = transform(root)(W)
        actual = transform(cast_root)(W)
    tolerance = 0.01 * float(jnp.abs(expected).max())
    np.testing.assert_allclose(actual, expected, atol=tolerance)

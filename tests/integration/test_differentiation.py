"""Steps whose model is rematerialized, and gradients that are differentiated once more."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from tables import POLICIES, assert_same_bits, cases
from training import MLP, X, amplified, mlp_loss, trainer

import jaxscale

pytestmark = pytest.mark.standard_promotion

DYNAMIC = POLICIES["dynamic"]

REMATS = {
    "all": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
}


@cases("remat", REMATS, fast=["all"])
def test_a_rematerialized_model_has_its_gradients(remat):
    loss_fn = REMATS[remat](mlp_loss)
    batch = X[0], jnp.array(1.0)
    ours = jaxscale.value_and_grad(loss_fn, DYNAMIC.init())
    assert_same_bits(ours(MLP, batch), jax.value_and_grad(loss_fn)(MLP, batch))
    # The forward pass is there twice, as its intermediate results are not kept.
    assert str(jax.make_jaxpr(ours)(MLP, batch)).count("= tanh") == 2


def polynomial(w):
    return jnp.sum(w**3) + w[0] * w[1]


def polynomial_with_aux(w):
    return polynomial(w), jnp.sum(w**2)


W = jnp.array([1.0, -2.0])
ONCE_MORE = {
    "jvp": lambda fun: jax.jvp(fun, (W,), (jnp.array([1.0, 2.0]),)),
    "jacfwd": lambda fun: jax.jacfwd(fun)(W),
    "jacrev": lambda fun: jax.jacrev(fun)(W),
    "hessian": lambda fun: jax.hessian(fun)(W),
    "vmapped jvp": lambda fun: jax.vmap(lambda t: jax.jvp(fun, (W,), (t,)))(jnp.eye(2)),
    "remat": lambda fun: jax.jacrev(jax.checkpoint(fun))(W),
}


@cases("once_more, has_aux", itertools.product(ONCE_MORE, [False, True]), fast=[("jvp", True)])
def test_value_and_grad_differentiated_once_more_is_that_of_jax(once_more, has_aux):
    # The loss, too: its derivative is that of the loss, and has nothing of the scale.
    fun = polynomial_with_aux if has_aux else polynomial
    expected = ONCE_MORE[once_more](jax.value_and_grad(fun, has_aux=has_aux))
    ours = jaxscale.value_and_grad(fun, DYNAMIC.init(), has_aux=has_aux)
    assert_same_bits(ONCE_MORE[once_more](ours), expected)


def test_a_gradient_penalty_is_unscaled_inside_and_outside():
    # Loss and penalty from one inner call, as a user writes it: both have to be unscaled.
    def penalized(inner):
        def loss_fn(params, batch):
            loss, grads = inner(lambda p: mlp_loss(p, (batch[0], 1.0)))(params)
            penalty = sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads))
            return amplified(loss + 0.1 * penalty, batch[1])

        return loss_fn

    state, batch = DYNAMIC.init(), (X[0], jnp.array(1.0))
    ours = penalized(lambda fun: jaxscale.value_and_grad(fun, state))
    assert_same_bits(  # op by op, and all scales are powers of two
        jaxscale.value_and_grad(ours, state)(MLP, batch),
        jax.value_and_grad(penalized(jax.value_and_grad))(MLP, batch),
    )


@pytest.mark.slow
def test_inner_gradients_of_half_precision_do_not_underflow_either():
    state = DYNAMIC.init()
    w = jnp.ones((), jnp.float16)

    def tiny(w):  # w**2 * 2**-26, of gradient 2**-25 and second derivative 2**-25
        return ((w * 2.0**-13) ** 2).astype(jnp.float32)

    def penalty(w, gradient):
        return (gradient(tiny)(w).astype(jnp.float32) * 2.0**10) ** 2

    assert jax.hessian(tiny)(w) == jax.grad(lambda w: penalty(w, jax.grad))(w) == 0
    assert_same_bits(jax.jacfwd(jaxscale.grad(tiny, state))(w), jnp.float32(2.0**-25))

    def ours(fun):
        return jaxscale.grad(fun, state)

    assert_same_bits(ours(lambda w: penalty(w, ours))(w), jnp.float32(2.0**-29))


@cases("jit", [True, False], fast=[True])
def test_a_step_can_be_differentiated_as_the_bare_one_can(jit):
    # As in meta-learning: how does the loss after a step depend on where it started?
    params = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array(4.0)}  # exact in few bits
    batch = jnp.array([2.0, -1.0, 1.0])

    def cubic(params, batch):
        return jnp.sum(params["w"] ** 3 * batch) + params["b"] ** 2

    def after(optimizer, differentiate):
        train_step = trainer(optimizer, cubic, jit, differentiate)
        train_step = jax.jit(train_step) if jit else train_step
        return lambda params: cubic(train_step((params, optimizer.init(params)), batch)[0], batch)

    bare = after(optax.sgd(0.25), lambda fun, _: jax.value_and_grad(fun))
    ours = after(jaxscale.loss_scaled(optax.sgd(0.25), DYNAMIC), jaxscale.value_and_grad)
    assert_same_bits(jax.grad(ours)(params), jax.grad(bare)(params))
    assert_same_bits(jax.jvp(ours, (params,), (params,)), jax.jvp(bare, (params,), (params,)))

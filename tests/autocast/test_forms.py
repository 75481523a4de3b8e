"""`autocast` and `scale_backward` do the same in JAX's old and new form of its autodiff.

`JAX_REMAT3`, `JAX_CUSTOM_VJP3` and `JAX_CUSTOM_JVP3` ask for the new form. All fast tests run in
either; here both are compared in one process.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import HAS_NEW_FORM, form
from half_programs import PROGRAMS, W, X, equations, products
from jax.ad_checkpoint import checkpoint_name
from jaxprs import residual_bytes
from tables import cases

import jaxscale
from jaxscale import _jax, diagnostics

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.skipif(not HAS_NEW_FORM, reason="this version of JAX has one form"),
]

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
# with operations in float32 between the product and the tangent
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = squashed(x, w)
    return y, jax.nn.softmax(jnp.exp(x @ w)) * (dx @ w + x @ dw)


def ruled(ws):
    return jnp.mean(squashed(squashed(X @ ws[0], ws[1]), ws[2]) @ ws[3])


def in_parts(ws):  # a `jit` and a `jax.checkpoint` that `scale_backward` divides
    @jax.jit
    @functools.partial(jax.checkpoint, prevent_cse=(True, False))
    def outputs(x, w):
        return jnp.mean((x @ w).astype(jnp.float32) ** 2) * jnp.sum(w)

    return outputs(X, ws[0]) + jnp.mean(squashed(X, ws[1]))


BOTH = {name: rematted(policy) for name, policy in POLICIES.items()}
BOTH |= {"ruled": ruled, "in parts": in_parts, "pinned": rematted(None, (True, False))}


def loss_of(fun, _, *args):
    return lambda ws: fun({"w": ws, "b": jnp.zeros(8)}, *args)[0]


BOTH |= {name: loss_of(fun, *args) for name, (fun, args) in PROGRAMS.items()}
WRAPPED = {
    "autocast": jaxscale.autocast,
    "scale_backward": jaxscale.scale_backward,
    "both": lambda fun: jaxscale.autocast(jaxscale.scale_backward(fun)),
}
FAST = [
    ("names", "autocast"),
    ("ruled", "autocast"),
    ("in parts", "both"),
    ("pinned", "autocast"),
]


def differentiated(loss, wrap):
    """The gradient, the products of both passes, and what the first keeps for the second."""
    wrapped = wrap(loss)
    value_and_grad = jax.jit(jax.value_and_grad(wrapped))
    return value_and_grad(W), sorted(
        map(sorted, products(jax.value_and_grad(wrapped), W))
    )


@cases("name, wrap", itertools.product(BOTH, WRAPPED), fast=FAST)
def test_both_forms_have_the_same_products_and_gradients(name, wrap):
    with form(False):
        old, old_products = differentiated(BOTH[name], WRAPPED[wrap])
    with form(True):
        new, new_products = differentiated(BOTH[name], WRAPPED[wrap])
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3 * float(jnp.abs(b).max()))
    assert {str(kinds) for kinds in new_products} == {
        str(kinds) for kinds in old_products
    }
    if name in POLICIES:  # for others JAX derives the rules in another way
        assert new_products == old_products


@cases("policy", POLICIES, fast=["names", "nothing"])
def test_both_forms_keep_the_same_for_the_backward_pass(policy):
    kept = []
    for is_new in (False, True):
        with form(is_new):
            kept.append(
                residual_bytes(jaxscale.autocast(rematted(POLICIES[policy])), W)
            )
            kept.append(residual_bytes(rematted(POLICIES[policy]), W))
    old, old_plain, new, new_plain = kept
    assert new <= max(old, old * new_plain / old_plain)


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
    """In one process the flags may change from call to call, of the same functions, too."""
    layer = jax.jit(lambda x, w: jax.nn.softmax(x @ w) @ w)

    def loss(w):
        return jnp.sum(jaxscale.scale_backward(lambda w: layer(layer(X, w), w))(w))

    cast = jaxscale.autocast(loss)
    found = []
    for is_new in (False, True, False, True):
        with form(is_new):
            names = {e.primitive.name for e in equations(jax.make_jaxpr(cast)(W[0]))}
        found.append(
            names & {"remat2", "custom_jvp_call", "custom_vjp_call", _jax.OBJECT}
        )
    assert (
        found[0]
        == found[2]
        == {"remat2", "custom_jvp_call", "custom_vjp_call"} & found[0]
    )
    assert "remat2" in found[0]
    assert found[1] == found[3] == {_jax.OBJECT}


def test_a_program_that_was_traced_before_is_rewritten_to_the_form_that_is_asked_for_now():
    layer = jax.jit(lambda x, w: jax.nn.softmax(x @ w) @ w)
    traced = jax.jit(lambda w: jnp.sum(layer(X, w))).trace(W[0])
    cast = jaxscale.autocast(lambda w: traced(w))
    for is_new in (False, True, False):
        with form(is_new):
            names = {e.primitive.name for e in equations(jax.make_jaxpr(cast)(W[0]))}
        assert names & {"remat2", _jax.OBJECT} == {_jax.OBJECT if is_new else "remat2"}


def test_a_program_of_one_form_is_rewritten_under_the_flags_of_the_other():
    programs = []
    for is_new in (False, True):
        with form(is_new):
            programs.append(jax.jit(rematted(POLICIES["names"])).trace(W))
    for is_new, traced in itertools.product((True, False), programs):
        with form(is_new):
            value, gradient = jax.value_and_grad(jaxscale.autocast(traced))(W)
        expected, of_plain = jax.value_and_grad(rematted(None))(W)
        np.testing.assert_allclose(value, expected, rtol=2e-2)
        np.testing.assert_allclose(gradient, of_plain, atol=2e-3)


@pytest.mark.parametrize("is_new", [False, True])
def test_the_trace_looks_into_both_forms(is_new):
    def loss(w):
        return jnp.sum(rematted(None)(w) + jnp.mean(squashed(1e3 * X, w[0] * 100)))

    with form(is_new):
        scaling = jaxscale.FixedLossScale(2.0**10).init()
        report = diagnostics.trace(jaxscale.autocast(loss), scaling)(W)
    assert not report.not_entered
    assert report.first_nonfinite.primitive == "dot_general"


def root(ws):
    """A fixed point, as of a deep equilibrium model, whose derivative is implicit."""
    w, x = ws[0] * 0.3, X

    def step(z):
        return jnp.tanh(z @ w + x) - z

    def tangent_solve(linear, y):
        matrix = jax.jacobian(lambda v: jnp.ravel(linear(v.reshape(y.shape))))(
            jnp.ravel(y)
        )
        return jnp.linalg.solve(matrix, jnp.ravel(y)).reshape(y.shape)

    def solve(fun, z):
        return jax.lax.fori_loop(0, 12, lambda _, z: z + fun(z), z)

    return jnp.mean(
        jax.lax.custom_root(step, jnp.zeros_like(x), solve, tangent_solve) ** 2
    )


@pytest.mark.parametrize("is_new", [False, True])
def test_a_custom_root_is_solved_in_half_precision_and_its_linear_system_in_float32(
    is_new,
):
    cast = jaxscale.autocast(root)
    with form(is_new):
        assert products(cast, W) == [{"float16"}]
        backward = products(jax.grad(cast), W)
        assert {"float16"} in backward
        assert {"float32"} in backward  # the steps of `jnp.linalg.solve`
        for differentiate in (jax.grad, jax.jacfwd):
            expected = differentiate(root)(W)
            tolerance = 0.01 * float(jnp.abs(expected).max())
            np.testing.assert_allclose(differentiate(cast)(W), expected, atol=tolerance)
        batch = jax.vmap(cast)(jnp.stack([W, W / 2]))
        np.testing.assert_allclose(batch, [root(W), root(W / 2)], rtol=0.01)
        assert {"float16"} not in products(
            jaxscale.autocast(jaxscale.full_precision(root)), W
        )
        report = diagnostics.trace(cast, jaxscale.FixedLossScale(8).init())(W)
    assert report.not_entered == ("custom_linear_solve",)

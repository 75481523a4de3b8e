"""The programs that `autocast` writes: how long they are, what they cast, and what is kept."""

import functools
import gc

import jax
import jax.numpy as jnp
import pytest
from half_programs import W, X, equations, primitives
from jax.ad_checkpoint import checkpoint_name
from tables import cases

import jaxscale
from jaxscale._autocast import table
from jaxscale._autocast.api import _make_autocast

pytestmark = pytest.mark.standard_promotion


def equations_of(fun, *args):
    return list(equations(jax.make_jaxpr(fun)(*args)))


def alternating(x):
    for i in range(2000):
        x = jnp.exp(-x) if i % 2 else jnp.negative(-x)
    return x


def long_chain(x):
    for _ in range(200):
        x = jnp.exp(x) - jnp.sum(x)
    return x


def many_readers(x):
    for _ in range(20):
        x = jnp.exp(x)
    return sum(jnp.sum(jnp.sin(x) ** i) for i in range(100))


def residual_layers(x):
    for _ in range(6):
        weights = jax.nn.softmax(x)
        x = x + jax.nn.relu(weights @ W[0] + W[0, 0]) @ W[1] + W[0, 1]
    return x


# Programs, and how many times as long they become, without a recursion.
GROWN = {
    "long": (alternating, 5),
    "long chain": (long_chain, 5),
    "many readers": (many_readers, 5),
    "residual layers": (residual_layers, 1.5),
}


@cases("name", GROWN)
def test_chains_do_not_make_the_program_grow(name):
    after, most = GROWN[name]

    def fun(x):
        return after(x @ W[0])

    assert len(primitives(jaxscale.autocast(fun), X)) <= most * len(primitives(fun, X))


def layer_of_scan(x, w):
    return jax.nn.softmax(x @ w), None


@cases("is_scanned", [False, True])
def test_chains_have_a_barrier_where_the_backward_pass_is_part_of_the_same_program(
    is_scanned,
):
    if is_scanned:
        fun, ws = functools.partial(jax.lax.scan, layer_of_scan), W
    else:
        fun, ws = layer_of_scan, W[0]
    barriers = set()
    for eqn in equations_of(jaxscale.autocast(fun), X, ws):
        # Some versions of JAX wrap the primitive, and its parameters with it.
        params = getattr(eqn.params.get("_prim"), "params", eqn.params)
        barriers.add(params.get("prevent_cse"))
    assert barriers - {None} == {not is_scanned}


def test_a_function_that_is_called_often_is_rewritten_once():
    layer = jax.jit(lambda x, w: jax.nn.relu(x @ w))

    def three_layers(x):
        return layer(layer(layer(x, W[0]), W[1]), W[2])

    def rewritten_layers():
        eqns = jax.make_jaxpr(jaxscale.autocast(lambda x: three_layers(x)))(X).eqns
        return [
            eqn.params["jaxpr"] for eqn in eqns if eqn.params.get("name") == "<lambda>"
        ]

    first, second, third = rewritten_layers()
    # The first call takes an argument in float32, the others what the first returns.
    assert first is not second
    assert second is third
    again = rewritten_layers()
    assert [id(program) for program in again] == [id(first), id(second), id(third)]


def test_each_parameter_is_cast_once():
    cast = jaxscale.autocast(lambda w, x: sum((x + i) @ w for i in range(4)))
    shapes = [
        eqn.invars[0].aval.shape
        for eqn in jax.make_jaxpr(cast)(W[0], X).eqns
        if eqn.primitive.name == "convert_element_type"
    ]
    assert shapes.count(W[0].shape) == 1


LEFT, RIGHT = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 8))
# By which a product of two activations is differentiated: the shapes that are read together, and
# the number of products. Not those of a parameter; the gradient of a constant is computed for
# nobody.
READ_TOGETHER = {
    "both": ((0, 1), [[LEFT.shape, RIGHT.shape]], 5),
    "left": (0, [], 4),
    "right": (1, [], 4),
}


@cases("name", READ_TOGETHER)
def test_gradients_of_a_product_of_activations_are_read_together(name):
    argnums, shapes, num_products = READ_TOGETHER[name]

    def loss(x, y):
        return jnp.sum(jnp.einsum("bij,bjk->bik", x, y) @ W[0])

    eqns = equations_of(jax.grad(jaxscale.autocast(loss), argnums), LEFT, RIGHT)
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    assert [[var.aval.shape for var in eqn.invars] for eqn in barriers] == shapes
    assert sum(eqn.primitive.name in table.PRODUCTS for eqn in eqns) == num_products


def named_before_a_name(w, x):
    kept = checkpoint_name(x @ w, name="kept")
    return jnp.abs(checkpoint_name(jnp.abs(kept), name="other"))


def named_after_an_exponential(w, x):
    return jnp.sin(checkpoint_name(jnp.exp(x @ w), name="kept"))


POLICIES_OF_REMAT = ["save_only_these_names", "save_any_names_but_these"]


@cases("policy", POLICIES_OF_REMAT)
@cases("layer", [named_before_a_name, named_after_an_exponential])
def test_a_remat_keeps_what_its_policy_says_in_half_precision(layer, policy):
    def residuals(fun):
        # What the backward pass of a function keeps, of the shape of an activation.
        pull = jax.eval_shape(lambda w: jax.vjp(lambda w: fun(w, X[:3]), w)[1], W[0])
        return sorted(
            str(leaf.dtype) for leaf in jax.tree.leaves(pull) if leaf.shape == (3, 8)
        )

    make_policy = getattr(jax.checkpoint_policies, policy)
    remat = jax.checkpoint(layer, policy=make_policy("kept"))
    num_kept = len(residuals(remat))
    # The input stays, as it came.
    assert residuals(jaxscale.autocast(remat)) == ["float16"] * (num_kept - 1) + [
        "float32"
    ]


@pytest.mark.slow  # what clears the caches makes all others compile anew
def test_what_is_rewritten_is_forgotten_with_its_program():
    def rewrite(n):
        layer = jax.jit(lambda x, w: jax.nn.relu(x @ w) + n)
        scan = jaxscale.autocast(
            lambda x: jax.lax.scan(lambda c, w: (layer(c, w), None), x, W)[0]
        )
        scan(X)

    def remembered_after(numbers):
        for n in numbers:
            rewrite(n)
        jax.clear_caches()
        gc.collect()
        return len(_make_autocast("float16", False).rewritten)

    assert remembered_after([0]) >= remembered_after(range(5))

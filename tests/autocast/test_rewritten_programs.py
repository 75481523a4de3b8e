"""The programs that `autocast` writes: how long they are, what they cast, and what is kept."""

import collections
import gc
import re

import jax
import jax.numpy as jnp
import pytest
from half_programs import W, X, equations
from jax.ad_checkpoint import checkpoint_name
from tables import cases

import jaxscale
from jaxscale._autocast.api import _make_autocast
from jaxscale._jax import jaxprs

pytestmark = pytest.mark.standard_promotion


def test_two_layers_have_two_products_in_float16():
    def model(x):
        return jnp.tanh(x @ x) @ x

    text = str(jax.make_jaxpr(jaxscale.autocast(model))(jnp.ones((4, 4))))
    assert text.count("dot_general") == 2
    assert "f16[4,4]" in text
    assert "f32[4,4]" in text


def equations_of(fun, *args):
    return list(equations(jax.make_jaxpr(fun)(*args)))


def select(name, eqns):
    return [eqn for eqn in eqns if eqn.primitive.name == name]


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
        hidden = jax.nn.relu(weights @ W[0] + W[0, 0])
        x = x + hidden @ W[1] + W[0, 1]
    return x


AFTER_A_PRODUCT = [alternating, long_chain, many_readers, residual_layers]
# What `autocast` adds, and what it puts in the place of a call.
ADDED = {"convert_element_type", "jaxscale_stand_in", jaxprs.RECOMPUTED}


def count_operations(fun):
    counts = collections.Counter(map(jaxprs.operation, equations_of(fun, X)))
    return {name: count for name, count in counts.items() if name not in ADDED}


@pytest.mark.worlds
@cases("after", AFTER_A_PRODUCT)
def test_nothing_is_computed_twice_in_the_forward_pass(after):
    def fun(x):
        return after(x @ W[0])

    assert count_operations(jaxscale.autocast(fun)) == count_operations(fun)


def layer_of_scan(x, w):
    return jax.nn.softmax(x @ w), None


def apply_layer(w):
    hidden, _ = layer_of_scan(X, w[0])
    return jnp.sum(hidden)


def attend(w):
    scores = jnp.einsum("bij,bkj->bik", w, w)
    return jnp.sum(jnp.einsum("bij,bjk->bik", jax.nn.softmax(scores), w))


def scan_layers(w):
    return jnp.sum(jax.lax.scan(layer_of_scan, X, w)[0])


def gated(activation, w):
    """A layer whose segment starts from more numbers than it returns."""
    hidden = X @ w[0] + w[1, 0]
    gate, value = jnp.split(hidden, 2, axis=-1)
    return jnp.sum(((activation(gate) * value) @ w[2, :4]) ** 2)


def silu_layer(w):
    return gated(jax.nn.silu, w)


def relu_layer(w):
    return gated(jax.nn.relu, w)


def mapped_silu_layer(w):
    return jnp.sum(jax.vmap(silu_layer)(jnp.stack([w, w])))


def scanned_silu_layer(w):
    return jax.lax.scan(lambda total, _: (total + silu_layer(w), None), 0.0, length=2)[
        0
    ]


# The types of what has a barrier around it. On a CPU, XLA would take what the forward pass
# computed, and keep it. In a loop it cannot. On a GPU it would keep in float32 what it computed, so
# a barrier is around what that is computed from in half precision, and not around cotangents.
X_TYPE, GATED_TYPE = "4x8xf16", "4x4xf16"
BARRIERS = {
    (apply_layer, "cpu"): {X_TYPE, "f32"},
    (attend, "cpu"): {"5x8x8xf16", "5x8x8xf32"},
    (silu_layer, "cpu"): {X_TYPE, GATED_TYPE, "1x8xf32", "f32"},
    (scan_layers, "cpu"): set(),
    (apply_layer, "cuda"): {X_TYPE},
    (attend, "cuda"): {"5x8x8xf16"},
    (relu_layer, "cuda"): {X_TYPE},
    (scanned_silu_layer, "cuda"): set(),
    (silu_layer, "cuda"): {X_TYPE},
    (mapped_silu_layer, "cuda"): {f"2x{X_TYPE}"},
    (apply_layer, "tpu"): set(),
    (attend, "tpu"): set(),
    (silu_layer, "tpu"): set(),
}


@pytest.mark.worlds
@cases("fun, platform", BARRIERS)
def test_barriers_stand_where_xla_would_keep_what_is_to_be_computed_again(
    fun, platform
):
    traced = jax.jit(jax.grad(jaxscale.autocast(fun))).trace(W)
    lowered = traced.lower(lowering_platforms=(platform,)).as_text()
    types = set()
    for line in lowered.splitlines():
        if "optimization_barrier" in line:
            types.update(re.findall(r"tensor<(\w+)>", line))
    assert types == BARRIERS[fun, platform]


def test_a_function_that_is_called_often_is_rewritten_once():
    layer = jax.jit(lambda x, w: jax.nn.relu(x @ w))

    def rewrite_three_layers():
        def three_layers(x):
            return layer(layer(layer(x, W[0]), W[1]), W[2])

        eqns = jax.make_jaxpr(jaxscale.autocast(three_layers))(X).eqns
        return [
            eqn.params["jaxpr"] for eqn in eqns if eqn.params.get("name") == "<lambda>"
        ]

    first, second, third = rewrite_three_layers()
    assert first is second is third
    assert list(map(id, rewrite_three_layers())) == [id(first)] * 3


LEFT = jnp.ones((2, 3, 4))
RIGHT = jnp.ones((2, 4, 8))


def gradients_of_activations(argnums):
    """The equations of a product of two activations, and of one by a parameter, with gradients."""

    def loss(x, y):
        return jnp.sum(jnp.einsum("bij,bjk->bik", x, y) @ W[0])

    return equations_of(jax.grad(jaxscale.autocast(loss), argnums), LEFT, RIGHT)


def test_gradients_of_a_product_of_activations_are_read_together():
    eqns = gradients_of_activations((0, 1))
    # There is none for the product by the parameter.
    (barrier,) = select("jaxscale_barrier", eqns)
    assert [var.aval.shape for var in barrier.invars] == [LEFT.shape, RIGHT.shape]
    assert len(select("dot_general", eqns)) == 5


@cases("argnum", [0, 1])
def test_the_gradient_of_a_constant_activation_is_not_computed(argnum):
    eqns = gradients_of_activations(argnum)
    assert select("jaxscale_barrier", eqns) == []
    assert len(select("dot_general", eqns)) == 4


def named_before_a_name(w, x):
    kept = checkpoint_name(x @ w, name="kept")
    return jnp.abs(checkpoint_name(jnp.abs(kept), name="other"))


def named_after_an_exponential(w, x):
    return jnp.sin(checkpoint_name(jnp.exp(x @ w), name="kept"))


def dtypes_of_activations(fun):
    """The dtypes of the activations that the backward pass of a layer keeps, in order."""
    _, pull = jax.vjp(lambda w: fun(w, X[:3]), W[0])
    return sorted(
        leaf.dtype.name for leaf in jax.tree.leaves(pull) if leaf.shape == (3, 8)
    )


POLICIES_OF_REMAT = ["save_only_these_names", "save_any_names_but_these"]


@cases("policy", POLICIES_OF_REMAT)
@cases("layer", [named_before_a_name, named_after_an_exponential])
def test_a_remat_keeps_what_its_policy_says_in_half_precision(layer, policy):
    make_policy = getattr(jax.checkpoint_policies, policy)
    remat = jax.checkpoint(layer, policy=make_policy("kept"))
    num_kept = len(dtypes_of_activations(remat))
    *others, of_input = dtypes_of_activations(jaxscale.autocast(remat))
    assert others == ["float16"] * (num_kept - 1)
    assert of_input == "float32"  # it stays as it came


@pytest.mark.slow  # what clears the caches makes all others compile anew
def test_what_is_rewritten_is_forgotten_with_its_program():
    def rewrite(n):
        layer = jax.jit(lambda x, w: jax.nn.relu(x @ w) + n)

        def scan_layers(x):
            return jax.lax.scan(lambda c, w: (layer(c, w), None), x, W)

        jaxscale.autocast(scan_layers)(X)

    def remembered_after(numbers):
        for n in numbers:
            rewrite(n)
        jax.clear_caches()
        gc.collect()
        return len(_make_autocast("float16").rewritten)

    assert remembered_after([0]) >= remembered_after(range(5))

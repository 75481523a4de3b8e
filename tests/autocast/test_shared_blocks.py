"""Functions with derivative rules, in blocks that are traced once and differentiated in many ways.

A program that is called many times, as that of a `jax.jit`, is one object for JAX, and so is each
equation with a rule in it. What one derivative keeps must not be what another one reads. Each row
makes its functions anew: what was differentiated before would be what is kept.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from half_programs import assert_near_by_norm, normal, scaled_autocast, with_vjp
from tables import cases, pairs, unchanged

import jaxscale


@pytest.mark.standard_promotion
def test_a_rule_in_a_block_that_is_called_twice_is_used_twice():
    @jax.custom_vjp
    def tripled(x):
        return x

    tripled.defvjp(lambda x: (x, None), lambda _, cotangent: (3 * cotangent,))
    block = jax.jit(lambda x: tripled(x) @ jnp.eye(2))
    gradient = jax.grad(jaxscale.autocast(lambda x: jnp.sum(block(block(x)))))
    assert gradient(jnp.ones((2, 2))).tolist() == [[9, 9], [9, 9]]


WEIGHTS = 0.3 * normal((3, 16, 16), seed=0)
# A square one has the shape of a weight, so that one may be taken for the other.
SHAPES = {"fits": (16, 16), "does not fit": (8, 16)}


def make_ruled_layer():
    multiply = with_vjp(jnp.matmul)
    return lambda w, x: jnp.tanh(multiply(x, w))


def make_deep_layer():
    return lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w) @ w.T


class Ruled(NamedTuple):
    """A layer with a rule: a user's, or that of `scale_backward`.

    Attributes:
      make: returns the layer, in float32.
      wrap_layer: what is applied to it, inside of the block.
      wrap_loss: what is applied to the loss.
    """

    make: Callable[[], Any]
    wrap_layer: Callable[[Any], Any]
    wrap_loss: Callable[[Any], Any]


RULED = {
    "rule of a user": Ruled(make_ruled_layer, unchanged, jaxscale.autocast),
    "rule in an autocast": Ruled(make_ruled_layer, jaxscale.autocast, unchanged),
    "scale_backward": Ruled(make_deep_layer, scaled_autocast, unchanged),
    "scale_backward in an autocast": Ruled(
        make_deep_layer, jaxscale.scale_backward, jaxscale.autocast
    ),
    "rule in a scale_backward": Ruled(make_ruled_layer, scaled_autocast, unchanged),
}


def scan_block(layer):
    def turn(x, w):
        return layer(w, x), None

    @jax.jit
    def block(w, x):
        return jax.lax.scan(turn, x, jnp.stack([w, 0.5 * w]))[0]

    return block


def map_block(layer):
    mapped = jax.vmap(layer, (None, 0))

    @jax.jit
    def block(w, x):
        return mapped(w, x.reshape(4, -1, 16)).reshape(x.shape)

    return block


BLOCKS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "both": lambda layer: jax.jit(jax.checkpoint(layer)),
    "scan": scan_block,
    "vmap": map_block,
}


def data_first(block, ws, x):
    for w in ws:
        x = block(w, x)
    return x


def activations_first(block, ws, x):
    of_activations = block(ws[1], jnp.tanh(x @ ws[0]))
    return of_activations + block(ws[2], x)


def one_weight(block, ws, x):
    for w in (ws[0], ws[0], ws[1] + ws[2]):
        x = block(w, x)
    return x


ORDERS = {fun.__name__: fun for fun in (data_first, activations_first, one_weight)}


@pytest.mark.worlds
@cases(
    "rule, block, order, shape",
    pairs(RULED, BLOCKS, ORDERS, SHAPES),
    fast=[
        ("rule of a user", "jit", "data_first", "fits"),
        ("rule of a user", "vmap", "activations_first", "does not fit"),
        ("rule in an autocast", "vmap", "data_first", "does not fit"),
        ("rule in a scale_backward", "checkpoint", "one_weight", "fits"),
        ("scale_backward", "checkpoint", "data_first", "does not fit"),
        ("scale_backward in an autocast", "scan", "one_weight", "fits"),
    ],
)
def test_each_derivative_of_a_shared_block_has_residuals_of_its_own(
    rule, block, order, shape
):
    make, wrap_layer, wrap_loss = RULED[rule]
    x = normal(SHAPES[shape], seed=1)

    def make_loss(wrap_layer):
        called = BLOCKS[block](wrap_layer(make()))
        return lambda ws: jnp.mean(ORDERS[order](called, ws, x) ** 2)

    exact = jax.grad(make_loss(unchanged))(WEIGHTS)
    gradient = jax.grad(wrap_loss(make_loss(wrap_layer)))(WEIGHTS)
    assert_near_by_norm(list(gradient), list(exact), share=5e-3)

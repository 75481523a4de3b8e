"""Steps of AdamW: with optax alone, and with jaxscale in three ways."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from following import Following

import jaxscale

CLIP = 0.01


def pass_gradients(fun, has_aux=False):
    """In the place of `jax.value_and_grad`: the gradients are what the function is called with."""
    return lambda params, grads: (fun(params, grads), grads)


def zero_loss(params, grads):
    return jnp.float32(0)


class Method(NamedTuple):
    """A step that begins with the gradients, as a backward pass left them."""

    init: Callable[[Any], Any]  # parameters -> carry
    step: Callable[[Any, Any], Any]  # carry, gradients -> carry


def three_lines(tx, grads, state, params, **values):
    """The plain optax loop, of `tx.update` and `optax.apply_updates`."""
    updates, state = tx.update(grads, state, params, **values)
    return optax.apply_updates(params, updates), state


def bare(clip):
    """Optax alone: no scale, no verdict, no skip."""
    tx = optax.adamw(1e-3)
    if clip:
        tx = optax.chain(optax.clip_by_global_norm(CLIP), tx)

    def step(carry, grads):
        params, state = carry
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return three_lines(tx, grads, state, params)

    return Method(lambda params: (params, tx.init(params)), step)


def scaled(clip, policy="dynamic"):
    max_norm = CLIP if clip else None
    return jaxscale.loss_scaled(optax.adamw(1e-3), policy, max_norm=max_norm)


def train_step(clip, policy="dynamic"):
    tx = scaled(clip, policy)
    whole = jaxscale.train_step(zero_loss, tx, transform=pass_gradients)
    return Method(
        lambda params: (params, tx.init(params)),
        lambda carry, grads: whole(*carry, grads)[:2],
    )


def apart(clip, apply):
    """`jaxscale.value_and_grad`, and what applies the gradients."""
    tx = scaled(clip)

    def step(carry, grads):
        params, state = carry
        unscaled = jaxscale.value_and_grad(zero_loss, state, transform=pass_gradients)
        loss, grads = unscaled(params, grads)
        return apply(tx, grads, state, params, value=loss)

    return Method(lambda params: (params, tx.init(params)), step)


BARE = "bare optax"
METHODS = {
    BARE: bare,
    "jaxscale.train_step": train_step,
    "jaxscale.train_step, following": partial(train_step, policy=Following()),
    "jaxscale.apply_gradients": partial(apart, apply=jaxscale.apply_gradients),
    "jaxscale optax wrapper": partial(apart, apply=three_lines),
}

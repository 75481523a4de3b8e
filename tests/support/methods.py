"""Steps of AdamW: with optax alone, and with jaxscale in three ways."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxscale

CLIP = 0.01


def pass_gradients(fun, has_aux=False):
    """In the place of `jax.value_and_grad`: the gradients are what the function is called with."""
    return lambda params, grads: (fun(params, grads), grads)


class Method(NamedTuple):
    """How a step is made."""

    init: Callable[[Any], Any]  # parameters -> carry
    step: Callable[[Any, Any], Any]  # carry, batch -> carry


def three_lines(tx, grads, state, params, **values):
    """The plain optax loop, of `tx.update` and `optax.apply_updates`."""
    updates, state = tx.update(grads, state, params, **values)
    return optax.apply_updates(params, updates), state


def bare(loss_fn, transform, clip):
    """Optax alone: no scale, no verdict, no skip."""
    tx = optax.adamw(1e-3)
    if clip:
        tx = optax.chain(optax.clip_by_global_norm(CLIP), tx)

    def step(carry, batch):
        params, state = carry
        _, grads = transform(loss_fn)(params, batch)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return three_lines(tx, grads, state, params)

    return Method(lambda params: (params, tx.init(params)), step)


def scaled(clip, policy="dynamic"):
    max_norm = CLIP if clip else None
    return jaxscale.loss_scaled(optax.adamw(1e-3), policy, max_norm=max_norm)


def train_step(loss_fn, transform, clip, policy="dynamic"):
    tx = scaled(clip, policy)
    whole = jaxscale.train_step(loss_fn, tx, transform=transform)
    return Method(
        lambda params: (params, tx.init(params)),
        lambda carry, batch: whole(*carry, batch)[:2],
    )


def apart(loss_fn, transform, clip, apply):
    """`jaxscale.value_and_grad`, and what applies the gradients."""
    tx = scaled(clip)

    def step(carry, batch):
        params, state = carry
        scaled_grad = jaxscale.value_and_grad(loss_fn, state, transform=transform)
        loss, grads = scaled_grad(params, batch)
        return apply(tx, grads, state, params, value=loss)

    return Method(lambda params: (params, tx.init(params)), step)


BARE = "bare optax"
METHODS = {
    BARE: bare,
    "jaxscale.train_step": train_step,
    "jaxscale.train_step, adaptive": partial(train_step, policy="adaptive"),
    "jaxscale.apply_gradients": partial(apart, apply=jaxscale.apply_gradients),
    "jaxscale optax wrapper": partial(apart, apply=three_lines),
}


def make(name, clip, loss_fn=None):
    """Returns a `Method`. Without a loss, its batch are gradients, as a backward pass left them."""
    if loss_fn is None:
        return METHODS[name](lambda *_: jnp.float32(0), pass_gradients, clip)
    return METHODS[name](loss_fn, jax.value_and_grad, clip)

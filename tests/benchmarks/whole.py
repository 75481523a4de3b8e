"""A whole training step in the form of each method: loss, gradients and update.

Each method scales the loss, takes the gradients, and makes its step in the way of its own
documentation; ``bare optax`` neither scales nor checks. What lies between the backward pass and the
next parameters is that of `methods.py`, and so are the carries, but for the rows that only ours
have.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import methods
import optax

import jaxscale


class Step(NamedTuple):
    init: Callable[[Any], Any]  # parameters -> carry
    step: Callable[..., Any]  # carry, batch -> carry, loss


def steps(loss_fn, clip):
    """Returns the :class:`Step` of each method, by name; `loss_fn(params, *batch)` is a float32."""
    tx, ours = methods.optimizer(clip), methods.ours(clip)
    adaptive = jaxscale.AdaptiveLossScale(init_scale=methods.INIT_SCALE)

    def scaled(policy, **options):
        max_norm = methods.CLIP if clip else None
        return jaxscale.loss_scaled(methods.optimizer(False), policy, max_norm=max_norm, **options)

    def plain(tx, loss_fn=loss_fn):
        def step(carry, *batch):
            params, state = carry
            loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return Step(lambda params: (params, tx.init(params)), step)

    def train_step(tx, retries=0):
        def step(carry, *batch):
            whole = jaxscale.train_step(loss_fn, tx, retries=retries)
            params, state, loss = whole(*carry, *batch)
            return (params, state), loss

        return Step(lambda params: (params, tx.init(params)), step)

    def apply_gradients(carry, *batch):
        params, state = carry
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, *batch)
        return jaxscale.apply_gradients(ours, grads, state, params, value=loss), loss

    def wrapper(carry, *batch):
        params, state = carry
        loss, grads = jaxscale.value_and_grad(loss_fn, state)(params, *batch)
        updates, state = ours.update(grads, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), loss

    def train_state(state, *batch):
        loss, grads = jaxscale.value_and_grad(loss_fn, state.opt_state)(state.params, *batch)
        return state.apply_gradients(grads=grads, value=loss), loss

    def flax_dynamic_scale(carry, *batch):
        params, (state, scaler) = carry
        scaler, finite, loss, grads = scaler.value_and_grad(loss_fn)(params, *batch)
        updates, new_state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        params, state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state))
        return (params, (state, scaler)), loss

    def jmp(carry, *batch):
        import jmp

        params, (state, scale, counter) = carry
        scaler = jmp.DynamicLossScale(scale, counter)
        loss, grads = jax.value_and_grad(lambda *args: scaler.scale(loss_fn(*args)))(params, *batch)
        loss, grads = scaler.unscale((loss, grads))
        finite = jmp.all_finite(grads)
        updates, new_state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        params, state = jmp.select_tree(finite, new, (params, state))
        scaler = scaler.adjust(finite)
        return (params, (state, scaler.loss_scale, scaler.counter)), loss

    def mpx(carry, *batch):
        import mpx

        params, (state, scale, counter) = carry
        scaler = mpx.DynamicLossScaling(scale, jnp.float32(1), counter=counter)
        loss, scaler, finite, grads = mpx.filter_value_and_grad(loss_fn, scaler)(params, *batch)
        params, state = mpx.optimizer_update(params, tx, state, grads, finite)
        return (params, (state, scaler.loss_scaling, scaler.counter)), loss

    def init_of(name):
        # Where its module is installed, and once: a `TrainState` holds its optimizer.
        make = functools.cache(lambda: methods.make(name, clip))
        return lambda params: make().init(params)

    mixed = {
        "jaxscale.apply_gradients": apply_gradients,
        "jaxscale.flax.TrainState": train_state,
        "jaxscale optax wrapper": wrapper,
        "Flax DynamicScale": flax_dynamic_scale,
        "jmp": jmp,
        "MPX": mpx,
    }
    return {
        "bare optax": plain(tx),
        "jaxscale.train_step": train_step(ours),
        "jaxscale.train_step, adaptive": train_step(scaled(adaptive)),
        "jaxscale.train_step, retries": train_step(ours, retries=10),
        "jaxscale.train_step, spikes": train_step(scaled("dynamic", spikes=jaxscale.SpikeRule())),
        "jaxscale.scale_backward": plain(scaled(None), jaxscale.scale_backward(loss_fn)),
        **{name: Step(init_of(name), step) for name, step in mixed.items()},
        "optax.apply_if_finite": plain(optax.apply_if_finite(tx, 1_000_000)),
    }


NAMES = tuple(steps(lambda params, *batch: jnp.float32(0), clip=False))

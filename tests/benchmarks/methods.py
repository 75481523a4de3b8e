"""One uniform step for each method: ``step(carry, grads) -> carry``.

All methods have the same inner optimizer. What goes in are gradients as a backward pass left
them, multiplied by the method's own scale; a method without one gets them unscaled. What comes
out are parameters and optimizer state. So a step is everything between the backward pass and the
next forward pass, and no method's own work is left out:

- unscaling, in float32, which half-precision gradients are cast to (``bare`` and
  ``apply_if_finite`` only cast);
- the verdict, and the move of the scale;
- the optimizer, and the parameters' update;
- the skip, of parameters and optimizer state, as the method's own documentation has it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxscale

INIT_SCALE = 2.0**15
LEARNING_RATE, CLIP = 1e-3, 0.01


class Method(NamedTuple):
    """How a method steps, and where in its carry to find what."""

    init: Callable[[Any], Any]  # parameters -> carry
    step: Callable[[Any, Any], Any]  # carry, scaled gradients -> carry
    params: Callable[[Any], Any]
    inner: Callable[[Any], Any]  # the state of the inner optimizer
    scale: Callable[[Any], Any] = lambda carry: 1.0
    skips: bool = True


def optimizer(clip):
    adamw = optax.adamw(LEARNING_RATE)
    return optax.chain(optax.clip_by_global_norm(CLIP), adamw) if clip else adamw


def ours(clip, growth_interval=2000):
    """The same optimizer; clipped, as jaxscale offers it, from the pass of the verdict."""
    policy = jaxscale.DynamicLossScale(init_scale=INIT_SCALE, growth_interval=growth_interval)
    return _wrapped(policy, clip)


def _wrapped(policy, clip):
    return jaxscale.loss_scaled(optimizer(False), policy, max_norm=CLIP if clip else None)


def to_float32(grads):
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads)


def bare(clip, growth_interval):
    """Optax alone: no scale, no verdict, no skip. The floor."""
    tx = optimizer(clip)

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(to_float32(grads), state, params)
        return optax.apply_updates(params, updates), state

    return Method(_init(tx), step, _first, _second, skips=False)


def train_step(clip, growth_interval):
    """`jaxscale.train_step`, without its forward pass.

    Its arithmetic is behind the function that differentiates; so that is replaced by one that
    returns the gradients.
    """
    return _train_step(ours(clip, growth_interval))


def train_step_adaptive(clip, growth_interval):
    """The same with the policy that follows the largest gradient."""
    del growth_interval  # its scale may grow in each step
    return _train_step(_wrapped(jaxscale.AdaptiveLossScale(init_scale=INIT_SCALE), clip))


def _train_step(tx):
    def given(fun, has_aux):
        return lambda params, grads: (fun(params, grads), grads)

    def step(carry, grads):
        whole = jaxscale.train_step(lambda params, grads: jnp.float32(0), tx, transform=given)
        return whole(*carry, grads)[:2]

    return Method(_init(tx), step, _first, _inner, _scale)


def apply_gradients(clip, growth_interval):
    """`jaxscale.unscale` and `jaxscale.apply_gradients`."""
    tx = ours(clip, growth_interval)

    def step(carry, grads):
        params, state = carry
        grads = jaxscale.unscale(state, grads)
        return jaxscale.apply_gradients(tx, grads, state, params)

    return Method(_init(tx), step, _first, _inner, _scale)


def wrapper(clip, growth_interval):
    """`jaxscale.unscale`, `tx.update` and `optax.apply_updates`: the plain optax loop."""
    tx = ours(clip, growth_interval)

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(jaxscale.unscale(state, grads), state, params)
        return optax.apply_updates(params, updates), state

    return Method(_init(tx), step, _first, _inner, _scale)


def train_state(clip, growth_interval):
    """`jaxscale.unscale` and `jaxscale.flax.TrainState.apply_gradients`."""
    import jaxscale.flax

    tx = ours(clip, growth_interval)

    def init(params):
        return jaxscale.flax.TrainState.create(apply_fn=None, params=params, tx=tx)

    def step(state, grads):
        return state.apply_gradients(grads=jaxscale.unscale(state.opt_state, grads))

    return Method(
        init,
        step,
        lambda state: state.params,
        lambda state: state.opt_state.inner_state,
        lambda state: state.opt_state.scaling.loss_scale,
    )


def flax_dynamic_scale(clip, growth_interval):
    """Flax `DynamicScale.value_and_grad`, and the `where` over state and parameters.

    Its arithmetic is inside of its `value_and_grad`; so that is given a function without a
    forward pass, whose backward pass returns the gradients. The `where` is that of Flax'
    ImageNet example.
    """
    from flax.training.dynamic_scale import DynamicScale

    tx = optimizer(clip)

    def init(params):
        scaler = DynamicScale(
            growth_interval=growth_interval,
            scale=jnp.float32(INIT_SCALE),
            fin_steps=jnp.int32(0),
        )
        return params, (tx.init(params), scaler)

    def step(carry, grads):
        params, (state, scaler) = carry
        scaler, finite, _, grads = scaler.value_and_grad(_backward(grads))(grads)
        updates, new_state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        params, state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state))
        return params, (state, scaler)

    return Method(init, step, _first, lambda carry: carry[1][0], lambda carry: carry[1][1].scale)


def jmp(clip, growth_interval):
    """jmp `DynamicLossScale`, `all_finite`, and `select_tree` over parameters and state."""
    import jmp

    tx = optimizer(clip)

    # Of the carry are its numbers alone: made of anything but numbers, it cannot be.
    def init(params):
        return params, (tx.init(params), jnp.float32(INIT_SCALE), jnp.int32(0))

    def step(carry, grads):
        params, (state, scale, counter) = carry
        scaler = jmp.DynamicLossScale(scale, counter, growth_interval)
        grads = scaler.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        params, state = jmp.select_tree(finite, new, (params, state))
        scaler = scaler.adjust(finite)
        return params, (state, scaler.loss_scale, scaler.counter)

    return Method(init, step, _first, lambda carry: carry[1][0], lambda carry: carry[1][1])


def mpx(clip, growth_interval):
    """MPX: the lines of its `filter_value_and_grad` after the gradient, `optimizer_update`.

    Those lines, and not the function, as it casts all arguments to half precision and so has
    no float32 gradients.
    """
    import mpx

    tx = optimizer(clip)

    def scaler(scale, counter):
        return mpx.DynamicLossScaling(
            scale, jnp.float32(1), period=growth_interval, counter=counter
        )

    def init(params):
        return params, (tx.init(params), jnp.float32(INIT_SCALE), jnp.int32(0))

    def step(carry, grads):
        params, (state, scale, counter) = carry
        finite = mpx.all_finite(grads)
        new = scaler(scale, counter).adjust(finite)
        grads = new.unscale(grads)
        params, state = mpx.optimizer_update(params, tx, state, grads, finite)
        return params, (state, new.loss_scaling, new.counter)

    return Method(init, step, _first, lambda carry: carry[1][0], lambda carry: carry[1][1])


def apply_if_finite(clip, growth_interval):
    """`optax.apply_if_finite`, which has no scale: the verdict and the skip alone."""
    tx = optax.apply_if_finite(optimizer(clip), 1_000_000)

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(to_float32(grads), state, params)
        return optax.apply_updates(params, updates), state

    return Method(_init(tx), step, _first, _inner)


METHODS = {
    "bare optax": bare,
    "jaxscale.train_step": train_step,
    "jaxscale.train_step, adaptive": train_step_adaptive,
    "jaxscale.apply_gradients": apply_gradients,
    "jaxscale.flax.TrainState": train_state,
    "jaxscale optax wrapper": wrapper,
    "Flax DynamicScale": flax_dynamic_scale,
    "jmp": jmp,
    "MPX": mpx,
    "optax.apply_if_finite": apply_if_finite,
}
BARE = "bare optax"
OURS = tuple(name for name in METHODS if name.startswith("jaxscale"))


def make(name, clip, growth_interval=2000):
    """Returns a :class:`Method`; raises ``ImportError`` where its package is missing."""
    return METHODS[name](clip, growth_interval)


def _init(tx):
    return lambda params: (params, tx.init(params))


def _first(carry):
    return carry[0]


def _second(carry):
    return carry[1]


def _inner(carry):
    return carry[1].inner_state


def _scale(carry):
    return carry[1].scaling.loss_scale


def _backward(grads):
    """A function of loss zero, whose gradient is ``grads`` whatever its loss is scaled by."""

    @jax.custom_vjp
    def loss_fn(dummy):
        return jnp.float32(0)

    loss_fn.defvjp(lambda dummy: (jnp.float32(0), None), lambda _, cotangent: (grads,))
    return loss_fn

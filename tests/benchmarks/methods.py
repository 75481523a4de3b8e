"""One training step for each method, with one optimizer: ``step(carry, *batch) -> carry, loss``.

Each method scales the loss, takes the gradients, and makes its step in the way of its own
documentation; ``bare optax`` neither scales nor checks. Without a loss function, the gradients are
what a step begins with, as a backward pass left them, multiplied by the method's own scale; a
method without one gets them unscaled. Then a step is everything between the backward pass and the
next forward pass, and no method's own work is left out:

- unscaling, in float32, which half-precision gradients are cast to (``bare optax`` and
  ``optax.apply_if_finite`` only cast);
- the verdict, and the move of the scale;
- the optimizer, and the parameters' update;
- the skip, of parameters and optimizer state, as the method's own documentation has it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxscale

INIT_SCALE = 2.0**15
LEARNING_RATE, CLIP = 1e-3, 0.01


def pass_gradients(fun, has_aux=False):
    """In the place of `jax.value_and_grad`: the gradients are what the function is called with."""
    return lambda params, grads: (fun(params, grads), grads)


class Setting(NamedTuple):
    """What a step is made of."""

    clip: bool  # whether the global norm is clipped
    growth_interval: int
    loss_fn: Callable[..., Any]  # (params, *batch) -> float32
    value_and_grad: Callable[..., Any]

    @property
    def from_gradients(self):
        return self.value_and_grad is pass_gradients

    def scaled(self, state):
        return jaxscale.value_and_grad(
            self.loss_fn, state, transform=self.value_and_grad
        )


class Method(NamedTuple):
    """How a method steps, and where in its carry to find what: here, where ours have it."""

    init: Callable[[Any], Any]  # parameters -> carry
    step: Callable[..., Any]  # carry, *batch -> carry, loss
    params: Callable[[Any], Any] = lambda carry: carry[0]
    # of the inner optimizer
    inner: Callable[[Any], Any] = lambda carry: carry[1].inner_state
    scale: Callable[[Any], Any] = lambda carry: carry[1].scaling.loss_scale
    skips: bool = True


def optimizer(clip):
    adamw = optax.adamw(LEARNING_RATE)
    if clip:
        return optax.chain(optax.clip_by_global_norm(CLIP), adamw)
    return adamw


def ours(setting, policy="dynamic", **options):
    """The same optimizer; clipped, as jaxscale offers it, from the pass of the verdict."""
    if policy == "dynamic":
        interval = setting.growth_interval
        policy = jaxscale.DynamicLossScale(
            init_scale=INIT_SCALE, growth_interval=interval
        )
    max_norm = CLIP if setting.clip else None
    return jaxscale.loss_scaled(optimizer(False), policy, max_norm=max_norm, **options)


def _three_lines(tx, grads, state, params, **values):
    """The plain optax loop, of `tx.update` and `optax.apply_updates`."""
    updates, state = tx.update(grads, state, params, **values)
    return optax.apply_updates(params, updates), state


def without_scale(tx, setting):
    def step(carry, *batch):
        params, state = carry
        loss, grads = setting.value_and_grad(setting.loss_fn)(params, *batch)
        if setting.from_gradients:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return _three_lines(tx, grads, state, params), loss

    return Method(
        lambda params: (params, tx.init(params)), step, scale=lambda carry: 1.0
    )


def bare(setting):
    """Optax alone: no scale, no verdict, no skip. The floor."""
    method = without_scale(optimizer(setting.clip), setting)
    return method._replace(inner=lambda carry: carry[1], skips=False)


def apply_if_finite(setting):
    """`optax.apply_if_finite`, which has no scale: the verdict and the skip alone."""
    return without_scale(
        optax.apply_if_finite(optimizer(setting.clip), 1_000_000), setting
    )


def scale_backward(setting):
    """`jaxscale.scale_backward`, whose scale no state holds."""
    boundary = setting._replace(loss_fn=jaxscale.scale_backward(setting.loss_fn))
    return without_scale(ours(setting, None), boundary)


def train_step(setting, policy="dynamic", retries=0, **options):
    """`jaxscale.train_step`."""
    tx = ours(setting, policy, **options)

    def step(carry, *batch):
        train_step = jaxscale.train_step(
            setting.loss_fn, tx, transform=setting.value_and_grad, retries=retries
        )
        *carry, loss = train_step(*carry, *batch)
        return tuple(carry), loss

    return Method(lambda params: (params, tx.init(params)), step)


def _apart(setting, apply):
    """`jaxscale.value_and_grad`, and what applies the gradients."""
    tx = ours(setting)

    def step(carry, *batch):
        params, state = carry
        loss, grads = setting.scaled(state)(params, *batch)
        return apply(tx, grads, state, params, value=loss), loss

    return Method(lambda params: (params, tx.init(params)), step)


def _peer(setting, differentiate, update):
    """A step with another package's scaler, of which the carry has the numbers: scale and counter.

    Args:
      setting: the :class:`Setting`.
      differentiate: `(numbers, params, *batch) -> new numbers, finite, loss, grads`.
      update: `(params, tx, state, grads, finite) -> params, state`, which may skip.
    """
    tx = optimizer(setting.clip)

    def init(params):
        return params, (tx.init(params), (jnp.float32(INIT_SCALE), jnp.int32(0)))

    def step(carry, *batch):
        params, (state, numbers) = carry
        numbers, finite, loss, grads = differentiate(numbers, params, *batch)
        params, state = update(params, tx, state, grads, finite)
        return (params, (state, numbers)), loss

    return Method(
        init, step, inner=lambda carry: carry[1][0], scale=lambda carry: carry[1][1][0]
    )


def _selected(select):
    """Returns an update that takes the new parameters and the new state, or the old ones."""

    def update(params, tx, state, grads, finite):
        return select(finite, _three_lines(tx, grads, state, params), (params, state))

    return update


def flax_dynamic_scale(setting):
    """Flax `DynamicScale.value_and_grad`, and the `where` of Flax' ImageNet example."""
    from flax.training.dynamic_scale import DynamicScale

    def differentiate(numbers, params, *batch):
        scale, counter = numbers
        scaler = DynamicScale(
            growth_interval=setting.growth_interval, scale=scale, fin_steps=counter
        )
        # Its arithmetic is inside of its `value_and_grad`, which has to differentiate something.
        if setting.from_gradients:
            loss_fn, args = _backward(*batch), batch
        else:
            loss_fn, args = setting.loss_fn, (params, *batch)
        scaler, finite, loss, grads = scaler.value_and_grad(loss_fn)(*args)
        return (scaler.scale, scaler.fin_steps), finite, loss, grads

    def select(finite, new, old):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    return _peer(setting, differentiate, _selected(select))


def _backward(grads):
    """A function of loss zero, whose gradient is ``grads`` whatever its loss is scaled by."""

    @jax.custom_vjp
    def loss_fn(dummy):
        return jnp.float32(0)

    loss_fn.defvjp(lambda dummy: (jnp.float32(0), None), lambda _, cotangent: (grads,))
    return loss_fn


def jmp(setting):
    """jmp `DynamicLossScale`, `all_finite`, and `select_tree` over parameters and state."""
    import jmp

    def differentiate(numbers, params, *batch):
        scaler = jmp.DynamicLossScale(*numbers, setting.growth_interval)
        scaled = setting.value_and_grad(
            lambda *args: scaler.scale(setting.loss_fn(*args))
        )
        loss, grads = scaler.unscale(scaled(params, *batch))
        finite = jmp.all_finite(grads)
        scaler = scaler.adjust(finite)
        return (scaler.loss_scale, scaler.counter), finite, loss, grads

    return _peer(setting, differentiate, _selected(jmp.select_tree))


BARE = "bare optax"
METHODS = {
    BARE: bare,
    "jaxscale.train_step": train_step,
    "jaxscale.train_step, adaptive": partial(
        train_step, policy=jaxscale.AdaptiveLossScale(init_scale=INIT_SCALE)
    ),
    "jaxscale.train_step, retries": partial(train_step, retries=10),
    "jaxscale.train_step, spikes": partial(train_step, spikes=jaxscale.SpikeRule()),
    "jaxscale.scale_backward": scale_backward,
    "jaxscale.apply_gradients": partial(_apart, apply=jaxscale.apply_gradients),
    "jaxscale optax wrapper": partial(_apart, apply=_three_lines),
    "Flax DynamicScale": flax_dynamic_scale,
    "jmp": jmp,
    "optax.apply_if_finite": apply_if_finite,
}
# Of steps that begin with the gradients, which there is nothing to retry or to scale in.
FROM_GRADIENTS = [
    name for name in METHODS if not name.endswith(("retries", "spikes", "backward"))
]


def make(name, clip, loss_fn=None, growth_interval=2000):
    """Returns a :class:`Method`; raises ``ImportError`` where its package is missing.

    Without a loss function its step is ``step(carry, scaled_gradients) -> carry``.
    """
    if loss_fn:
        setting = Setting(clip, growth_interval, loss_fn, jax.value_and_grad)
        return METHODS[name](setting)
    setting = Setting(clip, growth_interval, _zero_loss, pass_gradients)
    method = METHODS[name](setting)
    return method._replace(step=lambda carry, grads: method.step(carry, grads)[0])


def _zero_loss(params, grads):
    return jnp.float32(0)

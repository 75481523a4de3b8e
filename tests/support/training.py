"""Small whole training steps, and the law that bad ones thrown in leave no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tables import assert_same_bits, avals

import jaxscale

INF, NAN = jnp.inf, jnp.nan
# What the gradients of each step are multiplied by: three of the steps are bad.
FACTORS = jnp.array([1, INF, 1, 1, NAN, -INF, 1, 1], jnp.float32)

MLP = {
    "w": jax.random.normal(jax.random.key(0), (3, 8)),
    "v": jax.random.normal(jax.random.key(1), (8,)),
}
X = jax.random.normal(jax.random.key(2), (len(FACTORS), 5, 3))


@jax.custom_jvp
def amplified(loss, factor):
    """Returns ``loss``, whose gradients are ``factor`` times larger: an overflow going backward."""
    del factor
    return loss


@amplified.defjvp
def _amplified_jvp(primals, tangents):
    return amplified(*primals), tangents[0] * jnp.asarray(primals[1], tangents[0].dtype)


def mlp_loss(params, batch):
    """The loss of a network that computes in the dtype of its parameters."""
    x, factor = batch
    output = jnp.tanh(x.astype(params["w"].dtype) @ params["w"]) @ params["v"]
    error = jnp.abs(output - 1)
    error = error.astype(jnp.promote_types(error.dtype, jnp.float32))
    return amplified(jnp.mean(error**2), factor)


def trainer(tx, loss_fn, fused=True, differentiate=jaxscale.value_and_grad, extra=None):
    """A training step from carry and batch to carry, of parameters and optimizer state."""

    def train_step(carry, batch):
        params, state = carry
        loss, grads = differentiate(loss_fn, state)(params, batch)
        extra_args = {"value": loss} | (extra(batch, grads) if extra else {})
        if fused:
            return jaxscale.apply_gradients(tx, grads, state, params, **extra_args)
        updates, state = optax.with_extra_args_support(tx).update(
            grads, state, params, **extra_args
        )
        return optax.apply_updates(params, updates), state

    return train_step


def _is_state(node):
    return isinstance(node, jaxscale.LossScaledState)


def scaled_state(carry):
    """The one optimizer state of ours in a carry."""
    (state,) = filter(_is_state, jax.tree.leaves(carry, is_leaf=_is_state))
    return state


def assert_bad_steps_leave_no_trace(train_step, carry, xs=X, factors=FACTORS):
    """Good steps with bad ones thrown in end with the bits of the good ones alone.

    But for the loss scale and the counters. All go through one compiled program, and the
    avals of the carry never change. Returns what the mixed run ended with.
    """
    step = jax.jit(train_step)
    good = np.isfinite(factors)
    outcomes = []
    for kept in (np.ones_like(good), good):
        outcome = carry
        for x, factor in zip(xs[kept], factors[kept], strict=True):
            outcome = step(outcome, (x, factor))
            assert avals(outcome) == avals(carry)
        outcomes.append(outcome)
    assert step._cache_size() == 1
    mixed, alone = outcomes
    assert scaled_state(mixed).total_notfinite == sum(~good)
    assert scaled_state(alone).total_notfinite == 0

    def uncounted(carry):
        return jax.tree.map(
            lambda node: node.inner_state if _is_state(node) else node, carry, is_leaf=_is_state
        )

    assert_same_bits(uncounted(mixed), uncounted(alone))
    assert jaxscale.all_finite(mixed)
    return mixed


def x64():
    """A context in which numbers have 64 bits."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()

"""Small whole training steps, and gradients that are bad in some of them."""

import jax
import jax.numpy as jnp
import optax

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
    _, factor = primals
    tangent, _ = tangents
    return amplified(*primals), tangent * jnp.asarray(factor, tangent.dtype)


def mlp_loss(params, batch):
    """The loss of a network that computes in the dtype of its parameters."""
    x, factor = batch
    hidden = jnp.tanh(x.astype(params["w"].dtype) @ params["w"])
    error = jnp.abs(hidden @ params["v"] - 1)
    error = error.astype(jnp.promote_types(error.dtype, jnp.float32))
    return amplified(jnp.mean(error**2), factor)


def trainer(tx, loss_fn, fused=True, differentiate=jaxscale.value_and_grad, extra=None):
    """A training step from carry and batch to carry, of parameters and optimizer state."""

    def train_step(carry, batch):
        params, state = carry
        loss, grads = differentiate(loss_fn, state)(params, batch)
        extra_args = {"value": loss}
        if extra:
            extra_args |= extra(batch, grads)
        if fused:
            return jaxscale.apply_gradients(tx, grads, state, params, **extra_args)
        update = optax.with_extra_args_support(tx).update
        updates, state = update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return train_step


def x64():
    """A context in which numbers have 64 bits."""
    return jax.enable_x64(True)

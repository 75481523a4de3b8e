"""NumPyro's SVI: a small Bayesian network, its ELBO divided by the number of a large data set."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import optax_to_numpyro
from runs import BAD_STEP, batches, examples, optimizer, skipped

import jaxscale

# The ELBO is a sum over examples, and so larger than the mean loss of the others.
FACTOR = 2.0**-32
STEPS = 320
HIDDEN = 16


def normal(mean, deviation):
    return dist.Normal(mean, deviation).to_event(2)


def network(dtype):
    def model(x, y):
        w = numpyro.sample("w", normal(jnp.zeros((x.shape[1], HIDDEN)), 1.0))
        v = numpyro.sample("v", normal(jnp.zeros((HIDDEN, 1)), 1.0))
        hidden = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
        mean = (hidden @ v.astype(dtype)).astype(jnp.float32)
        numpyro.sample("y", normal(mean, 0.3), obs=y)

    return model


def train(dtype, scaled, skips, batch):
    """Returns the last ELBO over all examples, negative, and how many steps were skipped."""
    model = network(dtype)
    guide = AutoNormal(model, init_scale=0.05)
    elbo = Trace_ELBO()
    if scaled:
        elbo.loss_with_mutable_state = jaxscale.scale_backward(
            elbo.loss_with_mutable_state
        )
    svi = SVI(
        numpyro.handlers.scale(model, scale=FACTOR),
        numpyro.handlers.scale(guide, scale=FACTOR),
        optax_to_numpyro(optimizer(skips, FACTOR)),
        elbo,
    )
    x, y = examples()
    state = svi.init(jax.random.key(0), x, y)
    update = jax.jit(svi.update)
    for step, pair in enumerate(batches(STEPS, batch)):
        # The random numbers after a batch that is left out stay the same.
        if step == BAD_STEP and batch is None:
            state = state._replace(rng_key=jax.random.split(state.rng_key)[0])
        state, _ = update(state, *pair)
    params = svi.get_params(state)
    if not all(bool(jnp.isfinite(p).all()) for p in params.values()):
        # NumPyro would refuse to build its distributions.
        return float("nan"), skipped(state)
    model = network("float32")
    elbo = Trace_ELBO(num_particles=16)
    loss = elbo.loss(jax.random.key(1), params, model, guide, x, y)
    return float(loss), skipped(state)

"""Shows which steps are skipped in a trainer that returns nothing but the parameters.

Many trainers take a loss and an optimizer, run the whole loop themselves, and return what was
trained. The state of the optimizer, which counts skipped steps, is then lost: a run that skips
every step looks like any other. A wrapper around the optimizer tells the host of each skipped step
while the trainer runs.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import jaxscale

BATCH_SIZE = 64
BAD_BATCH = 1


def fit(loss_fn, tx, params, batches):
    """Trains on one batch after the other, like a trainer that you cannot edit."""

    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), batches)
    return params, losses


def telling(tx, tell):
    """Wraps an optimizer: `tell` gets its metrics on the host after each skipped step."""

    def report(metrics):
        if not metrics["step_applied"]:
            tell(metrics)

    def update(updates, state, params=None, **extra_args):
        updates, state = tx.update(updates, state, params, **extra_args)
        jax.debug.callback(report, jaxscale.metrics(state))
        return updates, state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def loss_fn(params, x):
    """Returns the mean squared error of a small network that learns a sine."""
    hidden = jnp.tanh(x[:, None] @ params["in"] + params["bias"])
    y = (hidden @ params["out"])[:, 0]
    return jnp.mean((y - jnp.sin(3 * x)) ** 2)


def main(num_steps: int = 300) -> float:
    """Trains for a number of steps, with a bad second batch, and returns the last loss."""
    skipped = []

    def tell(metrics):
        """Runs on the host, with what `jaxscale.metrics` shows."""
        batch = int(metrics["total_steps"]) - 1
        skipped.append(batch)
        print(f"batch {batch} is bad: {metrics['total_notfinite']} skipped")

    # The trainer takes the gradients by itself: the loss brings its scale, and the optimizer skips.
    scaled_loss = jaxscale.scale_backward(jaxscale.autocast(loss_fn))
    tx = telling(jaxscale.skip_nonfinite(optax.adam(1e-2)), tell)
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": 3 * jax.random.normal(keys[0], (1, 32)),
        "bias": jnp.zeros(32),
        "out": 0.1 * jax.random.normal(keys[1], (32, 1)),
    }
    batches = jax.random.uniform(keys[2], (num_steps, BATCH_SIZE), minval=-1.0)
    batches = batches.at[BAD_BATCH, 0].set(jnp.nan)
    run = jax.jit(fit, static_argnums=(0, 1))
    _, losses = run(scaled_loss, tx, params, batches)
    losses.block_until_ready()
    # `tell` may run a little after the losses are there.
    jax.effects_barrier()
    print(f"loss {losses[-1]:.5f}, skipped {len(skipped)} of {num_steps}")
    return float(losses[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    main(parser.parse_args().steps)

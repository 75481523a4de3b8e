"""Three steps that do something between the gradients and the update, or after the update.

- A physics-informed network for u'' = -sin(x), on all devices with `pmap`: `on_grads` averages the
  gradients of the devices.
- Private training (DP-SGD) with gradients by example: `on_grads` clips and averages them.
- Q-learning: `after` moves the target network, which a skipped step leaves where it is.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxscale

BATCH_SIZE, WIDTH = 64, 32


def init_params():
    """Returns float32 parameters of a perceptron with two hidden layers."""
    weight, last, *hidden = jax.random.normal(jax.random.key(0), (2 + WIDTH, WIDTH))
    return {
        "weight": weight,
        "bias": jnp.zeros(WIDTH),
        "hidden": jnp.stack(hidden) / WIDTH**0.5,
        "last": last / WIDTH**0.5,
    }


def network(params, x):
    """Returns the output of a perceptron for a number, or for each number of an array."""
    y = jnp.tanh(x[..., None] * params["weight"] + params["bias"])
    return jnp.tanh(y @ params["hidden"]) @ params["last"]


def equation_loss(params, x):
    """Returns the mean error of the equation at some points, and that of u(0) = 0."""
    curvature = jax.vmap(jax.grad(jax.grad(network, 1), 1), (None, 0))(params, x)
    return jnp.mean((curvature + jnp.sin(x)) ** 2) + network(params, 0 * x[0]) ** 2


def example_loss(params, x):
    """Returns the error of one example."""
    return (network(params, x) - x**2) ** 2


def value_loss(params, state, x):
    """Returns the error of the values of some places, and the state as it was."""
    return jnp.mean(
        (network(params, x) - x - 0.9 * network(state["target"], x / 2)) ** 2
    ), state


def by_example(fun, **kwargs):
    """Like `jax.value_and_grad`, but with the gradients of each example, and the mean loss."""
    differentiated = jax.vmap(jax.value_and_grad(fun, **kwargs), in_axes=(None, 0))

    def value_and_grad(params, x):
        (losses, aux), grads = differentiated(params, x)
        return (jnp.mean(losses), aux), grads

    return value_and_grad


def clipped_mean(grads):
    """Returns the mean of gradients by example, each of a norm of at most 1."""
    norms = jnp.sqrt(
        sum(jnp.sum(g.reshape(len(g), -1) ** 2, -1) for g in jax.tree.leaves(grads))
    )
    return jax.tree.map(
        lambda g: jnp.tensordot(1 / jnp.maximum(norms, 1), g, 1) / len(g), grads
    )


def move_target(params, state):
    """Returns the state with a target network that follows the parameters slowly."""
    return state | {"target": optax.incremental_update(params, state["target"], 0.05)}


def train(name, tx, step, num_steps, *state):
    """Trains on random numbers, the second batch bad, and returns the last loss."""
    carry, loss = [init_params(), tx.init(init_params()), *state], jnp.inf
    for i in range(num_steps):
        x = jax.random.uniform(jax.random.key(i), (BATCH_SIZE,), minval=-1.0)
        *carry, loss = step(*carry, x.at[0].set(jnp.nan) if i == 1 else x)
    print(
        f"{name}: loss {jnp.mean(loss):.5f}, skipped {carry[1].total_notfinite} of {num_steps}"
    )
    return jnp.mean(loss)


def main(num_steps: int = 300) -> float:
    """Trains three programs for a number of steps and returns the sum of their last losses."""
    half, tx = jaxscale.autocast, jaxscale.loss_scaled(optax.adam(1e-2))
    mean = partial(jax.lax.pmean, axis_name="devices")
    step = jaxscale.train_step(half(equation_loss), tx, retries=5, on_grads=mean)
    mapped: Any = jax.pmap(
        step, "devices", in_axes=(None, None, 0), out_axes=(None, None, 0)
    )
    shape = jax.local_device_count(), -1
    total = train(
        "equation", tx, lambda *c: mapped(*c[:2], c[2].reshape(shape)), num_steps
    )
    # a skip keeps its key
    noisy = optax.chain(optax.add_noise(1e-4, 0.0, 0), optax.sgd(0.05))
    noisy, options = (
        jaxscale.loss_scaled(noisy),
        {"transform": by_example, "retries": 5},
    )
    step = jaxscale.train_step(
        half(example_loss), noisy, on_grads=clipped_mean, **options
    )
    total += train("private", noisy, jax.jit(step), num_steps)
    step = jaxscale.train_step(half(value_loss), tx, has_state=True, after=move_target)
    return float(
        total + train("values", tx, jax.jit(step), num_steps, {"target": init_params()})
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    main(parser.parse_args().steps)

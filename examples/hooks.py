"""Three steps that do something between the gradients and the update, or after the update.

- A physics-informed network for u'' = -sin(x), on all devices with `pmap`: `on_grads` averages the
  gradients of the devices.
- Private training (DP-SGD) with gradients by example: `on_grads` clips and averages them.
- Q-learning: the target network moves, and a skipped step leaves it where it is.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import jaxscale

BATCH_SIZE = 64
WIDTH = 32


def init_params():
    """Returns float32 parameters of a perceptron with two hidden layers."""
    numbers = jax.random.normal(jax.random.key(0), (2 + WIDTH, WIDTH))
    return {
        "weight": numbers[0],
        "bias": jnp.zeros(WIDTH),
        "hidden": numbers[2:] / WIDTH**0.5,
        "last": numbers[1] / WIDTH**0.5,
    }


def network(params, x):
    """Returns the output of a perceptron for a number, or for each number of an array."""
    y = jnp.tanh(x[..., None] * params["weight"] + params["bias"])
    y = jnp.tanh(y @ params["hidden"])
    return y @ params["last"]


def equation_loss(params, x):
    """Returns the mean error of the equation at some points, and that of u(0) = 0."""
    second_derivative = jax.grad(jax.grad(network, 1), 1)
    curvature = jax.vmap(second_derivative, (None, 0))(params, x)
    at_zero = network(params, 0 * x[0])
    return jnp.mean((curvature + jnp.sin(x)) ** 2) + at_zero**2


def example_loss(params, x):
    """Returns the error of one example."""
    return (network(params, x) - x**2) ** 2


def value_loss(params, target, x):
    """Returns the error of the values of some places, given the target network."""
    values = network(params, x)
    next_values = network(target, x / 2)
    return jnp.mean((values - x - 0.9 * next_values) ** 2)


def by_example(fun, **kwargs):
    """Like `jax.value_and_grad`, but with the gradients of each example, and the mean loss."""
    differentiated = jax.vmap(jax.value_and_grad(fun, **kwargs), in_axes=(None, 0))

    def value_and_grad(params, x):
        (losses, aux), grads = differentiated(params, x)
        return (jnp.mean(losses), aux), grads

    return value_and_grad


def mean_over_devices(grads):
    """Returns the mean of the gradients of all devices."""
    return jax.lax.pmean(grads, axis_name="devices")


def clipped_mean(grads):
    """Returns the mean of gradients by example, each of a norm of at most 1."""
    squares = 0
    for leaf in jax.tree.leaves(grads):
        squares += jnp.sum(leaf.reshape(len(leaf), -1) ** 2, -1)
    factors = 1 / jnp.maximum(jnp.sqrt(squares), 1)

    def mean(leaf):
        return jnp.tensordot(factors, leaf, 1) / len(leaf)

    return jax.tree.map(mean, grads)


def train(name, step, carry, num_steps):
    """Trains on random numbers, the second batch bad, and returns the last loss."""
    loss = jnp.inf
    for i in range(num_steps):
        x = jax.random.uniform(jax.random.key(i), (BATCH_SIZE,), minval=-1.0)
        if i == 1:
            x = x.at[0].set(jnp.nan)
        *carry, loss = step(*carry, x)
    loss = jnp.mean(loss)
    skipped = jaxscale.metrics(carry)["total_notfinite"]
    print(f"{name}: loss {loss:.5f}, skipped {skipped} of {num_steps}")
    return loss


def train_on_equation(num_steps):
    """Trains on all devices: each differentiates at points of its own."""
    tx = jaxscale.loss_scaled(optax.adam(1e-2))
    step = jaxscale.train_step(
        jaxscale.autocast(equation_loss), tx, retries=5, on_grads=mean_over_devices
    )
    axes = (None, None, 0)
    device_step = jax.pmap(step, "devices", in_axes=axes, out_axes=axes)

    def split_and_step(params, opt_state, x):
        return device_step(params, opt_state, x.reshape(jax.local_device_count(), -1))

    params = init_params()
    return train("equation", split_and_step, [params, tx.init(params)], num_steps)


def train_privately(num_steps):
    """Trains with clipped gradients and noise. A skipped step keeps the key of the noise."""
    noisy_sgd = optax.chain(optax.add_noise(1e-4, 0.0, 0), optax.sgd(0.05))
    tx = jaxscale.loss_scaled(noisy_sgd)
    step = jaxscale.train_step(
        jaxscale.autocast(example_loss),
        tx,
        transform=by_example,
        retries=5,
        on_grads=clipped_mean,
    )
    params = init_params()
    return train("private", jax.jit(step), [params, tx.init(params)], num_steps)


def train_values(num_steps):
    """Trains with a target network."""
    tx = jaxscale.loss_scaled(optax.adam(1e-2))
    train_step = jaxscale.train_step(jaxscale.autocast(value_loss), tx)

    @jax.jit
    def step(params, opt_state, target, x):
        params, opt_state, loss = train_step(params, opt_state, target, x)
        # The target follows the parameters slowly, and stays where a step was skipped.
        moved = optax.incremental_update(params, target, 0.05)
        target = jaxscale.tree_where(opt_state.step_applied, moved, target)
        return params, opt_state, target, loss

    params = init_params()
    return train("values", step, [params, tx.init(params), params], num_steps)


def main(num_steps: int = 300) -> float:
    """Trains three programs for a number of steps and returns the sum of their last losses."""
    total = train_on_equation(num_steps)
    total += train_privately(num_steps)
    total += train_values(num_steps)
    return float(total)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    main(parser.parse_args().steps)

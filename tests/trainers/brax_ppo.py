"""brax's PPO, which builds its optimizer and its loss itself, and takes the networks alone.

The networks' gradients are made that small. Its optimizer is replaced in its module: no argument
reaches it. In a bad step the environment's reward is NaN, which spoils all updates from it.
"""

import dataclasses
import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from brax import envs
from brax.training.agents.ppo import networks
from brax.training.agents.ppo import train as ppo
from runs import BAD_STEP
from watch import Journal, in_precision, small

STEPS = 40
UPDATES = 2
ENVS = 32
UNROLL = 16
BAD_STEPS = UPDATES
# The sum over 512 examples is so large that float16 loses nothing at the factor of the others.
FACTOR = 2.0**-26


class Point(envs.Env):
    """A point that is to be pushed to the middle."""

    def __init__(self, bad_time):
        self.bad_time = bad_time

    def reset(self, rng):
        x = jax.random.uniform(rng, (2,), minval=-1.0, maxval=1.0)
        zero = jnp.zeros(())
        return envs.State(None, x, zero, zero, {}, {"time": jnp.int32(0)})

    def step(self, state, action):
        time = state.info["time"]
        x = jnp.clip(state.obs + 0.2 * jnp.clip(action, -1.0, 1.0), -2.0, 2.0)
        reward = jnp.where(time == self.bad_time, jnp.nan, -jnp.sum(x**2))
        return state.replace(obs=x, reward=reward, info=state.info | {"time": time + 1})

    observation_size = 2
    action_size = 2
    backend = "none"


def make_networks(*args, dtype, scaled, **kwargs):
    """Makes brax's networks, with an `apply` that runs in a precision."""
    ppo_networks = networks.make_ppo_networks(
        *args, policy_hidden_layer_sizes=(32,), value_hidden_layer_sizes=(32,), **kwargs
    )

    def replace(network):
        apply = in_precision(network.apply, dtype, scaled)
        return dataclasses.replace(
            network, apply=lambda *args: small(apply(*args), FACTOR)
        )

    return ppo_networks.replace(
        policy_network=replace(ppo_networks.policy_network),
        value_network=replace(ppo_networks.value_network),
    )


def device_put_replicated(tree, devices):
    """Does what brax expects of JAX, which JAX 0.10 no longer has."""
    return jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)


def train(dtype, scaled, skips, batch):
    """Returns minus the reward of the last evaluation, and how many updates were skipped."""
    bad_time = BAD_STEP * UNROLL if batch == "bad" else -1
    left_out = ()
    if batch is None:
        left_out = range(BAD_STEP * UPDATES, BAD_STEP * UPDATES + UPDATES)
    journal = Journal()
    rewards = []

    def adam(learning_rate):
        return journal.optimizer(skips, left_out, optax.adam(learning_rate), FACTOR)

    try:
        with (
            mock.patch.object(
                ppo, "optax", types.SimpleNamespace(**vars(optax) | {"adam": adam})
            ),
            mock.patch.object(
                jax, "device_put_replicated", device_put_replicated, create=True
            ),
        ):
            ppo.train(
                Point(bad_time),
                eval_env=Point(-1),
                num_timesteps=STEPS * ENVS * UNROLL,
                max_devices_per_host=1,
                num_envs=ENVS,
                batch_size=ENVS,
                num_minibatches=1,
                num_updates_per_batch=UPDATES,
                unroll_length=UNROLL,
                episode_length=UNROLL,
                learning_rate=3e-3,
                normalize_observations=True,
                num_evals=2,
                deterministic_eval=True,
                network_factory=functools.partial(
                    make_networks, dtype=dtype, scaled=scaled
                ),
                progress_fn=lambda _, metrics: rewards.append(
                    metrics["eval/episode_reward"]
                ),
            )
    # At the end it compares the parameters with themselves, and NaN differs from itself.
    except AssertionError:
        return float("nan"), journal.skipped
    return -float(rewards[-1]), journal.skipped

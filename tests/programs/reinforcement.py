"""Reinforcement learning: values and policies."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from corpus import (
    Program,
    apply_dense,
    dense,
    integers,
    normal,
    program,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Transitions:
    """A batch from a replay buffer. It checks its shapes, as many such classes do."""

    observations: jax.Array
    actions: jax.Array
    rewards: jax.Array
    next_observations: jax.Array
    done: jax.Array

    def __post_init__(self):
        if self.observations.shape != self.next_observations.shape:
            raise ValueError("observations of two sizes")
        if self.actions.shape != self.rewards.shape or self.actions.ndim != 1:
            raise ValueError("an action and a reward for each transition")


def make_transitions(seed, actions):
    return Transitions(
        observations=normal(16, 6, seed=seed),
        actions=integers(actions, 16, seed=seed),
        rewards=normal(16, seed=seed + 1),
        next_observations=normal(16, 6, seed=seed + 2),
        done=integers(2, 16, seed=seed + 3) == 1,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Values:
    """A network as a class that insists on its shapes: parameters, and the state of a target."""

    hidden: dict
    head: dict

    def __post_init__(self):
        if self.hidden["b"].shape != self.head["w"].shape[:1]:
            raise ValueError("layers that do not fit")

    def __call__(self, x):
        hidden = jax.nn.relu(apply_dense(self.hidden, x))
        return apply_dense(self.head, hidden)


@program("jax")
def deep_q_learning():
    """DQN: the value of the action that was taken, by `take_along_axis`. All trees are classes."""
    params = Values(dense(6, 32, seed=1), dense(32, 4, seed=2))
    target = Values(dense(6, 32, seed=3), dense(32, 4, seed=4))

    def loss(params, target, batch):
        values = params(batch.observations)
        actions = batch.actions[:, None]
        taken = jnp.take_along_axis(values, actions, axis=-1)
        next_values = target(batch.next_observations)
        after = jnp.max(next_values, axis=-1)
        wanted = batch.rewards + 0.99 * after * (1.0 - batch.done)
        predicted = taken[:, 0]
        wanted = jax.lax.stop_gradient(wanted)
        error = optax.huber_loss(predicted, wanted)
        return error.mean(), (target, {"value": taken.mean()})

    return Program(loss, params, make_transitions(5, 4), state=target)


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        actor = nn.tanh(nn.Dense(32)(x))
        critic = nn.tanh(nn.Dense(32)(x))
        logits = nn.Dense(3)(actor)
        values = nn.Dense(1)(critic)
        return logits, values[..., 0]


@program("linen")
def proximal_policy():
    """PPO with clipped ratios and values, normalized advantages and an entropy bonus."""
    model = ActorCritic()
    observations = normal(16, 6, seed=1)
    params = model.init(jax.random.key(0), observations)

    def loss(params, batch):
        logits, values = model.apply(params, batch["observations"])
        log_probs = jax.nn.log_softmax(logits)
        actions = batch["actions"][:, None]
        taken = jnp.take_along_axis(log_probs, actions, axis=1)[:, 0]
        ratio = jnp.exp(taken - batch["log_probs"])
        advantages = batch["advantages"]
        centered = advantages - advantages.mean()
        advantages = centered / (advantages.std() + 1e-8)
        clipped_gain = jnp.clip(ratio, 0.8, 1.2) * advantages
        plain_gain = ratio * advantages
        gain = jnp.minimum(plain_gain, clipped_gain)
        actor = -gain.mean()
        change = values - batch["values"]
        near = batch["values"] + jnp.clip(change, -0.2, 0.2)
        error = (values - batch["returns"]) ** 2
        clipped_error = (near - batch["returns"]) ** 2
        critic = jnp.maximum(error, clipped_error).mean()
        probabilities = jnp.exp(log_probs)
        mean_log_probs = jnp.sum(probabilities * log_probs, axis=-1)
        entropy = -mean_log_probs.mean()
        is_clipped = jnp.abs(ratio - 1) > 0.2
        aux = {"clipped": jnp.mean(is_clipped), "entropy": entropy}
        return actor + 0.5 * critic - 0.01 * entropy, aux

    batch = {
        "observations": observations,
        "actions": integers(3, 16, seed=2),
        "log_probs": -1.1 + 0.2 * normal(16, seed=3),
        "advantages": normal(16, seed=4),
        "values": normal(16, seed=5),
        "returns": normal(16, seed=6),
    }
    return Program(loss, params, batch)

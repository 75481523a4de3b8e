"""Reinforcement learning: values, policies, advantages, distributions of returns, preferences."""

import dataclasses

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from corpus import (
    Program,
    apply_dense,
    cross_entropy,
    dense,
    integers,
    normal,
    program,
    weight,
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


@program("equinox")
def decision_transformer():
    """Returns, states and actions as one sequence of tokens; vmapped, causal, labels integers."""

    class Agent(eqx.Module):
        embed_return: eqx.nn.Linear
        embed_observation: eqx.nn.Linear
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.embed_return = eqx.nn.Linear(1, 16, key=keys[0])
            self.embed_observation = eqx.nn.Linear(6, 16, key=keys[1])
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[2])
            self.norm = eqx.nn.LayerNorm(16)
            self.head = eqx.nn.Linear(16, 4, key=keys[3])

        def __call__(self, returns, observations):
            returns = jax.vmap(self.embed_return)(returns[:, None])
            observations = jax.vmap(self.embed_observation)(observations)
            pairs = jnp.stack([returns, observations], axis=1)
            x = pairs.reshape(-1, 16)
            y = jax.vmap(self.norm)(x)
            everywhere = jnp.ones((len(x), len(x)), bool)
            mask = jnp.tril(everywhere)
            x = x + self.attention(y, y, y, mask=mask)
            at_observations = x[1::2]
            return jax.vmap(self.head)(at_observations)

    def loss(model, batch):
        returns, observations, actions = batch
        logits = jax.vmap(model)(returns, observations)
        return cross_entropy(logits, actions)

    batch = normal(4, 5, seed=1), normal(4, 5, 6, seed=2), integers(4, 4, 5, seed=3)
    return Program(loss, Agent(jax.random.key(0)), batch)


def sequence_log_probs(params, tokens):
    """Returns the log-probability of each sequence, by indexing."""
    inputs = tokens[:, :-1]
    embedded = params["embedding"][inputs]
    sums = jnp.cumsum(embedded, axis=1)
    counts = jnp.arange(1, 6)[:, None]
    means = sums / counts
    hidden = jnp.tanh(means @ params["mix"])
    logits = apply_dense(params["head"], hidden)
    log_probs = jax.nn.log_softmax(logits)
    rows = jnp.arange(4)[:, None]
    columns = jnp.arange(5)[None]
    labels = tokens[:, 1:]
    taken = log_probs[rows, columns, labels]
    return taken.sum(-1)


@program("jax")
def direct_preferences():
    """DPO: what is chosen against what is rejected, beside a reference that is frozen."""
    body = {"embedding": normal(10, 16, seed=1), "mix": weight(16, 16, seed=2)}
    params = body | {"head": dense(16, 10, seed=3)}
    frozen = body | {"head": dense(16, 10, seed=4)}

    def loss(params, batch):
        chosen, rejected, frozen = batch

        def gain(tokens):
            before = sequence_log_probs(frozen, tokens)
            before = jax.lax.stop_gradient(before)
            return sequence_log_probs(params, tokens) - before

        margin = 0.5 * (gain(chosen) - gain(rejected))
        log_probs = jax.nn.log_sigmoid(margin)
        return -log_probs.mean(), {"right": jnp.mean(margin > 0)}

    batch = integers(10, 4, 6, seed=5), integers(10, 4, 6, seed=6), frozen
    return Program(loss, params, batch)

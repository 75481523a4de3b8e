"""Models of `parity.py` in Flax Linen: a transformer, a ResNet, and an agent."""

import collections
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from parity_setup import (
    Loss,
    Program,
    digits,
    held_out_text,
    program,
    some,
    some_text,
    text,
)

import jaxscale
import jaxscale.flax

LENGTH = 64


class Block(nn.Module):
    """Causal attention and a perceptron, each after a layer norm, as in nanodo."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x, _):
        head = self.width // self.heads
        dense = functools.partial(nn.DenseGeneral, use_bias=False)
        y = nn.LayerNorm(use_bias=False)(x)
        q, k, v = (
            dense((self.heads, head), name=name)(y)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("...qhd,...khd->...hqk", q / head**0.5, k).astype(
            jnp.float32
        )
        causal = jnp.tril(jnp.ones((1, 1, *scores.shape[-2:]), bool))
        weights = nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min))
        mixed = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        x = x + dense(self.width, axis=(-2, -1), name="out")(mixed)
        y = nn.gelu(dense(4 * self.width)(nn.LayerNorm(use_bias=False)(x)))
        return x + dense(self.width)(y), None


class Transformer(nn.Module):
    """A decoder-only language model whose blocks are scanned and rematerialized."""

    width: int = 64
    heads: int = 4
    layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        letters = text()[2]
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
        embed = nn.Embed(letters, self.width, embedding_init=init)
        positions = nn.Embed(LENGTH, self.width, embedding_init=init)
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1])[None])
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = blocks(self.width, self.heads)(x, None)
        return embed.attend(nn.LayerNorm(use_bias=False)(x))


def transformer(way, steps, batch):
    """Like nanodo: a decoder-only transformer, AdamW, clipping, warmup and cosine decay."""
    model = Transformer()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps)

    def loss_fn(params, tokens):
        logits = way.model(model.apply)(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    return program(
        way,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
        lambda key: model.init(key, jnp.zeros((1, LENGTH), jnp.int32)),
        loss_fn,
        lambda key: (some_text(key, batch, LENGTH),),
        lambda params: loss_fn(params, held_out_text(LENGTH)),
    )


class ResNetBlock(nn.Module):
    filters: int
    strides: int
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x):
        y = self.conv(self.filters, (3, 3), (self.strides, self.strides))(x)
        y = nn.relu(self.norm()(y))
        y = self.norm(scale_init=nn.initializers.zeros)(
            self.conv(self.filters, (3, 3))(y)
        )
        if x.shape != y.shape:
            x = self.conv(
                self.filters, (1, 1), (self.strides, self.strides), name="projection"
            )(x)
            x = self.norm(name="norm_projection")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    filters: int = 16
    stages: tuple[int, ...] = (1, 1, 1)

    @nn.compact
    def __call__(self, x, train):
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9
        )
        x = nn.relu(
            norm(name="bn_init")(conv(self.filters, (3, 3), name="conv_init")(x))
        )
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                strides = 2 if stage and not block else 1
                x = ResNetBlock(self.filters * 2**stage, strides, conv, norm)(x)
        return nn.Dense(10)(x.mean((1, 2)))


class BatchStatsState(jaxscale.flax.TrainState):
    batch_stats: Any


def resnet(way, steps, batch):
    """Like Flax's `examples/imagenet/train.py`: batch norm, a weight penalty, Nesterov's SGD."""
    model = ResNet()
    training, (test_images, test_labels) = digits()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, steps // 10, steps)
    tx = way.optimizer(optax.sgd(schedule, 0.9, nesterov=True))

    def loss_fn(params, fields, images, labels):
        logits, fields = way.model(model.apply)(
            {"params": params, **fields}, images, train=True, mutable=list(fields)
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        penalty = sum(
            jnp.sum(leaf**2) for leaf in jax.tree.leaves(params) if leaf.ndim > 1
        )
        return loss + 1e-4 * 0.5 * penalty, fields

    train_step = jaxscale.flax.train_step(way.cast(loss_fn), has_state=True)

    def init(key):
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
        return BatchStatsState.create(apply_fn=model.apply, tx=tx, **variables)

    def losses(state, key):
        fields = {"batch_stats": state.batch_stats}
        drawn = some(key, batch, *training)
        return [
            Loss(
                lambda params: loss_fn(params, fields, *drawn)[0],
                state.params,
                state.opt_state,
            )
        ]

    def evaluate(state):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits = model.apply(variables, test_images, train=False)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, test_labels
        ).mean()

    def step(state, key):
        return train_step(state, *some(key, batch, *training))

    return Program(init, step, evaluate, losses)


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        def perceptron(outputs, scale):
            y = x
            for _ in range(2):
                y = nn.tanh(
                    nn.Dense(64, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(y)
                )
            return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(scale))(y)

        return nn.log_softmax(perceptron(2, 0.01)), perceptron(1, 1.0)[..., 0]


# A cart with a pole: position, velocity, angle, angular velocity; and steps so far.
Pole = collections.namedtuple("Pole", "x time")
Transition = collections.namedtuple("Transition", "obs action log_prob value done")


def reset(key):
    return Pole(
        jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.zeros((), int)
    )


def advance(key, pole, action):
    """Returns the next state and whether the episode ended, by the rules of CartPole-v1."""
    _, velocity, angle, turning = pole.x
    force = jnp.where(action == 1, 10.0, -10.0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    pushed = (force + 0.05 * turning**2 * sin) / 1.1
    torque = (9.8 * sin - cos * pushed) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    acceleration = pushed - 0.05 * torque * cos / 1.1
    x = pole.x + 0.02 * jnp.stack([velocity, acceleration, turning, torque])
    time = pole.time + 1
    done = (jnp.abs(x[0]) > 2.4) | (jnp.abs(x[2]) > 12 * np.pi / 180) | (time >= 500)
    new = jax.tree.map(lambda a, b: jnp.where(done, a, b), reset(key), Pole(x, time))
    return new, done


ROLLOUT, EPOCHS, MINIBATCHES, GAMMA, LAMBDA, CLIP = 64, 4, 4, 0.99, 0.95, 0.2


def ppo(way, steps, batch):
    """Like purejaxrl's `ppo.py`: one program of nested scans, environment included (CartPole)."""
    network = ActorCritic()

    def schedule(count):
        return 1e-3 * (1.0 - (count // (EPOCHS * MINIBATCHES)) / steps)

    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule, eps=1e-5))
    tx = way.optimizer(tx)

    def loss_fn(params, taken, advantages, targets):
        log_probs, value = way.model(network.apply)(params, taken.obs)
        log_prob = jnp.take_along_axis(log_probs, taken.action[:, None], 1)[:, 0]
        clipped = taken.value + jnp.clip(value - taken.value, -CLIP, CLIP)
        worse = jnp.maximum(jnp.square(value - targets), jnp.square(clipped - targets))
        ratio = jnp.exp(log_prob - taken.log_prob)
        gain = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
        return -gain.mean() + 0.5 * 0.5 * worse.mean() - 0.01 * entropy.mean()

    train_step = jaxscale.train_step(way.cast(loss_fn), tx)

    def play(params, poles, key):
        def play_one(poles, key):
            act_key, step_key = jax.random.split(key)
            log_probs, value = network.apply(params, poles.x)
            action = jax.random.categorical(act_key, log_probs)
            log_prob = jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]
            after, done = jax.vmap(advance)(
                jax.random.split(step_key, batch), poles, action
            )
            return after, Transition(poles.x, action, log_prob, value, done)

        poles, taken = jax.lax.scan(play_one, poles, jax.random.split(key, ROLLOUT))
        last = network.apply(params, poles.x)[1]

        def estimate(carry, taken):
            advantage, following = carry
            delta = 1.0 + GAMMA * following * (1 - taken.done) - taken.value
            advantage = delta + GAMMA * LAMBDA * (1 - taken.done) * advantage
            return (advantage, taken.value), advantage

        _, advantages = jax.lax.scan(
            estimate, (jnp.zeros_like(last), last), taken, reverse=True
        )
        return poles, (taken, advantages, advantages + taken.value)

    def minibatches(played, key):
        order = jax.random.permutation(key, ROLLOUT * batch)

        def divided(x):
            flat = x.reshape(len(order), *x.shape[2:])
            return flat[order].reshape(MINIBATCHES, -1, *x.shape[2:])

        return jax.tree.map(divided, played)

    def init(key):
        params_key, env_key = jax.random.split(key)
        params = network.init(params_key, jnp.zeros((1, 4)))
        return (
            params,
            tx.init(params),
            jax.vmap(reset)(jax.random.split(env_key, batch)),
        )

    def step(carry, key):
        params, opt_state, poles = carry
        play_key, key = jax.random.split(key)
        poles, played = play(params, poles, play_key)

        def minibatch(carry, part):
            *carry, loss = train_step(*carry, *part)
            return tuple(carry), loss

        def epoch(carry, key):
            return jax.lax.scan(minibatch, carry, minibatches(played, key))

        keys = jax.random.split(key, EPOCHS)
        (params, opt_state), history = jax.lax.scan(epoch, (params, opt_state), keys)
        return (params, opt_state, poles), history.mean()

    def losses(carry, key):
        params, opt_state, poles = carry
        play_key, key = jax.random.split(key)
        played = play(params, poles, play_key)[1]
        first = jax.tree.map(lambda x: x[0], minibatches(played, key))
        return [Loss(lambda params: loss_fn(params, *first), params, opt_state)]

    def evaluate(carry):
        def act(state, key):
            poles, alive = state
            log_probs, _ = network.apply(carry[0], poles.x)
            act_key, step_key = jax.random.split(key)
            action = jax.random.categorical(act_key, log_probs)
            after, done = jax.vmap(advance)(
                jax.random.split(step_key, 64), poles, action
            )
            return (after, alive & ~done), alive

        keys = jax.random.split(jax.random.key(1), 500)
        poles = jax.vmap(reset)(jax.random.split(jax.random.key(2), 64))
        _, alive = jax.lax.scan(act, (poles, jnp.ones(64, bool)), keys)
        return alive.sum(0).mean()

    return Program(init, step, evaluate, losses)

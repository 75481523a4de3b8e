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
    CHARACTERS,
    Loss,
    Program,
    draw_rows,
    draw_text,
    held_out_text,
    make_program,
    read_digits,
)

import jaxscale
import jaxscale.flax

LENGTH = 64


def mean_cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


class Block(nn.Module):
    """Causal attention and a perceptron, each after a layer norm, as in nanodo."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x, _):
        norm = functools.partial(nn.LayerNorm, use_bias=False)
        dense = functools.partial(nn.DenseGeneral, use_bias=False)
        head = self.width // self.heads

        y = norm()(x)
        query = dense((self.heads, head), name="query")(y)
        key = dense((self.heads, head), name="key")(y)
        value = dense((self.heads, head), name="value")(y)
        scores = jnp.einsum("...qhd,...khd->...hqk", query / head**0.5, key)
        scores = scores.astype(jnp.float32)
        causal = jnp.tril(jnp.ones((1, 1, *scores.shape[-2:]), bool))
        scores = jnp.where(causal, scores, jnp.finfo(jnp.float32).min)
        mixed = jnp.einsum("...hqk,...khd->...qhd", nn.softmax(scores), value)
        x = x + dense(self.width, axis=(-2, -1), name="out")(mixed)

        y = dense(4 * self.width)(norm()(x))
        return x + dense(self.width)(nn.gelu(y)), None


class Transformer(nn.Module):
    """A decoder-only language model whose blocks are scanned and rematerialized."""

    width: int = 64
    heads: int = 4
    layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
        embed = nn.Embed(CHARACTERS, self.width, embedding_init=init)
        embed_position = nn.Embed(LENGTH, self.width, embedding_init=init)
        positions = jnp.arange(tokens.shape[1])[None]
        x = embed(tokens) + embed_position(positions)
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
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def init_params(key):
        return model.init(key, jnp.zeros((1, LENGTH), jnp.int32))

    def loss_fn(params, tokens):
        logits = way.model(model.apply)(params, tokens[:, :-1])
        return mean_cross_entropy(logits, tokens[:, 1:])

    draw = functools.partial(draw_text, batch=batch, length=LENGTH)
    return make_program(way, tx, init_params, loss_fn, draw, held_out_text(LENGTH))


class ResNetBlock(nn.Module):
    filters: int
    strides: int
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x):
        strides = (self.strides, self.strides)
        y = self.conv(self.filters, (3, 3), strides)(x)
        y = nn.relu(self.norm()(y))
        y = self.conv(self.filters, (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = self.conv(self.filters, (1, 1), strides, name="projection")(x)
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
        x = conv(self.filters, (3, 3), name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        for stage, blocks in enumerate(self.stages):
            filters = self.filters * 2**stage
            for block in range(blocks):
                # Each stage but the first begins by halving the image.
                strides = 2 if stage and not block else 1
                x = ResNetBlock(filters, strides, conv, norm)(x)
        return nn.Dense(10)(x.mean((1, 2)))


class BatchStatsState(jaxscale.flax.TrainState):
    batch_stats: Any


def resnet(way, steps, batch):
    """Like Flax's `examples/imagenet/train.py`: batch norm, a weight penalty, Nesterov's SGD."""
    model = ResNet()
    training, held_out = read_digits()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, steps // 10, steps)
    tx = way.optimizer(optax.sgd(schedule, 0.9, nesterov=True))

    def loss_fn(params, fields, images, labels):
        apply = way.model(model.apply)
        variables = {"params": params, **fields}
        logits, fields = apply(variables, images, train=True, mutable=list(fields))
        loss = mean_cross_entropy(logits, labels)
        penalty = 0
        for leaf in jax.tree.leaves(params):
            if leaf.ndim > 1:
                penalty += jnp.sum(leaf**2)
        return loss + 1e-4 * 0.5 * penalty, fields

    train_step = jaxscale.flax.train_step(way.cast(loss_fn), has_state=True)

    def init(key):
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
        return BatchStatsState.create(apply_fn=model.apply, tx=tx, **variables)

    def losses(state, key):
        fields = {"batch_stats": state.batch_stats}
        images, labels = draw_rows(key, batch, *training)

        def loss_of_params(params):
            return loss_fn(params, fields, images, labels)[0]

        return [Loss(loss_of_params, state.params, state.opt_state)]

    def evaluate(state):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits = model.apply(variables, held_out.images, train=False)
        return mean_cross_entropy(logits, held_out.labels)

    def step(state, key):
        return train_step(state, *draw_rows(key, batch, *training))

    return Program(init, step, evaluate, losses)


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        def dense(width, scale):
            return nn.Dense(width, kernel_init=nn.initializers.orthogonal(scale))

        def perceptron(outputs, scale):
            y = x
            for _ in range(2):
                y = nn.tanh(dense(64, np.sqrt(2))(y))
            return dense(outputs, scale)(y)

        logits = perceptron(2, 0.01)
        value = perceptron(1, 1.0)
        return nn.log_softmax(logits), value[..., 0]


# A cart with a pole: position, velocity, angle, angular velocity; and steps so far.
Pole = collections.namedtuple("Pole", "x time")
Transition = collections.namedtuple("Transition", "obs action log_prob value done")


def reset(key):
    x = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
    return Pole(x, jnp.zeros((), int))


def advance(key, pole, action):
    """Returns the next state and whether the episode ended, by the rules of CartPole-v1.

    Where it ended, the next state is the beginning of another episode.
    """
    _, velocity, angle, turning = pole.x
    sin = jnp.sin(angle)
    cos = jnp.cos(angle)
    force = jnp.where(action == 1, 10.0, -10.0)
    pushed = (force + 0.05 * turning**2 * sin) / 1.1
    inertia = 0.5 * (4 / 3 - 0.1 * cos**2 / 1.1)
    torque = (9.8 * sin - cos * pushed) / inertia
    acceleration = pushed - 0.05 * torque * cos / 1.1
    change = jnp.stack([velocity, acceleration, turning, torque])
    x = pole.x + 0.02 * change
    time = pole.time + 1

    is_outside = jnp.abs(x[0]) > 2.4
    is_down = jnp.abs(x[2]) > 12 * np.pi / 180
    done = is_outside | is_down | (time >= 500)
    start = reset(key)
    pole = Pole(jnp.where(done, start.x, x), jnp.where(done, start.time, time))
    return pole, done


def act(network, params, poles, key):
    """Draws an action for each pole, and moves it. Returns the poles, and what happened."""
    action_key, reset_key = jax.random.split(key)
    log_probs, value = network.apply(params, poles.x)
    action = jax.random.categorical(action_key, log_probs)
    log_prob = _log_prob_of(action, log_probs)
    reset_keys = jax.random.split(reset_key, len(action))
    next_poles, done = jax.vmap(advance)(reset_keys, poles, action)
    return next_poles, Transition(poles.x, action, log_prob, value, done)


def _log_prob_of(action, log_probs):
    return jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]


ROLLOUT, EPOCHS, MINIBATCHES = 64, 4, 4
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


def estimate_advantages(rollout, last_value):
    """Returns the advantage of each action: generalized advantage estimation.

    The reward of each step is 1.
    """

    def estimate(carry, transition):
        advantage, next_value = carry
        goes_on = 1 - transition.done
        error = 1.0 + GAMMA * next_value * goes_on - transition.value
        advantage = error + GAMMA * LAMBDA * goes_on * advantage
        return (advantage, transition.value), advantage

    carry = jnp.zeros_like(last_value), last_value
    _, advantages = jax.lax.scan(estimate, carry, rollout, reverse=True)
    return advantages


def policy_loss(log_prob, old_log_prob, advantages):
    """Returns the clipped loss of the actor."""
    ratio = jnp.exp(log_prob - old_log_prob)
    clipped_ratio = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gain = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return -jnp.minimum(ratio * gain, clipped_ratio * gain).mean()


def value_error(value, old_value, targets):
    """Returns the clipped squared error of the critic."""
    clipped_value = old_value + jnp.clip(value - old_value, -CLIP, CLIP)
    error = jnp.square(value - targets)
    clipped_error = jnp.square(clipped_value - targets)
    return jnp.maximum(error, clipped_error).mean()


def ppo(way, steps, batch):
    """Like purejaxrl's `ppo.py`: one program of nested scans, environment included (CartPole)."""
    network = ActorCritic()

    def schedule(count):
        return 1e-3 * (1.0 - (count // (EPOCHS * MINIBATCHES)) / steps)

    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule, eps=1e-5))
    tx = way.optimizer(tx)

    def loss_fn(params, rollout, advantages, targets):
        log_probs, value = way.model(network.apply)(params, rollout.obs)
        log_prob = _log_prob_of(rollout.action, log_probs)
        actor_loss = policy_loss(log_prob, rollout.log_prob, advantages)
        critic_loss = 0.5 * 0.5 * value_error(value, rollout.value, targets)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
        return actor_loss + critic_loss - 0.01 * entropy.mean()

    train_step = jaxscale.train_step(way.cast(loss_fn), tx)

    def play(params, poles, key):
        """Returns the poles after a rollout, and the arguments of the loss."""
        keys = jax.random.split(key, ROLLOUT)
        act_once = functools.partial(act, network, params)
        poles, rollout = jax.lax.scan(act_once, poles, keys)
        _, last_value = network.apply(params, poles.x)
        advantages = estimate_advantages(rollout, last_value)
        targets = advantages + rollout.value
        return poles, (rollout, advantages, targets)

    def divide(loss_args, key):
        """Shuffles the arguments of the loss and divides them into minibatches."""
        order = jax.random.permutation(key, ROLLOUT * batch)

        def divide_leaf(x):
            flat = x.reshape(len(order), *x.shape[2:])
            return flat[order].reshape(MINIBATCHES, -1, *x.shape[2:])

        return jax.tree.map(divide_leaf, loss_args)

    def init(key):
        params_key, poles_key = jax.random.split(key)
        params = network.init(params_key, jnp.zeros((1, 4)))
        poles = jax.vmap(reset)(jax.random.split(poles_key, batch))
        return params, tx.init(params), poles

    def step(carry, key):
        params, opt_state, poles = carry
        play_key, key = jax.random.split(key)
        poles, loss_args = play(params, poles, play_key)

        def train_on_minibatch(carry, minibatch):
            *carry, loss = train_step(*carry, *minibatch)
            return tuple(carry), loss

        def train_for_epoch(carry, key):
            return jax.lax.scan(train_on_minibatch, carry, divide(loss_args, key))

        carry = params, opt_state
        keys = jax.random.split(key, EPOCHS)
        (params, opt_state), history = jax.lax.scan(train_for_epoch, carry, keys)
        return (params, opt_state, poles), history.mean()

    def losses(carry, key):
        params, opt_state, poles = carry
        play_key, key = jax.random.split(key)
        _, loss_args = play(params, poles, play_key)
        minibatch = jax.tree.map(lambda x: x[0], divide(loss_args, key))
        return [Loss(lambda params: loss_fn(params, *minibatch), params, opt_state)]

    def evaluate(carry):
        params = carry[0]

        def play_on(state, key):
            poles, alive = state
            poles, transition = act(network, params, poles, key)
            return (poles, alive & ~transition.done), alive

        keys = jax.random.split(jax.random.key(1), 500)
        poles = jax.vmap(reset)(jax.random.split(jax.random.key(2), 64))
        _, alive = jax.lax.scan(play_on, (poles, jnp.ones(64, bool)), keys)
        return alive.sum(0).mean()

    return Program(init, step, evaluate, losses)

"""The model of `parity.py` in Equinox: a GAN."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from parity_setup import Loss, Program, distance, draw_rows, read_digits

import jaxscale

NOISE = 32


class Generator(eqx.Module):
    """Transposed convolutions with batch norm between them, from noise to 8 x 8 pixels."""

    convs: list[eqx.nn.ConvTranspose2d]
    norms: list[eqx.nn.BatchNorm]

    def __init__(self, key, width=32):
        sizes = [
            (NOISE, 2 * width, 2, 1, 0),
            (2 * width, width, 4, 2, 1),
            (width, 1, 4, 2, 1),
        ]
        self.convs = _convs(eqx.nn.ConvTranspose2d, key, sizes)
        self.norms = [_norm(2 * width), _norm(width)]

    def __call__(self, noise, state):
        x = noise[:, None, None]
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x, state = norm(conv(x), state)
            x = jax.nn.relu(x)
        return jnp.tanh(self.convs[-1](x)), state


class Discriminator(eqx.Module):
    """Convolutions with batch norm between them, from 8 x 8 pixels to a logit."""

    convs: list[eqx.nn.Conv2d]
    norm: eqx.nn.BatchNorm

    def __init__(self, key, width=32):
        sizes = [
            (1, width, 4, 2, 1),
            (width, 2 * width, 4, 2, 1),
            (2 * width, 1, 2, 1, 0),
        ]
        self.convs = _convs(eqx.nn.Conv2d, key, sizes)
        self.norm = _norm(2 * width)

    def __call__(self, x, state):
        first, second, last = self.convs
        x = jax.nn.leaky_relu(first(x), 0.2)
        x, state = self.norm(second(x), state)
        x = jax.nn.leaky_relu(x, 0.2)
        return last(x).reshape(()), state


def _norm(channels):
    return eqx.nn.BatchNorm(channels, "batch", mode="batch")


def _convs(kind, key, sizes):
    """Makes layers of a kind, each of inputs, outputs, kernel, stride and padding."""
    convs = []
    keys = jax.random.split(key, len(sizes))
    for conv_key, (*size, padding) in zip(keys, sizes, strict=True):
        convs.append(kind(*size, padding=padding, use_bias=False, key=conv_key))
    return convs


def _run_batch(model, x, state):
    run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    return run(x, state)


class Player(NamedTuple):
    model: Any
    state: Any
    opt_state: Any


def dcgan(way, steps, batch):
    """Like Equinox's DCGAN example: two players, each with batch norm, a state and Adam."""
    images, held_out = (
        jnp.asarray(digits.images).transpose(0, 3, 1, 2) * 2 - 1
        for digits in read_digits()
    )
    tx = way.optimizer(optax.adam(5e-4, b1=0.5, b2=0.999))
    run = way.model(_run_batch)

    def cross_entropy(logits, label):
        labels = jnp.full_like(logits, label)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    def discriminator_loss(discriminator, state, real, fake):
        logits_of_real, state = run(discriminator, real, state)
        logits_of_fake, state = run(discriminator, fake, state)
        loss = cross_entropy(logits_of_real, 1.0) + cross_entropy(logits_of_fake, 0.0)
        return loss / 2, state

    def generator_loss(generator, states, discriminator, noise):
        generator_state, discriminator_state = states
        fake, generator_state = run(generator, noise, generator_state)
        logits, discriminator_state = run(discriminator, fake, discriminator_state)
        return cross_entropy(logits, 1.0), (generator_state, discriminator_state)

    def make_step(loss_fn):
        return jaxscale.train_step(
            way.cast(loss_fn), tx, transform=eqx.filter_value_and_grad, has_state=True
        )

    generator_step = make_step(generator_loss)
    discriminator_step = make_step(discriminator_loss)

    def make_player(kind, key):
        model, state = eqx.nn.make_with_state(kind)(key)
        opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
        return Player(model, state, opt_state)

    def make_players(key):
        generator_key, discriminator_key = jax.random.split(key)
        generator = make_player(Generator, generator_key)
        return generator, make_player(Discriminator, discriminator_key)

    # What is not an array, such as the markers of the states, is the same for all seeds.
    static = eqx.filter(make_players(jax.random.key(0)), eqx.is_array, inverse=True)

    def init(key):
        return eqx.filter(make_players(key), eqx.is_array)

    def draw(key):
        rows_key, noise_key = jax.random.split(key)
        (real,) = draw_rows(rows_key, batch, images)
        return real, jax.random.normal(noise_key, (batch, NOISE))

    def step(carry, key):
        generator, discriminator = eqx.combine(carry, static)
        real, noise = draw(key)
        fake, _ = _run_batch(generator.model, noise, generator.state)
        judge, judge_opt_state, judge_state, _ = discriminator_step(
            discriminator.model,
            discriminator.opt_state,
            discriminator.state,
            real,
            fake,
        )
        model, opt_state, states, loss = generator_step(
            generator.model,
            generator.opt_state,
            (generator.state, judge_state),
            judge,
            noise,
        )
        state, judge_state = states
        generator = Player(model, state, opt_state)
        discriminator = Player(judge, judge_state, judge_opt_state)
        return eqx.filter((generator, discriminator), eqx.is_array), loss

    def losses(carry, key):
        generator, discriminator = eqx.combine(carry, static)
        real, noise = draw(key)
        fake, _ = _run_batch(generator.model, noise, generator.state)
        states = generator.state, discriminator.state

        def make_loss(loss_fn, player, *args):
            params, rest = eqx.partition(player.model, eqx.is_inexact_array)

            def loss_of_params(params):
                return loss_fn(eqx.combine(params, rest), *args)[0]

            return Loss(loss_of_params, params, player.opt_state)

        return [
            make_loss(discriminator_loss, discriminator, states[1], real, fake),
            make_loss(generator_loss, generator, states, discriminator.model, noise),
        ]

    def evaluate(carry):
        generator, _ = eqx.combine(carry, static)
        noise = jax.random.normal(jax.random.key(3), (len(held_out), NOISE))
        fake, _ = _run_batch(generator.model, noise, generator.state)
        return distance(fake.reshape(-1, 64), held_out.reshape(-1, 64))

    return Program(init, step, evaluate, losses)

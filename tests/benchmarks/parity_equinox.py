"""The model of `parity.py` in Equinox: a GAN."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from parity_setup import Loss, Program, digits, distance, some

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
        self.norms = [
            eqx.nn.BatchNorm(n, "batch", mode="batch") for n in (2 * width, width)
        ]

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
        self.norm = eqx.nn.BatchNorm(2 * width, "batch", mode="batch")

    def __call__(self, x, state):
        x = jax.nn.leaky_relu(self.convs[0](x), 0.2)
        x, state = self.norm(self.convs[1](x), state)
        return self.convs[2](jax.nn.leaky_relu(x, 0.2)).reshape(()), state


def _convs(kind, key, sizes):
    """Layers of a kind, each of inputs, outputs, kernel, stride and padding."""
    return [
        kind(*size, padding=padding, use_bias=False, key=each)
        for (*size, padding), each in zip(
            sizes, jax.random.split(key, len(sizes)), strict=True
        )
    ]


def _of_batch(model, x, state):
    run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    return run(x, state)


def dcgan(way, steps, batch):
    """Like Equinox's DCGAN example: two players, each with batch norm, a state and Adam."""
    images, held_out = (
        jnp.asarray(part[0]).transpose(0, 3, 1, 2) * 2 - 1 for part in digits()
    )
    tx = way.optimizer(optax.adam(5e-4, b1=0.5, b2=0.999))

    def cross_entropy(logits, real):
        return optax.sigmoid_binary_cross_entropy(
            logits, jnp.full_like(logits, real)
        ).mean()

    run = way.model(_of_batch)

    def discriminator_loss(discriminator, state, real, fake):
        on_real, state = run(discriminator, real, state)
        on_fake, state = run(discriminator, fake, state)
        return (cross_entropy(on_real, 1.0) + cross_entropy(on_fake, 0.0)) / 2, state

    def generator_loss(generator, states, discriminator, noise):
        fake, generator_state = run(generator, noise, states[0])
        logits, discriminator_state = run(discriminator, fake, states[1])
        return cross_entropy(logits, 1.0), (generator_state, discriminator_state)

    def training_step(loss_fn):
        return jaxscale.train_step(
            way.cast(loss_fn), tx, transform=eqx.filter_value_and_grad, has_state=True
        )

    generator_step, discriminator_step = map(
        training_step, (generator_loss, discriminator_loss)
    )

    def make(key):
        players = []
        for kind, each in zip(
            (Generator, Discriminator), jax.random.split(key), strict=True
        ):
            model, state = eqx.nn.make_with_state(kind)(each)
            players.append(
                (model, state, tx.init(eqx.filter(model, eqx.is_inexact_array)))
            )
        return players

    def arrays(players):
        return eqx.filter(players, eqx.is_array)

    # What is not an array, such as the markers of the states, is the same for all seeds.
    static = eqx.filter(make(jax.random.key(0)), eqx.is_array, inverse=True)

    def draw(key):
        chosen_key, noise_key = jax.random.split(key)
        return *some(chosen_key, batch, images), jax.random.normal(
            noise_key, (batch, NOISE)
        )

    def step(carry, key):
        (gen, gen_state, gen_opt), (disc, disc_state, disc_opt) = eqx.combine(
            carry, static
        )
        real, noise = draw(key)
        fake, _ = _of_batch(gen, noise, gen_state)
        disc, disc_opt, disc_state, _ = discriminator_step(
            disc, disc_opt, disc_state, real, fake
        )
        states = gen_state, disc_state
        gen, gen_opt, states, loss = generator_step(gen, gen_opt, states, disc, noise)
        return arrays([(gen, states[0], gen_opt), (disc, states[1], disc_opt)]), loss

    def losses(carry, key):
        (gen, gen_state, gen_opt), (disc, disc_state, disc_opt) = eqx.combine(
            carry, static
        )
        real, noise = draw(key)
        fake, _ = _of_batch(gen, noise, gen_state)

        def of_arrays(model, loss_fn, opt_state, *args):
            params, static = eqx.partition(model, eqx.is_inexact_array)
            return Loss(
                lambda params: loss_fn(eqx.combine(params, static), *args)[0],
                params,
                opt_state,
            )

        return [
            of_arrays(disc, discriminator_loss, disc_opt, disc_state, real, fake),
            of_arrays(
                gen, generator_loss, gen_opt, (gen_state, disc_state), disc, noise
            ),
        ]

    def evaluate(carry):
        gen, gen_state, _ = eqx.combine(carry, static)[0]
        noise = jax.random.normal(jax.random.key(3), (len(held_out), NOISE))
        fake, _ = _of_batch(gen, noise, gen_state)
        return distance(fake.reshape(-1, 64), held_out.reshape(-1, 64))

    return Program(lambda key: arrays(make(key)), step, evaluate, losses)

"""Models of `parity.py` in plain JAX: an LSTM, super-resolution, and a PINN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from parity_setup import held_out_text, photo, program, some_text, text


def _dense(key, inputs, outputs):
    weight = jax.nn.initializers.glorot_normal()(key, (inputs, outputs))
    return {"w": weight, "b": jnp.zeros(outputs)}


def _apply(layer, x):
    return x @ layer["w"] + layer["b"]


def lstm(way, steps, batch):
    """Like Haiku's `examples/rnn`: an LSTM over characters, unrolled by `lax.scan`, Adam."""
    hidden, length, letters = 64, 32, text()[2]

    def init_params(key):
        keys = jax.random.split(key)
        gates = _dense(keys[0], letters + hidden, 4 * hidden)
        return {"gates": gates, "out": _dense(keys[1], hidden, letters)}

    def network(params, inputs):
        def cell(state, x):
            h, c = state
            gates = _apply(params["gates"], jnp.concatenate([x, h], -1))
            i, g, f, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((inputs.shape[1], hidden))
        _, outputs = jax.lax.scan(cell, (zeros, zeros), inputs)
        return _apply(params["out"], outputs)

    def loss_fn(params, tokens):
        inputs = jax.nn.one_hot(tokens[:, :-1].T, letters)
        log_probs = jax.nn.log_softmax(way.model(network)(params, inputs))
        targets = jax.nn.one_hot(tokens[:, 1:].T, letters)
        return -jnp.sum(targets * log_probs) / jnp.sum(targets)

    held_out = held_out_text(length)
    return program(
        way,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3)),
        init_params,
        loss_fn,
        lambda key: (some_text(key, batch, length),),
        lambda params: loss_fn(params, held_out),
    )


def super_resolution(way, steps, batch):
    """Like `examples/quickstart.py`: doubles the size of a photograph, better than cubic.

    The loss is a mean over all pixels of the batch, so that the gradient of each is below the
    smallest number of float16. A perceptron on patches replaces the convolutions, which take long
    in float16 on a CPU.
    """
    crop, patch, width = 128, 4, 64
    train_half, test_half = (jnp.asarray(half[:, :424]) for half in photo())

    def cut(images, size):
        number, height, across, _ = images.shape
        return images.reshape(number, height // size, size, across // size, size, 3)

    def patches(images, size):
        return (
            cut(images, size).transpose(0, 1, 3, 2, 4, 5).reshape(-1, size * size * 3)
        )

    def init_params(key):
        hidden = _dense(key, patch * patch * 3, width)
        # The output is zero, so training starts at cubic interpolation.
        return [
            hidden,
            {"w": jnp.zeros((width, 12 * patch**2)), "b": jnp.zeros(12 * patch**2)},
        ]

    def network(params, small):
        return _apply(
            params[1], jax.nn.relu(_apply(params[0], patches(small - 0.5, patch)))
        )

    def loss_fn(params, large):
        small = cut(large, 2).mean((2, 4))
        detail = way.model(network)(params, small)
        cubic = jax.image.resize(small, large.shape, "cubic")
        return jnp.mean(
            (patches(cubic, 2 * patch) + detail - patches(large, 2 * patch)) ** 2
        )

    def draw(key):
        limits = jnp.array(train_half.shape[1:3]) - crop + 1
        corners = jax.random.randint(key, (batch, 2), 0, limits)
        size = crop, crop, 3
        crops = jax.vmap(
            lambda yx: jax.lax.dynamic_slice(train_half[0], (*yx, 0), size)
        )
        return (crops(corners),)

    return program(
        way,
        optax.adam(1e-3),
        init_params,
        loss_fn,
        draw,
        lambda params: 1e4 * loss_fn(params, test_half),
    )


def allen_cahn(way, steps, batch):
    """Like jaxpi's `examples/allen_cahn`: a PINN for u_t = 1e-4 u_xx - 5 u**3 + 5 u.

    The residual takes second derivatives of the network, and later times count once earlier ones
    are learned: their weights are the exponential of a product with a triangular matrix.
    """
    width, depth, chunks, tolerance = 64, 3, 16, 1.0
    earlier = jnp.triu(jnp.ones((chunks, chunks)), 1).T
    start = jnp.linspace(-1.0, 1.0, 128)

    def init_params(key):
        keys = jax.random.split(key, depth + 2)
        layers = [_dense(each, width, width) for each in keys[:depth]]
        fourier = jax.random.normal(keys[-2], (3, width // 2))
        return {"fourier": fourier, "layers": layers, "out": _dense(keys[-1], width, 1)}

    def u_net(params, t, x):
        z = jnp.stack([t, jnp.cos(np.pi * x), jnp.sin(np.pi * x)])
        y = z @ params["fourier"]
        y = jnp.concatenate([jnp.cos(y), jnp.sin(y)])
        for layer in params["layers"]:
            y = jnp.tanh(_apply(layer, y))
        return _apply(params["out"], y)[0]

    def r_net(params, t, x):
        u = u_net(params, t, x)
        u_t = jax.grad(u_net, argnums=1)(params, t, x)
        u_xx = jax.hessian(u_net, argnums=2)(params, t, x)
        return u_t + 5 * u**3 - 5 * u - 0.0001 * u_xx

    def loss_fn(params, times, places):
        u0 = jax.vmap(u_net, (None, None, 0))(params, 0.0, start)
        initial = jnp.mean((u0 - start**2 * jnp.cos(np.pi * start)) ** 2)
        residuals = jax.vmap(r_net, (None, 0, 0))(params, times, places)
        by_time = jnp.mean(residuals.reshape(chunks, -1) ** 2, axis=1)
        weights = jax.lax.stop_gradient(jnp.exp(-tolerance * (earlier @ by_time)))
        return 100 * initial + jnp.mean(weights * by_time)

    def draw(key):
        keys = jax.random.split(key)
        times = jnp.sort(jax.random.uniform(keys[0], (batch,)))
        return times, jax.random.uniform(keys[1], (batch,), minval=-1.0, maxval=1.0)

    schedule = optax.warmup_exponential_decay_schedule(
        0.0, 2e-3, steps // 20, steps // 4, 0.5
    )
    held_out = [draw(key) for key in jax.random.split(jax.random.key(7), 4096 // batch)]
    times, places = (jnp.concatenate(part) for part in zip(*held_out, strict=True))
    order = jnp.argsort(times)
    return program(
        way,
        optax.adam(schedule),
        init_params,
        loss_fn,
        draw,
        lambda params: loss_fn(params, times[order], places[order]),
    )

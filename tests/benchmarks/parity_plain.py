"""Models of `parity.py` in plain JAX: an LSTM, super-resolution, and a PINN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from parity_setup import (
    CHARACTERS,
    draw_text,
    held_out_text,
    make_program,
    read_photo,
)


def _dense(key, inputs, outputs):
    weight = jax.nn.initializers.glorot_normal()(key, (inputs, outputs))
    return {"w": weight, "b": jnp.zeros(outputs)}


def _apply(layer, x):
    return x @ layer["w"] + layer["b"]


def lstm(way, steps, batch):
    """Like Haiku's `examples/rnn`: an LSTM over characters, unrolled by `lax.scan`, Adam."""
    hidden, length = 64, 32

    def init_params(key):
        gates_key, out_key = jax.random.split(key)
        gates = _dense(gates_key, CHARACTERS + hidden, 4 * hidden)
        out = _dense(out_key, hidden, CHARACTERS)
        return {"gates": gates, "out": out}

    def network(params, inputs):
        def cell(state, x):
            output, memory = state
            gates = _apply(params["gates"], jnp.concatenate([x, output], -1))
            write, new, keep, read = jnp.split(gates, 4, axis=-1)
            kept = jax.nn.sigmoid(keep + 1) * memory
            written = jax.nn.sigmoid(write) * jnp.tanh(new)
            memory = kept + written
            output = jax.nn.sigmoid(read) * jnp.tanh(memory)
            return (output, memory), output

        zeros = jnp.zeros((inputs.shape[1], hidden))
        _, outputs = jax.lax.scan(cell, (zeros, zeros), inputs)
        return _apply(params["out"], outputs)

    def loss_fn(params, tokens):
        inputs = jax.nn.one_hot(tokens[:, :-1].T, CHARACTERS)
        targets = jax.nn.one_hot(tokens[:, 1:].T, CHARACTERS)
        log_probs = jax.nn.log_softmax(way.model(network)(params, inputs))
        return -jnp.sum(targets * log_probs) / jnp.sum(targets)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))
    draw = functools.partial(draw_text, batch=batch, length=length)
    return make_program(way, tx, init_params, loss_fn, draw, held_out_text(length))


def super_resolution(way, steps, batch):
    """Like `examples/quickstart.py`: doubles the size of a photograph, better than cubic.

    The loss is a mean over all pixels of the batch, so that the gradient of each is below the
    smallest number of float16. A perceptron on patches replaces the convolutions, which take long
    in float16 on a CPU.
    """
    crop, patch, width = 128, 4, 64
    train_half, test_half = (jnp.asarray(half[:, :424]) for half in read_photo())

    def cut(images, size):
        number, height, across, _ = images.shape
        return images.reshape(number, height // size, size, across // size, size, 3)

    def patches(images, size):
        pieces = cut(images, size).transpose(0, 1, 3, 2, 4, 5)
        return pieces.reshape(-1, size * size * 3)

    def init_params(key):
        hidden = _dense(key, 3 * patch**2, width)
        # The output is zero, so training starts at cubic interpolation.
        outputs = 3 * (2 * patch) ** 2
        return [hidden, {"w": jnp.zeros((width, outputs)), "b": jnp.zeros(outputs)}]

    def network(params, small):
        hidden = _apply(params[0], patches(small - 0.5, patch))
        return _apply(params[1], jax.nn.relu(hidden))

    def loss_fn(params, large):
        small = cut(large, 2).mean((2, 4))
        detail = way.model(network)(params, small)
        cubic = jax.image.resize(small, large.shape, "cubic")
        outputs = patches(cubic, 2 * patch) + detail
        return jnp.mean((outputs - patches(large, 2 * patch)) ** 2)

    def cut_at(corner):
        return jax.lax.dynamic_slice(train_half[0], (*corner, 0), (crop, crop, 3))

    def draw(key):
        limits = jnp.array(train_half.shape[1:3]) - crop + 1
        corners = jax.random.randint(key, (batch, 2), 0, limits)
        return (jax.vmap(cut_at)(corners),)

    return make_program(
        way, optax.adam(1e-3), init_params, loss_fn, draw, (test_half,), unit=1e-4
    )


def allen_cahn(way, steps, batch):
    """Like jaxpi's `examples/allen_cahn`: a PINN for u_t = 1e-4 u_xx - 5 u**3 + 5 u.

    The residual takes second derivatives of the network, and later times count once earlier ones
    are learned: their weights are the exponential of a product with a triangular matrix.
    """
    width, depth, chunks, tolerance = 64, 3, 16, 1.0
    earlier = jnp.triu(jnp.ones((chunks, chunks)), 1).T
    first_places = jnp.linspace(-1.0, 1.0, 128)
    first_values = first_places**2 * jnp.cos(np.pi * first_places)

    def init_params(key):
        *keys, fourier_key, out_key = jax.random.split(key, depth + 2)
        layers = [_dense(layer_key, width, width) for layer_key in keys]
        fourier = jax.random.normal(fourier_key, (3, width // 2))
        out = _dense(out_key, width, 1)
        return {"fourier": fourier, "layers": layers, "out": out}

    def u_net(params, t, x):
        periodic = jnp.stack([t, jnp.cos(np.pi * x), jnp.sin(np.pi * x)])
        phases = periodic @ params["fourier"]
        y = jnp.concatenate([jnp.cos(phases), jnp.sin(phases)])
        for layer in params["layers"]:
            y = jnp.tanh(_apply(layer, y))
        return _apply(params["out"], y)[0]

    def r_net(params, t, x):
        u = u_net(params, t, x)
        u_t = jax.grad(u_net, argnums=1)(params, t, x)
        u_xx = jax.hessian(u_net, argnums=2)(params, t, x)
        return u_t + 5 * u**3 - 5 * u - 0.0001 * u_xx

    def loss_fn(params, times, places):
        values = jax.vmap(u_net, (None, None, 0))(params, 0.0, first_places)
        initial_error = jnp.mean((values - first_values) ** 2)
        residuals = jax.vmap(r_net, (None, 0, 0))(params, times, places)
        residuals = residuals.reshape(chunks, -1)
        error_by_time = jnp.mean(residuals**2, axis=1)
        earlier_errors = earlier @ error_by_time
        weights = jax.lax.stop_gradient(jnp.exp(-tolerance * earlier_errors))
        return 100 * initial_error + jnp.mean(weights * error_by_time)

    def draw(key):
        times_key, places_key = jax.random.split(key)
        times = jax.random.uniform(times_key, (batch,))
        places = jax.random.uniform(places_key, (batch,), minval=-1.0, maxval=1.0)
        return jnp.sort(times), places

    held_out_keys = jax.random.split(jax.random.key(7), 4096 // batch)
    times, places = map(jnp.ravel, jax.vmap(draw)(held_out_keys))
    order = jnp.argsort(times)
    held_out = times[order], places[order]
    schedule = optax.warmup_exponential_decay_schedule(
        0.0, 2e-3, steps // 20, steps // 4, 0.5
    )
    return make_program(way, optax.adam(schedule), init_params, loss_fn, draw, held_out)

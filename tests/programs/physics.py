"""Physics and equations: derivatives, solvers, fixed points, integrators."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from corpus import (
    Program,
    apply_dense,
    dense,
    mean_squared_error,
    normal,
    program,
    weight,
)
from jax.experimental.ode import odeint


@program("jax")
def neural_ode():
    """`jax.experimental.ode.odeint` around a network, with its adjoint."""
    params = {"hidden": dense(3, 16, seed=1), "out": dense(16, 3, seed=2)}
    times = jnp.linspace(0.0, 1.0, 4)

    def field(x, t, params):
        hidden = jnp.tanh(apply_dense(params["hidden"], x))
        return apply_dense(params["out"], hidden)

    def loss(params, batch):
        starts, ends = batch
        paths = odeint(field, starts, times, params, rtol=1e-2, atol=1e-2)
        error = paths[-1] - ends
        return jnp.mean(error**2), {}

    return Program(loss, params, (normal(4, 3, seed=3), normal(4, 3, seed=4)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(f, params, x):
    """Returns z = f(params, x, z), differentiated by the implicit function theorem."""

    def keep_going(state):
        old, new, i = state
        return (jnp.max(jnp.abs(new - old)) > 1e-4) & (i < 30)

    def step(state):
        _, new, i = state
        return new, f(params, x, new), i + 1

    start = jnp.zeros_like(x)
    state = start + 1, f(params, x, start), 0
    _, z, _ = jax.lax.while_loop(keep_going, step, state)
    return z


def _fixed_point_forward(f, params, x):
    z = fixed_point(f, params, x)
    return z, (params, x, z)


def _fixed_point_backward(f, residuals, cotangent):
    params, x, z = residuals
    _, by_state = jax.vjp(lambda z: f(params, x, z), z)

    def step(_, u):
        return cotangent + by_state(u)[0]

    solved = jax.lax.fori_loop(0, 12, step, cotangent)
    _, by_inputs = jax.vjp(lambda params, x: f(params, x, z), params, x)
    return by_inputs(solved)


fixed_point.defvjp(_fixed_point_forward, _fixed_point_backward)


@program("jax")
def deep_equilibrium():
    """A layer that is its own fixed point, by a while loop with a custom derivative."""
    inside = {"w": 0.3 * weight(12, 12, seed=1), "b": normal(12, seed=2, size=0.1)}
    params = {"inside": inside, "out": dense(12, 2, seed=3)}

    def layer(params, x, z):
        return jnp.tanh(apply_dense(params, z) + x)

    def loss(params, batch):
        x, wanted = batch
        z = fixed_point(layer, params["inside"], x)
        outputs = apply_dense(params["out"], z)
        return mean_squared_error(outputs, wanted), {}

    return Program(loss, params, (normal(8, 12, seed=4), normal(8, 2, seed=5)))


@program("linen")
def neural_operator():
    """A Fourier layer: complex weights on a few modes, beside a pointwise dense layer."""

    class FourierLayer(nn.Module):
        modes: int = 4

        @nn.compact
        def __call__(self, x):
            _, length, width = x.shape
            shape = (self.modes, width, width)
            init = nn.initializers.normal(0.2)
            real = self.param("real", init, shape)
            imaginary = self.param("imaginary", init, shape)
            spectrum = jnp.fft.rfft(x, axis=1)
            low_modes = spectrum[:, : self.modes]
            kernel = jax.lax.complex(real, imaginary)
            mixed = jnp.einsum("bki,kio->bko", low_modes, kernel)
            smooth = jnp.fft.irfft(mixed, n=length, axis=1)
            pointwise = nn.Dense(width)(x)
            return nn.gelu(smooth + pointwise)

    class Operator(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            return nn.Dense(1)(FourierLayer()(FourierLayer()(x)))

    model = Operator()
    batch = normal(4, 12, 2, seed=1), normal(4, 12, 1, seed=2)
    params = model.init(jax.random.key(0), batch[0])

    def loss(params, batch):
        x, wanted = batch
        outputs = model.apply(params, x)
        errors = jnp.linalg.norm(outputs - wanted, axis=1)
        sizes = jnp.linalg.norm(wanted, axis=1)
        return jnp.mean(errors / sizes), {}

    return Program(loss, params, batch)

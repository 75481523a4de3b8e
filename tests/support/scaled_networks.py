"""Networks in float16 whose gradients are compared with those of float32, for `scale_backward`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxpr_equations import equations

HALF = jnp.float16
_rng = np.random.default_rng(0)
X = jnp.asarray(_rng.standard_normal((16, 8)), jnp.float32)
Y = jnp.asarray(_rng.standard_normal((16, 8)), jnp.float32)
PARAMS = {
    "w": jnp.asarray(_rng.standard_normal((3, 8, 8)) * 0.3, jnp.float32),
    "b": jnp.linspace(-0.1, 0.1, 8),
}
ACCURACY = 2e-3  # of float16 in these small networks; rounding alone costs 6e-4
SMALL = 2.0**-30  # a loss that float16 flushes all gradients of
HIGH = 2.0**62  # a scale at which that loss overflows twice, and no more


def net(p, x, dtype=HALF, out=jnp.float32):
    """Three layers in half precision."""
    for i in range(3):
        w = p["w"][i].astype(dtype)
        b = p["b"].astype(dtype)
        x = jnp.tanh(x.astype(dtype) @ w + b[None])
    return x.astype(out)


net32 = functools.partial(net, dtype=jnp.float32)


def loss_of(model, factor=SMALL):
    """The mean squared error of a model, times a factor."""

    def loss(p, x=X, y=Y):
        return factor * jnp.mean((model(p, x) - y) ** 2)

    return loss


REFERENCE = jax.jit(jax.grad(loss_of(net32, 1.0)))(PARAMS)


def error(got, expected, factor=1.0):
    """The norm of a difference, of gradients that are divided by a factor, beside the norm."""
    got = _flatten(got) / factor
    expected = _flatten(expected)
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def _flatten(grads):
    return np.concatenate(
        [np.ravel(np.complex128(leaf)) for leaf in jax.tree.leaves(grads)]
    )


def equations_named(name, fun, *args):
    """The equations of a name in a function."""
    program = jax.make_jaxpr(fun)(*args)
    return [eqn for eqn in equations(program) if eqn.primitive.name == name]


def cast_and_back(x):
    return x.astype(HALF).astype(jnp.float32)


def squared_grad_norm(loss):
    """A penalty on the gradients of a loss: the square of their norm."""

    def penalty(p):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(p)))

    return penalty

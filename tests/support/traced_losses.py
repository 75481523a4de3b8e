"""Losses in float16, what traces them, and how their marked lines are found."""

import inspect
import pathlib

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

import jaxscale
from jaxscale import diagnostics

HALF = jnp.float16


def marked(name, file):
    """The number of the line that ends in `# plant: <name>`, or that this mark stands above."""
    lines = pathlib.Path(file).read_text().splitlines()
    (line,) = [line for line in lines if line.endswith(f"# plant: {name}")]
    number = lines.index(line) + 1
    if line.strip().startswith("#"):
        number += 1
    return number


def faulty_lines(function):
    """The numbers of the lines of a function that end in `# fault`."""
    lines, first = inspect.getsourcelines(function)
    return [i for i, line in enumerate(lines, first) if line.endswith("# fault\n")]


def scaling(loss_scale=2.0**15):
    return jaxscale.FixedLossScale(loss_scale).init()


def trace(fun, *args, loss_scale=2.0**15, **kwargs):
    return diagnostics.trace(fun, scaling(loss_scale), **kwargs)(*args)


def normal(seed, *shape):
    # NumPy's: JAX would compile a program for each shape
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def half(*values):
    return np.array(values, HALF)


EIGHT = half(*np.linspace(1, 3, 8))


def at(t, step, value):
    """A value at one step, and 1 at the others."""
    return jnp.where(t == step, value, 1).astype(HALF)


def summed(fun):
    """A loss: the sum, in float32, of what a function returns."""

    def loss_fn(*args):
        return jnp.sum(fun(*args).astype(jnp.float32))

    return loss_fn


def mean_square(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


def with_backward(fun, rule, forward=None):
    """A function with a rule of its own for its cotangent, and maybe one for its forward pass."""
    if forward is None:
        forward = fun
    ruled = jax.custom_vjp(fun)
    ruled.defvjp(lambda x: (forward(x), None), lambda _, cotangent: (rule(cotangent),))
    return ruled


def not_differentiated(fun):
    """The function of one array with the derivative of the identity."""

    def call(x, *more):
        return with_backward(lambda x: fun(x, *more), lambda cotangent: cotangent)(x)

    return call


def assert_fields(record, **expected):
    """A place or a report has these fields, and maybe others."""
    assert {name: getattr(record, name) for name in expected} == expected
